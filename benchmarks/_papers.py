"""What the three papers' figures share: tables in Markdown, and what a part of the page is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from stretto.config import ScheduleConfig
from stretto.planner.formulas import priced
from stretto.runtime.sim.cluster import Cluster
from stretto.runtime.sim.simulate import SimResult, simulate

EAGER_S_A_LAYER = 0.0008
"""Launching the kernels of a decode step from Python, as trainers do that generate without CUDA
graphs."""
PADDED = 64
"""Responses that such trainers score at a time, padded to the longest of them: TRL's default."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is made of one paper.

    Attributes:
        tables: Markdown, by the mark in docs/papers.md between which and the next they stand.
        pictures: SVG, by the name of a file in docs/images.
    """

    tables: Mapping[str, str]
    pictures: Mapping[str, str] = field(default_factory=dict)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def scheduled(cluster: Cluster, **settings: object) -> SimResult:
    """Simulate a cluster under another schedule."""
    schedule = ScheduleConfig.model_validate(settings)
    return simulate(priced(cluster).model_copy(update={"schedule": schedule}))


def step_s(result: SimResult, skipped: int = 0) -> float:
    """Return the mean seconds of a step, without the first ones and the last.

    What overlaps has nothing to overlap with at the end.
    """
    seconds = [step["timing_s/step"] for step in result.steps]
    return fmean(seconds[skipped:-1] or seconds[-1:])


def percent(share: float) -> str:
    """Return a share."""
    return f"{100 * share:.0f} %"
