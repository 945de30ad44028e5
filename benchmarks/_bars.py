"""Pictures of reported and simulated figures side by side, as SVG.

They follow the viewer's preference for light or dark, with the colours of reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from stretto.observe.report import style

Figure = float | tuple[float, float] | None
"""A number, a range of numbers, or nothing."""

_LEFT, _WIDTH, _BAR, _GAP, _TOP, _HEAD = 250, 540, 13, 13, 30, 40
_LINES_HIGH = 220
_COLOURS = ("var(--muted)", "var(--run-0)", "var(--run-1)", "var(--run-2)", "var(--run-3)")
"""Reported figures, which come first, are grey."""


@dataclass(frozen=True, slots=True)
class Bars:
    """A panel of horizontal bars.

    Attributes:
        title: what they show, with its unit.
        groups: names of what is compared.
        series: figures of each group, by whose they are; the reported ones first.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[Figure]]

    @property
    def height(self) -> int:
        """Pixels."""
        each = _BAR * len(self.series) + _GAP
        return _HEAD + 18 + each * len(self.groups)

    def draw(self, y: int) -> Iterator[str]:
        """Yield what is drawn, below ``y``."""
        yield _head(self.title, list(self.series), y)
        every = [_high(x) for values in self.series.values() for x in values]
        scale = (_WIDTH - 60) / max(every)
        at = y + _HEAD + 8
        for i, group in enumerate(self.groups):
            middle = at + _BAR * len(self.series) / 2 + 4.5
            yield (
                f'<text x="{_LEFT - 10}" y="{middle:.1f}" text-anchor="end">{escape(group)}</text>'
            )
            for colour, values in zip(_COLOURS, self.series.values(), strict=False):
                yield from _bar(values[i], colour, at, scale)
                at += _BAR
            at += _GAP


@dataclass(frozen=True, slots=True)
class Lines:
    """A panel of curves.

    Attributes:
        title: what they show, with its unit.
        across: what the horizontal axis shows.
        x: where the points are.
        series: heights of the points, by curve.
    """

    title: str
    across: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]]
    height: int = _HEAD + _LINES_HIGH + 52

    def draw(self, y: int) -> Iterator[str]:
        """Yield what is drawn, below ``y``."""
        yield _head(self.title, ["", *self.series], y)
        every = [v for values in self.series.values() for v in values]
        low, high = min(every), max(every)
        top, span = y + _HEAD + 10, (high - low) or 1.0

        def place(x: float, value: float) -> str:
            across = _LEFT + _WIDTH * (x - self.x[0]) / (self.x[-1] - self.x[0])
            return f"{across:.1f} {top + _LINES_HIGH * (high - value) / span:.1f}"

        for value in (low, (low + high) / 2, high):
            level = place(self.x[0], value).split()[1]
            yield f'<path class="rule" d="M{_LEFT} {level}h{_WIDTH}"/>'
            yield (
                f'<text class="muted" x="{_LEFT - 8}" y="{float(level) + 4.5:.1f}" '
                f'text-anchor="end">{value:.2f}</text>'
            )
        for x in self.x[:: max(1, len(self.x) // 10)]:
            at = place(x, low).split()[0]
            yield (
                f'<text class="muted" x="{at}" y="{top + _LINES_HIGH + 18}" '
                f'text-anchor="middle">{x:g}</text>'
            )
        yield (
            f'<text class="muted" x="{_LEFT + _WIDTH / 2}" y="{top + _LINES_HIGH + 36}" '
            f'text-anchor="middle">{escape(self.across)}</text>'
        )
        for colour, values in zip(_COLOURS[1:], self.series.values(), strict=False):
            points = "L".join(place(*point) for point in zip(self.x, values, strict=True))
            yield f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="2"/>'


def picture(label: str, panels: Sequence[Bars | Lines]) -> str:
    """Return panels below each other as an SVG file.

    Args:
        label: what they show, for those who do not see them.
        panels: from the top.
    """
    y, body = _TOP, list[str]()
    for panel in panels:
        body += panel.draw(y)
        y += panel.height + 22
    width = _LEFT + _WIDTH + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" role="img" aria-label="{escape(label)}">'
        f"<style>svg{{{style.variables(dark=False)}"
        "font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        f"@media(prefers-color-scheme:dark){{svg{{{style.variables(dark=True)}}}}}"
        "text{fill:var(--ink)}.muted{fill:var(--muted)}.title{font-weight:600;font-size:14px}"
        ".small{font-size:11px}.rule{stroke:var(--rule)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>{"".join(body)}</svg>\n'
    )


def _head(title: str, names: Sequence[str], y: int) -> str:
    """The title, and below it which colour is whose."""
    parts, x = [f'<text class="title" x="20" y="{y}">{escape(title)}</text>'], float(_LEFT)
    for colour, name in zip(_COLOURS, names, strict=False):
        if name:
            parts.append(
                f'<rect x="{x:.0f}" y="{y + 12}" width="12" height="12" fill="{colour}"/>'
                f'<text x="{x + 17:.0f}" y="{y + 23}">{escape(name)}</text>'
            )
            x += 40 + 6.8 * len(name)
    return "".join(parts)


def _high(value: Figure) -> float:
    return 0.0 if value is None else value[1] if isinstance(value, tuple) else value


def _bar(value: Figure, colour: str, y: int, scale: float) -> Iterator[str]:
    """A bar and its number; of a range, the part between its ends is pale."""
    if value is None:
        return
    low, high = value if isinstance(value, tuple) else (value, value)
    height, end = _BAR - 2, _LEFT + high * scale
    yield f'<rect x="{_LEFT}" y="{y}" width="{low * scale:.1f}" height="{height}" fill="{colour}"/>'
    if high > low:
        yield (
            f'<rect x="{_LEFT + low * scale:.1f}" y="{y}" width="{(high - low) * scale:.1f}" '
            f'height="{height}" fill="{colour}" fill-opacity=".45"/>'
        )
    text = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    yield f'<text class="small muted" x="{end + 5:.1f}" y="{y + 10}">{text}</text>'
