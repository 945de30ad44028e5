"""Instructions of each rank for a schedule, and the problem with measured latencies.

Transfers cannot deadlock, however slow ranks and links are, even if a send lasts until its receiver
has asked for it:

- All transfers have one order: by the time at which the simulated schedule computes their tensors.
  Every rank starts its transfers in that order. So both ranks of a pair start theirs alike, as NCCL
  demands if the transfers of a pair share a stream.
- A rank asks for a tensor before the first of its own tasks that ends later than the tensor is
  computed, and waits for it only when a task needs it. In the simulation that is no later than the
  send, so tensors travel while both ranks compute.

To see this, take the first transfer in the order that has not happened. Everything before its two
ends in the words is done or in progress, so it happens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Literal

from stretto.pipelines.executor.stages import NAMES, Name, StageLayout
from stretto.pipelines.graph import FORWARD, Graph, make_graph
from stretto.pipelines.pipeline_schedule import PipelineSchedule, evaluate
from stretto.pipelines.problem import ModelPipelines, Problem

_US = 1e6
Kind = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class PipelineTask:
    """Forward or backward of a micro-batch on this rank's stage of a pipeline. Pipelines count from
    0, the actor's first, and micro-batches within their pipeline."""

    kind: Kind
    pipeline: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Ask a rank for the input of a task, without waiting for it."""

    task: PipelineTask
    peer: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a rank the input of one of its tasks, without waiting for its arrival."""

    task: PipelineTask
    peer: int


Instruction = PipelineTask | Receive | Send


@lru_cache(maxsize=16)
def instructions(
    problem: Problem, schedule: PipelineSchedule
) -> tuple[tuple[Instruction, ...], ...]:
    """List the instructions of each device, in order. They are correct for any latencies, and
    fastest if the problem's are accurate. Raises ConfigError if the schedule cannot run."""
    evaluation = evaluate(problem, schedule)
    graph = make_graph(problem)
    ends = evaluation.starts + graph.duration[graph.queue_of]
    # (end of the task that computes the tensor, its number): keys are unique, and a task comes
    # after all its dependencies, because each takes at least a tick.
    key = list(zip(ends.tolist(), range(ends.size), strict=True))
    words = [evaluation.tasks[low:high].tolist() for low, high in pairwise(graph.word_at)]
    incoming: list[list[tuple[tuple[int, int], Receive]]] = [[] for _ in words]
    for task in range(ends.size):
        if send := _sent(graph, task):
            peer = int(graph.device[graph.queue_of[task]])
            incoming[send.peer].append((key[task], Receive(send.task, peer)))
    programs = []
    for word, receives in zip(words, incoming, strict=True):
        receives.sort(key=lambda entry: entry[0], reverse=True)
        program: list[Instruction] = []
        for task in word:
            while receives and receives[-1][0] < key[task]:
                program.append(receives.pop()[1])
            send = _sent(graph, task)
            program += [_task(graph, task), *([send] if send else [])]
        programs.append(tuple(program))
    return tuple(programs)


def of_rank(
    layout: StageLayout, rank: int, program: Sequence[Instruction]
) -> Iterator[Instruction]:
    """Yield a rank's instructions, by the program of its slot. Where the slot has several stages of
    a model, those in between exchange tensors as they run each of its tasks, in the same order.
    """
    slot = layout.slot(rank)
    for step in program:
        task = step if isinstance(step, PipelineTask) else step.task
        name: Name = "actor" if task.pipeline < layout.actor_pipelines else "critic"
        onward = 1 if task.kind == "F" else -1
        source = layout.neighbour(name, rank, -onward)
        target = layout.neighbour(name, rank, onward)
        takes_here = source is not None and layout.slot(source) == slot
        gives_here = target is not None and layout.slot(target) == slot
        if isinstance(step, PipelineTask):
            if source is not None and takes_here:
                yield Receive(task, source)
            yield task
            if target is not None and gives_here:
                yield Send(task, target)
        elif isinstance(step, Receive) and source is not None and not takes_here:
            yield Receive(task, source)
        elif isinstance(step, Send) and target is not None and not gives_here:
            yield Send(task, target)


def _task(graph: Graph, task: int) -> PipelineTask:
    q = int(graph.queue_of[task])
    kind: Kind = "F" if graph.kind[q] == FORWARD else "B"
    return PipelineTask(kind, int(graph.pipeline[q]), task - int(graph.offset[q]))


def _sent(graph: Graph, task: int) -> Send | None:
    q = int(graph.queue_of[task])
    next_queue = int(graph.after[q])
    if next_queue < 0 or graph.device[next_queue] == graph.device[q]:
        return None
    next_task = int(graph.offset[next_queue]) + task - int(graph.offset[q])
    return Send(_task(graph, next_task), int(graph.device[next_queue]))


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a rank's tasks in seconds, from a start that all ranks share. ``asked`` is when it
    began to wait for a task's input, ``start`` when that arrived, and ``end`` when the task was
    done."""

    word: tuple[PipelineTask, ...]
    asked: tuple[float, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]


def profile(layout: StageLayout, timings: Sequence[Timings], guess: Problem) -> Problem:
    """Return the problem with latencies in microseconds, as measured in one run of all ranks, and
    with the activation memory of a ``guess``.

    A stage's latency of forwards, and of backwards, is the median over micro-batches and pipelines.
    Communication is the median over transfers that the receiver was already waiting for when their
    tensor was computed, because the duration of other transfers is unknown.
    """
    actor, critic = (
        _measured(layout, name, timings, model.activation)
        for name, model in zip(NAMES, guess.models, strict=True)
    )
    return Problem(actor, critic)


def makespan_us(timings: Sequence[Timings]) -> int:
    """Return microseconds from the start of the first task to the end of the last, on all ranks."""
    return round(_US * (max(t.end[-1] for t in timings) - min(t.start[0] for t in timings)))


def _measured(
    layout: StageLayout, name: Name, timings: Sequence[Timings], activation: Sequence[float]
) -> ModelPipelines:
    merged = layout.merged(name)
    (stages, pipelines), ranks = layout.of(name), range(layout.slots * layout.slot_size)
    wide = range(stages // merged)  # stages of the problem
    first = 0 if name == "actor" else layout.actor_pipelines
    numbers = range(first, first + pipelines)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    ends: dict[tuple[PipelineTask, int], float] = {}
    for rank, rank_timings in zip(ranks, timings, strict=False):
        _, stage = layout.place(name, rank)
        for task, start, end in zip(
            rank_timings.word, rank_timings.start, rank_timings.end, strict=True
        ):
            if task.pipeline in numbers:
                seconds[task.kind, stage // merged].append(end - start)
                ends[task, stage] = end
    travels = []
    for rank, rank_timings in zip(ranks, timings, strict=False):
        _, stage = layout.place(name, rank)
        for task, wait_start, start in zip(
            rank_timings.word, rank_timings.asked, rank_timings.start, strict=True
        ):
            input_end = ends.get((task, stage - 1 if task.kind == "F" else stage + 1))
            if task.pipeline in numbers and input_end is not None and wait_start < input_end:
                travels.append(start - input_end)
    return ModelPipelines.of(
        len(wide),
        pipelines,
        len(ends) // (2 * stages * pipelines),
        forward=[max(1, round(_US * median(seconds["F", s]))) for s in wide],
        backward=[max(1, round(_US * median(seconds["B", s]))) for s in wide],
        activation=activation,
        communication=max(0, round(_US * median(travels))) if travels else 0,
    )
