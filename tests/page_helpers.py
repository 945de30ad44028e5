"""Blocks of code on the pages of the documentation, and the commands among them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+")


class Block(NamedTuple):
    """A block of code; ``language`` is empty where none is named."""

    language: str
    text: str


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a page, those of one language if that is given."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = [(match.start(), Block(match[1], match[2])) for match in FENCED.finditer(text)]
    # Blanked out, so that what is indented within a fenced block is no block of its own.
    rest = FENCED.sub(lambda match: re.sub(r"[^\n]", "-", match[0]), text)
    for match in INDENTED.finditer(rest):
        inner = "".join(line[4:] or "\n" for line in match[0].splitlines(keepends=True))
        found.append((match.start(), Block("", inner)))
    return [block for _, block in sorted(found) if language in (None, block.language)]


def commands(page: str, program: str = "stretto") -> Iterator[list[str]]:
    """Yield the command lines of a page that start a program, split into words."""
    for block in blocks(page):
        if block.language in ("", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.removeprefix("$ ").startswith(f"{program} "):
                    yield shlex.split(line.removeprefix("$ "), comments=True)[1:]
