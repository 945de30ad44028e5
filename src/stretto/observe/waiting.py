"""Lanes for overlapping spans of one role: environment calls, maybe thousands, and other work."""

from __future__ import annotations

import re
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from stretto.observe.spans import ENVIRONMENT, Span

LANES = 8
"""Trace tracks for an environment's calls, because spans of one track must not overlap. Calls
without a free track share one more."""


def is_environment(role: str) -> bool:
    name, _, number = role.partition(" ")
    return name == ENVIRONMENT and (not number or number.isdecimal())


def at_once(span: Span) -> int:
    return int(span.attributes.get("calls", 1))


INSTANT_S = 1e-6  # intervals up to this precision of traces are ignored
FURTHER = 1000  # most spans per step for calls without a free track


class Lanes:
    """Trace tracks of an environment's calls."""

    def __init__(self) -> None:
        self._ends_s = [float("-inf")] * LANES
        self._joined_s = float("-inf")  # end of the shared last track's spans

    def place(self, spans: Iterable[Span]) -> list[tuple[str, Span]]:
        """Return track names, each with a span. Calls without a free track become consecutive
        spans, at most :data:`FURTHER`, whose attribute ``calls`` is their number. Parts of them
        before the end of the last such span are cut off."""
        track_spans: list[tuple[str, Span]] = []
        overflow: list[Span] = []
        for span in sorted(spans, key=lambda span: span.start_s):
            lane = next((i for i, end_s in enumerate(self._ends_s) if end_s <= span.start_s), None)
            if lane is None:
                overflow.append(span)
                continue
            self._ends_s[lane] = span.end_s
            track_spans.append((f"{ENVIRONMENT} {lane + 1}" if lane else ENVIRONMENT, span))
        ends_s = max((span.end_s for span in overflow), default=0.0)
        for start_s, end_s, count in profile(overflow, self._joined_s, ends_s, FURTHER // 2):
            self._joined_s = end_s
            merged_span = Span(ENVIRONMENT, "further calls", start_s, end_s, {"calls": count})
            track_spans.append((f"{ENVIRONMENT} {LANES + 1}", merged_span))
        return track_spans


LANE = re.compile(r" \(lane (\d+)\)$")  # suffix of a role's further track


class RoleLanes:
    """The tracks of roles other than an environment.

    - Spans of one track nest or are disjoint, because viewers draw other overlaps wrongly.
    - Spans keep the order in which they ended. They may arrive a little late.
    """

    _KEPT = 256  # spans of a track that a later one is compared with

    def __init__(self) -> None:
        self._lanes: defaultdict[str, list[list[tuple[float, float]]]] = defaultdict(list)

    def place(self, spans: Iterable[Span]) -> Iterator[tuple[str, Span]]:
        """Yield each span with the name of its track: the role's, or one of :data:`LANE`."""
        for span in spans:
            lanes = self._lanes[span.role]
            number = next((i for i, lane in enumerate(lanes) if _fits(span, lane)), len(lanes))
            if number == len(lanes):
                lanes.append([])
            insort(lanes[number], (span.end_s, span.start_s))
            del lanes[number][: -self._KEPT]
            yield (f"{span.role} (lane {number + 1})" if number else span.role), span


def _fits(span: Span, lane: Sequence[tuple[float, float]]) -> bool:
    for end_s, start_s in reversed(lane):
        if end_s <= span.start_s:
            break
        inside = start_s <= span.start_s and span.end_s <= end_s
        around = span.start_s <= start_s and end_s <= span.end_s
        if not (inside or around or span.end_s <= start_s):
            return False
    return True


def profile(
    spans: Iterable[Span], start_s: float, end_s: float, most: int
) -> list[tuple[float, float, int]]:
    """Return the concurrent calls between two moments, as intervals in order. Beyond ``most``
    intervals, neighbours are joined, with the greater number, to at most twice ``most``."""
    inside = ((max(s.start_s, start_s), min(s.end_s, end_s), at_once(s)) for s in spans)
    changes: dict[float, int] = {}
    for begin_s, finish_s, count in inside:
        if begin_s < finish_s:
            changes[begin_s] = changes.get(begin_s, 0) + count
            changes[finish_s] = changes.get(finish_s, 0) - count
    intervals: list[tuple[float, float, int]] = []
    times, open_now = sorted(changes), 0
    for at_s, next_s in pairwise(times):
        open_now += changes[at_s]
        if open_now and next_s - at_s > INSTANT_S:  # spans read back may overlap by rounding
            intervals.append((at_s, next_s, open_now))
    if len(intervals) <= most:
        return intervals
    return _joined(intervals, (intervals[-1][1] - intervals[0][0]) / most)


def _joined(
    parts: Sequence[tuple[float, float, int]], least_s: float
) -> list[tuple[float, float, int]]:
    """Join neighbours as long as the result is at most ``least_s`` long."""
    joined: list[tuple[float, float, int]] = []
    for start_s, end_s, count in parts:
        if joined and end_s - joined[-1][0] <= least_s:
            joined[-1] = (joined[-1][0], end_s, max(joined[-1][2], count))
        else:
            joined.append((start_s, end_s, count))
    return joined
