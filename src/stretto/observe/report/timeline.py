"""The timeline of a step, reduced to its visible parts, and its picture as an SVG file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from stretto.errors import ConfigError
from stretto.observe.idle import time_of_roles
from stretto.observe.report import style
from stretto.observe.report.run_data import LoadedRun
from stretto.observe.spans import ENVIRONMENT, Span
from stretto.observe.trace import TracedStep
from stretto.observe.waiting import profile
from stretto.saying import tick_step

MAX_BARS = 300  # Most bars of a role. Beyond it, neighbours of one kind are joined.

_JOINED_GAP = 1 / 1000
_SMALLEST_WAIT = 1 / 2000  # shortest wait to show, as a share of its step

_NAME_CHARS = 14
_WIDTH = 960
_LEFT = 112
_RIGHT = 20
_LANE = 26
_BAR = 18
_HEAD = 34
_AXIS = 34
_LEGEND = 26


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


# -- the picture ---------------------------------------------------------------------------------


def timeline_svg(runs: Sequence[LoadedRun], step: int | None = None) -> str:
    """Draw one step of each run, below each other over the same time axis. By default it is the
    middle step of all steps that every run has. The picture follows the viewer's preference for
    light or dark. Raises ConfigError if a run has no such step in its trace."""
    if step is None:
        common = sorted(set.intersection(*(set(run.steps) for run in runs)))
        step = common[len(common) // 2] if common else 1
    for run in runs:
        if step not in run.steps:
            step_range = (
                f"it has {min(run.steps)} to {max(run.steps)}" if run.steps else "it has none"
            )
            text = f"step {step} is not in the trace of '{run.name}': {step_range}"
            raise ConfigError(text, "step-not-traced")
    steps = [run.steps[step] for run in runs]
    longest_s = max(s.end_s - s.start_s for s in steps) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_s
    body = list[str]()
    kinds = set[str]()
    causes = set[str]()
    y = 8.0
    for run, traced_step in zip(runs, steps, strict=True):
        body.append(
            f'<text class="title" x="16" y="{y + 20:.1f}">{escape(run.name)}'
            f'<tspan class="muted" font-weight="400" dx="10">step {step}, '
            f"{seconds_text(traced_step.end_s - traced_step.start_s)}</tspan></text>"
        )
        y += _HEAD
        idle, work = waits(traced_step, run.roles), bars(traced_step)
        causes |= {wait.kind for wait in idle}
        kinds |= {bar.kind for bar in work}
        fills = [(wait, _hatch(wait.kind)) for wait in idle]
        fills += [(bar, style.kind_colour(bar.kind)) for bar in work]
        body += _tracks(run.roles, fills, traced_step.start_s, y, scale)
        y += _LANE * len(run.roles) + 10
    body += _axis(longest_s, y, scale)
    y += _AXIS
    legend, rows = _legend(kinds, causes, y)
    return Template(style.asset("report.svg")).substitute(
        label=f"Timeline of step {step}: {escape(', '.join(run.name for run in runs))}",
        width=_WIDTH,
        height=f"{y + _LEGEND * rows + 6:.0f}",
        light=style.variables(dark=False),
        dark=style.variables(dark=True),
        hatches=style.hatch_patterns(),
        body="".join(body + legend),
    )


def _tracks(
    roles: Sequence[str], fills: Sequence[tuple[Bar, str]], start_s: float, y: float, scale: float
) -> Iterator[str]:
    tops = {role: y + _LANE * i for i, role in enumerate(roles)}
    for role, top in tops.items():
        name = role if len(role) <= _NAME_CHARS else f"{role[: _NAME_CHARS - 1]}…"
        place = f'x="{_LEFT - 10}" y="{top + 13.5:.1f}" text-anchor="end"'
        yield f"<text {place}>{escape(name)}</text>"
    for bar, fill in fills:
        x = _LEFT + (bar.start_s - start_s) * scale
        # Slightly narrower, so that consecutive calls can be told apart.
        width = max((bar.end_s - bar.start_s) * scale - 0.6, 0.6)
        height = _BAR * bar.height
        top = tops[bar.role] + _BAR - height
        yield (
            f'<rect x="{x:.2f}" y="{top:.1f}" width="{width:.2f}" height="{height:.3g}" '
            f'rx="{min(2.0, width / 3):.1f}" fill="{fill}"/>'
        )


def _hatch(cause: str) -> str:
    return f"url(#hatch-{cause})" if cause in style.HATCHINGS else "var(--wait)"


def _axis(longest_s: float, y: float, scale: float) -> Iterator[str]:
    yield f'<path class="rule" fill="none" d="M{_LEFT} {y:.1f}H{_LEFT + longest_s * scale:.1f}"/>'
    step = tick_step(longest_s, 8)
    for i in range(int(longest_s / step * (1 + 1e-9)) + 1):
        x = _LEFT + i * step * scale
        yield (
            f'<path class="rule" d="M{x:.1f} {y:.1f}v5"/><text class="muted" x="{x:.1f}" '
            f'y="{y + 19:.1f}" text-anchor="middle">{seconds_text(i * step)}</text>'
        )


def _legend(kinds: set[str], causes: set[str], y: float) -> tuple[list[str], int]:
    order = [*style.KINDS, *sorted(kinds - set(style.KINDS))]
    entries = [(style.kind_colour(k), style.KINDS.get(k, k)) for k in order if k in kinds]
    entries += [(_hatch(c), style.CAUSES[c]) for c in style.HATCHINGS if c in causes]
    elements = []
    x = float(_LEFT)
    rows = 1
    for fill, title in entries:
        width = 34 + 6.7 * len(title)
        if x + width > _WIDTH:
            x, rows = float(_LEFT), rows + 1
        top = y + _LEGEND * (rows - 1)
        elements.append(
            f'<rect x="{x:.1f}" y="{top + 3:.1f}" width="14" height="14" rx="2" fill="{fill}"/>'
            f'<text x="{x + 20:.1f}" y="{top + 14.5:.1f}">{escape(title)}</text>'
        )
        x += width
    return elements, rows


def seconds_text(seconds: float) -> str:
    """Write '250 ms', '1.5 s', '12 min' or '3.2 h', with three digits."""
    if not seconds:
        return "0 s"
    units = ((7200, 3600, "h"), (600, 60, "min"), (1, 1, "s"), (0, 1e-3, "ms"))
    size, unit = next((size, unit) for least, size, unit in units if seconds >= least)
    return f"{float(f'{seconds / size:.3g}'):g} {unit}"
