"""The colours and hatchings of reports, for pages and for pictures.

Runs have the colours of Okabe and Ito (2008), kinds of work and groups of runs those of Paul Tol's
'bright' scheme (2021); both can be told apart by people with any of the common colour
blindnesses. Waiting is pale and hatched, for each cause in a direction of its own; its tint is that
of the work waited for. Each colour is a pair, for a light and for a dark background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Colour = tuple[str, str]

RUNS: Sequence[Colour] = (
    ("#0072b2", "#3d9be0"),
    ("#e69f00", "#f0b429"),
    ("#009e73", "#1fbf92"),
    ("#cc79a7", "#e09cc4"),
    ("#d55e00", "#f0763a"),
    ("#56b4e9", "#8fd0f7"),
)
GROUPS: Sequence[Colour] = (
    ("#4477aa", "#6fa8e0"),
    ("#ee6677", "#ff8593"),
    ("#228833", "#4fc465"),
    ("#aa3377", "#d465ae"),
    ("#ccbb44", "#dccd5c"),
    ("#66ccee", "#8adcf5"),
)
OTHER: Colour = ("#8a8f98", "#8a8f98")


class Kind(NamedTuple):
    """A kind of work; ``pale``: text on its colour is dark."""

    title: str
    colour: Colour
    pale: bool = False


KINDS: Mapping[str, Kind] = {
    "gen": Kind("generate", ("#4477aa", "#5c94cc")),
    "prefill": Kind("prefill", ("#66ccee", "#66ccee"), pale=True),
    "score": Kind("score", ("#228833", "#3aa54c")),
    "update": Kind("train", ("#ee6677", "#ee6677")),
    "publish": Kind("publish weights", ("#aa3377", "#c74a92")),
    "load": Kind("load weights", ("#d08bb5", "#d08bb5"), pale=True),
    "migrate": Kind("migrate", ("#ccbb44", "#ccbb44"), pale=True),
    "send": Kind("send weights", ("#bbbbbb", "#bbbbbb"), pale=True),
    "checkpoint": Kind("write a checkpoint", ("#997755", "#997755")),
}


class Cause(NamedTuple):
    """A cause of idle time; ``hatching``: lines in a square of 7."""

    title: str
    tint: Colour
    hatching: str


CAUSES: Mapping[str, Cause] = {
    "data": Cause("waits for data", ("#8a94a6", "#98a2b3"), '<path d="M3.5 0V7"/>'),
    "stragglers": Cause(
        "waits for stragglers", ("#4477aa", "#6fa8e0"), '<path d="M-1 1L1 -1M0 7L7 0M6 8L8 6"/>'
    ),
    "scores": Cause(
        "waits for scores", ("#228833", "#4fc465"), '<path d="M-1 6L1 8M0 0L7 7M6 -1L8 1"/>'
    ),
    "weights": Cause("waits for weights", ("#d0506a", "#f0708a"), '<path d="M0 3.5H7"/>'),
    "down": Cause("process lost", ("#b02020", "#ff5a4f"), '<path d="M0 0L7 7M7 0L0 7"/>'),
}

_NAMED: Mapping[str, Colour] = {
    "paper": ("#ffffff", "#14181f"),
    "ink": ("#1d2430", "#e6e9ef"),
    "muted": ("#667085", "#98a2b3"),
    "rule": ("#dfe3ea", "#303846"),
    "panel": ("#f7f8fa", "#1b212b"),
    "wait": ("#eef0f4", "#222a36"),
    "accent": ("#0072b2", "#3d9be0"),
}


def variables(dark: bool) -> str:
    """Return all colours as CSS custom properties: ``--ink``, ``--run-0``, ``--kind-gen``, ..."""
    every = {
        **_NAMED,
        **{f"run-{i}": colour for i, colour in enumerate(RUNS)},
        **{f"group-{i}": colour for i, colour in enumerate((*GROUPS, OTHER))},
        **{f"kind-{name}": kind.colour for name, kind in KINDS.items()},
        "kind-other": OTHER,
        **{f"tint-{name}": cause.tint for name, cause in CAUSES.items()},
    }
    return "".join(f"--{name}:{colour[dark]};" for name, colour in every.items())


def grouped(groups: Sequence[int]) -> str:
    """Return the colours of runs as those of their groups."""
    return "".join(
        f"--run-{i}:var(--group-{min(group, len(GROUPS))});" for i, group in enumerate(groups)
    )


def hatch_patterns() -> str:
    """Return SVG patterns ``hatch-<cause>``."""
    return "".join(
        f'<pattern id="hatch-{name}" width="7" height="7" patternUnits="userSpaceOnUse">'
        f'<rect width="7" height="7" fill="var(--tint-{name})" fill-opacity=".1"/>'
        f'<g stroke="var(--tint-{name})" stroke-opacity=".55" fill="none">{cause.hatching}</g>'
        "</pattern>"
        for name, cause in CAUSES.items()
    )


def kind_colour(kind: str) -> str:
    """Return the colour of a kind of work, as CSS."""
    return f"var(--kind-{kind if kind in KINDS else 'other'})"
