"""Runs as a report reads them: whatever records a run directory has, and what it lacks."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import ConfigError
from stretto.observe.display import STEP_TIME
from stretto.observe.idle import cause_order, role_order
from stretto.observe.run_directory import RolloutRecord, RunDirectory
from stretto.observe.spans import Span
from stretto.observe.trace import Trace, TracedStep


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """The records of one run.

    Attributes:
        name: its folder's, with as many of the folders above as tell it from the other runs.
        settings: by dotted name.
        metrics: one mapping a step, in order, under ``step`` its number.
        rollouts: those that ended.
        steps: the traced ones with their spans, by number.
        roles: with a track in the trace, in the order in which they are shown.
        missing: what it lacks, in plain words.
        evaluations: records of ``stretto eval``, the oldest first.
    """

    name: str
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    rollouts: Sequence[RolloutRecord]
    steps: Mapping[int, TracedStep] = field(default_factory=dict)
    roles: Sequence[str] = ()
    missing: Sequence[str] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return step numbers and values of a metric, where it has a finite one."""
        found = [(int(m["step"]), m[metric]) for m in self.metrics if _finite(m.get(metric))]
        return [step for step, _ in found], [float(value) for _, value in found]

    def times_s(self) -> dict[int, float]:
        """Return seconds since the run's start at the end of each step.

        From the steps' own durations where the time itself was not recorded.
        """
        times: dict[int, float] = {}
        now_s = 0.0
        for m in self.metrics:
            now_s += m[STEP_TIME] if _finite(m.get(STEP_TIME)) else 0.0
            if _finite(m.get("time_s")):
                now_s = m["time_s"]
            times[int(m["step"])] = now_s
        return times

    def timed(self) -> Iterator[tuple[Mapping[str, Any], float]]:
        """Yield the metrics of each step, and the seconds that it took."""
        times_s, before_s = self.times_s(), 0.0
        for m in self.metrics:
            now_s = times_s[int(m["step"])]
            yield m, now_s - before_s
            before_s = now_s

    def mean_over_time(self, metric: str) -> float | None:
        """Return a metric's mean over the run's time: long steps count for more than short ones."""
        known = [(m[metric], step_s) for m, step_s in self.timed() if _finite(m.get(metric))]
        length_s = sum(step_s for _, step_s in known)
        return sum(value * step_s for value, step_s in known) / length_s if length_s else None


class Shares(NamedTuple):
    """Busy and idle time of a role over a run, in seconds; idle time by cause."""

    role: str
    busy_s: float
    idle_s: Mapping[str, float]


def load(paths: Sequence[str | Path]) -> list[LoadedRun]:
    """Read runs. Raises ConfigError if a path is not a run directory, none was given or one twice;
    StateError if a file is damaged.
    """
    folders = [Path(path) for path in paths]
    if not folders:
        raise ConfigError(
            "a report takes at least one run directory; none was given", "no-run-named"
        )
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("the same run directory was given twice; name each once", "run-twice")
    return [_load(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _load(folder: Path, name: str) -> LoadedRun:
    run = RunDirectory(folder)
    configured = run.config_file.is_file()
    if not (configured or run.metrics_file.is_file()):
        raise ConfigError(
            f"'{folder}' is not a run directory: it has neither config.toml nor metrics.jsonl",
            "not-a-run",
        )
    settings = _flat(tomllib.loads(run.config_file.read_text("utf-8"))) if configured else {}
    metrics, rollouts, trace = run.read_metrics(), run.read_rollouts(), run.trace.read()
    lacks = (
        (settings, "config.toml: its settings are not compared"),
        (metrics, "metrics.jsonl: it has no curves"),
        (trace.steps, "trace.json: it has no timeline"),
        (rollouts, "rollouts.jsonl: it has no response lengths"),
    )
    return LoadedRun(
        name=name,
        settings=settings,
        metrics=metrics,
        rollouts=rollouts,
        steps=_by_step(trace),
        roles=sorted({span.role for span in trace.spans}, key=role_order),
        missing=[text for found, text in lacks if not found],
        evaluations=run.read_evaluations(),
    )


def _by_step(trace: Trace) -> dict[int, TracedStep]:
    steps = sorted(trace.steps, key=lambda step: step.start_s)
    ends = [step.end_s for step in steps]
    spans: list[list[Span]] = [[] for _ in steps]
    for span in trace.spans:
        i = bisect_right(ends, span.start_s)
        while i < len(steps) and steps[i].start_s < span.end_s:
            spans[i].append(span)
            i += 1
    return {
        step.step: replace(step, spans=tuple(inside))
        for step, inside in zip(steps, spans, strict=True)
    }


def shares(run: LoadedRun) -> list[Shares]:
    """Return work and waiting by role over a run, from the metrics of its steps."""
    busy_s: defaultdict[str, float] = defaultdict(float)
    idle_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for m, step_s in run.timed():
        for key, value in m.items():
            kind, _, rest = key.partition("/")
            if kind == "utilisation" and _finite(value):
                busy_s[rest] += value * step_s
            elif kind == "idle_s" and _finite(value):
                role, _, cause = rest.rpartition("/")
                idle_s[role][cause] += value
    return [
        Shares(
            role, busy_s[role], {c: idle_s[role][c] for c in sorted(idle_s[role], key=cause_order)}
        )
        for role in sorted(busy_s, key=role_order)
    ]


def differing_settings(runs: Sequence[LoadedRun]) -> list[tuple[str, list[Any]]]:
    """Return settings that are not the same in all runs that have any, with each run's value.

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


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
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
