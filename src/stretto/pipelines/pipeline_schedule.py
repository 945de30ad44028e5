"""Schedules: the order of each device's tasks, and its evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np

from stretto.errors import ConfigError
from stretto.pipelines.graph import (
    FORWARD,
    Graph,
    Ints,
    capacity_units,
    earliest_starts,
    latency_of,
    make_graph,
    peak_memory,
)
from stretto.pipelines.problem import Problem


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """One word a device, each a sequence of letters. A letter is a pipeline and a kind, for example
    ``0F`` or ``2B``. Pipelines count from 0, the actor's first, in the order of their devices. The
    micro-batches of a pipeline are identical, so the i-th ``0F`` of a word is the forward of
    micro-batch i."""

    words: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return {"devices": [" ".join(word) for word in self.words]}

    @classmethod
    def of_tasks(cls, graph: Graph, word: Ints) -> PipelineSchedule:
        letters = [_letter(graph, q) for q in graph.queue_of[word].tolist()]
        return cls(tuple(tuple(letters[low:high]) for low, high in _spans(graph)))

    def tasks(self, problem: Problem) -> Ints:
        """Return task numbers [T] by device. Raises ConfigError for another problem's words."""
        graph = make_graph(problem)
        queues = [
            {_letter(graph, q): q for q in device_queues}
            for device_queues in graph.queues.reshape(-1, 4).tolist()
        ]
        expected = [
            Counter({letter: graph.length[q] for letter, q in device_queues.items()})
            for device_queues in queues
        ]
        if [Counter(word) for word in self.words] != expected:
            raise ConfigError(
                "the schedule's words do not have a letter for each task of the problem; they must "
                "be of the same problem",
                "other-problem",
            )
        tasks = []
        for word, device_queues in zip(self.words, queues, strict=True):
            numbers = {letter: count(int(graph.offset[q])) for letter, q in device_queues.items()}
            tasks += [next(numbers[letter]) for letter in word]
        return np.array(tasks, dtype=np.int64)


def _letter(graph: Graph, q: int) -> str:
    return f"{graph.pipeline[q]}{'FB'[graph.kind[q]]}"


def _spans(graph: Graph) -> list[tuple[int, int]]:
    return list(pairwise(graph.word_at.tolist()))


BUBBLES = ("warm-up", "dependency", "communication", "memory", "order", "drain")


@dataclass(frozen=True, slots=True)
class ScheduleMetrics:
    """Latency, memory and idle time of a schedule in which each task runs as early as possible.

    Attributes:
        latency: ticks from the start of the first task to the end of the last.
        peaks: highest activation memory of each device.
        bubbles: idle ticks of each device by cause: ``warm-up`` (before its first task),
            ``dependency`` (no input has arrived, and the next task's is not computed yet),
            ``communication`` (no input has arrived, but the next task's is on its way), ``memory``
            (a forward is ready, but exceeds the capacity), ``order`` (another task is ready, but
            later in the word), ``drain`` (after its last task).
        starts, tasks: [T] start of each task by number, and task numbers, device after device.
    """

    latency: int
    peaks: tuple[float, ...]
    bubbles: tuple[Mapping[str, int], ...]
    starts: Ints
    tasks: Ints

    @property
    def peak(self) -> float:
        return max(self.peaks)

    @property
    def bubble_share(self) -> float:
        idle = sum(sum(ticks.values()) for ticks in self.bubbles)
        return idle / (self.latency * len(self.bubbles))


def evaluate(problem: Problem, schedule: PipelineSchedule) -> ScheduleMetrics:
    """Simulate a schedule. Raises ConfigError if devices wait for each other for ever."""
    graph, word = make_graph(problem), schedule.tasks(problem)
    starts, order = np.empty(word.size, np.int64), np.empty(word.size, np.int64)
    ran = earliest_starts(graph, word, starts, order)
    if ran < word.size:
        stuck = [
            word[low:high][~np.isin(word[low:high], order[:ran])] for low, high in _spans(graph)
        ]
        tasks = ", ".join(
            _described(graph, int(device_tasks[0])) for device_tasks in stuck if device_tasks.size
        )
        raise ConfigError(
            f"the schedule cannot run: devices wait for each other at {tasks}", "deadlock"
        )
    peaks = np.zeros(problem.devices, np.int64)
    peak_memory(graph, word, peaks)
    latency = int(latency_of(graph, word, starts))
    capacity = capacity_units(problem, problem.capacity)
    bubbles = (_bubbles(graph, word, starts, d, latency, capacity) for d in range(peaks.size))
    memory = tuple(int(peak) / problem.memory_scale for peak in peaks)
    return ScheduleMetrics(latency, memory, tuple(bubbles), starts, word)


def _described(graph: Graph, task: int) -> str:
    q = int(graph.queue_of[task])
    batch = task - int(graph.offset[q])
    return f"{_letter(graph, q)} of micro-batch {batch} on device {graph.device[q]}"


def _bubbles(
    graph: Graph, word: Ints, starts: Ints, d: int, latency: int, capacity: int
) -> dict[str, int]:
    idle = dict.fromkeys(BUBBLES, 0)
    done = {int(q): 0 for q in graph.queues[4 * d : 4 * d + 4]}
    free = memory = 0
    for task in word[graph.word_at[d] : graph.word_at[d + 1]].tolist():
        q, begin = int(graph.queue_of[task]), int(starts[task])
        if not any(done.values()):
            idle["warm-up"] += begin
        elif begin > free:
            # Start of each cause. Causes later in the list take precedence.
            input_end, _ = _arrival(graph, starts, q, done[q])
            fits, full = _NEVER, _NEVER
            for other, i in done.items():
                arrival = _NEVER if other == q else _arrival(graph, starts, other, i)[1]
                if memory + graph.memory[other] <= capacity:
                    fits = min(fits, arrival)
                else:
                    full = min(full, arrival)
            until = begin
            for cause, since in (("order", fits), ("memory", full), ("communication", input_end)):
                since = min(max(since, free), until)
                idle[cause] += until - since
                until = since
            idle["dependency"] += until - free
        done[q] += 1
        memory += int(graph.memory[q])
        free = begin + int(graph.duration[q])
    idle["drain"] += latency - free
    return idle


_NEVER = 2**60


def _arrival(graph: Graph, starts: Ints, q: int, i: int) -> tuple[int, int]:
    """Return the ticks at which a task's input is computed, and at which it arrives."""
    if i >= graph.length[q]:
        return _NEVER, _NEVER
    b = int(graph.before[q])
    if b < 0:
        return 0, 0
    end = int(starts[graph.offset[b] + i] + graph.duration[b])
    return end, end + int(graph.delay[q])


def memory_curve(graph: Graph, evaluation: ScheduleMetrics, d: int) -> list[tuple[int, int]]:
    """Return times, and the activation memory of a device from then on, in the graph's units."""
    memory, curve = 0, [(0, 0)]
    for task in evaluation.tasks[graph.word_at[d] : graph.word_at[d + 1]].tolist():
        q = int(graph.queue_of[task])
        at = int(evaluation.starts[task])
        at += 0 if graph.kind[q] == FORWARD else int(graph.duration[q])
        memory += int(graph.memory[q])
        curve.append((at, memory))
    return curve
