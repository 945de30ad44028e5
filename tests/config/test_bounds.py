"""Numbers of settings have bounds, which refuse those that nobody means."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

import pytest

from stretto.cli.dry_run import describe_run
from stretto.config import Config, recipes
from stretto.config.sections import Section, subsection
from stretto.errors import ConfigError, StrettoError


def numeric(kind: type[Section], prefix: str = "") -> dict[str, type]:
    """Types of numbers by the names of the settings that take one, or several."""
    found: dict[str, type] = {}
    for name, field in kind.model_fields.items():
        if inner := subsection(kind, name):
            found |= numeric(inner, f"{prefix}{name}.")
        elif numbers := re.findall(r"\b(?:int|float)\b", str(field.annotation)):
            found[prefix + name] = {"int": int, "float": float}[numbers[0]]
    return found


@pytest.mark.parametrize("kind", recipes.FOLDERS)
def test_numbers_that_nobody_means_are_refused_in_a_sentence(kind: type[Section]) -> None:
    """They would fill the memory or overflow, if they got beyond the settings."""
    names = numeric(kind)
    assert names.keys() <= set(recipes.setting_names(kind))
    assert len(names) > 20
    signed = {"reward.missing_eos_penalty"}
    several = {"reward.weights": 1, "training.betas": 2, "schedule.threads": 3}
    for name, number in names.items():
        section, _, key = name.rpartition(".")
        absurd = [10**18, 10**30] if number is int else [1e308, math.inf, math.nan]
        for value in [*absurd, *([] if name in signed | {"reward.weights"} else [-1])]:
            if value == 10**18 and key == "seed":
                continue
            given: Any = [value] * several[name] if name in several else value
            data = {section: {key: given}} if section else {key: given}
            with pytest.raises(ConfigError) as caught:
                recipes.build(data, "test", kind=kind)
            assert key in str(caught.value)
            assert caught.value.code


def largest(name: str) -> int:
    """The largest number that a setting takes."""
    section, _, key = name.rpartition(".")
    kind = (subsection(Config, section) if section else None) or Config
    return int(re.findall(r"le=(\d+)", str(kind.model_fields[key]))[0])


OBJECTS = [
    *("steps", "warmup_examples", "task.size", "environment.processes", "environment.parallel"),
    *("rollout.batch", "rollout.slots", "rollout.engines", "schedule.lag", "schedule.chunk_window"),
    *("cluster.restarts", "pipeline.micro_batches", "pipeline.ranks", "training.epochs"),
    *("observe.samples", "observe.eval_prompts", "threads"),
]


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("runtime", ["inline", "local"])
def test_dry_runs_end_with_the_largest_numbers(name: str, runtime: str) -> None:
    """They make no object for each."""
    section, _, key = name.rpartition(".")
    value = {key: largest(name)}
    data: dict[str, Any] = {
        "model": {"name": "tiny", "device": "cpu"},
        "task": {"name": "arithmetic"},
    }
    data["rollout"] = {"max_new_tokens": 6}
    data |= {section: {**data.get(section, {}), **value}} if section else value
    with suppress(StrettoError):  # such as one about the memory that it would take
        assert "emory" in describe_run(recipes.build({**data, "runtime": runtime}, "test"))
