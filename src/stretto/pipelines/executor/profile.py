"""Make the problem that describes a measured run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from stretto.pipelines.executor.instructions import PipelineTask
from stretto.pipelines.executor.layout import Name, StageLayout
from stretto.pipelines.executor.timing import Timings
from stretto.pipelines.problem import Problem, Side

_US = 1e6


def profile(
    layout: StageLayout,
    timings: Sequence[Timings],
    saved_bytes: Sequence[tuple[int, int]] | None = None,
) -> Problem:
    """The problem in microseconds and bytes, as measured.

    The latency of a stage's forwards is their median over micro-batches and pipelines, and so is
    that of its backwards. Communication is the median over those transfers that the receiver was
    already waiting for when their tensor was made; of others it cannot be seen how long they took.

    Args:
        timings: of all ranks, of one run; the first run of a process is no good measure.
        saved_bytes: of each rank, what a micro-batch of the actor and one of the critic keeps
            (:meth:`~stretto.pipelines.executor.executor.PipelineExecutor.saved_bytes`); without it,
            1 each.
    """
    saved = saved_bytes or [(1, 1)] * layout.ranks
    return Problem(
        _side(layout, "actor", timings, [actor for actor, _ in saved]),
        _side(layout, "critic", timings, [critic for _, critic in saved]),
    )


def makespan_us(timings: Sequence[Timings]) -> int:
    """Microseconds from the start of the first task to the end of the last, over all ranks."""
    return round(_US * (max(t.end[-1] for t in timings) - min(t.start[0] for t in timings)))


def _side(
    layout: StageLayout, name: Name, timings: Sequence[Timings], saved: Sequence[int]
) -> Side:
    stages, pipelines = layout.of(name)
    first = 0 if name == "actor" else layout.actor_pipelines
    own = range(first, first + pipelines)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    ends: dict[tuple[PipelineTask, int], float] = {}
    for rank, of in enumerate(timings):
        _, stage = layout.place(name, rank)
        for task, start, end in zip(of.word, of.start, of.end, strict=True):
            if task.pipeline in own:
                seconds[task.kind, stage].append(end - start)
                ends[task, stage] = end
    travels = []
    for rank, of in enumerate(timings):
        _, stage = layout.place(name, rank)
        for task, asked, start in zip(of.word, of.asked, of.start, strict=True):
            made = ends.get((task, stage - 1 if task.kind == "F" else stage + 1))
            if task.pipeline in own and made is not None and asked < made:
                travels.append(start - made)
    places = [layout.place(name, rank)[1] for rank in range(layout.ranks)]
    return Side.of(
        stages,
        pipelines,
        len(ends) // (2 * stages * pipelines),
        forward=[max(1, round(_US * median(seconds["F", s]))) for s in range(stages)],
        backward=[max(1, round(_US * median(seconds["B", s]))) for s in range(stages)],
        activation=[
            float(max(saved[r] for r, place in enumerate(places) if place == s))
            for s in range(stages)
        ],
        communication=max(0, round(_US * median(travels))) if travels else 0,
    )
