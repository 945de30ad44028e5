"""The problem as arrays; starts and memory of its schedules, and bounds of both.

Tasks of one pipeline, stage and kind (forward or backward) are a *queue*: they run in the order of
their micro-batches, on one device. Task ``i`` of queue ``q`` has the number ``offset[q] + i``. The
words of all devices stand one after the other in one array of tasks; device ``d`` has the places
``word_at[d]`` to ``word_at[d + 1]``.

Letters in shapes: Q queues, D devices, T tasks.

Compiled functions take the fields they need out of the graph first: reading a field of a tuple in a
loop costs more than the loop.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stretto.errors import MissingExtraError
from stretto.pipelines.problem import Problem

try:
    from numba import njit as njit
except ImportError as error:
    raise MissingExtraError("numba", "pipelines", "planning of fused pipelines") from error

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
FORWARD, BACKWARD = 0, 1


class Graph(NamedTuple):
    """A problem's queues.

    Attributes:
        pipeline: [Q] which pipeline; the actor's come first.
        stage: [Q] of that pipeline.
        kind: [Q] FORWARD or BACKWARD.
        device: [Q] on which it runs.
        length: [Q] tasks in it: the pipeline's micro-batches.
        offset: [Q] number of its first task.
        duration: [Q] ticks of each task.
        before: [Q] queue whose task of the same micro-batch comes first, or -1.
        after: [Q] queue whose task of the same micro-batch comes next, or -1.
        delay: [Q] ticks between the end of that earlier task and this one's start.
        memory: [Q] whole units that each task takes (forward) or frees (backward; negative).
        mate: [Q] the other kind of the same pipeline and stage.
        rival: [Q] the forward queue of the other pipeline on the same device.
        queues: [Q] queue numbers, device after device; four each.
        word_at: [D + 1] where a device's word starts.
        queue_of: [T] of each task.
    """

    pipeline: Ints
    stage: Ints
    kind: Ints
    device: Ints
    length: Ints
    offset: Ints
    duration: Ints
    before: Ints
    after: Ints
    delay: Ints
    memory: Ints
    mate: Ints
    rival: Ints
    queues: Ints
    word_at: Ints
    queue_of: Ints


def make_graph(problem: Problem) -> Graph:
    """Number the queues: pipeline after pipeline, stage after stage, forward before backward."""
    rows: list[list[int]] = []
    scale, pipeline, offset = problem.memory_scale, 0, 0
    for direction, side in zip((1, -1), problem.models, strict=True):
        m, c = side.micro_batches, side.communication
        for copy in range(side.pipelines):
            for s in range(side.stages):
                q, last = len(rows), s == side.stages - 1
                device = copy * side.stages + (s if direction == 1 else side.stages - 1 - s)
                held = round(side.activation[s] * scale)
                forward = [pipeline, s, FORWARD, device, m, offset, side.forward[s]]
                forward += [q - 2, q + 1 if last else q + 2, c, held, q + 1]
                backward = [pipeline, s, BACKWARD, device, m, offset + m, side.backward[s]]
                backward += [q if last else q + 3, q - 1, 0 if last else c, -held, q]
                if s == 0:
                    forward[7] = backward[8] = -1
                    forward[9] = 0
                rows += [forward, backward]
                offset += 2 * m
            pipeline += 1
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    device_of, length = columns[3], columns[4]
    queues = np.argsort(device_of, kind="stable").astype(np.int64)
    # Four queues a device, the actor's first: forward, backward, and the same of the critic.
    rival = np.empty_like(queues)
    rival[queues] = np.roll(queues.reshape(-1, 4)[:, [0, 0, 2, 2]], 2, axis=1).ravel()
    tasks = np.bincount(device_of, weights=length, minlength=problem.devices).astype(np.int64)
    queue_of = np.repeat(np.arange(len(rows), dtype=np.int64), length)
    fields = [*columns, rival, queues, _starts(tasks), queue_of]
    return Graph(**dict(zip(Graph._fields, fields, strict=True)))


def _starts(sizes: npt.NDArray[np.int64]) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def capacity_units(problem: Problem, capacity: float | None) -> int:
    """A capacity in the graph's units of memory, rounded down; no limit is a huge number."""
    no_limit = int(np.iinfo(np.int64).max // 4)
    if capacity is None:
        return no_limit
    # A capacity that is a sum of activations may be a rounding error below that sum.
    exact = Fraction(str(capacity)) * (1 + Fraction(1, 10**12))
    return min(math.floor(exact * problem.memory_scale), no_limit)


@njit(cache=True, nogil=True)
def earliest_starts(g: Graph, word: Ints, start: Ints, order: Ints) -> int:
    """Run every device through its word, each task as early as it can.

    Args:
        word: [T] tasks, device after device.
        start: [T] filled: start of each task, by task number.
        order: [T] filled: tasks in an order in which each comes after all it waits for.

    Returns:
        Number of tasks that could run: all, unless devices wait for each other in a circle.
    """
    word_at, queue_of, offset, device = g.word_at, g.queue_of, g.offset, g.device
    before, after, delay, duration = g.before, g.after, g.delay, g.duration
    devices = word_at.size - 1
    at = word_at[:-1].copy()
    free = np.zeros(devices, np.int64)
    done = np.zeros(offset.size, np.int64)
    stack = np.empty(2 * devices, np.int64)  # each device once at first, and once woken
    stack[:devices] = np.arange(devices)
    waiting = devices
    ran = 0
    while waiting:
        waiting -= 1
        d = stack[waiting]
        while at[d] < word_at[d + 1]:
            task = word[at[d]]
            q = queue_of[task]
            i = task - offset[q]
            begin = free[d]
            b = before[q]
            if b >= 0:
                if done[b] <= i:
                    break
                begin = max(begin, start[offset[b] + i] + duration[b] + delay[q])
            start[task] = begin
            free[d] = begin + duration[q]
            done[q] = i + 1
            order[ran] = task
            ran += 1
            at[d] += 1
            a = after[q]
            if a >= 0 and device[a] != d:
                # Wake the device whose next task is the one that waited for this.
                other = device[a]
                if at[other] < word_at[other + 1] and word[at[other]] == offset[a] + i:
                    stack[waiting] = other
                    waiting += 1
    return ran


@njit(cache=True, nogil=True)
def latency_of(g: Graph, word: Ints, start: Ints) -> int:
    """The end of the last task."""
    word_at, queue_of, duration = g.word_at, g.queue_of, g.duration
    latest = 0
    for d in range(word_at.size - 1):
        task = word[word_at[d + 1] - 1]
        latest = max(latest, start[task] + duration[queue_of[task]])
    return latest


@njit(cache=True, nogil=True)
def peak_memory(g: Graph, word: Ints, peaks: Ints) -> int:
    """Fill ``peaks`` [D] with each device's highest memory, and return the highest of all.

    What a device holds depends on the order of its tasks alone, not on when they run.
    """
    word_at, queue_of, memory = g.word_at, g.queue_of, g.memory
    highest = 0
    for d in range(peaks.size):
        held = 0
        peak = 0
        for k in range(word_at[d], word_at[d + 1]):
            held += memory[queue_of[word[k]]]
            peak = max(peak, held)
        peaks[d] = peak
        highest = max(highest, peak)
    return highest


def latency_bound(problem: Problem) -> int:
    """The lower bound of RLHFuse, section 5.2, over all subsets of pipelines of each device.

    A device cannot start on a set of pipelines before the first micro-batch of one of them arrives,
    must do all their work one after the other, and after that one of them still has to drain. With
    all pipelines of the device this is the paper's bound; a subset can give more, as its work
    arrives later or drains longer.
    """
    graph = make_graph(problem)
    first, rest = heads(graph), tails(graph)
    highest = 0
    for d in range(problem.devices):
        rows = [
            (first[q], _work(graph, q), rest[int(graph.mate[q])])
            for q in graph.queues[4 * d : 4 * d + 4].tolist()
            if graph.kind[q] == FORWARD
        ]
        subsets = chain.from_iterable(combinations(rows, n) for n in range(1, len(rows) + 1))
        for subset in subsets:
            before, works, after = zip(*subset, strict=True)
            highest = max(highest, min(before) + sum(works) + min(after))
    return highest


def heads(graph: Graph) -> list[int]:
    """[Q] ticks before a task of a queue can start, with its chain alone on the devices."""
    ticks = [0] * graph.length.size
    for q in np.flatnonzero(graph.before < 0).tolist():
        while (after := int(graph.after[q])) >= 0:
            ticks[after] = ticks[q] + int(graph.duration[q] + graph.delay[after])
            q = after
    return ticks


def tails(graph: Graph) -> list[int]:
    """[Q] ticks that must follow the end of a task of a queue, with its chain alone."""
    ticks = [0] * graph.length.size
    for q in np.flatnonzero(graph.after < 0).tolist():
        while (before := int(graph.before[q])) >= 0:
            ticks[before] = ticks[q] + int(graph.delay[q] + graph.duration[q])
            q = before
    return ticks


def _work(graph: Graph, q: int) -> int:
    both = graph.duration[q] + graph.duration[graph.mate[q]]
    return int(graph.length[q] * both)


def memory_floor(problem: Problem) -> float:
    """A peak that no schedule can beat, whatever its latency: the largest activation."""
    graph = make_graph(problem)
    held = graph.memory[graph.kind != BACKWARD]
    return float(held.max()) / problem.memory_scale
