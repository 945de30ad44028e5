"""A schedule: for each device, the order of its tasks; and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np

from stretto.errors import ConfigError
from stretto.pipelines.graph import (
    BACKWARD,
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
    """One word a device, each a sequence of letters.

    A letter is a pipeline and a kind, such as ``0F`` or ``2B``. Pipelines count from 0, the actor's
    first, in the order of their devices. As the micro-batches of a pipeline are all alike, the i-th
    ``0F`` of a word is the forward of micro-batch i.
    """

    words: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data: a string of tasks a device, such as ``0F 1F 1B 0B``."""
        return {"devices": [" ".join(word) for word in self.words]}

    @classmethod
    def from_json(cls, data: object) -> PipelineSchedule:
        """Make a schedule of such data; :func:`check` says if it is valid."""
        words = data.get("devices") if isinstance(data, dict) else None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                'a schedule must be a JSON object with "devices", a list of strings such as '
                '"0F 1F 1B 0B"',
                "not-a-schedule",
            )
        return cls(tuple(tuple(word.split()) for word in words))

    @classmethod
    def of_tasks(cls, graph: Graph, word: Ints) -> PipelineSchedule:
        """Make a schedule from task numbers [T], device after device."""
        letters = [_letter(graph, q) for q in graph.queue_of[word].tolist()]
        return cls(tuple(tuple(letters[low:high]) for low, high in _spans(graph)))

    def tasks(self, problem: Problem) -> Ints:
        """Return task numbers [T], device after device; raises ConfigError if the words do not have
        the letters that the problem asks for.
        """
        graph = make_graph(problem)
        if len(self.words) != problem.devices:
            raise ConfigError(
                f"the schedule has {len(self.words)} devices, the problem {problem.devices}; they "
                "must be of the same problem",
                "other-devices",
            )
        return np.concatenate([self._device(graph, d) for d in range(problem.devices)])

    def _device(self, graph: Graph, d: int) -> Ints:
        word = self.words[d]
        queues = {_letter(graph, q): q for q in graph.queues[4 * d : 4 * d + 4].tolist()}
        if unknown := [letter for letter in word if letter not in queues]:
            raise ConfigError(
                f"device {d}: no task '{unknown[0]}' there; it runs {', '.join(queues)}",
                "unknown-task",
            )
        for letter, q in queues.items():
            if word.count(letter) != graph.length[q]:
                raise ConfigError(
                    f"device {d}: '{letter}' stands {word.count(letter)} times; it must once for "
                    f"each of the {graph.length[q]} micro-batches",
                    "not-once-a-micro-batch",
                )
        numbers = {letter: count(int(graph.offset[q])) for letter, q in queues.items()}
        return np.array([next(numbers[letter]) for letter in word], dtype=np.int64)


def _letter(graph: Graph, q: int) -> str:
    return f"{graph.pipeline[q]}{'FB'[graph.kind[q]]}"


def check(problem: Problem, schedule: PipelineSchedule) -> str:
    """Return why the schedule cannot run; an empty string if it can, whatever the memory."""
    try:
        word = schedule.tasks(problem)
    except ConfigError as error:
        return str(error)
    graph = make_graph(problem)
    return _early_backward(graph, word) or _circle(graph, word)


def _early_backward(graph: Graph, word: Ints) -> str:
    """Name the first backward that comes before its forward, if one does."""
    place = np.argsort(word)
    queue = graph.queue_of[word]
    batch = word - graph.offset[queue]
    early = place[graph.offset[graph.mate[queue]] + batch] > np.arange(word.size)
    found = np.flatnonzero((graph.kind[queue] == BACKWARD) & early)
    if not found.size:
        return ""
    q = queue[found[0]]
    return (
        f"device {graph.device[q]}: backward of micro-batch {batch[found[0]]} of pipeline "
        f"{graph.pipeline[q]} before its forward"
    )


def _circle(graph: Graph, word: Ints) -> str:
    """Name the tasks that wait for each other in a circle, if some do."""
    order = np.empty_like(word)
    ran = earliest_starts(graph, word, np.zeros_like(word), order)
    if ran == word.size:
        return ""
    finished, tasks = set(order[:ran].tolist()), word.tolist()
    task = next(t for t in tasks if t not in finished)
    path: list[int] = []
    while task not in path:
        path.append(task)
        q = int(graph.queue_of[task])
        before = int(graph.before[q])
        input_ = int(graph.offset[before]) + task - int(graph.offset[q]) if before >= 0 else task
        waits_for_input = before >= 0 and input_ not in finished
        task = input_ if waits_for_input else tasks[tasks.index(task) - 1]
    circle = path[path.index(task) :]
    steps = [_describe(graph, t) for t in [*circle, circle[0]]]
    return f"devices wait for each other: {' waits for '.join(steps)}"


def _describe(graph: Graph, task: int) -> str:
    q = int(graph.queue_of[task])
    batch = task - int(graph.offset[q])
    return f"{_letter(graph, q)} of micro-batch {batch} on device {graph.device[q]}"


def _spans(graph: Graph) -> list[tuple[int, int]]:
    return list(pairwise(graph.word_at.tolist()))


BUBBLES = ("warm-up", "dependency", "communication", "memory", "order", "drain")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of a schedule in which each task runs as early as it can.

    Attributes:
        latency: ticks from the start of the first task to the end of the last.
        peaks: highest activation memory of each device.
        bubbles: idle ticks of each device by cause: ``warm-up``, before its first task;
            ``dependency``, no input is there, and the next task's is not made yet;
            ``communication``, no input is there, but the next task's is on its way; ``memory``, a
            forward could run, but would not fit in the capacity; ``order``, another task could run,
            but the word has it later; ``drain``, after its last task.
        starts, tasks: [T] start of each task, by number; and numbers, device after device.
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
    """Run a schedule on paper; raises ConfigError with the reason if it cannot run."""
    if reason := check(problem, schedule):
        raise ConfigError(f"the schedule is not valid: {reason}", "invalid-schedule")
    return evaluate_tasks(problem, make_graph(problem), schedule.tasks(problem))


def evaluate_tasks(problem: Problem, graph: Graph, word: Ints) -> Evaluation:
    """Evaluate a valid word of task numbers [T]."""
    starts, order = np.empty(word.size, np.int64), np.empty(word.size, np.int64)
    earliest_starts(graph, word, starts, order)
    peaks = np.zeros(problem.devices, np.int64)
    peak_memory(graph, word, peaks)
    latency = int(latency_of(graph, word, starts))
    capacity = capacity_units(problem, problem.capacity)
    bubbles = (_bubbles(graph, word, starts, d, latency, capacity) for d in range(peaks.size))
    memory = tuple(int(peak) / problem.memory_scale for peak in peaks)
    return Evaluation(latency, memory, tuple(bubbles), starts, word)


def _bubbles(
    graph: Graph, word: Ints, starts: Ints, d: int, latency: int, capacity: int
) -> dict[str, int]:
    """Return the idle ticks of one device by cause."""
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
                there = _NEVER if other == q else _arrival(graph, starts, other, i)[1]
                if held + graph.memory[other] <= capacity:
                    fits = min(fits, there)
                else:
                    full = min(full, there)
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
    """Return the ticks at which the input of a queue's task is made, and at which it is there."""
    if i >= graph.length[q]:
        return _NEVER, _NEVER
    b = int(graph.before[q])
    if b < 0:
        return 0, 0
    made = int(starts[graph.offset[b] + i] + graph.duration[b])
    return made, made + int(graph.delay[q])


def memory_curve(graph: Graph, evaluation: Evaluation, d: int) -> list[tuple[int, int]]:
    """Return times, and the activation memory of a device from then on, in the graph's units."""
    held, curve = 0, [(0, 0)]
    for task in evaluation.tasks[graph.word_at[d] : graph.word_at[d + 1]].tolist():
        q = int(graph.queue_of[task])
        at = int(evaluation.starts[task])
        at += 0 if graph.kind[q] == FORWARD else int(graph.duration[q])
        held += int(graph.memory[q])
        curve.append((at, held))
    return curve
