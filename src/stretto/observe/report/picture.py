"""The timeline of one step as a picture: an SVG file, for a README."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stretto.errors import ConfigError
from stretto.observe.report import style
from stretto.observe.report.runs import Run, StepSpans
from stretto.observe.report.steps import bars, waits

_NAME_CHARS = 14
_WIDTH, _LEFT, _RIGHT = 960, 112, 20
_LANE, _BAR, _HEAD, _AXIS, _LEGEND = 26, 18, 34, 34, 26


def timeline_svg(runs: Sequence[Run], step: int | None = None) -> str:
    """Draw one step of each run, one below the other over the same time axis.

    The picture follows the viewer's preference for light or dark.

    Args:
        step: which; ``None`` takes one from the middle of those that all runs have.

    Raises:
        ConfigError: a run has no such step in its trace.
    """
    if step is None:
        common = sorted(set.intersection(*(set(run.steps) for run in runs)))
        step = common[len(common) // 2] if common else 1
    steps = [_step(run, step) for run in runs]
    longest_s = max(s.step.end_s - s.step.start_s for s in steps) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_s
    body: list[str] = []
    y = 8.0
    kinds: set[str] = set()
    causes: set[str] = set()
    for run, of_run in zip(runs, steps, strict=True):
        body.append(_title(run, of_run, y))
        y += _HEAD
        body += _workers(run, of_run, y, scale, kinds, causes)
        y += _LANE * len(run.roles) + 10
    body.append(_axis(longest_s, y, scale))
    y += _AXIS
    legend, rows = _legend(kinds, causes, y)
    body += legend
    height = y + _LEGEND * rows + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'width="{_WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="Timeline of step {step}: {escape(", ".join(r.name for r in runs))}">'
        f"<style>svg{{{style.variables(dark=False)}"
        "font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        f"@media(prefers-color-scheme:dark){{svg{{{style.variables(dark=True)}}}}}"
        "text{fill:var(--ink)}.muted{fill:var(--muted)}.title{font-weight:600;font-size:14px}"
        ".rule{stroke:var(--rule)}</style>"
        f"<defs>{style.hatch_patterns()}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>{"".join(body)}</svg>\n'
    )


def _step(run: Run, step: int) -> StepSpans:
    if step not in run.steps:
        has = f"it has {min(run.steps)} to {max(run.steps)}" if run.steps else "it has none"
        raise ConfigError(f"step {step} is not in the trace of '{run.name}': {has}")
    return run.steps[step]


def _title(run: Run, of_run: StepSpans, y: float) -> str:
    step_s = of_run.step.end_s - of_run.step.start_s
    return (
        f'<text class="title" x="16" y="{y + 20:.1f}">{escape(run.name)}'
        f'<tspan class="muted" font-weight="400" dx="10">step {of_run.step.step}, '
        f"{seconds_text(step_s)}</tspan></text>"
    )


def _workers(
    run: Run, of_run: StepSpans, y: float, scale: float, kinds: set[str], causes: set[str]
) -> list[str]:
    """The tracks of one run; adds what it draws to ``kinds`` and ``causes``."""
    start_s = of_run.step.start_s
    worker = {role: y + _LANE * i for i, role in enumerate(run.roles)}
    drawn = []
    for role, top in worker.items():
        drawn.append(
            f'<text x="{_LEFT - 10}" y="{top + 13.5:.1f}" text-anchor="end">'
            f"{escape(_cut(role))}</text>"
        )
    filled = []
    for wait in waits(of_run, run.roles):
        causes.add(wait.cause)
        filled.append((wait.role, wait.start_s, wait.end_s, _hatch(wait.cause)))
    for bar in bars(of_run):
        kinds.add(bar.kind)
        filled.append((bar.role, bar.start_s, bar.end_s, style.kind_colour(bar.kind)))
    for role, from_s, to_s, fill in filled:
        x, width = _LEFT + (from_s - start_s) * scale, (to_s - from_s) * scale
        drawn.append(_rect(x, worker[role], width, fill))
    return drawn


def _rect(x: float, y: float, width: float, fill: str) -> str:
    # A hair narrower than it is, so that consecutive calls can be told apart.
    width = max(width - 0.6, 0.6)
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_BAR}" '
        f'rx="{min(2.0, width / 3):.1f}" fill="{fill}"/>'
    )


def _hatch(cause: str) -> str:
    return f"url(#hatch-{cause})" if cause in style.HATCHES else "var(--wait)"


def _axis(longest_s: float, y: float, scale: float) -> str:
    end = _LEFT + longest_s * scale
    parts = [f'<path class="rule" fill="none" d="M{_LEFT} {y:.1f}H{end:.1f}"/>']
    step = tick_step(longest_s, 8)
    for i in range(int(longest_s / step * (1 + 1e-9)) + 1):
        x = _LEFT + i * step * scale
        parts.append(
            f'<path class="rule" d="M{x:.1f} {y:.1f}v5"/><text class="muted" x="{x:.1f}" '
            f'y="{y + 19:.1f}" text-anchor="middle">{seconds_text(i * step)}</text>'
        )
    return "".join(parts)


def _legend(kinds: set[str], causes: set[str], y: float) -> tuple[list[str], int]:
    """Entries, and the number of rows they take."""
    entries = [(style.kind_colour(k), style.KIND_TITLES[k]) for k in style.KINDS if k in kinds]
    entries += [(style.kind_colour(k), k) for k in sorted(kinds - set(style.KINDS))]
    entries += [(_hatch(c), style.CAUSE_TITLES[c]) for c in style.HATCHES if c in causes]
    drawn, x, rows = [], float(_LEFT), 1
    for fill, title in entries:
        width = 34 + 6.7 * len(title)
        if x + width > _WIDTH:
            x, rows = float(_LEFT), rows + 1
        top = y + _LEGEND * (rows - 1)
        drawn.append(
            f'<rect x="{x:.1f}" y="{top + 3:.1f}" width="14" height="14" rx="2" fill="{fill}"/>'
            f'<text x="{x + 20:.1f}" y="{top + 14.5:.1f}">{escape(title)}</text>'
        )
        x += width
    return drawn, rows


def tick_step(length: float, ticks: int) -> float:
    """The smallest of 1, 2, 5, 10, ... (and their fractions) that gives at most ``ticks`` steps."""
    step = 1e-6
    while length / step > ticks:
        for factor in (2, 5, 10):
            if length / (step * factor) <= ticks:
                return step * factor
        step *= 10
    return step


def seconds_text(seconds: float) -> str:
    """'250 ms', '1.5 s', '12 min' or '3.2 h', with three digits."""
    for unit, size in (("h", 7200.0), ("min", 600.0), ("s", 1.0)):
        if seconds >= size or (unit == "s" and seconds == 0):
            return f"{_three_digits(seconds / _UNIT_S[unit])} {unit}"
    return f"{_three_digits(seconds * 1e3)} ms"


_UNIT_S = {"h": 3600.0, "min": 60.0, "s": 1.0}


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def _cut(role: str) -> str:
    return role if len(role) <= _NAME_CHARS else f"{role[: _NAME_CHARS - 1]}…"
