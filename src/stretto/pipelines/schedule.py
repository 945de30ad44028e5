"""A schedule: for each device, the order of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stretto.errors import ConfigError
from stretto.pipelines.graph import BACKWARD, Graph, Ints, make_graph
from stretto.pipelines.kernels import earliest_starts
from stretto.pipelines.problem import Problem

_LETTERS = ("F", "B")


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """One word a device.

    A letter is a pipeline and a kind, such as ``0F`` or ``2B``. Pipelines count from 0, the actor's
    first, in the order of their devices. As the micro-batches of a pipeline are all alike, the i-th
    ``0F`` of a word is the forward of micro-batch i.

    Attributes:
        words: one a device, each a sequence of letters.
    """

    words: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data: a string of tasks a device, such as ``0F 1F 1B 0B``."""
        return {"devices": [" ".join(word) for word in self.words]}

    @classmethod
    def from_json(cls, data: object) -> PipelineSchedule:
        """Make a schedule from :meth:`to_json`'s plain data; :func:`check` says if it is valid.

        Raises:
            ConfigError: it has another form.
        """
        words = data.get("devices") if isinstance(data, dict) else None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                'a schedule must be a JSON object with "devices", a list of strings such as '
                '"0F 1F 1B 0B"'
            )
        return cls(tuple(tuple(word.split()) for word in words))

    @classmethod
    def of_tasks(cls, graph: Graph, word: Ints) -> PipelineSchedule:
        """Make a schedule from task numbers [T], device after device."""
        queue = graph.queue_of[word]
        letters = [
            f"{p}{_LETTERS[k]}"
            for p, k in zip(graph.pipeline[queue].tolist(), graph.kind[queue].tolist(), strict=True)
        ]
        at = graph.word_at.tolist()
        return cls(tuple(tuple(letters[a:b]) for a, b in pairwise(at)))

    def tasks(self, problem: Problem) -> Ints:
        """Task numbers [T], device after device.

        Raises:
            ConfigError: the words do not have the letters that the problem asks for.
        """
        graph = make_graph(problem)
        if len(self.words) != problem.devices:
            raise ConfigError(
                f"the schedule has {len(self.words)} devices, the problem {problem.devices}; they "
                "must be of the same problem"
            )
        return np.concatenate([self._device(graph, d) for d in range(problem.devices)])

    def _device(self, graph: Graph, d: int) -> Ints:
        queues = {
            f"{graph.pipeline[q]}{_LETTERS[graph.kind[q]]}": int(q)
            for q in graph.queues[4 * d : 4 * d + 4]
        }
        done = dict.fromkeys(queues, 0)
        tasks = []
        for letter in self.words[d]:
            if letter not in queues:
                raise ConfigError(
                    f"device {d}: no task '{letter}' there; it runs {', '.join(queues)}"
                )
            tasks.append(int(graph.offset[queues[letter]]) + done[letter])
            done[letter] += 1
        for letter, q in queues.items():
            if done[letter] != graph.length[q]:
                raise ConfigError(
                    f"device {d}: '{letter}' stands {done[letter]} times; it must once for each of "
                    f"the {graph.length[q]} micro-batches"
                )
        return np.array(tasks, dtype=np.int64)


def check(problem: Problem, schedule: PipelineSchedule) -> str:
    """Say why the schedule cannot run; an empty string if it can.

    Memory is not looked at: compare :class:`~stretto.pipelines.evaluate.Evaluation`'s peak with the
    capacity.
    """
    try:
        word = schedule.tasks(problem)
    except ConfigError as error:
        return str(error)
    graph = make_graph(problem)
    return _early_backward(graph, word) or _circle(graph, word)


def _early_backward(graph: Graph, word: Ints) -> str:
    for d, (low, high) in enumerate(_spans(graph)):
        seen: set[int] = set()
        for task in word[low:high].tolist():
            q = int(graph.queue_of[task])
            i = task - int(graph.offset[q])
            mate = int(graph.mate[q])
            if graph.kind[q] == BACKWARD and int(graph.offset[mate]) + i not in seen:
                return (
                    f"device {d}: backward of micro-batch {i} of pipeline {graph.pipeline[q]} "
                    "before its forward"
                )
            seen.add(task)
    return ""


def _circle(graph: Graph, word: Ints) -> str:
    """Name the tasks that wait for each other in a circle, if some do."""
    size = word.size
    order = np.full(size, -1, dtype=np.int64)
    ran = earliest_starts(graph, word, np.zeros(size, np.int64), order)
    if ran == size:
        return ""
    finished = set(order[:ran].tolist())
    previous: dict[int, int] = {}
    for low, high in _spans(graph):
        previous.update((b, a) for a, b in pairwise(word[low:high].tolist()))

    def waits_for(task: int) -> int:
        q = int(graph.queue_of[task])
        before = int(graph.before[q])
        chain = int(graph.offset[before]) + task - int(graph.offset[q]) if before >= 0 else -1
        return chain if chain >= 0 and chain not in finished else previous[task]

    task = next(t for t in word.tolist() if t not in finished)
    path: list[int] = []
    while task not in path:
        path.append(task)
        task = waits_for(task)
    circle = path[path.index(task) :]
    steps = [_describe(graph, t) for t in [*circle, circle[0]]]
    return f"devices wait for each other: {' waits for '.join(steps)}"


def _describe(graph: Graph, task: int) -> str:
    q = int(graph.queue_of[task])
    letter = f"{graph.pipeline[q]}{_LETTERS[graph.kind[q]]}"
    return f"{letter} of micro-batch {task - int(graph.offset[q])} on device {graph.device[q]}"


def _spans(graph: Graph) -> Sequence[tuple[int, int]]:
    at = graph.word_at.tolist()
    return list(pairwise(at))
