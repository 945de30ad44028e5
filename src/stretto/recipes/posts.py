"""Posts to summarise, and their gold reward: a controlled stand-in for summaries of Reddit posts.

A post tells who lost what, where and when, among other things. The references are one-sentence
summaries as different people might write them: about half of the facts, and sometimes words to
spare. The gold reward knows the facts. It stands for human preferences, so that what a learned
reward model misses can be measured.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

ENOUGH_WORDS = 10
"""All facts fit into so many words; more are a cost."""

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


def rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Different posts, each with a reference summary and its facts; the same for the same seed."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        facts = [rng.choice(words.split()) for words in (_NAMES, _COLOURS, _THINGS, _PLACES, _DAYS)]
        post = _post(rng, *facts)
        if post not in seen:
            seen.add(post)
            yield {"prompt": post, "completion": _reference(rng, *facts), "facts": facts}


def gold(completions: Sequence[Any], facts: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """The facts told, of five, less a tenth for each word beyond :data:`ENOUGH_WORDS`."""
    scores = []
    for completion, told in zip(completions, facts, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        words = re.findall(r"\w+", text)
        scores.append(sum(fact in words for fact in told) - 0.1 * max(len(words) - ENOUGH_WORDS, 0))
    return scores


def _post(rng: random.Random, name: str, colour: str, thing: str, place: str, day: str) -> str:
    middle = [rng.choice(_ASIDES), f"On {day} I lost my {colour} {thing} at the {place}."]
    rng.shuffle(middle)
    return " ".join([f"Hello, I am {name}.", *middle, rng.choice(_REQUESTS), "TL;DR:"])


def _reference(rng: random.Random, name: str, colour: str, thing: str, place: str, day: str) -> str:
    who = rng.choice([name, name, "Someone", "The writer"])
    what = rng.choice([f"a {colour} {thing}", f"a {thing}", f"a {thing}", "something"])
    where, when = rng.choice([f" at the {place}", ""]), rng.choice([f" on {day}", "", ""])
    return f" {who} lost {what}{where}{when}{rng.choice([*_ENDINGS, '', '', ''])}."
