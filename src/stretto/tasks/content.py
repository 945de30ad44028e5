"""Content of prompts, by which they are held out from training.

The seed and the place of a row do not tell what it asks: the rows of procedural tasks repeat,
and files share rows. So a prompt is held out by its content alone. All rows that ask the same are
on one side, in every file, under every seed and in every order.
"""

from __future__ import annotations

import hashlib
import json

from stretto.tasks.base import TaskRow


def content(row: TaskRow) -> str:
    """Content of a row as text, equal for rows that ask the same.

    Kinds of white space count as equal, and so do a text and a conversation of this one turn.
    """
    turns = row.prompt
    said = (
        [("user", turns)] if isinstance(turns, str) else [(t["role"], t["content"]) for t in turns]
    )
    return json.dumps([(role, " ".join(text.split())) for role, text in said])


def is_held_out(row: TaskRow, share: float) -> bool:
    """Return whether a row is for evaluation alone.

    Args:
        share: share of all different prompts to hold out, from 0 (none) to 1. Prompts that a
            smaller share holds out, a larger one does too.
    """
    if not share:
        return False
    digest = hashlib.sha256(content(row).encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
