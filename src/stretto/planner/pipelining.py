"""Time that pipeline stages stand idle, by the schedule of their micro-batches."""

from __future__ import annotations

from typing import Literal

Pipelining = Literal["1f1b", "interleaved", "fused"]
"""Schedules of a learner's pipelines: models one after the other, each by 1F1B or with two chunks
of layers a stage (interleaved), or both at once in opposite directions (fused; RLHFuse, section 5).
"""


def bubble(pipelining: Pipelining, stages: int) -> float:
    """Return how long a stage is idle in an update, in micro-batches, for each model.

    It does not depend on the number of micro-batches, if there are twice as many as stages. Two
    chunks of layers a stage halve the bubble. Fused schedules are of two models of one size, at the
    lower bound of latency, which the solver of :mod:`stretto.pipelines` reaches for them.
    """
    if pipelining == "1f1b":
        return stages - 1.0
    if pipelining == "interleaved":
        return (stages - 1) / 2
    return ((stages + 1) // 2 - 1) / 2
