"""Runs as a report reads them: records, missing records, and results by KL and off-policyness."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any, NamedTuple

from stretto.errors import ConfigError
from stretto.observe.display import REWARD, STEP_TIME
from stretto.observe.idle import cause_order, role_order
from stretto.observe.run_directory import RolloutRecord, RunDirectory
from stretto.observe.spans import Span
from stretto.observe.trace import Trace, TracedStep
from stretto.observe.trackers import flat_settings

OFF_POLICY = "schedule.weight_sync_interval"
"""The setting N: batches generated, and then trained on, with one version of the weights."""

LAST_SHARE = 10  # the reward of a run is the mean over the last tenth of its steps


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """The records of one run."""

    name: str  # its folder's, with parent folders if needed to be unique
    settings: Mapping[str, Any]  # by dotted name
    metrics: Sequence[Mapping[str, Any]]  # of each step, with its number ``step``
    rollouts: Sequence[RolloutRecord]  # ended ones
    steps: Mapping[int, TracedStep] = field(default_factory=dict)  # with spans, by number
    roles: Sequence[str] = ()  # that have a track in the trace, in display order
    missing: Sequence[str] = ()  # missing records, in plain words
    evaluations: Sequence[Mapping[str, Any]] = ()  # of ``stretto eval``, oldest first
    samples: Sequence[Mapping[str, Any]] = ()  # with ``step`` and the fields of a Sample
    machine: str = ""
    starts: Sequence[Mapping[str, Any]] = ()  # date, command and versions, oldest first

    def times_s(self) -> dict[int, float]:
        """Return seconds from the run's start to each step's end, summed up if not recorded."""
        times: dict[int, float] = {}
        now_s = 0.0
        for m in self.metrics:
            now_s += m[STEP_TIME] if finite(m.get(STEP_TIME)) else 0.0
            if finite(m.get("time_s")):
                now_s = m["time_s"]
            times[int(m["step"])] = now_s
        return times

    def timed(self) -> Iterator[tuple[Mapping[str, Any], float]]:
        """Yield the metrics of each step, and its seconds."""
        times_s, before_s = self.times_s(), 0.0
        for m in self.metrics:
            now_s = times_s[int(m["step"])]
            yield m, now_s - before_s
            before_s = now_s

    def mean_over_time(self, metric: str) -> float | None:
        points = [(m[metric], step_s) for m, step_s in self.timed() if finite(m.get(metric))]
        length_s = sum(step_s for _, step_s in points)
        return sum(value * step_s for value, step_s in points) / length_s if length_s else None


# -- reading -------------------------------------------------------------------------------------


def load(paths: Sequence[str | Path], *, begun: bool = True) -> list[LoadedRun]:
    """Read runs, which must have ``begun`` by default. Raises ConfigError for no path, a path given
    twice, or one that is no run directory, and StateError for a damaged file."""
    folders = [Path(path) for path in paths]
    if not folders:
        raise ConfigError("a report takes at least one run directory; got none", "no-run-named")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("the same run directory was given twice; name each once", "run-twice")
    return [_load(f, name, begun) for f, name in zip(folders, _names(folders), strict=True)]


def _load(folder: Path, name: str, begun: bool) -> LoadedRun:
    run = RunDirectory(folder)
    has_config = run.config_file.is_file()
    if not (has_config or run.metrics_file.is_file()):
        if not begun:
            return LoadedRun(name, {}, (), (), missing=["everything so far: it has not begun"])
        lacks = "it has neither config.toml nor metrics.jsonl"
        raise ConfigError(f"'{folder}' is not a run directory: {lacks}", "not-a-run")
    settings = (
        dict(flat_settings(tomllib.loads(run.config_file.read_text("utf-8")))) if has_config else {}
    )
    metrics = run.read_metrics()
    rollouts = run.read_rollouts()
    trace = run.trace.read()
    starts = run.read_starts() if run.machine_file.is_file() else ()
    if starts and "runtime" in starts[-1]:  # of a replay, next to the settings of its run
        settings["runtime"] = starts[-1]["runtime"]
    checks = (
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
        missing=[text for records, text in checks if not records],
        evaluations=run.read_evaluations(),
        samples=run.read_samples(),
        machine=str(run.read_machine()) if run.machine_file.is_file() else "",
        starts=starts,
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
    step_spans = zip(steps, spans, strict=True)
    return {step.step: replace(step, spans=tuple(inside)) for step, inside in step_spans}


def _names(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for path in parts:
        length = 1
        while length < len(path) and sum(p[-length:] == path[-length:] for p in parts) > 1:
            length += 1
        names.append("/".join(path[-length:]))
    return names


# -- figures -------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Busy time of a role over a run, and idle time by cause, in seconds."""

    role: str
    busy_s: float
    idle_s: Mapping[str, float]


def shares(run: LoadedRun) -> list[Shares]:
    """Return busy and idle time by role over a run, from the metrics of its steps."""
    busy_s: defaultdict[str, float] = defaultdict(float)
    idle_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for m, step_s in run.timed():
        for key, value in m.items():
            kind, _, rest = key.partition("/")
            if kind == "utilisation" and finite(value):
                busy_s[rest] += value * step_s
            elif kind == "idle_s" and finite(value):
                role, _, cause = rest.rpartition("/")
                idle_s[role][cause] += value
    role_shares = []
    for role in sorted(busy_s, key=role_order):
        idle_by_cause = sorted(idle_s[role].items(), key=lambda item: cause_order(item[0]))
        role_shares.append(Shares(role, busy_s[role], dict(idle_by_cause)))
    return role_shares


def gpu_memory(run: LoadedRun) -> list[tuple[str, float, float]]:
    """Return by process the peaks of tensors' and of torch's reserved GPU memory [GB]."""
    peaks: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for m in run.metrics:
        for key, value in m.items():
            process, _, kind = key.removeprefix("memory/").rpartition("/")
            if key.startswith("memory/") and process and finite(value):
                peaks[process][kind] = max(peaks[process][kind], value)
    return [(name, peak["peak_gb"], peak["reserved_gb"]) for name, peak in sorted(peaks.items())]


def about(runs: Sequence[LoadedRun]) -> list[tuple[str, list[Any]]]:
    """Return facts for repeating the runs, with a value for each run, ``None`` if unknown."""

    def versions(run: LoadedRun) -> str | None:
        packages = run.starts[-1]["versions"] if run.starts else {}
        return ", ".join(f"{name} {version}" for name, version in packages.items()) or None

    facts = (
        ("begun", [run.starts[0]["date"] if run.starts else None for run in runs]),
        ("resumed", [run.starts[-1]["date"] if len(run.starts) > 1 else None for run in runs]),
        ("command", [run.starts[0]["command"] if run.starts else None for run in runs]),
        ("seed", [run.settings.get("seed") for run in runs]),
        ("versions", list(map(versions, runs))),
        ("machine", [run.machine or None for run in runs]),
    )
    return [(name, values) for name, values in facts if set(values) != {None}]


def last_reward(run: LoadedRun) -> float | None:
    rewards = [float(m[REWARD]) for m in run.metrics if finite(m.get(REWARD))]
    return fmean(rewards[-math.ceil(len(rewards) / LAST_SHARE) :]) if rewards else None


def differing_settings(runs: Sequence[LoadedRun]) -> list[tuple[str, list[Any]]]:
    """Return settings that differ among runs, without ``out``, ``seed`` and ``observe``, with each
    run's value, or ``None`` if a run lacks it."""
    all_settings = [run.settings for run in runs if run.settings]
    return [
        (key, [run.settings.get(key) for run in runs])
        for key in sorted({key for settings in all_settings for key in settings} - {"out", "seed"})
        if not key.startswith("observe.")
        and any(settings.get(key) != all_settings[0].get(key) for settings in all_settings)
    ]


def algorithm(run: LoadedRun) -> str:
    return str(run.settings.get("algorithm.name", "unknown"))


def algorithms(runs: Sequence[LoadedRun]) -> list[str]:
    return list(dict.fromkeys(map(algorithm, runs)))


def win_rates(figures: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    for key, name, form in (("win_rate", "by", "{}"), ("judge", "judge", "LLM judge {}")):
        if win_rate := figures.get(key):
            yield form.format(win_rate[name]), win_rate["rate"], win_rate["standard_error"]


def pareto(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Return win-rates with the KL [nats a response] of the same samples and the run's index, in
    groups by judge and SFT model, because different groups are not comparable."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for index, run in enumerate(runs):
        for figures in (record["figures"] for record in run.evaluations):
            kl = figures.get("kl")
            if not kl:
                continue
            for by, rate, error in win_rates(figures):
                point = {
                    "run": index,
                    "rate": rate,
                    "rate_error": error,
                    "kl": kl["kl"],
                    "kl_error": kl["standard_error"],
                    "perplexity": kl["perplexity"],
                }
                groups.setdefault((by, str(kl["sft"])), []).append(point)
    return [{"by": by, "sft": _short(sft), "points": group} for (by, sft), group in groups.items()]


def verified(run: LoadedRun) -> dict[str, Any] | None:
    """Return a run's latest pass@1 and mean score with standard errors, or ``None`` if not
    measured. ``overlap`` is the share of prompts that training uses too, if known."""
    for record in reversed(run.evaluations):
        if "pass@1" in (figures := record["figures"]):
            return {
                "pass_at_1": [figures["pass@1"], figures["pass@1_standard_error"]],
                "mean_score": [figures["mean_score"], figures["mean_score_standard_error"]],
                "overlap": figures["overlap"],
            }
    return None


def off_policy(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Return reward, win-rates, KL and perplexity by off-policyness, or nothing for a single N. A
    line for each algorithm has ``points`` (N and the mean over its runs) and ``runs`` (N, value and
    index of each run)."""
    dials = {
        i: run.settings[OFF_POLICY] for i, run in enumerate(runs) if OFF_POLICY in run.settings
    }
    if len(set(dials.values())) < 2:
        return []
    outcomes = [_achieved(run) for run in runs]
    titles = dict.fromkeys(title for outcome in outcomes for title in outcome)
    charts = []
    for title in sorted(titles, key=lambda t: [t.startswith(start) for start in _LATER]):
        lines: dict[str, list[tuple[int, float, int]]] = {}
        for i, n in dials.items():
            if title in outcomes[i]:
                lines.setdefault(algorithm(runs[i]), []).append((n, outcomes[i][title], i))
        if lines:
            series = [_line(name, sorted(points)) for name, points in lines.items()]
            is_share = title.startswith("Win-rate")
            charts.append({"title": title, "is_share": is_share, "lines": series})
    return charts


_LATER = ("Perplexity", "KL", "Win-rate")  # charts after the reward's, last one first


def _achieved(run: LoadedRun) -> dict[str, float]:
    outcomes: dict[str, float] = {}
    if (reward := last_reward(run)) is not None:
        outcomes["Reward, last tenth of the steps"] = reward
    for figures in (record["figures"] for record in run.evaluations):
        outcomes |= {f"Win-rate by {by}": rate for by, rate, _ in win_rates(figures)}
        if kl := figures.get("kl"):
            outcomes["KL to the SFT model [nats a response]"] = kl["kl"]
            outcomes["Perplexity of the SFT model on the samples"] = kl["perplexity"]
    return outcomes


def _line(name: str, runs: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    values_by_n: dict[int, list[float]] = {}
    for n, value, _ in runs:
        values_by_n.setdefault(n, []).append(value)
    means = [[n, fmean(values)] for n, values in values_by_n.items()]
    return {"algorithm": name, "points": means, "runs": [list(run) for run in runs]}


def _short(model: str) -> str:
    path = PurePath(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
