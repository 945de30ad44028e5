"""Variants of a schedule by name, the settings of their runs, and the outcomes of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config import KNOBS, PRESETS, Config, PresetName, ScheduleConfig, recipes
from stretto.observe.compare import Outcome
from stretto.observe.report import load


def _variants(names: Iterable[PresetName]) -> dict[str, dict[str, object]]:
    """Presets, each after what is left of it without one of its parts."""
    found: dict[str, dict[str, object]] = {}
    for name in names:
        for part, knob in PRESETS[name].parts.items():
            found[f"{name}-no-{part}"] = {"preset": name, knob: KNOBS[knob].off[0]}
        found[name] = {"preset": name}
    return found


ONE_ENGINE = _variants(name for name in PRESETS if not PRESETS[name].several_engines)
"""The variants that need no more than one engine."""

OVERCOMMIT_RULES: dict[str, dict[str, object]] = {
    "oppo-algorithm1": {"preset": "oppo", "overcommit_rule": "algorithm1"},
    "oppo-throughput": {"preset": "oppo", "overcommit_rule": "throughput"},
    "oppo-delta4": {"preset": "oppo", "overcommit": 4},
    "oppo-delta8": {"preset": "oppo", "overcommit": 8},
}
"""Other rules for the delta of 'oppo', which by default follows 'equation4'."""

VARIANTS: Mapping[str, Mapping[str, object]] = (
    ONE_ENGINE
    | _variants(name for name in PRESETS if PRESETS[name].several_engines)
    | OVERCOMMIT_RULES
)
"""Names for settings of the schedule."""

REPLACED = ("preset", *KNOBS)
"""Settings that every variant replaces in the recipe, by the default if it names no value."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a comparison."""

    variant: str
    seed: int


def config_of(config: Config, job: Job, out: str) -> Config:
    """The settings of one run. It writes no checkpoints beyond those that a recipe counts in steps.

    Raises:
        ConfigError: the variant's settings and the others contradict each other.
    """
    data = config.model_dump()
    data |= {"seed": job.seed, "out": out, "schedule": schedule_of(config.schedule, job.variant)}
    data["observe"] |= {"progress": "plain", "checkpoint_minutes": 0.0}
    return recipes.build(data, f"variant '{job.variant}'")


def schedule_of(
    schedule: ScheduleConfig,
    variant: str,
    variants: Mapping[str, Mapping[str, object]] = VARIANTS,
) -> dict[str, Any]:
    """The settings of a schedule with the variant's preset and knobs."""
    defaults = ScheduleConfig().model_dump()
    knobs = {name: defaults[name] for name in REPLACED}
    return {**schedule.model_dump(), **knobs, **variants[variant]}


def outcome_of(job: Job, folder: Path) -> Outcome:
    """Read the outcome of a run from its folder."""
    return Outcome.of(job.variant, job.seed, load([folder])[0])
