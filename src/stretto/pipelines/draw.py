"""Pictures of a schedule: its timeline, and the memory of its devices over time."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from stretto.errors import MissingExtraError
from stretto.pipelines.baselines import serial_1f1b
from stretto.pipelines.evaluate import BUBBLES, Evaluation, memory_curve
from stretto.pipelines.graph import BACKWARD, Graph, make_graph
from stretto.pipelines.problem import Problem

_ACTOR, _CRITIC = ("#4477aa", "#8fb4d9"), ("#cc6677", "#e8b0b8")
"""Of forwards and backwards; in tints of Paul Tol's schemes (2021)."""
_WIDTH, _LEFT, _RIGHT, _LANE, _CURVE = 1000, 64, 24, 20, 150
_LABELLED = 11.0
"""Pixels from which a bar has its micro-batch's number."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One task.

    Attributes:
        device: it runs on.
        start: ticks.
        end: ticks.
        critic: whether it is the critic's.
        backward: whether it is one.
        label: number of its micro-batch, among all of its model.
    """

    device: int
    start: int
    end: int
    critic: bool
    backward: bool
    label: str


def bars(problem: Problem, graph: Graph, evaluation: Evaluation) -> list[Bar]:
    """All tasks, device after device."""
    found = []
    for task in evaluation.tasks.tolist():
        q = int(graph.queue_of[task])
        pipeline, start = int(graph.pipeline[q]), int(evaluation.starts[task])
        critic = pipeline >= problem.actor.pipelines
        copy = pipeline - problem.actor.pipelines * critic
        number = copy * int(graph.length[q]) + task - int(graph.offset[q])
        found.append(
            Bar(
                int(graph.device[q]), start, start + int(graph.duration[q]), critic,
                bool(graph.kind[q] == BACKWARD), str(number),
            )
        )  # fmt: skip
    return found


def timeline_svg(problem: Problem, evaluation: Evaluation, title: str) -> str:
    """Timeline above, memory below, over the same time axis; follows light or dark."""
    graph = make_graph(problem)
    scale = (_WIDTH - _LEFT - _RIGHT) / evaluation.latency
    top, devices = 64, problem.devices
    drawn = [f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>', _legend(46)]
    drawn += [
        f'<text class="muted" x="{_LEFT - 8}" y="{top + _LANE * d + 14}" text-anchor="end">'
        f"{d}</text>"
        for d in range(devices)
    ]
    drawn += [_bar(bar, top, scale) for bar in bars(problem, graph, evaluation)]
    bottom = top + _LANE * devices + 8
    drawn.append(_time_axis(evaluation.latency, bottom, scale))
    curve = bottom + 48
    drawn += _memory(problem, graph, evaluation, curve, scale)
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
        ".limit{stroke:#cc6677;stroke-dasharray:5 4;fill:none}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>{"".join(drawn)}</svg>\n'
    )


def _bar(bar: Bar, top: float, scale: float) -> str:
    x, width = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    y = top + _LANE * bar.device
    colour = (_CRITIC if bar.critic else _ACTOR)[bar.backward]
    drawn = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width - 0.6, 0.4):.2f}" height="{_LANE - 3}" '
        f'fill="{colour}"/>'
    )
    if width >= _LABELLED:
        pale = " pale" if bar.backward else ""
        drawn += (
            f'<text class="on{pale}" x="{x + width / 2:.2f}" y="{y + 12:.1f}">{bar.label}</text>'
        )
    return drawn


def _legend(y: float) -> str:
    entries = [
        (_ACTOR[0], "actor forward"),
        (_ACTOR[1], "actor backward"),
        (_CRITIC[0], "critic forward"),
        (_CRITIC[1], "critic backward"),
    ]
    return "".join(
        f'<rect x="{_LEFT + 130 * i}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>'
        f'<text x="{_LEFT + 130 * i + 18}" y="{y}">{name}</text>'
        for i, (colour, name) in enumerate(entries)
    )


def _time_axis(latency: int, y: float, scale: float) -> str:
    step = tick_step(latency, 10)
    parts = [f'<path class="rule" d="M{_LEFT} {y}H{_LEFT + latency * scale:.1f}"/>']
    for t in range(0, latency + 1, step):
        x = _LEFT + t * scale
        parts.append(
            f'<path class="rule" d="M{x:.1f} {y}v4"/>'
            f'<text class="muted" x="{x:.1f}" y="{y + 17}" text-anchor="middle">{t:,}</text>'
        )
    return "".join(parts)


def _memory(
    problem: Problem, graph: Graph, evaluation: Evaluation, top: float, scale: float
) -> list[str]:
    serial, scaled = serial_1f1b(problem).peak, problem.memory_scale
    highest = 1.08 * max(evaluation.peak, serial, problem.capacity or 0.0)
    bottom = top + _CURVE

    def y_of(memory: float) -> float:
        return bottom - memory / highest * _CURVE

    drawn = [
        f'<text class="muted" x="{_LEFT}" y="{top - 8}">activation memory of each device; the '
        f"highest is {evaluation.peak:g}</text>",
        f'<path class="rule" d="M{_LEFT} {bottom}H{_LEFT + evaluation.latency * scale:.1f}"/>',
    ]
    fullest = max(range(problem.devices), key=lambda d: evaluation.peaks[d])
    for d in sorted(range(problem.devices), key=lambda d: d == fullest):
        path: list[str] = []
        for at, held in memory_curve(graph, evaluation, d):
            x, y = _LEFT + at * scale, y_of(held / scaled)
            path.append(f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}")
        name = "peak" if d == fullest else "curve"
        drawn.append(f'<path class="{name}" d="{"".join(path)}"/>')
    lines = [(serial, f"serial 1F1B {serial:g}")]
    if problem.capacity is not None:
        lines.append((problem.capacity, f"capacity {problem.capacity:g}"))
    for memory, name in lines:
        y = y_of(memory)
        drawn.append(
            f'<path class="limit" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text class="muted" x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">'
            f"{name}</text>"
        )
    return drawn


def tick_step(length: int, ticks: int) -> int:
    """The smallest of 1, 2, 5, 10, ... that gives at most ``ticks`` steps."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if length <= step * factor * ticks:
                return step * factor
        step *= 10


def page_html(problem: Problem, evaluation: Evaluation, title: str, lines: list[str]) -> str:
    """A page that needs nothing else: what is known of the schedule, the picture, the bubbles."""
    rows = "".join(
        f"<tr><td>{d}</td><td>{evaluation.peaks[d]:g}</td>"
        + "".join(f"<td>{of[cause]:,}</td>" for cause in BUBBLES)
        + f"<td>{sum(of.values()) / evaluation.latency:.1%}</td></tr>"
        for d, of in enumerate(evaluation.bubbles)
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
        f"<h1>{escape(title)}</h1><ul>{notes}</ul>{timeline_svg(problem, evaluation, title)}"
        "<h2>Idle ticks of each device, by cause</h2>"
        f"<table><tr>{heads}</tr>{rows}</table></html>\n"
    )


def save_png(problem: Problem, evaluation: Evaluation, title: str, file: Path) -> None:
    """The same picture as a PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "a picture as PNG") from error
    graph = make_graph(problem)
    figure = Figure(figsize=(12, 2.6 + 0.22 * problem.devices), layout="constrained")
    above, below = figure.subplots(
        2, 1, sharex=True, height_ratios=[max(2, 0.22 * problem.devices), 1.6]
    )
    drawn = bars(problem, graph, evaluation)
    for critic, colours in ((False, _ACTOR), (True, _CRITIC)):
        for backward in (False, True):
            of = [b for b in drawn if (b.critic, b.backward) == (critic, backward)]
            name = f"{'critic' if critic else 'actor'} {'backward' if backward else 'forward'}"
            above.barh(
                [b.device for b in of], [b.end - b.start for b in of], left=[b.start for b in of],
                height=0.85, color=colours[backward], label=name, edgecolor="white", linewidth=0.3,
            )  # fmt: skip
    above.set(title=title, ylabel="device")
    above.invert_yaxis()
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    fullest = max(range(problem.devices), key=lambda d: evaluation.peaks[d])
    for d in range(problem.devices):
        at, held = zip(*memory_curve(graph, evaluation, d), strict=True)
        memory = [h / problem.memory_scale for h in held]
        style = {"color": "black", "linewidth": 1.4} if d == fullest else {"color": "0.75"}
        below.step(at, memory, where="post", **style)
    serial = serial_1f1b(problem).peak
    below.axhline(serial, color=_CRITIC[0], linestyle="--", label=f"serial 1F1B {serial:g}")
    below.set(xlabel="ticks", ylabel="activation memory", xlim=(0, evaluation.latency))
    below.legend(loc="lower right", fontsize=8)
    figure.savefig(file, dpi=130)
