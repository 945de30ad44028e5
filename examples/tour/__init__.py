"""The tour: PPO and its cost in four parts that run, for people who are new to it.

Every figure on a page is computed while it is shown. Pages are plain text without colours.
"""

import textwrap

WIDTH = 92
"""Characters of a line, at most."""


def heading(text: str) -> str:
    """Return a part's title, underlined."""
    return f"{text}\n{'=' * len(text)}\n"


def paragraph(text: str) -> str:
    """Return text in lines of at most :data:`WIDTH` characters."""
    return textwrap.fill(text, WIDTH)


def onward(page: str, command: str) -> str:
    """Return the last line of a part: a page of the docs and a command that go on from there."""
    return f"\nGo on: docs/{page}.md; {command}\n"
