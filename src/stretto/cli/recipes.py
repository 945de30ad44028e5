"""``stretto recipes``: what there is to train."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from stretto import recipes


def run(arguments: Sequence[str]) -> int:
    """List the recipes with their descriptions."""
    tyro.cli(_list, prog="stretto recipes", args=list(arguments))
    return 0


def _list() -> None:
    """List the recipes that 'stretto train' and 'stretto eval' take by name."""
    names = recipes.names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {recipes.describe(name)}")
