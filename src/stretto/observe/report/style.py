"""Colours and hatchings of reports, for pages and pictures (from ``report.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources


def asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")


_STYLE = tomllib.loads(asset("report.toml"))
_COLOURS: Sequence[Mapping[str, str]] = (_STYLE["light"], _STYLE["dark"])

KINDS: Mapping[str, str] = _STYLE["kinds"]  # titles of kinds of work
PALE_KINDS = ("prefill", "load", "migrate", "send")
"""Kinds of work with pale colours, which need dark text."""
CAUSES: Mapping[str, str] = _STYLE["causes"]  # titles of causes of idle time
HATCHINGS: Mapping[str, str] = _STYLE["hatchings"]
"""Lines of each cause's hatching, in a square of 7."""
RUNS = sum(name.startswith("run-") for name in _COLOURS[0])
GROUPS = sum(name.startswith("group-") for name in _COLOURS[0]) - 1
"""Number of colours of groups. One more colour is for the rest."""


def variables(dark: bool) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in _COLOURS[dark].items())


def grouped(groups: Sequence[int]) -> str:
    return "".join(f"--run-{i}:var(--group-{min(g, GROUPS)});" for i, g in enumerate(groups))


def hatch_patterns() -> str:
    """Return SVG patterns ``hatch-<cause>``."""
    return "".join(
        f'<pattern id="hatch-{cause}" width="7" height="7" patternUnits="userSpaceOnUse">'
        f'<rect width="7" height="7" fill="var(--tint-{cause})" fill-opacity=".1"/>'
        f'<g stroke="var(--tint-{cause})" stroke-opacity=".55" fill="none">{lines}</g></pattern>'
        for cause, lines in HATCHINGS.items()
    )


def kind_colour(kind: str) -> str:
    return f"var(--kind-{kind if kind in KINDS else 'other'})"
