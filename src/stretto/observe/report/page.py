"""The report as one page: data, style and script in a single file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import count
from string import Template
from typing import Any

import numpy as np

from stretto.bounds import ceil_div
from stretto.errors import ConfigError
from stretto.observe.idle import CAUSES, role_order
from stretto.observe.report import run_data as figures
from stretto.observe.report import style
from stretto.observe.report.run_data import LoadedRun
from stretto.observe.report.timeline import bars, waits
from stretto.observe.trace import TracedStep

MAX_RUNS = style.RUNS  # Number of distinguishable colours. With more runs, only outcomes are shown.

SAMPLES_PER_S = "perf/samples_per_s"

NO_CURVES = ("step", "time_s", "utilisation/", "idle_s/")
"""Name prefixes of metrics without a curve. 'Where time went' has the last two."""

TIMELINE_CHARS = 3_000_000
"""Most characters in the timelines of all runs. Beyond it, every n-th step is shown."""

SAMPLE_CHARS = 2_000_000
"""Most characters of the samples of all runs. Beyond it, every n-th step's are shown."""

_POINTS = 1000  # Most points of a curve. A longer one is averaged over stretches of equal length.
_RESOLUTION = 20_000  # time resolution of a timeline, in parts of a step

_BINS_PER_DOUBLING = 3


def html_page(
    runs: Sequence[LoadedRun],
    step: int | None = None,
    predictions: Sequence[Mapping[str, Any]] = (),
    poll_ms: int = 0,
) -> str:
    """Return the page. Raises ConfigError if the step is in no trace, or for too many timelines.

    Args:
        runs: shown together, each with its own colour. Of more than :data:`MAX_RUNS`, only the
            outcomes are shown, in the colours of their algorithms.
        step: the first timeline to show; ``None`` takes one from the middle.
        predictions: of the runs, if any: each with the ``phases`` of a step (name, measured and
            predicted seconds) under a ``title``, or with the reason ``why`` there is none.
        poll_ms: a served page's pause between polls for updates, 0 for a file.
    """
    if step is not None and len(runs) > MAX_RUNS:
        raise ConfigError(
            f"a report shows timelines of at most {MAX_RUNS} runs; got {len(runs)}. Name fewer, or "
            "leave out `step`",
            "too-many-timelines",
        )
    if step is not None and not any(step in run.steps for run in runs):
        text = f"step {step} is in no run's trace; leave out `step` to see which there are"
        raise ConfigError(text, "step-not-traced")
    # Escape characters that could end the element that contains the data.
    content = {**payload(runs, step), "predictions": list(predictions), "live": poll_ms}
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    colours = ""
    if len(runs) > MAX_RUNS:
        names = figures.algorithms(runs)
        colours = style.grouped([names.index(figures.algorithm(run)) for run in runs])

    return Template(style.asset("report.html")).substitute(
        connect="connect-src 'self';" if poll_ms else "",
        title=escape(", ".join(run.name for run in runs)),
        light=style.variables(dark=False) + colours,
        dark=style.variables(dark=True) + colours,
        style=style.asset("report.css"),
        hatches=style.hatch_patterns(),
        script="".join(map(style.asset, ("charts.js", "transcripts.js", "report.js"))),
        data=data,
    )


def payload(runs: Sequence[LoadedRun], step: int | None = None) -> dict[str, Any]:
    """Return the content of the page, as plain data."""
    edges = length_edges(max((n for run in runs for n in _trained_lengths(run)), default=0))
    kinds = list(style.KINDS)
    in_brief = len(runs) > MAX_RUNS
    timelines: list[dict[str, Any]] = [{} for _ in runs]
    if not in_brief:
        timelines_by_step = [
            {at: _timeline(run, s, kinds) for at, s in run.steps.items()} for run in runs
        ]
        timelines = _thinned(timelines_by_step, TIMELINE_CHARS, step)
    titles = {"driver": "run the schedule", **style.KINDS}
    return {
        "step": step,
        "in_brief": in_brief,
        "algorithms": figures.algorithms(runs),
        "pareto": figures.pareto(runs),
        "off_policy": figures.off_policy(runs),
        "kinds": [[style.kind_colour(k), titles.get(k, k), k in style.PALE_KINDS] for k in kinds],
        "causes": [[cause, style.CAUSES[cause]] for cause in CAUSES],
        "resolution": _RESOLUTION,
        "edges": edges,
        "settings": [*figures.about(runs), *figures.differing_settings(runs)],
        **(updates := news(runs)),
        "runs": [
            {
                "name": run.name,
                "task": [run.settings.get(f"task.{key}") for key in ("kind", "name")],
                "missing": list(run.missing),
                "verified": figures.verified(run),
                "lengths": _lengths(run, edges),
                "roles": list(run.roles),
                "timeline": timeline,
                **update,
            }
            for run, timeline, update in zip(runs, timelines, updates["runs"], strict=True)
        ],
    }


def news(runs: Sequence[LoadedRun], after: Sequence[int] = ()) -> dict[str, Any]:
    """Return the growing content of a page: ``curves`` and ``samples`` after the given steps
    (default: all), and the metrics over all steps, which the page redraws."""
    where_time_went = [figures.shares(run) for run in runs]
    after, in_brief = after or [-1] * len(runs), len(runs) > MAX_RUNS
    samples = [{} for _ in runs] if in_brief else _samples(runs, after)
    return {
        "roles": sorted(
            {s.role for run_shares in where_time_went for s in run_shares}, key=role_order
        ),
        "runs": [
            {
                "curves": _curves([] if in_brief else run.metrics, run.times_s(), step),
                "samples": run_samples,
                "seconds": _short(max(run.times_s().values(), default=0.0)),
                "steps": run.metrics[-1]["step"] if run.metrics else 0,
                "rate": run.mean_over_time(SAMPLES_PER_S),
                "reward": figures.last_reward(run),
                "staleness": run.mean_over_time("staleness/mean"),
                "shares": shares,
                "gpu_memory": figures.gpu_memory(run),
            }
            for run, step, run_samples, shares in zip(
                runs, after, samples, where_time_went, strict=True
            )
        ],
    }


def length_edges(longest: int) -> list[int]:
    """Return edges of bins for 0 to ``longest`` tokens, three to a doubling. Bin i ends below edge
    i + 1, the last one with ``longest``."""
    powers = (round(2 ** (power / _BINS_PER_DOUBLING)) for power in count(1))
    edges = [0, 1]
    while edges[-1] <= longest:
        edges.append(min(next(edge for edge in powers if edge > edges[-1]), longest + 1))
    return edges


def _trained_lengths(run: LoadedRun) -> list[int]:
    return [r.sampled_tokens for r in run.rollouts if r.state == "trained"]


def _lengths(run: LoadedRun, edges: Sequence[int]) -> dict[str, Any] | None:
    lengths = _trained_lengths(run)
    if not lengths:
        return None
    return {
        "counts": np.histogram(lengths, edges)[0].tolist(),
        "total": len(lengths),
        "rejected": len(run.rollouts) - len(lengths),
        "median": float(np.median(lengths)),
        "p95": float(np.quantile(lengths, 0.95)),
        "max": max(lengths),
    }


def _curves(
    metrics: Sequence[Mapping[str, Any]], times_s: Mapping[int, float], after: int
) -> dict[str, Any]:
    """Return ``steps``, ``times`` [s] and ``values`` by metric (``None`` if missing), averaged over
    stretches if there are too many."""
    rows = [m for m in metrics if m["step"] > after]
    size = max(1, ceil_div(len(rows), _POINTS))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    names = dict.fromkeys(name for m in rows for name in m if not name.startswith(NO_CURVES))
    values = {name: [_mean(m.get(name) for m in part) for part in parts] for name in names}
    return {
        "steps": [part[-1]["step"] for part in parts],
        "times": [_short(times_s[part[-1]["step"]]) for part in parts],
        "values": {name: curve for name, curve in values.items() if set(curve) != {None}},
    }


def _mean(values: Iterable[Any]) -> float | None:
    numbers = [value for value in values if figures.finite(value)]
    return _short(math.fsum(numbers) / len(numbers)) if numbers else None


def _samples(runs: Sequence[LoadedRun], after: Sequence[int]) -> list[dict[str, Any]]:
    """Return each run's samples by step: prompt, response, reward, finish, tokens, scores with the
    sources' extra values, and the transcript of an episode."""
    by_run: list[dict[int, list[Any]]] = [{} for _ in runs]
    for run, step, by_step in zip(runs, after, by_run, strict=True):
        for s in (s for s in run.samples if s["step"] > step):
            all_scores = {**s.get("scores", {}), **s.get("extra", {})}
            scores = {n: v if isinstance(v, str) else _mean([v]) for n, v in all_scores.items()}
            row = [s["prompt"], s["response"], _mean([s["reward"]]), s["finish"], s["tokens"]]
            episode = {key: s.get(key) for key in ("turns", "pieces", "ended_by")}
            extra_cells = [episode] if episode["turns"] else []
            by_step.setdefault(s["step"], []).append([*row, scores, *extra_cells])
    return _thinned(by_run, SAMPLE_CHARS)


def _thinned(
    by_run: Sequence[Mapping[int, list[Any]]], most_chars: int, step: int | None = None
) -> list[dict[str, Any]]:
    """Return each run's rows by step, of every n-th step if all would be too many characters."""
    sizes = [{n: len(json.dumps(rows)) for n, rows in by_step.items()} for by_step in by_run]
    stride = 1
    while sum(s for size in sizes for n, s in size.items() if n % stride == 0) > most_chars:
        stride += 1
    return [
        {
            str(n): rows
            for n, rows in sorted(by_step.items())
            if n % stride == 0 or n in (1, max(by_step), step)
        }
        for by_step in by_run
    ]


def _timeline(run: LoadedRun, step: TracedStep, kinds: list[str]) -> list[Any]:
    """Return start and length of a step [s], its bars and its waits, in 1/20,000 of its length."""
    start_s = step.start_s
    length_s = step.end_s - start_s
    roles = {role: i for i, role in enumerate(run.roles)}

    def place(from_s: float, to_s: float) -> list[int]:
        scale = _RESOLUTION / length_s if length_s else 0.0
        first = round((from_s - start_s) * scale)
        return [first, max(round((to_s - start_s) * scale) - first, 1)]

    bar_rows: list[list[Any]] = []
    for bar in bars(step):
        if bar.kind not in kinds:
            kinds.append(bar.kind)
        row: list[Any] = [roles[bar.role], kinds.index(bar.kind), *place(bar.start_s, bar.end_s)]
        row += [bar.tokens, bar.version, bar.count or None, list(bar.rollouts) or None]
        row += [bar.spans if bar.spans > 1 else None, None if bar.height == 1 else bar.height]
        while row[-1] is None:
            row.pop()
        bar_rows.append(row)
    idle = [
        [roles[wait.role], CAUSES.index(wait.kind), *place(wait.start_s, wait.end_s)]
        for wait in waits(step, run.roles)
        if wait.kind in CAUSES
    ]
    return [_short(start_s), _short(length_s), bar_rows, idle]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
