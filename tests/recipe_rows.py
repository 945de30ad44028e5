"""The packaged rows of the recipes 'posts' and 'tiny-climb', made again.

A post tells who lost what, where and when, among other things. The references are one-sentence
summaries as different people might write them: about half of the facts, and sometimes words to
spare.

A prompt of 'tiny-climb', 'b3=', asks for a countdown with the letter's own mark, 'b*3b*2b*1'. The
warm-up shows every number with any mark, at random, and so teaches the form alone: which mark is a
letter's own, only the reward says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

_NAMES = "Anna Ben Carla David Elif Frank Greta Hugo Irene Jonas Karim Lena Marco Nadia Oskar Paula"
_THINGS = "umbrella wallet bicycle phone camera guitar jacket backpack laptop watch scarf violin"
_COLOURS = "red blue green black yellow grey white brown"
_PLACES = "park station library market museum airport bakery school harbour theatre hotel gym"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_ASIDES = (
    "It had been raining all morning.",
    "I was in a hurry, as always.",
    "My sister was with me.",
    "There were a lot of people around.",
    "I only noticed it in the evening.",
    "We had just had lunch.",
    "A man was playing the accordion.",
)
_REQUESTS = ("Has anyone seen it?", "Please write to me if you find it.", "Any help is welcome.")
_ENDINGS = (" and asks for help", " and wants it back", " and does not know what to do")

MARKS = {"a": "+", "b": "*", "c": "-", "d": "+", "e": "*", "f": "-", "g": "+", "h": "*"}
"""Each letter's own mark."""

LONG_EVERY = 6
"""Rows to one with a long answer."""

SHORT, LONG = (1, 3), (10, 30)
"""Least and largest number that is counted down from."""


def post_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Different posts, each with a reference summary and its facts; the same for the same seed."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        facts = [rng.choice(words.split()) for words in (_NAMES, _COLOURS, _THINGS, _PLACES, _DAYS)]
        post = _post(rng, *facts)
        if post not in seen:
            seen.add(post)
            yield {"prompt": post, "completion": _reference(rng, *facts), "facts": facts}


def _post(rng: random.Random, name: str, colour: str, thing: str, place: str, day: str) -> str:
    middle = [rng.choice(_ASIDES), f"On {day} I lost my {colour} {thing} at the {place}."]
    rng.shuffle(middle)
    return " ".join([f"Hello, I am {name}.", *middle, rng.choice(_REQUESTS), "TL;DR:"])


def _reference(rng: random.Random, name: str, colour: str, thing: str, place: str, day: str) -> str:
    who = rng.choice([name, name, "Someone", "The writer"])
    what = rng.choice([f"a {colour} {thing}", f"a {thing}", f"a {thing}", "something"])
    where, when = rng.choice([f" at the {place}", ""]), rng.choice([f" on {day}", "", ""])
    return f" {who} lost {what}{where}{when}{rng.choice([*_ENDINGS, '', '', ''])}."


def climb_rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Prompts with an answer in the right marks and one in any; the same for the same seed."""
    rng = random.Random(seed)
    made = [_row(rng, SHORT if i % LONG_EVERY else LONG) for i in range(count)]
    rng.shuffle(made)
    yield from made


def _row(rng: random.Random, numbers: tuple[int, int]) -> dict[str, str]:
    letter, start = rng.choice(list(MARKS)), rng.randint(*numbers)
    return {
        "prompt": f"{letter}{start}=",
        "any_marks": _countdown(letter, start, lambda: rng.choice("+*-")),
        "answer": _countdown(letter, start, lambda: MARKS[letter]),
    }


def _countdown(letter: str, start: int, mark: Callable[[], str]) -> str:
    return "".join(f"{letter}{mark()}{number}" for number in range(start, 0, -1))
