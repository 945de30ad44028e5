"""Metrics of a round that controllers learn from, without the round itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A decode call, as the schedule saw it.

    Attributes:
        rows: rollouts that were being decoded, on average over the call's steps.
        steps: tokens that the longest-lived of them got.
        seconds: how long the call took.
        first: whether it was its generator's first of a round, which prefills what was admitted.
        carried: with ``first``, rollouts with tokens of earlier rounds, which it may have to
            prefill again.
    """

    rows: float
    steps: int
    seconds: float
    first: bool = False
    carried: int = 0


@dataclass(frozen=True, slots=True)
class Feedback:
    """A round, from one hand-over of weights to the next, as controllers see it.

    Attributes:
        reward: mean of the batches trained on.
        lengths: response tokens of the rollouts that ended.
        decode: the decode calls.
        seconds: the whole round.
        overhead_s: the part of it in which nothing was being decoded.
        beyond: rollouts that were in flight beyond a round's when the newest round began.
    """

    reward: float
    lengths: Sequence[int]
    decode: Sequence[DecodeSample]
    seconds: float
    overhead_s: float
    beyond: int = 0
