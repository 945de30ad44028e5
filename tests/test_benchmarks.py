"""Every benchmark still runs: each with ``--smoke``, in seconds, on a tiny random model."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import importlib
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SKIPPED = 77
"""Status of a peer whose packages are not installed."""
PROGRAMS = [
    str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.py") if not file.name.startswith("_")
]
OUTER = "compare.py"
INSIDE = [
    "ppo_step.py",
    "decode.py",
    "peers/trl_ppo.py",
    "peers/vllm_decode.py",
    "peers/transformers_decode.py",
]
"""Programs that ``compare.py`` runs, with ``--smoke`` too. They are not run twice."""

PRELOADED = ["torch.distributed", "transformers.modeling_utils", "stretto.runtime.run"]
"""Modules that are imported once for all programs: importing takes longer than most of them."""


class Done(NamedTuple):
    """What a program has left behind."""

    returncode: int | None
    stdout: str
    stderr: str


def execute(program: str, words: Sequence[str], output: Path) -> None:
    """Do what the interpreter does with a program; in a process of its own."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(output.with_suffix(f".{name}"), os.O_CREAT | os.O_WRONLY), number)
    sys.argv = [str(FOLDER / program), "--smoke", *words]
    sys.path.insert(0, str((FOLDER / program).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def smoke(program: str, folder: Path, *words: str) -> Done:
    output = folder / f"output-of-{Path(program).stem}"
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(
        target=execute, args=(program, words, output)
    )
    process.start()
    process.join(900)
    process.kill()
    out, err = (output.with_suffix(f".{name}").read_text() for name in ("out", "err"))
    return Done(process.exitcode, out, err)


@pytest.mark.parametrize("program", sorted({*PROGRAMS} - {*INSIDE}))
def test_each_benchmark_runs(program: str, tmp_path: Path) -> None:
    done = smoke(program, tmp_path)
    assert done.returncode in (0, SKIPPED), done.stderr
    assert "|" in done.stdout
    if program == OUTER:
        missing = [name for name in INSIDE if f"{FOLDER / name} --smoke" not in done.stderr]
        assert not missing, done.stderr


def test_a_part_on_a_gpu_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    gpu = importlib.import_module("gpu")

    def part(bench: Any) -> Iterator[Any]:
        yield gpu.attempt("a kernel", lambda: str(1 // 0))
        yield gpu.attempt("another", lambda: "2 s")
        raise RuntimeError("an illegal memory access\nand more lines")

    monkeypatch.setitem(gpu.ALL, "part", part)
    gpu.work("part", argparse.Namespace(limit_s=600.0), tmp_path / "rows")
    faulthandler.cancel_dump_traceback_later()
    *rows, peak = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert rows == [
        ["a kernel", "FAILED", "ZeroDivisionError: integer division or modulo by zero"],
        ["another", "ok", "2 s"],
        ["the rest", "FAILED", "RuntimeError: an illegal memory access"],
    ]
    assert peak[0].startswith("peak of ")
    assert "an illegal memory access" in capsys.readouterr().err  # with the traceback
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 0)
    assert gpu.main() == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_part_on_a_gpu_that_hangs_leaves_its_stack_and_no_time_is_exceeded(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.md"
    words = ["--parts", "hang", "learner", "--minutes", "0.19", "--out", str(out)]
    done = smoke("gpu.py", tmp_path, *words)
    assert done.returncode == 1
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    assert rows[-1][:3] == ["| learner", "all of it", "left out"]
    assert rows[-2][:3] == ["| hang", "the rest", "FAILED"]
    assert rows[-2][3].startswith("not done after 11 s")
    assert " in hang" in done.stderr


def test_a_peer_without_its_packages_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as TRL's, whose environment is not this one."""
    (tmp_path / "trl.py").write_text("raise ImportError(\"No module named 'trl'\")")
    monkeypatch.syspath_prepend(tmp_path)
    done = smoke("peers/trl_ppo.py", tmp_path)
    assert done.returncode == SKIPPED
    assert done.stderr.strip() == (
        "skipped: No module named 'trl'; "
        "benchmarks/peers/setup.sh FOLDER trl makes the environment for this"
    )
