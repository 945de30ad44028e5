"""What several test files start from."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

# Several tests at a time share the cores, so that further threads of an operation would only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Torch warns, with stack traces, of peers that tests kill on purpose. Errors are still printed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Models that tests make by name, and datasets, are in the cache: by default, below HOME.
_HOME = Path.home()
if not os.access(_HOME / ".cache" if (_HOME / ".cache").exists() else _HOME, os.W_OK):
    os.environ.setdefault("XDG_CACHE_HOME", f"{tempfile.gettempdir()}/stretto-tests-{os.getuid()}")

from stretto.models.tiny import make_tiny  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # tests share some of its tables
pytest.register_assert_rewrite("run_helpers")  # its assertions say what differs, too


LONG = frozenset(Path(__file__).with_name("long.txt").read_text().split("\n")[2:-1])
"""Tests, or all cases of tests, that take long. ``make test`` leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ``long.txt`` lists, which a tool writes from measured durations."""
    for item in items:
        if LONG & {item.nodeid, item.nodeid.partition("[")[0]}:
            item.add_marker("long")


def pytest_collection_finish() -> None:
    """Let no collection look at modules and tests, which stay until the end."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Signals can be tested although a script in the background, or nohup, ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, in Hugging Face format; not to be written to."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_collection_as_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at all objects of all libraries, which takes longer than a small run."""
    monkeypatch.setattr("stretto.runs.training_loop.freeze_heap", nullcontext)


@pytest.fixture(autouse=True)
def _imports_of_users_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test's files, and the folders that loading them adds, must not hide other tests' files."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(tempfile.gettempdir()):
            del sys.modules[name]
