"""Time that pipeline stages stand idle, by the schedule of their micro-batches."""

from __future__ import annotations

from functools import cache
from typing import Literal

from stretto.pipelines.baselines import interleaved_1f1b
from stretto.pipelines.problem import Problem, Side
from stretto.pipelines.solve import solve

Pipelining = Literal["1f1b", "interleaved", "fused"]
"""Schedules of a learner's pipelines: models one after the other, each by 1F1B or with two chunks
of layers a stage (interleaved), or both at once in opposite directions (fused; RLHFuse, section 5).
"""
FORWARD, BACKWARD = 1, 2
"""Ticks of a micro-batch on a stage."""
SECONDS = 2.0
"""Longest search for a fused schedule; of two like models it is at its bound sooner."""


@cache
def bubble(pipelining: Pipelining, stages: int) -> float:
    """Return how long a stage is idle in an update, in micro-batches, for each model.

    It does not depend on the number of micro-batches, if there are as many as stages. For fused
    schedules it is that of two models of one size, by the solver.
    """
    if stages == 1:
        return 0.0
    if pipelining == "1f1b":
        return stages - 1.0
    micro_batches = 2 * stages
    each = FORWARD + BACKWARD
    side = Side.of(
        stages, 1, micro_batches, forward=2 * FORWARD, backward=2 * BACKWARD, activation=1
    )
    problem = Problem(side, side)  # in half ticks, as chunks halve a stage's work
    if pipelining == "interleaved":
        latency = interleaved_1f1b(problem).latency
    else:
        latency = solve(problem, seconds=SECONDS).makespan
    return (latency / 2 - 2 * micro_batches * each) / each / 2
