"""Busy time of each role, and causes of its idle time.

A schedule records its own waits. Most idle time is not a recorded wait: for example, a scorer has
nothing to do. Its cause follows from the other roles' activity at that moment, by the first rule
that applies:

1. The role itself waits: its own cause, ``down`` while its process is lost.
2. Another role waits: that role's cause.
3. A generator generates: ``data``, or ``stragglers`` for an idle generator.
4. A scorer works: ``scores``.
5. The learner works, or a role loads weights: ``weights``.
6. No role does anything while another role's process is lost: ``down``.
7. No role does anything while an environment answers: ``environment``.
8. No role does anything: ``other`` (writing records, checkpoints, the schedule itself).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from stretto.observe.spans import DOWN, ENVIRONMENT, NO_DEVICES, Span, Window
from stretto.saying import aligned

CAUSES = ("data", "stragglers", ENVIRONMENT, "scores", "weights", "swap", DOWN, "other")
"""Causes of idle time, in display order."""

ALL_DEVICES = "all devices"  # role name of the mean over devices
Intervals = list[tuple[float, float]]  # disjoint intervals of time [s], in order


def role_order(role: str) -> tuple[int, int, str]:
    """Return a role's sort key for display. The order is generators by number, environment, scorers
    by name, learner, roles without a device, and the mean over devices."""
    if role == ALL_DEVICES:
        return 4, 0, role
    if role == ENVIRONMENT:
        return 1, -1, role
    if role in NO_DEVICES:
        return 3, 0, role
    if is_generator(role):
        return 0, generator_number(role), role
    return (2 if role == "learner" else 1), 0, role


def cause_order(cause: str) -> tuple[int, str]:
    return (CAUSES.index(cause) if cause in CAUSES else len(CAUSES)), cause


def is_generator(role: str) -> bool:
    name, _, number = role.partition(" ")
    return name == "generator" and (not number or number.isdecimal())


def generator_number(role: str) -> int:
    return int(role.partition(" ")[2] or 0)


@dataclass(frozen=True, slots=True)
class RoleTime:
    """One role's share of a window: busy intervals, and idle ones by cause."""

    busy: Intervals
    idle: dict[str, Intervals]


def time_of_roles(
    spans: Iterable[Span],
    start_s: float,
    end_s: float,
    roles: Iterable[str] = (),
    devices: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, RoleTime]:
    """Return busy and idle time of each role between two moments, by this module's rules.

    Args:
        spans: those that touch the window, to which they are clipped.
        roles: further roles, which may have no span in it.
        devices: device by role. Roles on a device are combined into one role with its name.
    """
    work: defaultdict[tuple[str, str], Intervals] = defaultdict(list)
    waits: defaultdict[tuple[str, str], Intervals] = defaultdict(list)
    answers = Intervals()
    all_roles = {*roles, *devices}
    for span in spans:
        all_roles.add(span.role)
        part = (max(span.start_s, start_s), min(span.end_s, end_s))
        if span.role == ENVIRONMENT and part[0] < part[1]:
            answers.append(part)
        if span.role not in NO_DEVICES and part[0] < part[1]:
            place = devices.get(span.role, span.role)
            (waits[place, span.cause] if span.waits else work[place, _product(span)]).append(part)
    work_times = {key: union(parts) for key, parts in work.items()}
    wait_times = {key: union(parts) for key, parts in waits.items()}
    answers = union(answers)
    window = [(start_s, end_s)] if end_s > start_s else []
    all_roles -= NO_DEVICES
    generates = {devices.get(role, role) for role in all_roles if is_generator(role)}
    times = {}
    for role in sorted({devices.get(role, role) for role in all_roles}, key=role_order):
        busy = union(
            part for (worker, _), parts in work_times.items() if worker == role for part in parts
        )
        idle = subtract(window, busy)
        times[role] = RoleTime(
            busy, _idle(role, role in generates, idle, work_times, wait_times, answers)
        )
    return times


_PRODUCTS = ("data", "scores", "weights")


def _product(span: Span) -> str:
    if span.role == "learner" or span.name == "load":
        return "weights"
    return "data" if is_generator(span.role) else "scores"


def _idle(
    role: str,
    generates: bool,
    remainder: Intervals,
    work_times: Mapping[tuple[str, str], Intervals],
    wait_times: Mapping[tuple[str, str], Intervals],
    answers: Intervals,
) -> dict[str, Intervals]:
    reasons: list[tuple[int, int, str, Intervals]] = [(6, 0, ENVIRONMENT, answers)]
    for (other, cause), parts in wait_times.items():
        if other == role:
            reasons.append((0, cause != DOWN, cause, parts))
        else:
            reasons.append((5 if cause == DOWN else 1, cause_order(cause)[0], cause, parts))
    for (other, product), parts in work_times.items():
        if other != role:
            cause = "stragglers" if generates and product == "data" else product
            reasons.append((2 + _PRODUCTS.index(product), 0, cause, parts))
    idle: defaultdict[str, Intervals] = defaultdict(list)
    for *_, cause, parts in sorted(reasons, key=lambda reason: reason[:2]):
        rest = subtract(remainder, parts)
        idle[cause] += subtract(remainder, rest)
        remainder = rest
    idle["other"] += remainder
    return {cause: union(parts) for cause, parts in idle.items() if parts}


class TimeSheet:
    """Sum of windows: the busy and idle time of a run by role."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._busy_s: defaultdict[str, float] = defaultdict(float)
        self._idle_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(self, window: Window) -> dict[str, float]:
        """Add a window and return its metrics. ``utilisation/<role>`` is the busy share of the
        window, ``idle_s/<role>/<cause>`` is in seconds. If devices are known, the role
        :data:`ALL_DEVICES` has the means over them."""
        length_s = window.end_s - window.start_s
        spans, devices = (*window.ended, *window.open), window.devices
        roles = self._busy_s.keys() - {ALL_DEVICES}
        seconds_by_role = {
            role: _mean([time])
            for role, time in time_of_roles(spans, window.start_s, window.end_s, roles).items()
        }
        if devices:
            times = time_of_roles(spans, window.start_s, window.end_s, devices=devices)
            seconds_by_role[ALL_DEVICES] = _mean(
                [times[device] for device in set(devices.values())]
            )
        metrics: dict[str, float] = {}
        for role, (busy_s, idle_s) in seconds_by_role.items():
            if role not in self._busy_s:
                self._idle_s[role, "other"] += self.total_s  # before its first span
            self._busy_s[role] += busy_s
            metrics[f"utilisation/{role}"] = busy_s / length_s if length_s else 0.0
            for cause, seconds_idle in idle_s.items():
                metrics[f"idle_s/{role}/{cause}"] = seconds_idle
                self._idle_s[role, cause] += seconds_idle
        self.total_s += length_s
        return metrics

    def table(self) -> str:
        """Return shares of the summed time, a line a role, or an empty text without any."""
        if not self._busy_s or not self.total_s:
            return ""
        causes = sorted({cause for _, cause in self._idle_s}, key=cause_order)
        rows = [["", "busy", *causes]]
        for role in sorted(self._busy_s, key=role_order):
            times_s = [self._busy_s[role], *(self._idle_s.get((role, c), 0.0) for c in causes)]
            shares = (time_s / self.total_s for time_s in times_s)
            rows.append([role, *(f"{100 * s:.1f} %" if s >= 0.0005 else "-" for s in shares)])
        title = f"where time went ({self.total_s:.1f} s; a role was busy, or idle for want of ...)"
        return f"{title}\n{aligned(rows)}"


def _mean(times: Sequence[RoleTime]) -> tuple[float, dict[str, float]]:
    idle_s: defaultdict[str, float] = defaultdict(float)
    for time in times:
        for cause, parts in time.idle.items():
            idle_s[cause] += seconds(parts) / len(times)
    return sum(seconds(time.busy) for time in times) / len(times), dict(idle_s)


def seconds(parts: Intervals) -> float:
    return sum(end - start for start, end in parts)


def union(parts: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals, which may overlap and be in any order."""
    merged: Intervals = []
    for start, end in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the time of ``a`` that is not in ``b``."""
    remainder: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                remainder.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            remainder.append((start, end))
    return remainder
