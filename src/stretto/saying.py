"""Lines and progress of work for the display."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

Say = Callable[[str], None]  # shows a line
Advance = Callable[[int], None]  # reports an amount of finished work
LOADING = "loading PyTorch and what else is needed"  # work at the start of most commands
CHECKING = "looking at settings, models and data"  # work before LOADING


class Display:
    """A receiver of lines and of work in progress, and a :data:`Say`. This one shows nothing."""

    def note(self, text: str) -> None:
        """Show a message."""

    def __call__(self, text: str) -> None:
        self.note(text)

    def working(
        self, what: str, total: int = 0, limit_s: float = math.inf
    ) -> AbstractContextManager[Advance]:
        """Show work in progress during a ``with`` statement.

        Args:
            what: description, for example "loading a model".
            total: amount of work in any unit, 0 if unknown.
            limit_s: seconds after which the work ends in any case.
        """
        return nullcontext(unseen)


silent = Display()  # shows nothing


def working(
    say: Say, what: str, total: int = 0, limit_s: float = math.inf
) -> AbstractContextManager[Advance]:
    return (say if isinstance(say, Display) else silent).working(what, total, limit_s)


def unseen(_: int) -> None:
    """Ignore progress."""


def format_count(number: int) -> str:
    """Format a number of parameters with four digits."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


def format_size(size_bytes: int) -> str:
    """Format a number of bytes with four digits."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= size:
            digits = ",.4g" if size_bytes < 1000 * size else ",.0f"
            return f"{size_bytes / size:{digits}} {unit}"
    return f"{size_bytes} B"


def tick_step(length: float, ticks: int) -> float:
    """Return the least of 1, 2, 5, times a power of ten, that gives at most ``ticks`` steps."""
    power = 10.0 ** math.floor(math.log10(length / ticks))
    return next(f * power for f in (1, 2, 5, 10, 20) if length <= f * power * ticks)


def padded(rows: Sequence[Sequence[str]], left: int = 1) -> list[list[str]]:
    """Pad the cells of each column to one width. Left-align the first ``left`` columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            f"{cell:{'<' if i < left else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    return "\n".join("  " + "  ".join(cells).rstrip() for cells in padded(rows, left))
