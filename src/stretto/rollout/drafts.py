"""Proposals of a row's next tokens, out of texts that begin with the same prompt.

A pass over a row's newest token and k proposed ones samples k + 1 tokens with the random numbers
that single steps would have taken (:mod:`stretto.rollout.sampling`). The first is the token of a
single step; each further one is, as long as all proposals before it are equal to what was sampled.
So proposals are kept by equality, where speculative sampling (Leviathan et al. 2023) accepts them
with a probability, and not one token changes. They are prompt lookups (Saxena 2023): what followed
the longest suffix of the row's text where it last occurred, in the row itself or else in others.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from stretto.rollout.base import Row
from stretto.types import IntArray

LONGEST = 6
"""Tokens of a suffix that is looked up."""

REMEMBERED = 1 << 24
"""Tokens of finished responses that are kept, for later responses to their prompts."""

Ends = dict[tuple[int, ...], tuple[Sequence[int], int]]
"""Where n-grams last ended: a text, and the index of the token that followed."""


class Texts:
    """Texts that begin with one prompt, each by a number, and where their n-grams ended."""

    def __init__(self, prompt: Sequence[int], responses: Iterable[IntArray]) -> None:
        self._read: defaultdict[int, int] = defaultdict(lambda: len(prompt))  # tokens of each text
        self._prompt: Ends = {}
        self._own: defaultdict[int, Ends] = defaultdict(dict)
        self._all: Ends = {}
        _enter(prompt, 1, self._prompt)
        for response in responses:
            _enter([*prompt, *response.tolist()], len(prompt), self._all)

    def read(self, number: int, text: Sequence[int]) -> None:
        """Read a text, the same list each time, from where it was left."""
        _enter(text, self._read[number], self._own[number], self._all)
        self._read[number] = len(text)

    def after(self, number: int, text: Sequence[int], most: int) -> Sequence[int]:
        """Return up to ``most`` tokens that followed the longest suffix, of the text itself first,
        then of others.
        """
        suffixes = [tuple(text[-n:]) for n in range(min(LONGEST, len(text)), 0, -1)]
        for among in ((self._own[number], self._prompt), (self._all,)):
            for suffix, ends in product(suffixes, among):
                if found := ends.get(suffix):
                    other, at = found
                    after = other[at : at + most]
                    # A text that repeats itself goes on beyond its end.
                    return ([*after] * most)[:most] if other is text else after
        return ()


def _enter(text: Sequence[int], begin: int, *into: Ends) -> None:
    for at in range(max(begin, 1), len(text)):
        for n in range(1, min(LONGEST, at) + 1):
            suffix = tuple(text[at - n : at])
            for ends in into:
                ends[suffix] = text, at


class PromptLookup:
    """Proposals for the rows of an engine, from texts of their own, their groups and the past.

    Args:
        kept: finished responses to a prompt that are remembered, the newest ones.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._texts: dict[tuple[int, ...], Texts] = {}
        self._past: OrderedDict[tuple[int, ...], deque[IntArray]] = OrderedDict()
        self._tokens = 0  # of them

    def propose(self, rows: Sequence[Row], most: int) -> list[Sequence[int]]:
        """Return up to ``most`` tokens for each row, and no more than its limit leaves room for."""
        prompts = {row.prompt for row in rows}
        self._texts = {prompt: t for prompt, t in self._texts.items() if prompt in prompts}
        for prompt in prompts - self._texts.keys():
            self._texts[prompt] = Texts(prompt, self._past.get(prompt, ()))
        for row in rows:
            self._texts[row.prompt].read(row.id, row.tokens)
        return [
            self._texts[row.prompt].after(row.id, row.tokens, min(most, row.tokens_left - 1))
            for row in rows
        ]

    def ended(self, row: Row) -> None:
        """Remember the response of a row that has finished."""
        past = self._past.setdefault(row.prompt, deque())
        past.append(np.array(row.tokens[len(row.prompt) :], np.int32))
        self._tokens += row.generated
        self._past.move_to_end(row.prompt)
        while len(past) > self._kept:
            self._tokens -= len(past.popleft())
        while self._tokens > REMEMBERED:
            self._tokens -= sum(map(len, self._past.popitem(last=False)[1]))
