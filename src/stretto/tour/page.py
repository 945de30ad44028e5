"""Plain text of a page: headings, paragraphs, tables. Without colours, it reads well in a file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 92
"""Characters of a line, at most."""


def heading(text: str) -> str:
    """Return a part's title, underlined."""
    return f"{text}\n{'=' * len(text)}\n"


def paragraph(text: str, indent: int = 0) -> str:
    """Return text in lines of at most :data:`WIDTH` characters."""
    space = " " * indent
    return textwrap.fill(text, WIDTH, initial_indent=space, subsequent_indent=space)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows with their columns aligned, two spaces before each line.

    Args:
        rows: the header first; as many cells in each.
        left: how many columns, of the first, stand to the left; the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def onward(page: str, command: str) -> str:
    """Return the last line of a part: the page that says more, and the command that goes on.

    Args:
        page: of the documentation, without its ending.
    """
    return f"Go on: docs/{page}.md; {command}\n"
