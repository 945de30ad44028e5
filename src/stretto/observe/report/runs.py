"""Runs as a report reads them: whatever records a run directory has, and what it lacks."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import ConfigError
from stretto.observe.idle import CAUSES, role_order
from stretto.observe.progress import STEP_TIME
from stretto.observe.report import evaluations
from stretto.observe.run_directory import RolloutRecord, RunDirectory
from stretto.observe.spans import Span
from stretto.observe.trace import Trace, TracedStep

TIME = "time_s"


@dataclass(frozen=True, slots=True)
class StepSpans:
    """Spans of one step in the trace.

    Attributes:
        step: its number and times, in seconds since the run's start.
        spans: all that touch it; some may have begun before it, or end after it.
    """

    step: TracedStep
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        name: its folder's, with as many of the folders above as tell it from the other runs.
        settings: by dotted name.
        metrics: one mapping a step, in order, under ``step`` its number.
        rollouts: those that ended.
        steps: the traced ones, by number.
        roles: with a track in the trace, in the order in which they are shown.
        missing: what it lacks, in plain words.
        evaluations: records of ``stretto eval``, the oldest first.
    """

    name: str
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    rollouts: Sequence[RolloutRecord]
    steps: Mapping[int, StepSpans] = field(default_factory=dict)
    roles: Sequence[str] = ()
    missing: Sequence[str] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Step numbers and values of a metric, where it has a finite one."""
        found = [(int(m["step"]), m[metric]) for m in self.metrics if _finite(m.get(metric))]
        return [step for step, _ in found], [float(value) for _, value in found]

    def times_s(self) -> dict[int, float]:
        """Seconds since the run's start at the end of each step.

        From the steps' own durations where the time itself was not recorded.
        """
        times: dict[int, float] = {}
        now_s = 0.0
        for m in self.metrics:
            now_s += m[STEP_TIME] if _finite(m.get(STEP_TIME)) else 0.0
            if _finite(m.get(TIME)):
                now_s = m[TIME]
            times[int(m["step"])] = now_s
        return times

    def mean_over_time(self, metric: str) -> float | None:
        """A metric's mean over the run's time: long steps count for more than short ones."""
        times_s, before_s = self.times_s(), 0.0
        total = length_s = 0.0
        for m in self.metrics:
            step_s = times_s[int(m["step"])] - before_s
            before_s += step_s
            if _finite(m.get(metric)):
                total += m[metric] * step_s
                length_s += step_s
        return total / length_s if length_s else None


@dataclass(frozen=True, slots=True)
class Shares:
    """Busy and idle time of a role over a run, in seconds.

    Attributes:
        idle_s: by cause.
    """

    role: str
    busy_s: float
    idle_s: Mapping[str, float]


def load(paths: Sequence[str | Path]) -> list[Run]:
    """Read runs.

    Raises:
        ConfigError: a path is not a run directory, or none was given, or one twice.
        StateError: a file is damaged.
    """
    folders = [Path(path) for path in paths]
    if not folders:
        raise ConfigError("a report takes at least one run directory; none was given")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("the same run directory was given twice; name each once")
    return [_load(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _load(folder: Path, name: str) -> Run:
    run = RunDirectory(folder)
    if not (run.config_file.is_file() or run.metrics_file.is_file()):
        raise ConfigError(
            f"'{folder}' is not a run directory: it has neither config.toml nor metrics.jsonl"
        )
    settings = (
        _flat(tomllib.loads(run.config_file.read_text("utf-8")))
        if run.config_file.is_file()
        else {}
    )
    metrics, rollouts = run.read_metrics(), run.read_rollouts()
    trace = run.trace.read() if run.trace.path.is_file() else Trace((), ())
    missing = [
        text
        for lacks, text in (
            (not settings, "config.toml: its settings are not compared"),
            (not metrics, "metrics.jsonl: it has no curves"),
            (not trace.steps, "trace.json: it has no timeline"),
            (not rollouts, "rollouts.jsonl: it has no response lengths"),
        )
        if lacks
    ]
    return Run(
        name=name,
        settings=settings,
        metrics=metrics,
        rollouts=rollouts,
        steps=_by_step(trace),
        roles=sorted({span.role for span in trace.spans}, key=role_order),
        missing=missing,
        evaluations=evaluations.read(folder),
    )


def _by_step(trace: Trace) -> dict[int, StepSpans]:
    steps = sorted(trace.steps, key=lambda step: step.start_s)
    ends = [step.end_s for step in steps]
    spans: list[list[Span]] = [[] for _ in steps]
    for span in trace.spans:
        i = bisect_right(ends, span.start_s)
        while i < len(steps) and steps[i].start_s < span.end_s:
            spans[i].append(span)
            i += 1
    return {
        step.step: StepSpans(step, tuple(inside)) for step, inside in zip(steps, spans, strict=True)
    }


def shares(run: Run) -> list[Shares]:
    """Work and waiting by role over a run, from the metrics of its steps."""
    roles: dict[str, tuple[float, dict[str, float]]] = {}
    times_s, before_s = run.times_s(), 0.0
    for m in run.metrics:
        now_s = times_s[int(m["step"])]
        for key, value in m.items():
            kind, _, rest = key.partition("/")
            if kind == "utilisation" and _finite(value):
                busy_s, idle_s = roles.get(rest, (0.0, {}))
                roles[rest] = (busy_s + value * (now_s - before_s), idle_s)
        for key, value in m.items():
            kind, _, rest = key.partition("/")
            role, _, cause = rest.rpartition("/")
            if kind == "idle_s" and role in roles and _finite(value):
                roles[role][1][cause] = roles[role][1].get(cause, 0.0) + value
        before_s = now_s
    return [
        Shares(role, roles[role][0], {c: idle[c] for c in sorted(idle, key=_cause_order)})
        for role in sorted(roles, key=role_order)
        for idle in (roles[role][1],)
    ]


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Settings that are not the same in all runs that have any, with each run's value.

    ``None`` stands for a run that does not have it. Where and how a run is shown is left out.
    """
    known = [run for run in runs if run.settings]
    keys = sorted({key for run in known for key in run.settings})
    return [
        (key, [run.settings.get(key) for run in runs])
        for key in keys
        if key != "out"
        and not key.startswith("observe.")
        and any(run.settings.get(key) != known[0].settings.get(key) for run in known)
    ]


def _cause_order(cause: str) -> tuple[int, str]:
    return (CAUSES.index(cause) if cause in CAUSES else len(CAUSES)), cause


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for own in parts:
        length = 1
        while length < len(own) and sum(p[-length:] == own[-length:] for p in parts) > 1:
            length += 1
        names.append("/".join(own[-length:]))
    return names


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
