"""Draws one step of several runs on one time axis as an SVG file, such as the picture of README.md.

stretto compare tiny-tail --variants sync,oppo --steps 50 --seeds 0
python benchmarks/step_picture.py RUN RUN --step 46 --out docs/images/timeline.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

from _shared import parse
from stretto.api.settings import changed, config_of
from stretto.api.training import begin, execute
from stretto.errors import ConfigError
from stretto.observe.report import LoadedRun, load, style
from stretto.observe.report.timeline import Bar, bars, waits
from stretto.saying import tick_step

_NAME_CHARS = 14
_WIDTH = 960
_LEFT = 112
_RIGHT = 20
_LANE = 26
_BAR = 18
_HEAD = 34
_AXIS = 34
_LEGEND = 26

_PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" width="$width" \
height="$height" role="img" aria-label="$label"><style>svg{$light
font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
@media(prefers-color-scheme:dark){svg{$dark}}
text{fill:var(--ink)}.muted{fill:var(--muted)}.title{font-weight:600;font-size:14px}
.rule{stroke:var(--rule)}</style>
<defs>$hatches</defs>
<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>
$body</svg>
"""


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
    return Template(_PICTURE).substitute(
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


def main() -> None:
    """Draw the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="run directories, from top to bottom")
    parser.add_argument("--step", type=int, help="default: the middle one of all common steps")
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"))
    args = parse(parser, {"runs": []})
    with TemporaryDirectory() as scratch:
        if args.smoke:
            args.out = Path(scratch, "timeline.svg")
            settings = {"steps": 2, "warmup_examples": 0, "rollout__batch": 4, "out": scratch}
            run = begin(changed(config_of("tiny"), settings))
            execute(run)
            args.runs = [str(run.run_dir.path)]
        picture = timeline_svg(load(args.runs), args.step)
        args.out.write_text(picture, encoding="utf-8")
    print(f"| file | characters |\n|---|---|\n| {args.out} | {len(picture):,} |")


if __name__ == "__main__":
    main()
