"""The timeline of a step, reduced to its visible parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stretto.observe.idle import time_of_roles
from stretto.observe.spans import ENVIRONMENT, Span
from stretto.observe.trace import TracedStep
from stretto.observe.waiting import profile

MAX_BARS = 300  # Most bars of a role. Beyond it, neighbours of one kind are joined.

_JOINED_GAP = 1 / 1000
_SMALLEST_WAIT = 1 / 2000  # shortest wait to show, as a share of its step


@dataclass(slots=True)
class Bar:
    """A stretch of work, or of waiting, of one role."""

    role: str
    kind: str  # span names up to a slash, or the cause of a wait
    start_s: float
    end_s: float
    tokens: int | None = None  # None: not recorded
    version: int | None = None  # of the policy
    rollouts: Sequence[int] = ()  # the first ids
    count: int = 0  # of all rollouts
    spans: int = 1  # number of joined spans
    height: float = 1.0  # a share of its lane's height


def bars(step: TracedStep) -> list[Bar]:
    """Return the work of a step, in order of start, clipped to the step."""
    by_role: dict[str, list[Bar]] = {}
    for span in sorted(step.spans, key=lambda span: span.start_s):
        if not span.waits and span.role != ENVIRONMENT:
            by_role.setdefault(span.role, []).append(_bar(span, step))
    gap_s = _JOINED_GAP * (step.end_s - step.start_s)
    work: list[Bar] = []
    for bars in by_role.values():
        work += _join(bars, gap_s) if len(bars) > MAX_BARS else bars
    calls = [span for span in step.spans if span.role == ENVIRONMENT]
    intervals = profile(calls, step.start_s, step.end_s, MAX_BARS)
    peak = max((waiting for *_, waiting in intervals), default=1)
    for start_s, end_s, waiting in intervals:
        bar = Bar(ENVIRONMENT, ENVIRONMENT, start_s, end_s, count=waiting, height=waiting / peak)
        work.append(bar)
    return work


def waits(step: TracedStep, roles: Iterable[str]) -> list[Bar]:
    """Return waits of the roles, without those too short to see or of unknown cause."""
    smallest_s = _SMALLEST_WAIT * (step.end_s - step.start_s)
    return [
        Bar(role, cause, start, end)
        for role, time in time_of_roles(step.spans, step.start_s, step.end_s, roles).items()
        for cause, parts in time.idle.items()
        if cause != "other"
        for start, end in parts
        if end - start >= smallest_s
    ]


def _bar(span: Span, step: TracedStep) -> Bar:
    facts, kind = span.attributes, span.name.partition("/")[0]
    start_s, end_s = max(span.start_s, step.start_s), min(span.end_s, step.end_s)
    rollouts = facts.get("rollouts") or ()
    count = facts.get("rollouts_count", len(rollouts))
    tokens, version = facts.get("tokens"), facts.get("version")
    return Bar(span.role, kind, start_s, end_s, tokens, version, rollouts, count)


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
        # The same rollouts come again chunk after chunk, so their total is unknown.
        last.rollouts, last.count = (), 0
    return joined
