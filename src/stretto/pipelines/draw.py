"""Pictures of a schedule: its timeline, and the memory of its devices over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from stretto.errors import require
from stretto.pipelines.baselines import serial_1f1b
from stretto.pipelines.graph import BACKWARD, Graph, make_graph
from stretto.pipelines.pipeline_schedule import BUBBLES, ScheduleMetrics, memory_curve
from stretto.pipelines.problem import Problem, Units
from stretto.saying import tick_step

KINDS = ("actor forward", "actor backward", "critic forward", "critic backward")
_COLOURS = ("#4477aa", "#8fb4d9", "#cc6677", "#e8b0b8")
"""Colours of the kinds: tints of Paul Tol's schemes (2021)."""
_WIDTH = 1000
_LEFT = 64
_RIGHT = 24
_LANE = 20
_BAR = 17
_CURVE = 150
_LABELLED = 11.0  # least pixels of a bar with its micro-batch's number


@dataclass(frozen=True, slots=True)
class TaskBar:
    """One task, from tick to tick. ``label`` is its micro-batch's number within its model."""

    device: int
    start: int
    end: int
    kind: int  # in KINDS
    label: str

    def gapless(self, scale: float) -> float:
        width = (self.end - self.start) * scale
        return width - min(0.6, 0.15 * width)


def bars(problem: Problem, graph: Graph, evaluation: ScheduleMetrics) -> list[TaskBar]:
    """Return all tasks, device after device."""
    task_bars = []
    for task in evaluation.tasks.tolist():
        q = int(graph.queue_of[task])
        pipeline, start = int(graph.pipeline[q]), int(evaluation.starts[task])
        critic = pipeline >= problem.actor.pipelines
        copy = pipeline - problem.actor.pipelines * critic
        number = copy * int(graph.length[q]) + task - int(graph.offset[q])
        device, end = int(graph.device[q]), start + int(graph.duration[q])
        kind = 2 * critic + (graph.kind[q] == BACKWARD)
        task_bars.append(TaskBar(device, start, end, kind, str(number)))
    return task_bars


def timeline_svg(problem: Problem, evaluation: ScheduleMetrics, title: str, units: Units) -> str:
    """Draw timeline and memory over one time axis, in the viewer's light or dark mode."""
    graph = make_graph(problem)
    scale = (_WIDTH - _LEFT - _RIGHT) / evaluation.latency
    top, devices = 64, problem.devices
    parts = [f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>', _legend(46)]
    parts += [_label(_LEFT - 8, top + _LANE * d + 14, str(d)) for d in range(devices)]
    parts += _bars(bars(problem, graph, evaluation), top, scale)
    bottom = top + _LANE * devices + 8
    parts.append(_time_axis(evaluation.latency, bottom, scale, units))
    curve = bottom + 48
    parts += _memory(problem, graph, evaluation, curve, scale, units)
    height = curve + _CURVE + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(title)}"><style>'
        "svg{--paper:#fff;--ink:#1d2430;--muted:#667085;--rule:#dfe3ea;"
        "font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        "@media(prefers-color-scheme:dark){svg{--paper:#14181f;--ink:#e6e9ef;--muted:#98a2b3;"
        "--rule:#303846}}text{fill:var(--ink)}.muted{fill:var(--muted)}"
        ".title{font-size:14px;font-weight:600}.on{fill:#fff;font-size:9px;text-anchor:middle}"
        ".pale{fill:#14181f}.rule{stroke:var(--rule);fill:none}"
        ".curve{stroke:var(--muted);stroke-opacity:.45;fill:none}"
        ".peak{stroke:var(--ink);stroke-width:1.6;fill:none}"
        f".bar{{stroke-width:{_BAR};fill:none}}"
        ".limit{stroke:#cc6677;stroke-dasharray:5 4;fill:none}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def _bars(task_bars: list[TaskBar], top: int, scale: float) -> list[str]:
    dashes, labels = defaultdict(list), []
    for bar in task_bars:
        x, width = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
        dashes[bar.device, _COLOURS[bar.kind]].append(f"M{x:.2f} 0h{bar.gapless(scale):.2f}")
        if width >= _LABELLED:
            pale, y = " pale" if bar.kind % 2 else "", top + _LANE * bar.device + 12
            labels.append(
                f'<text class="on{pale}" x="{x + width / 2:.2f}" y="{y}">{bar.label}</text>'
            )
    lines = (
        f'<path class="bar" stroke="{colour}" d="{"".join(segments)}" '
        f'transform="translate(0 {top + _LANE * device + _BAR / 2})"/>'
        for (device, colour), segments in dashes.items()
    )
    return [*lines, *labels]


def _legend(y: float) -> str:
    return "".join(
        f'<rect x="{_LEFT + 130 * i}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>'
        f'<text x="{_LEFT + 130 * i + 18}" y="{y}">{name}</text>'
        for i, (colour, name) in enumerate(zip(_COLOURS, KINDS, strict=True))
    )


def _time_axis(latency: int, y: float, scale: float, units: Units) -> str:
    step = int(max(1, tick_step(latency, 10)))
    parts = [f'<path class="rule" d="M{_LEFT} {y}H{_LEFT + latency * scale:.1f}"/>']
    for t in range(0, latency + 1, step):
        x = _LEFT + t * scale
        parts.append(f'<path class="rule" d="M{x:.1f} {y}v4"/>')
        parts.append(_label(x, y + 17, f"{t:,}", "middle"))
    return "".join([*parts, _label(_LEFT - 8, y + 17, units.time)])


def _label(x: float, y: float, text: str, anchor: str = "end") -> str:
    return f'<text class="muted" x="{x:.5g}" y="{y:.5g}" text-anchor="{anchor}">{text}</text>'


def _memory(
    problem: Problem,
    graph: Graph,
    evaluation: ScheduleMetrics,
    top: float,
    scale: float,
    units: Units,
) -> list[str]:
    limits = _limits(problem, units)
    highest = 1.08 * max(evaluation.peak, *(limit for limit, _ in limits)) or 1.0
    bottom = top + _CURVE

    def y_of(memory: float) -> float:
        return bottom - memory / highest * _CURVE

    peak = units.of_memory(evaluation.peak)
    title = f"{_memory_axis(units)} of each device; the highest is {peak}"
    parts = [
        _label(_LEFT, top - 8, title, "start"),
        f'<path class="rule" d="M{_LEFT} {bottom}H{_LEFT + evaluation.latency * scale:.1f}"/>',
    ]
    step = tick_step(highest, 5)
    for i in range(int(highest / step) + 1):
        y = y_of(i * step)
        parts.append(f'<path class="rule" d="M{_LEFT} {y:.1f}h-4"/>')
        parts.append(_label(_LEFT - 8, y + 4, f"{i * step:,.10g}"))
    for curve, is_fullest in _curves(problem, graph, evaluation):
        (x, y), *rest = ((_LEFT + at * scale, y_of(level)) for at, level in curve)
        path = f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)
        parts.append(f'<path class="{"peak" if is_fullest else "curve"}" d="{path}"/>')
    for i, (limit, name) in enumerate(limits):
        y = y_of(limit)
        parts.append(f'<path class="limit" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_label(_WIDTH - _RIGHT - 190 * i, y - 4, name))  # two limits may be equal
    return parts


def _limits(problem: Problem, units: Units) -> list[tuple[float, str]]:
    levels = {"serial 1F1B": serial_1f1b(problem).peak, "capacity": problem.capacity}
    limits = [(level, name) for name, level in levels.items() if level is not None]
    return [(level, f"{name} {units.of_memory(level)}") for level, name in limits]


def _curves(
    problem: Problem, graph: Graph, evaluation: ScheduleMetrics
) -> Iterator[tuple[list[tuple[int, float]], bool]]:
    """Yield each device's memory over time, and whether its peak is the highest, that one last."""
    fullest = max(range(problem.devices), key=lambda d: evaluation.peaks[d])
    for d in sorted(range(problem.devices), key=lambda d: d == fullest):
        curve = memory_curve(graph, evaluation, d)
        yield [(at, level / problem.memory_scale) for at, level in curve], d == fullest


def _memory_axis(units: Units) -> str:
    return "activation memory" + (f" ({units.memory})" if units.memory else "")


def page_html(
    problem: Problem, evaluation: ScheduleMetrics, title: str, units: Units, lines: list[str]
) -> str:
    """Return a self-contained page: a summary, the picture, the bubbles."""
    rows = "".join(
        f"<tr><td>{d}</td><td>{units.of_memory(evaluation.peaks[d])}</td>"
        + "".join(f"<td>{ticks[cause]:,}</td>" for cause in BUBBLES)
        + f"<td>{sum(ticks.values()) / evaluation.latency:.1%}</td></tr>"
        for d, ticks in enumerate(evaluation.bubbles)
    )
    heads = "".join(f"<th>{name}</th>" for name in ("device", "peak", *BUBBLES, "idle"))
    notes = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>html{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}"
        "body{max-width:1040px;margin:24px auto;padding:0 16px}ul{padding-left:18px}"
        "svg{max-width:100%;height:auto}table{border-collapse:collapse;font-size:14px}"
        "th,td{text-align:right;padding:3px 14px 3px 0;font-variant-numeric:tabular-nums}"
        "th{font-weight:500;color:#667085}</style>"
        f"<h1>{escape(title)}</h1><ul>{notes}</ul>"
        f"{timeline_svg(problem, evaluation, title, units)}"
        f"<h2>Idle {units.time} of each device, by cause</h2>"
        f"<table><tr>{heads}</tr>{rows}</table></html>\n"
    )


def require_png() -> None:
    require("matplotlib", "plots", "a picture as PNG")


def save_png(
    problem: Problem, evaluation: ScheduleMetrics, title: str, units: Units, file: Path
) -> None:
    """Save the picture as a PNG. Raises MissingExtraError without matplotlib."""
    require_png()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    graph = make_graph(problem)
    workers = min(0.22 * problem.devices, 40.0)  # inches
    figure = Figure(figsize=(12, 2.6 + workers), layout="constrained")
    timeline_ax, memory_ax = figure.subplots(
        2, 1, sharex=True, height_ratios=[max(2, workers), 1.6]
    )
    spans = defaultdict(list)
    scale = _WIDTH / evaluation.latency
    for bar in bars(problem, graph, evaluation):
        spans[bar.device, _COLOURS[bar.kind]].append((bar.start, bar.gapless(scale) / scale))
    for (device, colour), segments in spans.items():
        timeline_ax.broken_barh(segments, (device - 0.42, 0.84), facecolors=colour, snap=False)
    for colour, name in zip(_COLOURS, KINDS, strict=True):
        timeline_ax.broken_barh([], (0, 1), facecolors=colour, label=name)
    timeline_ax.set(title=title, ylabel="device", ylim=(problem.devices - 0.5, -0.5))
    timeline_ax.yaxis.set_major_locator(MaxNLocator(20, integer=True))
    for curve, is_fullest in _curves(problem, graph, evaluation):
        at, memory = zip(*curve, strict=True)
        width, color, order = (1.4, "black", 3) if is_fullest else (0.6, "0.75", 1)
        memory_ax.step(at, memory, where="post", linewidth=width, color=color, zorder=order)
    styles = ((_COLOURS[2], "--"), (_COLOURS[0], ":"))
    for (limit, label), (color, style) in zip(_limits(problem, units), styles):  # noqa: B905
        memory_ax.axhline(limit, color=color, linestyle=style, label=label, zorder=4)
    memory_ax.set(xlabel=units.time, ylabel=_memory_axis(units), xlim=(0, evaluation.latency))
    memory_ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    memory_ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    handles, names = timeline_ax.get_legend_handles_labels()
    memory_handles, memory_names = memory_ax.get_legend_handles_labels()
    figure.legend(
        handles + memory_handles, names + memory_names, loc="outside lower center", ncols=6
    )
    figure.savefig(file, dpi=130)
