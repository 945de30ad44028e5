"""GPU code on the pretended GPU: no operand on another device, nothing that a capture forbids.

Each check has a process of its own, because it replaces parts of torch. ``pretended_checks.py
FOLDER CHECK`` runs one of them, and prints for which operations the host waited.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("pretended_checks.py")


def checked(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECKS), str(folder), *names]
    paths = [*sys.path, str(CHECKS.parents[1])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["contracts", "sync", "oppo", "async", "engines", "lora", "offload", "weight_sync"]
)
def test_code_for_gpus_runs_on_the_pretended_gpu(name: str, tiny_folder: Path) -> None:
    result = checked(tiny_folder, name)
    assert result.returncode == 0, result.stderr


def test_all_of_the_schedule_runs_on_the_pretended_gpu(tiny_folder: Path) -> None:
    result = checked(tiny_folder, "stretto")
    assert result.returncode == 0, result.stderr


def test_a_tensor_left_on_the_cpu_fails_on_the_pretended_gpu(tiny_folder: Path) -> None:
    result = checked(tiny_folder, "sync", "targets_on_cpu")
    assert result.returncode == 1
    assert "Expected all tensors to be on the same device, cuda:0 and cpu" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no_wait_for_results", "no_wait_for_callers"])
def test_a_hand_over_without_its_wait_fails_on_the_pretended_gpu(
    fault: str, tiny_folder: Path
) -> None:
    result = checked(tiny_folder, "async", fault)
    assert result.returncode == 1
    assert "a tensor of another stream without a wait for it" in result.stderr
