"""Problems and schedules of fused pipelines, for several test files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from stretto.pipelines.executor.stages import NAMES, StageLayout
from stretto.pipelines.graph import make_graph
from stretto.pipelines.pipeline_schedule import PipelineSchedule
from stretto.pipelines.problem import ModelPipelines, Problem


def model(stages: int, pipelines: int, batches: int, **other: Any) -> ModelPipelines:
    """One of the two models, by default with a backward that takes as long as two forwards."""
    given = {"forward": 1, "backward": 2, "activation": 1.0, **other}
    return ModelPipelines.of(stages, pipelines, batches, **given)


def problem_of(layout: StageLayout, actor: int, critic: int) -> Problem:
    """The problem of so many micro-batches of each model, whose stages are all alike."""
    first, second = (
        model(*layout.of(name), count // layout.of(name)[1]).merged(layout.merged(name))
        for name, count in zip(NAMES, (actor, critic), strict=True)
    )
    return Problem(first, second)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    devices = draw(st.sampled_from([1, 2, 3, 4, 6]))
    models = []
    for _ in range(2):
        stages = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
        ticks = st.lists(st.integers(1, 7), min_size=stages, max_size=stages)
        models.append(
            ModelPipelines.of(
                stages,
                devices // stages,
                draw(st.integers(1, 5)),
                forward=draw(ticks),
                backward=draw(ticks),
                activation=[n / 4 for n in draw(ticks)],
                communication=draw(st.integers(0, 3)),
            )
        )
    actor, critic = models
    return Problem(actor, critic)


def random_schedule(problem: Problem, choose: Callable[[list[int]], int]) -> PipelineSchedule:
    """Any valid one: tasks whose inputs are made, in an order of chance."""
    graph = make_graph(problem)
    done = [0] * graph.length.size
    words: list[list[str]] = [[] for _ in range(problem.devices)]

    def ready(q: int) -> bool:
        before, mate = int(graph.before[q]), int(graph.mate[q])
        return (
            done[q] < graph.length[q]
            and (before < 0 or done[before] > done[q])
            and (graph.kind[q] == 0 or done[mate] > done[q])
        )

    while open_queues := [q for q in range(len(done)) if ready(q)]:
        q = choose(open_queues)
        done[q] += 1
        words[graph.device[q]].append(f"{graph.pipeline[q]}{'FB'[graph.kind[q]]}")
    return PipelineSchedule(tuple(map(tuple, words)))
