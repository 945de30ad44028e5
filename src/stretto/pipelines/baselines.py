"""Baselines for fused schedules: 1F1B and its variants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from stretto.bounds import ceil_div
from stretto.pipelines.graph import earliest_starts, latency_of, make_graph
from stretto.pipelines.pipeline_schedule import PipelineSchedule
from stretto.pipelines.problem import ModelPipelines, Problem

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Ticks of both models one after the other, and the highest memory of any device."""

    latency: int
    peak: float


def serial_1f1b(problem: Problem) -> Baseline:
    """Return both models by 1F1B, the critic after the actor has finished."""
    latency = sum(_alone(problem, actor) for actor in (True, False))
    peak = max(
        min(model.stages - s, model.micro_batches) * activation
        for model in problem.models
        for s, activation in enumerate(model.activation)
    )
    return Baseline(latency, peak)


def one_f_one_b(problem: Problem) -> PipelineSchedule:
    """Make 1F1B of the actor, then of the critic (Narayanan et al. 2019, section 3.2). A device
    starts the critic's part as soon as it has finished the actor's."""
    words = []
    for device in range(problem.devices):
        word: list[str] = []
        for first, model in ((0, problem.actor), (problem.actor.pipelines, problem.critic)):
            pipeline, place = divmod(device, model.stages)
            later_stages = place if first else model.stages - 1 - place  # this stage
            warm_up = min(later_stages, model.micro_batches)
            forward, backward = f"{first + pipeline}F", f"{first + pipeline}B"
            word += [forward] * warm_up
            word += [forward, backward] * (model.micro_batches - warm_up) + [backward] * warm_up
        words.append(tuple(word))
    return PipelineSchedule(tuple(words))


def one_f_one_b_plus(problem: Problem) -> Baseline | None:
    """Return 1F1B with half the stages and twice the pipelines, or ``None`` for an odd number. Two
    neighbouring stages become one, on both of their devices. Half the micro-batches (rounded up) go
    through each pipeline. A device holds the activations of two stages."""
    if any(model.stages % 2 for model in problem.models):
        return None
    actor, critic = (
        ModelPipelines(
            stages=model.stages // 2,
            pipelines=model.pipelines * 2,
            micro_batches=ceil_div(model.micro_batches, 2),
            forward=_by_two(model.forward),
            backward=_by_two(model.backward),
            activation=_by_two(model.activation),
            communication=model.communication,
        )
        for model in problem.models
    )
    return serial_1f1b(Problem(actor, critic))


def interleaved_1f1b(problem: Problem, chunks: int = 2) -> Baseline:
    """Return interleaved 1F1B with ``chunks`` chunks a device (Narayanan et al. 2021, section 2.2).
    It uses formulas, because its stages are finer than the problem's. The bubble is 1F1B's divided
    by the chunks, and memory is that of the first stage's warm-up."""
    latency, peak = 0.0, 0.0
    for model in problem.models:
        stage_ticks = [f + b for f, b in zip(model.forward, model.backward, strict=True)]
        hops = 2 * (model.stages * chunks - 1) * model.communication
        bubble = sum(stage_ticks) - max(stage_ticks)
        latency += model.micro_batches * max(stage_ticks) + (bubble + hops) / chunks
        in_flight = 2 * (model.stages - 1) + (chunks - 1) * model.stages + 1
        in_flight = min(in_flight, chunks * model.micro_batches)
        peak = max(peak, in_flight / chunks * max(model.activation))
    return Baseline(math.ceil(latency), peak)


def _alone(problem: Problem, actor: bool) -> int:
    graph, word = make_graph(problem), one_f_one_b(problem).tasks(problem)
    mask = (graph.pipeline[graph.queue_of[word]] < problem.actor.pipelines) == actor
    counts = np.concatenate([[0], np.cumsum(mask)])
    subgraph, word = graph._replace(word_at=counts[graph.word_at]), word[mask]
    start = np.zeros(graph.queue_of.size, np.int64)
    earliest_starts(subgraph, word, start, np.zeros_like(word))
    return int(latency_of(subgraph, word, start))


def _by_two(values: tuple[N, ...]) -> tuple[N, ...]:
    """Return sums of neighbouring pairs, exact for the decimals that problems may have."""
    return tuple(round(a + b, 12) for a, b in zip(values[::2], values[1::2], strict=True))
