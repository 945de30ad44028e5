"""The timeline of a step, reduced to what can be seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.observe.idle import time_of_roles
from stretto.observe.report.runs import StepSpans
from stretto.observe.spans import Span

MAX_BARS = 300
"""Bars of a role; with more of them, neighbours of one kind are joined."""

_JOINED_GAP = 1 / 1000
_SMALLEST_WAIT = 1 / 2000
"""Shortest wait that is shown, as a share of its step."""


@dataclass(slots=True)
class Bar:
    """A stretch of work of one role.

    Attributes:
        kind: the name of the spans, up to a slash.
        start_s, end_s: within the step.
        tokens: worked on; ``None`` where that was not recorded.
        version: of the policy.
        rollouts: the first ids.
        count: of rollouts, in all.
        spans: that it stands for.
    """

    role: str
    kind: str
    start_s: float
    end_s: float
    tokens: int | None = None
    version: int | None = None
    rollouts: Sequence[int] = ()
    count: int = 0
    spans: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch of time in which a role was idle."""

    role: str
    cause: str
    start_s: float
    end_s: float


def bars(step: StepSpans) -> list[Bar]:
    """The work of a step, in order of start; what reaches beyond it is cut off."""
    by_role: dict[str, list[Bar]] = {}
    for span in sorted(step.spans, key=lambda span: span.start_s):
        if not span.waits:
            by_role.setdefault(span.role, []).append(_bar(span, step))
    gap_s = _JOINED_GAP * (step.step.end_s - step.step.start_s)
    return [
        bar
        for of_role in by_role.values()
        for bar in (_join(of_role, gap_s) if len(of_role) > MAX_BARS else of_role)
    ]


def waits(step: StepSpans, roles: Iterable[str]) -> list[Wait]:
    """Waits of the roles with their causes, without those too short to see or of unknown cause."""
    start_s, end_s = step.step.start_s, step.step.end_s
    smallest_s = _SMALLEST_WAIT * (end_s - start_s)
    return [
        Wait(role, cause, start, end)
        for role, time in time_of_roles(step.spans, start_s, end_s, roles).items()
        for cause, parts in time.idle.items()
        if cause != "other"
        for start, end in parts
        if end - start >= smallest_s
    ]


def _bar(span: Span, step: StepSpans) -> Bar:
    given: dict[str, Any] = span.attributes
    rollouts = given.get("rollouts") or ()
    return Bar(
        role=span.role,
        kind=span.name.partition("/")[0],
        start_s=max(span.start_s, step.step.start_s),
        end_s=min(span.end_s, step.step.end_s),
        tokens=given.get("tokens"),
        version=given.get("version"),
        rollouts=rollouts,
        count=given.get("rollouts_count", len(rollouts)),
    )


def _join(of_role: Sequence[Bar], gap_s: float) -> list[Bar]:
    joined: list[Bar] = []
    for bar in of_role:
        last = joined[-1] if joined else None
        if last is None or last.kind != bar.kind or bar.start_s - last.end_s > gap_s:
            joined.append(bar)
            continue
        last.end_s = max(last.end_s, bar.end_s)
        last.spans += bar.spans
        if bar.tokens is not None:
            last.tokens = (last.tokens or 0) + bar.tokens
        last.version = bar.version if last.version is None else last.version
        # The same rollouts come again chunk after chunk; how many there are in all is not known.
        last.rollouts, last.count = (), 0
    return joined
