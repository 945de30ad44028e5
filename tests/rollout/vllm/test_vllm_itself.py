"""vLLM itself, in processes of its own; skipped where it is not installed.

``STRETTO_VLLM_PYTHON`` names an interpreter that has it ('make vllm' makes one and runs these).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.rollout.vllm.llm import installed

PYTHON = os.environ.get("STRETTO_VLLM_PYTHON") or (sys.executable if installed() else "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="vLLM is not installed")

CHECKS = Path(__file__).with_name("vllm_checks.py")


def found_by(tmp_path_factory: pytest.TempPathFactory, *part: str) -> dict[str, Any]:
    """What :mod:`vllm_checks` has found, of a process that is vLLM's from its start."""
    folder = tmp_path_factory.mktemp("vllm")
    found = folder / "found.json"
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [PYTHON, str(CHECKS), str(folder), str(found), *part],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(found.read_text())
    return result


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(tmp_path_factory)


def test_greedy_tokens_are_our_engines_and_transformers(checked: dict[str, Any]) -> None:
    assert len(checked["greedy"]["vllm"]) == 4
    assert checked["greedy"]["vllm"] == checked["greedy"]["torch"]
    assert checked["greedy"]["vllm"] == checked["greedy"]["transformers"]


def test_logprobs_are_of_the_distribution_that_was_sampled(checked: dict[str, Any]) -> None:
    """Of sampled tokens, and of the probe, against the model's own at the same temperature."""
    assert checked["tokens"] > 100
    assert checked["sampled_gap"] < 1e-3
    assert checked["probe_gap"] < 1e-3


def test_responses_may_be_sampled_each_in_its_own_way(checked: dict[str, Any]) -> None:
    """Greedy ones have the model's likeliest tokens, beside others."""
    assert checked["likeliest"] >= 6
    assert checked["likeliest_gap"] < 1e-3


def test_a_weight_sync_brings_the_new_weights(checked: dict[str, Any]) -> None:
    """And one that does not happen is seen: the old weights' log-probs are far from the new."""
    for gap in checked["handover_gaps"]:
        assert gap < 1e-3
    assert checked["skipped_gap"] > 0.1


def test_a_broken_weight_sync_is_made_good_by_the_next(checked: dict[str, Any]) -> None:
    assert "breaks off" in checked["broken"]
    assert checked["after_broken_gap"] < 1e-3


def test_adapters_arrive_as_such(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each of two syncs, on weights that are loaded once."""
    checked = found_by(tmp_path_factory, "adapters")
    assert max(checked["gaps"]) < 1e-3
    assert min(checked["changes"]) > 0.1
    assert checked["sampled_gap"] < 1e-3


def test_prefixes_are_shared_within_a_version_alone(checked: dict[str, Any]) -> None:
    """Of 80 prompt tokens two blocks of 32 are found again; after a weight sync none."""
    assert checked["read_first"] == 80
    assert checked["read_again"] == 80 - 64
    assert checked["read_after_handover"] == 80


def test_rollouts_go_on_where_they_were(checked: dict[str, Any]) -> None:
    """Greedy, in chunks, released and admitted again, over a weight sync of the same weights."""
    assert checked["carried"] == checked["greedy"]["vllm"]
    assert checked["chunked"] == checked["greedy"]["vllm"]


def test_episodes_are_our_engines(checked: dict[str, Any]) -> None:
    """Greedy, with turns that end by end tokens and limits, whatever became of those waiting."""
    ours, theirs = checked["turns"]["torch"], checked["turns"]["vllm"]
    several = [turns for _, turns, _ in ours["kept"]["ended"] if len(turns) > 1]
    assert len(several) > 3
    assert len({ended_by for *_, ended_by in ours["kept"]["ended"]}) > 1
    for of in (ours, theirs):
        for way in of.values():
            assert way["ended"] == ours["kept"]["ended"]


def test_numbers_are_not_drawn_twice(checked: dict[str, Any]) -> None:
    """After a cut, the continuation does not begin with the tokens that the first part began with.

    From a uniform distribution over many tokens: equal numbers would give equal tokens.
    """
    before, after = checked["drawn"]
    assert before != after[: len(before)]
    assert checked["same_seed"][0] == checked["same_seed"][1]


def test_arguments_are_looked_at(checked: dict[str, Any]) -> None:
    assert "which follows from other settings" in checked["refused"]
