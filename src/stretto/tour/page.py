"""Plain text of a page: headings, paragraphs, tables. Without colours, it reads well in a file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 92
"""Characters of a line, at most."""


def heading(text: str) -> str:
    """Return a part's title, underlined."""
    return f"{text}\n{'=' * len(text)}\n"


def paragraph(text: str) -> str:
    """Return text in lines of at most :data:`WIDTH` characters."""
    return textwrap.fill(text, WIDTH)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows, of which the header is the first, with their columns aligned; the first ``left``
    columns to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:{'<' if i < left else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def onward(page: str, command: str) -> str:
    """Return the last line of a part: the page of the docs that says more, and the command that
    goes on."""
    return f"Go on: docs/{page}.md; {command}\n"
