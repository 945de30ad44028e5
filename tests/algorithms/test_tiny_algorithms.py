"""Every algorithm teaches `tiny` to spell backward, stage after stage and with every knob on.

The settings are data, in tiny_algorithms.toml; docs/algorithms.md has what they reach.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from stretto import runs
from stretto.config import KNOBS, Config, recipes
from stretto.config.algorithm import ALGORITHMS
from stretto.observe import RunDirectory
from stretto.observe.display import Progress

SETTINGS = tomllib.loads((Path(__file__).parent / "tiny_algorithms.toml").read_text())

START, END = 0.6, 0.8
"""Bounds of the mean reward of ten steps.

It is of 640 responses, and so has a standard error of up to 0.02 of its own; another seed, or a CPU
that rounds otherwise, moves it as much again. docs/algorithms.md has what was measured.
"""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "sync": {},
    "every knob": {"schedule": {"preset": "stretto"}, "rollout": {"engines": 2}},
}


def settings(algorithm: str, schedule: str) -> Config:
    data = recipes.load("tiny").model_dump()
    off = {"observe": {"progress": "off"}}
    for changes in (SETTINGS[algorithm], SCHEDULES[schedule], off):
        for key, value in changes.items():
            data[key] = data[key] | value if isinstance(value, Mapping) else value
    return Config.model_validate(data)


def test_the_file_has_valid_settings_for_every_algorithm_without_a_teacher() -> None:
    assert set(SETTINGS) == {name for name, spec in ALGORITHMS.items() if not spec.teacher}
    recipe = recipes.load("tiny")
    for algorithm in SETTINGS:
        config = settings(algorithm, "every knob")
        assert config.algorithm.name == algorithm
        knobs = {*KNOBS} - {"train_on"}  # not with lag, and not for all algorithms
        assert all(config.schedule.knobs.works(name, engines=2) for name in knobs)
        assert config.warmup_examples == recipe.warmup_examples
        assert config.rollout.batch == recipe.rollout.batch
    assert settings("ppo", "sync").algorithm == recipe.algorithm  # the recipe as it is shipped


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("algorithm", SETTINGS)
def test_tiny_learns_under(algorithm: str, schedule: str, tmp_path: Path) -> None:
    """From under 0.6 to over 0.8, in about a minute of one core."""
    config = settings(algorithm, schedule)
    run_dir = RunDirectory.create(tmp_path, algorithm, config)
    runs.train(config, run_dir=run_dir, progress=Progress())
    rewards = [step["objective/scores"] for step in run_dir.read_metrics()]
    assert len(rewards) == config.steps
    assert fmean(rewards[:10]) < START
    assert fmean(rewards[-10:]) > END
