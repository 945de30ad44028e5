"""What is compared: variants of a schedule by name, the settings of a run, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config import PRESETS, Config, ScheduleConfig, recipes
from stretto.observe.compare import Outcome
from stretto.observe.report import load

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"preset": "sync"},
    "oppo-no-intra": {"preset": "oppo", "score_on": "batch"},
    "oppo-no-inter": {"preset": "oppo", "overcommit": 0},
    "oppo": {"preset": "oppo"},
    "async": {"preset": "async"},
    "stretto": {"preset": "stretto"},
    "rlhfuse": {"preset": "rlhfuse"},
}
"""Names for settings of the schedule."""

KNOBS = ("preset", *PRESETS["sync"])
"""What a variant sets, whatever the recipe says; to the default where the variant names none."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a comparison."""

    variant: str
    seed: int


def config_of(config: Config, job: Job, out: str) -> Config:
    """The settings of one run.

    Raises:
        ConfigError: the variant's settings and the others contradict each other.
    """
    data = config.model_dump()
    data |= {"seed": job.seed, "out": out, "schedule": schedule_of(config.schedule, job.variant)}
    data["observe"]["progress"] = "plain"
    return recipes.build(data, f"variant '{job.variant}'")


def schedule_of(schedule: ScheduleConfig, variant: str) -> dict[str, Any]:
    """The settings of a schedule with the variant's preset and knobs."""
    defaults = ScheduleConfig().model_dump()
    knobs = {knob: defaults[knob] for knob in KNOBS}
    return {**schedule.model_dump(), **knobs, **VARIANTS[variant]}


def outcome_of(job: Job, folder: Path) -> Outcome:
    """What a run in a folder has recorded."""
    return Outcome.of(job.variant, job.seed, load([folder])[0])
