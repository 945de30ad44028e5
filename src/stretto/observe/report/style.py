"""The colours and hatchings of reports, for pages and for pictures.

Runs have the colours of Okabe and Ito (2008), kinds of work and groups of runs those of Paul Tol's
'bright' scheme (2021); both can be told apart by people with any of the common colour
blindnesses. Waiting is pale and hatched, for each cause in a direction of its own; its tint is that
of the work waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RUNS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
RUNS_DARK = ("#3d9be0", "#f0b429", "#1fbf92", "#e09cc4", "#f0763a", "#8fd0f7")

KINDS: Mapping[str, str] = {
    "gen": "#4477aa",
    "prefill": "#66ccee",
    "score": "#228833",
    "update": "#ee6677",
    "publish": "#aa3377",
    "load": "#d08bb5",
    "migrate": "#ccbb44",
    "send": "#bbbbbb",
    "checkpoint": "#997755",
}
KINDS_DARK: Mapping[str, str] = {
    **KINDS,
    "gen": "#5c94cc",
    "score": "#3aa54c",
    "publish": "#c74a92",
}
GROUPS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")
GROUPS_DARK = ("#6fa8e0", "#ff8593", "#4fc465", "#d465ae", "#dccd5c", "#8adcf5")
OTHER_KIND = "#8a8f98"
PALE_KINDS = ("prefill", "load", "migrate", "send")
"""Kinds of work with pale colours, on which text is dark."""

HATCHES: Mapping[str, str] = {
    "data": '<path d="M3.5 0V7"/>',
    "stragglers": '<path d="M-1 1L1 -1M0 7L7 0M6 8L8 6"/>',
    "scores": '<path d="M-1 6L1 8M0 0L7 7M6 -1L8 1"/>',
    "weights": '<path d="M0 3.5H7"/>',
    "down": '<path d="M0 0L7 7M7 0L0 7"/>',
}
"""The lines of each cause's hatching, in a square of 7."""

_TINTS: Mapping[str, str] = {
    "data": "#8a94a6",
    "stragglers": "#4477aa",
    "scores": "#228833",
    "weights": "#d0506a",
    "down": "#b02020",
}
_TINTS_DARK: Mapping[str, str] = {
    "data": "#98a2b3",
    "stragglers": "#6fa8e0",
    "scores": "#4fc465",
    "weights": "#f0708a",
    "down": "#ff5a4f",
}

KIND_TITLES: Mapping[str, str] = {
    "gen": "generate",
    "prefill": "prefill",
    "score": "score",
    "update": "train",
    "publish": "publish weights",
    "load": "load weights",
    "migrate": "migrate",
    "send": "hand over weights",
    "checkpoint": "write a checkpoint",
    "driver": "run the schedule",
}
CAUSE_TITLES: Mapping[str, str] = {
    "data": "waits for data",
    "stragglers": "waits for stragglers",
    "scores": "waits for scores",
    "weights": "waits for weights",
    "down": "process lost",
    "other": "idle",
}

_LIGHT = {"paper": "#ffffff", "ink": "#1d2430", "muted": "#667085", "rule": "#dfe3ea"}
_DARK = {"paper": "#14181f", "ink": "#e6e9ef", "muted": "#98a2b3", "rule": "#303846"}
_LIGHT_MORE = {"panel": "#f7f8fa", "wait": "#eef0f4", "accent": "#0072b2"}
_DARK_MORE = {"panel": "#1b212b", "wait": "#222a36", "accent": "#3d9be0"}


def variables(dark: bool) -> str:
    """All colours as CSS custom properties: ``--ink``, ``--run-0``, ``--kind-gen``, ..."""
    names = {**_DARK, **_DARK_MORE} if dark else {**_LIGHT, **_LIGHT_MORE}
    runs, kinds = (RUNS_DARK, KINDS_DARK) if dark else (RUNS, KINDS)
    tints = _TINTS_DARK if dark else _TINTS
    groups = GROUPS_DARK if dark else GROUPS
    every = {
        **names,
        **{f"run-{i}": colour for i, colour in enumerate(runs)},
        **{f"group-{i}": colour for i, colour in enumerate((*groups, OTHER_KIND))},
        **{f"kind-{kind}": colour for kind, colour in kinds.items()},
        "kind-other": OTHER_KIND,
        **{f"tint-{cause}": colour for cause, colour in tints.items()},
    }
    return "".join(f"--{name}:{colour};" for name, colour in every.items())


def grouped(groups: Sequence[int]) -> str:
    """The colours of runs as those of their groups."""
    return "".join(
        f"--run-{i}:var(--group-{min(group, len(GROUPS))});" for i, group in enumerate(groups)
    )


def hatch_patterns() -> str:
    """SVG patterns ``hatch-<cause>``."""
    return "".join(
        f'<pattern id="hatch-{cause}" width="7" height="7" patternUnits="userSpaceOnUse">'
        f'<rect width="7" height="7" fill="var(--tint-{cause})" fill-opacity=".1"/>'
        f'<g stroke="var(--tint-{cause})" stroke-opacity=".55" fill="none">{lines}</g></pattern>'
        for cause, lines in HATCHES.items()
    )


def kind_colour(kind: str) -> str:
    """Colour of a kind of work, as CSS."""
    return f"var(--kind-{kind if kind in KINDS else 'other'})"
