"""Every benchmark still runs: each with ``--smoke``, in seconds, on a tiny random model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SKIPPED = 77
"""Status of a peer whose packages are not installed."""
PROGRAMS = sorted(
    str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.py") if not file.name.startswith("_")
)
INSIDE = {
    f"{folder}{name}.py": "compare.py"
    for folder, names in (
        ("", ("ppo_step", "decode")),
        ("peers/", ("trl_ppo", "vllm_decode", "transformers_decode")),
    )
    for name in names
}
"""Programs that another one runs, with ``--smoke`` too; they are not run twice."""

Runs = dict[str, "Future[subprocess.CompletedProcess[str]]"]


def smoke(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / program), "--smoke"],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """All of them, two at a time: most of the time goes into importing torch."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(smoke, name) for name in PROGRAMS if name not in INSIDE}


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_benchmark_runs(program: str, runs: Runs) -> None:
    outer = INSIDE.get(program, program)
    done = runs[outer].result()
    assert done.returncode in (0, SKIPPED), done.stderr
    if outer != program:
        assert f"{FOLDER / program} --smoke" in done.stderr
    assert "|" in done.stdout


def test_a_peer_without_its_packages_says_so(tmp_path: Path) -> None:
    """Such as TRL's, whose environment is not this one."""
    (tmp_path / "trl.py").write_text("raise ImportError(\"No module named 'trl'\")")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "peers/trl_ppo.py"), "--smoke"],
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == SKIPPED
    assert done.stderr.strip() == (
        "skipped: No module named 'trl'; "
        "benchmarks/peers/setup.sh FOLDER trl makes the environment for this"
    )
