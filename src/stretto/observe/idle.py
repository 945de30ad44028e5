"""Time of each role: how long it worked, and what it waited for in between.

A schedule records a wait where it waits. Most idle time is no such wait: a scorer just has nothing
to do. Its cause follows from what the others do at that moment:

1. the role itself waits: its own cause, and ``down`` while its process is lost;
2. another role waits: that one's cause;
3. a generator generates: ``data``, or ``stragglers`` for another generator, out of rows itself;
4. a scorer works: ``scores``;
5. the learner works, or anyone loads weights: ``weights``;
6. nobody does anything while another role's process is lost: ``down``;
7. nobody does anything: ``other`` (writing records, checkpoints, the schedule itself).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from stretto.observe.spans import DOWN, NO_DEVICES, Span, Window

CAUSES = ("data", "stragglers", "scores", "weights", DOWN, "other")
"""Causes of idle time, in the order in which they are shown."""

ALL_DEVICES = "all devices"
"""Stands where a role does, for the mean over devices."""

_NO_DEVICES_KNOWN: Mapping[str, str] = MappingProxyType({})

Intervals = list[tuple[float, float]]
"""Disjoint stretches of time [s], in order."""


def role_order(role: str) -> tuple[int, int, str]:
    """Sort key of roles as they are shown: generators by number, scorers by name, the learner.

    Behind these come roles without a device, and the mean over all.
    """
    if role == ALL_DEVICES:
        return 4, 0, role
    if role in NO_DEVICES:
        return 3, 0, role
    if is_generator(role):
        number = role.removeprefix("generator").strip()
        return 0, int(number or 0), role
    return (2 if role == "learner" else 1), 0, role


def is_generator(role: str) -> bool:
    """Return whether a role is the generator, or one of several."""
    name, _, number = role.partition(" ")
    return name == "generator" and (not number or number.isdecimal())


@dataclass(frozen=True, slots=True)
class RoleTime:
    """One role's share of a window.

    Attributes:
        busy: stretches in which it worked.
        idle: stretches in which it did not, by cause; with ``busy`` they fill the window.
    """

    busy: Intervals
    idle: dict[str, Intervals]


def time_of_roles(
    spans: Iterable[Span],
    start_s: float,
    end_s: float,
    roles: Iterable[str] = (),
    devices: Mapping[str, str] = _NO_DEVICES_KNOWN,
) -> dict[str, RoleTime]:
    """Work and idle time of each role between two moments, by the rules on top of this file.

    Args:
        spans: those that touch the window; parts outside of it are cut off.
        start_s, end_s: the window.
        roles: further ones, which may have no span in it.
        devices: by role; roles that have one are taken together, as one role by its name.
    """
    work: defaultdict[tuple[str, str], Intervals] = defaultdict(list)
    waits: defaultdict[tuple[str, str], Intervals] = defaultdict(list)
    named = {*roles, *devices} - NO_DEVICES
    known = {devices.get(role, role) for role in named}
    generates = {devices.get(role, role) for role in named if is_generator(role)}
    for span in spans:
        if span.role in NO_DEVICES:
            continue
        who = devices.get(span.role, span.role)
        known.add(who)
        if is_generator(span.role):
            generates.add(who)
        part = (max(span.start_s, start_s), min(span.end_s, end_s))
        if part[0] < part[1]:
            (waits[who, span.cause] if span.waits else work[who, _yields(span)]).append(part)
    worked = {key: union(parts) for key, parts in work.items()}
    waited = {key: union(parts) for key, parts in waits.items()}
    window = [(start_s, end_s)] if end_s > start_s else []
    times = {}
    for role in sorted(known, key=role_order):
        busy = union(part for (who, _), parts in worked.items() if who == role for part in parts)
        left = subtract(window, busy)
        times[role] = RoleTime(busy, _idle(role, role in generates, left, worked, waited))
    return times


def _yields(span: Span) -> str:
    if span.role == "learner" or span.name == "load":
        return "weights"
    return "data" if is_generator(span.role) else "scores"


def _idle(
    role: str,
    generates: bool,
    left: Intervals,
    worked: Mapping[tuple[str, str], Intervals],
    waited: Mapping[tuple[str, str], Intervals],
) -> dict[str, Intervals]:
    """Put the window's time without a role's own work down to causes."""
    own = [(cause, parts) for (who, cause), parts in waited.items() if who == role]
    others = [(cause, parts) for (who, cause), parts in waited.items() if who != role]
    reasons = sorted(own, key=lambda reason: reason[0] != DOWN)
    reasons += sorted(
        (reason for reason in others if reason[0] != DOWN),
        key=lambda reason: CAUSES.index(reason[0]) if reason[0] in CAUSES else len(CAUSES),
    )
    for wanted in ("data", "scores", "weights"):
        cause = "stragglers" if wanted == "data" and generates else wanted
        reasons += [
            (cause, parts)
            for (who, what), parts in worked.items()
            if who != role and what == wanted
        ]
    reasons += [reason for reason in others if reason[0] == DOWN]
    idle: defaultdict[str, Intervals] = defaultdict(list)
    for cause, parts in reasons:
        idle[cause] += intersect(left, parts)
        left = subtract(left, parts)
    idle["other"] += left
    return {cause: union(parts) for cause, parts in idle.items() if parts}


class TimeSheet:
    """Sum of windows: the work and waiting of a run by role."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._busy_s: defaultdict[str, float] = defaultdict(float)
        self._idle_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(self, window: Window) -> dict[str, float]:
        """Take in a window.

        Returns:
            Its metrics: ``utilisation/<role>``, the share of the window in which the
            role worked, and ``idle_s/<role>/<cause>``, seconds. Where devices are known, also the
            means over them, as those of the role :data:`ALL_DEVICES`.
        """
        length_s = window.end_s - window.start_s
        spans, devices = (*window.ended, *window.open), window.devices
        metrics: dict[str, float] = {}
        roles = self._busy_s.keys() - {ALL_DEVICES}
        found = {
            role: (seconds(time.busy), {c: seconds(parts) for c, parts in time.idle.items()})
            for role, time in time_of_roles(spans, window.start_s, window.end_s, roles).items()
        }
        if devices:
            times = time_of_roles(spans, window.start_s, window.end_s, devices=devices)
            found[ALL_DEVICES] = _mean([times[device] for device in set(devices.values())])
        for role, (busy_s, idle_s) in found.items():
            if role not in self._busy_s:
                self._idle_s[role, "other"] += self.total_s  # before it was first seen
            self._busy_s[role] += busy_s
            metrics[f"utilisation/{role}"] = busy_s / length_s if length_s else 0.0
            for cause, idle in idle_s.items():
                metrics[f"idle_s/{role}/{cause}"] = idle
                self._idle_s[role, cause] += idle
        self.total_s += length_s
        return metrics

    def table(self) -> str:
        """Shares of the time added up, a line a role; empty when nothing was."""
        roles = sorted(self._busy_s, key=role_order)
        if not roles or not self.total_s:
            return ""
        known = {cause for _, cause in self._idle_s}
        causes = [c for c in CAUSES if c in known] + sorted(known - set(CAUSES))
        rows = [["", "busy", *causes]]
        for role in roles:
            shares = [self._busy_s[role], *(self._idle_s.get((role, c), 0.0) for c in causes)]
            rows.append([role, *(_percent(share / self.total_s) for share in shares)])
        title = f"where time went ({self.total_s:.1f} s; a role was busy, or idle for want of ...)"
        return "\n".join([title, *_aligned(rows)])


def _mean(times: Sequence[RoleTime]) -> tuple[float, dict[str, float]]:
    idle_s: defaultdict[str, float] = defaultdict(float)
    for time in times:
        for cause, parts in time.idle.items():
            idle_s[cause] += seconds(parts) / len(times)
    return sum(seconds(time.busy) for time in times) / len(times), dict(idle_s)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def seconds(parts: Intervals) -> float:
    """Length of all intervals together, in seconds."""
    return sum(end - start for start, end in parts)


def union(parts: Iterable[tuple[float, float]]) -> Intervals:
    """The time that any of the stretches covers; they may overlap, in any order."""
    merged: Intervals = []
    for start, end in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The time that lies in both."""
    common: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The time of ``a`` that is not in ``b``."""
    left: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                left.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            left.append((start, end))
    return left
