"""Results in notebooks: curves and links as HTML, without scripts or other files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

CURVES = (
    *("objective/scores", "objective/kl", "eval/score", "loss/policy_avg", "policy/entropy_avg"),
    *("train/loss", "train/accuracy", "held_out/loss", "held_out/accuracy"),
)
"""Metrics that are drawn if a run has them."""
WIDTH = 220
HEIGHT = 70
MARGIN = 4


def html_of(
    folder: Path, facts: str, history: Sequence[Mapping[str, Any]], model: Path | None
) -> str:
    """Return a run's curves, ``facts`` (one line) and links (relative to the working directory) as
    HTML. The folder of the trained ``model`` is linked if it exists."""
    curves = (_curve(name, history) for name in CURVES)
    report = folder / "report.html"
    links = {"folder": folder, "model": model, "report": report}
    footer = [
        f'<a href="{escape(quote(os.path.relpath(path)))}">{name}</a>'
        for name, path in links.items()
        if path and path.exists()
    ]
    if not report.exists():
        footer.append(f"<code>stretto report {escape(str(folder))}</code>")
    return (
        f"<div><p><b>{escape(folder.name)}</b>: {escape(facts)}</p>"
        f"<div>{''.join(curves)}</div><p>{' · '.join(footer)}</p></div>"
    )


def _curve(name: str, history: Sequence[Mapping[str, Any]]) -> str:
    points = [(float(m["step"]), float(m[name])) for m in history if m.get(name) is not None]
    if not points:
        return ""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    length = max(steps) - min(steps) or 1.0
    line = " ".join(
        f"{(step - min(steps)) / length * WIDTH:.1f},"
        f"{(high - value) / (high - low) * HEIGHT if high > low else HEIGHT / 2:.1f}"
        for step, value in points
    )
    mark = f'<circle cx="{line.split(",")[0]}" cy="{HEIGHT / 2}" r="2" fill="#3b6fd4"/>'
    polyline = f'<polyline points="{line}" fill="none" stroke="#3b6fd4" stroke-width="1.5"/>'
    range_text = f"{low:.3g} to {high:.3g}, steps {steps[0]:g} to {steps[-1]:g}"
    width, height = WIDTH + 2 * MARGIN, HEIGHT + 2 * MARGIN
    return (
        f'<span style="display:inline-block;vertical-align:top;width:{width}px;'
        'margin:0 16px 12px 0;font-size:12px">'
        f"{escape(name)} <b>{values[-1]:.4g}</b><br>"
        f'<svg width="{width}" height="{height}" viewBox="{-MARGIN} {-MARGIN} {width} {height}" '
        f'role="img" aria-label="{escape(name)}">{polyline if len(points) > 1 else mark}</svg><br>'
        f'<span style="opacity:.7">{range_text if len(points) > 1 else f"step {steps[0]:g}"}'
        "</span></span>"
    )
