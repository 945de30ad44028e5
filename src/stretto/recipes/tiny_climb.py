"""Rows and reward of the recipe 'tiny-climb'.

A prompt, 'b3=', asks for a countdown with the letter's own mark, 'b*3b*2b*1'. The warm-up shows
every number with any mark, at random, and so teaches the form alone: which mark is a letter's own,
only the reward says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MARKS = {"a": "+", "b": "*", "c": "-", "d": "+", "e": "*", "f": "-", "g": "+", "h": "*"}
"""Each letter's own mark."""

LONG_EVERY = 6
"""Rows to one with a long answer."""

SHORT, LONG = (1, 3), (10, 30)
"""Least and largest number that is counted down from."""


def rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Prompts with an answer in the right marks and one in any; the same for the same seed."""
    rng = random.Random(seed)
    made = [_row(rng, SHORT if i % LONG_EVERY else LONG) for i in range(count)]
    rng.shuffle(made)
    yield from made


def right_share(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Numbers with the right letter and mark, of those that a response has or should have."""
    shares = []
    for text, right in zip(completions, answer, strict=True):
        given, wanted = _items(text), _items(right)
        shares.append(len(set(given) & set(wanted)) / max(len(given), len(wanted)))
    return shares


def _row(rng: random.Random, numbers: tuple[int, int]) -> dict[str, str]:
    letter, start = rng.choice(list(MARKS)), rng.randint(*numbers)
    return {
        "prompt": f"{letter}{start}=",
        "any_marks": _countdown(letter, start, lambda: rng.choice("+*-")),
        "answer": _countdown(letter, start, lambda: MARKS[letter]),
    }


def _countdown(letter: str, start: int, mark: Callable[[], str]) -> str:
    return "".join(f"{letter}{mark()}{number}" for number in range(start, 0, -1))


def _items(text: str) -> list[str]:
    return re.findall(r"\D*\d+|\D+$", text)
