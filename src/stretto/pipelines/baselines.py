"""Baselines for fused schedules: 1F1B and its variants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from stretto.pipelines.graph import earliest_starts, latency_of, make_graph
from stretto.pipelines.problem import Problem
from stretto.pipelines.schedule import PipelineSchedule


@dataclass(frozen=True, slots=True)
class Baseline:
    """The two models one after the other.

    Attributes:
        latency: ticks of both.
        peak: highest activation memory of any device.
    """

    latency: int
    peak: float


def serial_1f1b(problem: Problem) -> Baseline:
    """Both models by 1F1B, the critic after the actor has finished."""
    latency = sum(_alone(problem, actor) for actor in (True, False))
    peak = max(
        min(side.stages - s, side.micro_batches) * side.activation[s]
        for side in problem.models
        for s in range(side.stages)
    )
    return Baseline(latency, peak)


def one_f_one_b(problem: Problem) -> PipelineSchedule:
    """1F1B of the actor, then of the critic (Narayanan et al. 2019, section 3.2).

    A device that has ended the actor's part goes on with the critic's at once.
    """
    words = []
    for device in range(problem.devices):
        word: list[str] = []
        for first, side in ((0, problem.actor), (problem.actor.pipelines, problem.critic)):
            pipeline, place = divmod(device, side.stages)
            ahead = place if first else side.stages - 1 - place  # stages behind this one
            ahead = min(ahead, side.micro_batches)
            forward, backward = f"{first + pipeline}F", f"{first + pipeline}B"
            word += [forward] * ahead
            word += [forward, backward] * (side.micro_batches - ahead) + [backward] * ahead
        words.append(tuple(word))
    return PipelineSchedule(tuple(words))


def one_f_one_b_plus(problem: Problem) -> Baseline | None:
    """1F1B with half the stages and twice the pipelines; ``None`` where stages are odd in number.

    Each two neighbouring stages become one, on both of their devices; half the micro-batches
    (rounded up) go through each half. A device holds the activations of two stages.
    """
    if any(side.stages % 2 for side in problem.models):
        return None
    actor, critic = (
        replace(
            side,
            stages=side.stages // 2,
            pipelines=side.pipelines * 2,
            micro_batches=-(-side.micro_batches // 2),
            forward=_by_two(side.forward),
            backward=_by_two(side.backward),
            activation=tuple(
                float(Fraction(str(a)) + Fraction(str(b))) for a, b in _twos(side.activation)
            ),
        )
        for side in problem.models
    )
    return serial_1f1b(Problem(actor, critic))


def interleaved_1f1b(problem: Problem, chunks: int = 2) -> Baseline:
    """Interleaved 1F1B with ``chunks`` model chunks a device (Narayanan et al. 2021, section 2.2).

    The bubble is that of 1F1B divided by the chunks, whatever the number of micro-batches;
    memory is that of the first stage's warm-up. By formula, as stages are cut more finely than the
    problem says.
    """
    latency, peak = 0.0, 0.0
    for side in problem.models:
        each = [f + b for f, b in zip(side.forward, side.backward, strict=True)]
        hops = 2 * (side.stages * chunks - 1) * side.communication
        bubble = sum(each) - max(each)
        latency += side.micro_batches * max(each) + (bubble + hops) / chunks
        in_flight = 2 * (side.stages - 1) + (chunks - 1) * side.stages + 1
        in_flight = min(in_flight, chunks * side.micro_batches)
        peak = max(peak, in_flight / chunks * max(side.activation))
    return Baseline(math.ceil(latency), peak)


def _alone(problem: Problem, actor: bool) -> int:
    """Latency of one model by 1F1B, with the devices to itself."""
    graph, word = make_graph(problem), one_f_one_b(problem).tasks(problem)
    own = (graph.pipeline[graph.queue_of[word]] < problem.actor.pipelines) == actor
    counted = np.concatenate([[0], np.cumsum(own)])
    alone, word = graph._replace(word_at=counted[graph.word_at]), word[own]
    start = np.zeros(graph.queue_of.size, np.int64)
    earliest_starts(alone, word, start, np.zeros_like(word))
    return int(latency_of(alone, word, start))


def _twos(values: Sequence[float]) -> Iterator[tuple[float, float]]:
    return zip(values[::2], values[1::2], strict=True)


def _by_two(latencies: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(latencies[::2], latencies[1::2], strict=True))
