"""``stretto recipes``: what there is to train."""

from __future__ import annotations

from stretto.config import recipes


def command() -> None:
    """List the recipes that commands take by name; 'stretto eval' takes those of 'train'."""
    rows = [
        (folder or "train", name, recipes.describe(name, kind))
        for kind, folder in recipes.FOLDERS.items()
        for name in recipes.names(kind)
    ]
    width = max(len(name) for _, name, _ in rows)
    for command, name, description in rows:
        print(f"{command:<6}  {name:<{width}}  {description}")
