"""Rounds of decoding without a clock: which responses make a batch, after how many decode steps.

All rows in flight get a token a step, whatever the GPUs. So the steps of a round, its tokens and
what is carried follow from the responses' lengths alone, and are worked out once for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Round:
    """The work of a round, or of an average step.

    Attributes:
        steps: decode steps, until enough responses have ended.
        tokens: decoded.
        context: tokens of prompts and responses that these steps read.
        prompts: tokens of the prompts that came in.
        trained: tokens of the responses that ended first, with their prompts.
        carried: tokens of what is still in flight at the end, with their prompts.
    """

    steps: float
    tokens: float
    context: float
    prompts: float
    trained: float
    carried: float

    @classmethod
    def mean(cls, rounds: list[Round], steps: int = 1) -> Round:
        """Return the average of some rounds, of so many training steps each, for one step."""
        return cls(*(fmean(getattr(r, name) for r in rounds) / steps for name in cls.__slots__))


@dataclass(slots=True)
class _Row:
    prompt: int
    start: int
    end: int


def rounds(
    batch: int,
    extra: int,
    count: int,
    *,
    length: Callable[[int], int],
    prompt: Callable[[int], int],
    samples: int = 1,
) -> list[Round]:
    """Decode batches in lockstep.

    Args:
        extra: that are in flight besides (delta); a multiple of ``samples``.
        length: of a response, by its number.
        prompt: length of a prompt, by its number.
        samples: responses to each prompt, which end together.
    """
    groups: list[list[_Row]] = []
    drawn = now = 0
    found = []
    for _ in range(count):
        came = 0
        while len(groups) < (batch + extra) // samples:
            tokens = prompt(drawn)
            ends = [now + length(drawn * samples + i) for i in range(samples)]
            groups.append([_Row(tokens, now, end) for end in ends])
            came += tokens
            drawn += 1
        groups.sort(key=lambda group: max(row.end for row in group))
        done, groups = groups[: batch // samples], groups[batch // samples :]
        start, now = now, max(now, *(row.end for row in done[-1]))
        rows = [row for group in (*done, *groups) for row in group]
        found.append(_round(rows, start, now, came, done, groups))
    return found


def _round(
    rows: list[_Row],
    start: int,
    now: int,
    came: int,
    done: list[list[_Row]],
    groups: list[list[_Row]],
) -> Round:
    tokens = context = 0
    for row in rows:
        first, last = start - row.start, min(row.end, now) - row.start
        if last > first:
            tokens += last - first
            context += (last - first) * row.prompt + (last * (last - 1) - first * (first - 1)) // 2
    ended = [row for group in done for row in group]
    left = [row for group in groups for row in group]
    return Round(
        steps=now - start,
        tokens=tokens,
        context=context,
        prompts=came,
        trained=sum(row.prompt + row.end - row.start for row in ended),
        carried=sum(row.prompt + min(row.end, now) - row.start for row in left),
    )
