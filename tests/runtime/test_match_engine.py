"""Runs in which engine and learner compute equal bits (``training.match_engine``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raising import raises
from run_helpers import run, settings, write_rows
from stretto.config import Config, recipes
from stretto.errors import ConfigError
from stretto.models.tiny import make_tiny

WORLD = """
class World:
    def reset(self, seed, answer=None, **row):
        self.turns = 0
        return None

    def step(self, text):
        self.turns += 1
        return "go on", 0.5, self.turns > 2
"""


def matched(folder: Path, dtype: str, **sections: Any) -> Config:
    training = {"match_engine": True, **sections.pop("training", {})}
    model = {"name": str(folder), "dtype": dtype, **sections.pop("model", {})}
    return settings(folder, training=training, model=model, steps=3, **sections)


def assert_on_policy(steps: list[dict[str, Any]]) -> None:
    """Each update is the first one on responses of its own weights."""
    for metrics in steps:
        assert metrics["val/ratio_min"] == metrics["val/ratio_max"] == 1
        assert metrics["policy/approxkl_avg"] == metrics["policy/clipfrac_avg"] == 0
        assert metrics["sampling/logp_difference_max"] == 0
        assert metrics["sampling/logp_difference_rms"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratios_of_the_first_update_are_exactly_one(
    dtype: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """With a critic that trains beside the actor, on a thread less, and a temperature."""
    config = matched(
        tiny_folder,
        dtype,
        threads=2,
        rollout={"batch": 6, "max_new_tokens": 9, "temperature": 0.7, "slots": 4},
        training={"microbatch_tokens": 64},
    )
    assert_on_policy(run(config, tmp_path)[0].read_metrics())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_and_episodes_match(dtype: str, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    rows = write_rows(tmp_path, [{"prompt": f"Say {n}."} for n in range(8)])
    make_tiny(tmp_path / "chat", chat=True)
    config = matched(
        tmp_path / "chat",
        dtype,
        model={"lora_rank": 2},
        task={"kind": "dataset", "name": rows, "settings": {}, "max_prompt_tokens": 200},
        environment={"sources": [f"{tmp_path / 'world.py'}:World"], "max_turns": 3},
        reward={"sources": ["environment"], "missing_eos": "off"},
        rollout={"batch": 4, "max_new_tokens": 300, "stop": [*"eiotan"]},
    )
    run_dir, _ = run(config, tmp_path)
    assert_on_policy(run_dir.read_metrics())
    assert max(len(r.turns) for r in run_dir.read_rollouts()) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fresh_responses_match_among_carried_ones(
    dtype: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Carried responses have tokens of older weights, whose ratios are not 1."""
    config = matched(
        tiny_folder,
        dtype,
        rollout={"batch": 4, "max_new_tokens": 12},
        schedule={"overcommit": 3, "score_on": "chunk", "chunk_tokens": 4},
    )
    steps = run(config, tmp_path)[0].read_metrics()
    assert any(metrics["val/ratio_max"] != 1 for metrics in steps[1:])
    measured = [metrics for metrics in steps if "sampling/logp_difference_max" in metrics]
    assert measured
    for metrics in measured:
        assert metrics["sampling/logp_difference_max"] == 0


def test_processes_match(tiny_folder: Path, tmp_path: Path) -> None:
    config = matched(tiny_folder, "bfloat16", runtime="local", threads=2)
    assert_on_policy(run(config, tmp_path)[0].read_metrics())


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"engine": "vllm"}, "runtime": "local"},
        {"pipeline": {"ranks": 2}},
        {
            "runtime": "local",
            "cluster": {
                "processes": [
                    {"roles": ["learner"], "ranks": 2},
                    {"roles": ["generator", "task", "reference", "critic"]},
                ]
            },
        },
        {"model": {"load_in_4bit": True, "lora_rank": 2}},
        {"model": {"use_liger_kernel": True}},
        {"model": {"torch_compile": True}, "runtime": "local"},
        {"model": {"lora_rank": 2, "lora_kind": "dora"}},
    ],
)
def test_settings_that_compute_otherwise_are_refused(sections: dict[str, Any]) -> None:
    recipes.build(sections, "here")
    with raises(ConfigError, "match-engine-with-others"):
        recipes.build({"training": {"match_engine": True}, **sections}, "here")
