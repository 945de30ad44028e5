"""Evaluation of a schedule: latency, memory, and why its devices idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stretto.errors import ConfigError
from stretto.pipelines.graph import FORWARD, Graph, Ints, capacity_units, make_graph
from stretto.pipelines.kernels import earliest_starts, latency_of, peak_memory
from stretto.pipelines.problem import Problem
from stretto.pipelines.schedule import PipelineSchedule, check

BUBBLES = ("warm-up", "dependency", "communication", "memory", "order", "drain")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of a schedule in which each task runs as early as it can.

    Attributes:
        latency: ticks from the start of the first task to the end of the last.
        peaks: highest activation memory of each device.
        bubbles: idle ticks of each device by cause:
            ``warm-up``, before its first task;
            ``dependency``, no input is there, and the next task's is not made yet;
            ``communication``, no input is there, but the next task's is on its way;
            ``memory``, a forward could run, but would not fit in the capacity;
            ``order``, something else could run, but the word has it later;
            ``drain``, after its last task.
        starts: [T] start of each task, by number.
        tasks: [T] task numbers, device after device.
    """

    latency: int
    peaks: tuple[float, ...]
    bubbles: tuple[Mapping[str, int], ...]
    starts: Ints
    tasks: Ints

    @property
    def peak(self) -> float:
        """The highest memory of any device."""
        return max(self.peaks)

    @property
    def bubble_share(self) -> float:
        """Idle time as a share of all devices' time."""
        idle = sum(sum(of.values()) for of in self.bubbles)
        return idle / (self.latency * len(self.bubbles))


def evaluate(problem: Problem, schedule: PipelineSchedule) -> Evaluation:
    """Run a schedule on paper.

    Raises:
        ConfigError: the schedule cannot run; the message says why.
    """
    reason = check(problem, schedule)
    if reason:
        raise ConfigError(f"the schedule is not valid: {reason}")
    return evaluate_tasks(problem, make_graph(problem), schedule.tasks(problem))


def evaluate_tasks(problem: Problem, graph: Graph, word: Ints) -> Evaluation:
    """Evaluate a valid word of task numbers [T]."""
    starts, order = np.empty(word.size, np.int64), np.empty(word.size, np.int64)
    earliest_starts(graph, word, starts, order)
    peaks = np.zeros(problem.devices, np.int64)
    peak_memory(graph, word, peaks)
    latency = int(latency_of(graph, word, starts))
    capacity = capacity_units(problem, problem.capacity)
    return Evaluation(
        latency=latency,
        peaks=tuple(int(p) / problem.memory_scale for p in peaks),
        bubbles=tuple(
            _bubbles(graph, word, starts, d, latency, capacity) for d in range(problem.devices)
        ),
        starts=starts,
        tasks=word,
    )


def _bubbles(
    graph: Graph, word: Ints, starts: Ints, d: int, latency: int, capacity: int
) -> dict[str, int]:
    """Idle ticks of one device by cause."""
    idle = dict.fromkeys(BUBBLES, 0)
    done = {int(q): 0 for q in graph.queues[4 * d : 4 * d + 4]}
    free = held = 0
    for task in word[graph.word_at[d] : graph.word_at[d + 1]].tolist():
        q, begin = int(graph.queue_of[task]), int(starts[task])
        if not any(done.values()):
            idle["warm-up"] += begin
        elif begin > free:
            # From when on each cause holds; the later ones in the list go before the earlier.
            made, _ = _arrival(graph, starts, q, done[q])
            fits, full = _NEVER, _NEVER
            for other, i in done.items():
                if other != q and held + graph.memory[other] <= capacity:
                    fits = min(fits, _arrival(graph, starts, other, i)[1])
                elif other != q:
                    full = min(full, _arrival(graph, starts, other, i)[1])
            until = begin
            for cause, since in (("order", fits), ("memory", full), ("communication", made)):
                since = min(max(since, free), until)
                idle[cause] += until - since
                until = since
            idle["dependency"] += until - free
        done[q] += 1
        held += int(graph.memory[q])
        free = begin + int(graph.duration[q])
    idle["drain"] += latency - free
    return idle


_NEVER = 2**60


def _arrival(graph: Graph, starts: Ints, q: int, i: int) -> tuple[int, int]:
    """Ticks at which the input of task ``i`` of a queue is made, and at which it is there."""
    if i >= graph.length[q]:
        return _NEVER, _NEVER
    b = int(graph.before[q])
    if b < 0:
        return 0, 0
    made = int(starts[graph.offset[b] + i] + graph.duration[b])
    return made, made + int(graph.delay[q])


def memory_curve(graph: Graph, evaluation: Evaluation, d: int) -> list[tuple[int, int]]:
    """Activation memory of a device over time, in the graph's units.

    Returns:
        Times and what is held from then on: a forward takes its memory when it starts, a backward
        frees it when it ends.
    """
    held, curve = 0, [(0, 0)]
    for task in evaluation.tasks[graph.word_at[d] : graph.word_at[d + 1]].tolist():
        q = int(graph.queue_of[task])
        at = int(evaluation.starts[task])
        at += 0 if graph.kind[q] == FORWARD else int(graph.duration[q])
        held += int(graph.memory[q])
        curve.append((at, held))
    return curve
