"""The problem as arrays, its schedules' start times and memory, and a lower bound on latency.

Tasks of one pipeline, stage and kind (forward or backward) are a *queue*: they run in the order of
their micro-batches, on one device. Task ``i`` of queue ``q`` has the number ``offset[q] + i``. The
words of all devices are concatenated in one array of tasks. Device ``d`` has the places
``word_at[d]`` to ``word_at[d + 1]``.

Compiled functions first copy the graph's fields to local variables, because reading a field of a
tuple in a loop costs more than the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from stretto.errors import MissingExtraError
from stretto.pipelines.problem import Problem

try:
    import numba
except ImportError as error:
    raise MissingExtraError("numba", "pipelines", "planning of fused pipelines") from error

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
FORWARD, BACKWARD = 0, 1
F = TypeVar("F", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[F], F]:
    """Compile like ``numba.njit``, without a cache if numba can write to no folder for it, for
    example for a user who owns neither the package's folder nor HOME."""

    def compile_(function: F) -> F:
        try:
            return cast(F, numba.njit(**options)(function))
        except RuntimeError:  # "no locator available"
            return cast(F, numba.njit(**(options | {"cache": False}))(function))

    return compile_


class Graph(NamedTuple):
    """A problem's queues: Q queues of T tasks on D devices."""

    pipeline: Ints  # [Q] the actor's come first
    stage: Ints  # [Q] of that pipeline
    kind: Ints  # [Q] FORWARD or BACKWARD
    device: Ints  # [Q]
    length: Ints  # [Q] number of tasks: the pipeline's micro-batches
    offset: Ints  # [Q] number of its first task
    duration: Ints  # [Q] ticks of each task
    before: Ints  # [Q] queue of the previous task of the same micro-batch, or -1
    after: Ints  # [Q] queue of the next task of the same micro-batch, or -1
    delay: Ints  # [Q] ticks between the end of the previous task and this one's start
    memory: Ints  # [Q] integer units that a task takes (forward) or frees (backward, negative)
    mate: Ints  # [Q] the other kind of the same pipeline and stage
    rival: Ints  # [Q] the forward queue of the other pipeline on the same device
    queues: Ints  # [4 D] by device
    word_at: Ints  # [D + 1] where a device's word starts
    queue_of: Ints  # [T] of each task


def make_graph(problem: Problem) -> Graph:
    """Number the queues: pipeline after pipeline, stage after stage, forward before backward."""
    rows: list[list[int]] = []
    scale = problem.memory_scale
    pipeline = 0
    offset = 0
    for is_critic, model in enumerate(problem.models):
        m, c = model.micro_batches, model.communication
        for copy, s in product(range(model.pipelines), range(model.stages)):
            q, last = len(rows), s == model.stages - 1
            position = model.stages - 1 - s if is_critic else s
            device, memory = copy * model.stages + position, round(model.activation[s] * scale)
            forward = [pipeline + copy, s, FORWARD, device, m, offset, model.forward[s]]
            forward += [q - 2, q + 1 if last else q + 2, c, memory, q + 1]
            backward = [pipeline + copy, s, BACKWARD, device, m, offset + m, model.backward[s]]
            backward += [q if last else q + 3, q - 1, 0 if last else c, -memory, q]
            if s == 0:
                forward[7] = backward[8] = -1
                forward[9] = 0
            rows += [forward, backward]
            offset += 2 * m
        pipeline += model.pipelines
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    device_of, length = columns[3], columns[4]
    queues = np.argsort(device_of, kind="stable").astype(np.int64)
    # Four queues a device: the actor's forward and backward, then the critic's.
    rival = np.empty_like(queues)
    rival[queues] = np.roll(queues.reshape(-1, 4)[:, [0, 0, 2, 2]], 2, axis=1).ravel()
    tasks = np.bincount(device_of, weights=length, minlength=problem.devices)
    word_at = np.concatenate([[0], np.cumsum(tasks)]).astype(np.int64)
    queue_of = np.repeat(np.arange(len(rows), dtype=np.int64), length)
    return Graph._make([*columns, rival, queues, word_at, queue_of])


def capacity_units(problem: Problem, capacity: float | None) -> int:
    """Return a capacity in the graph's units, rounded down, or a huge number for ``None``."""
    no_limit = int(np.iinfo(np.int64).max // 4)
    if capacity is None:
        return no_limit
    # A capacity that is a sum of activations may be below that sum by a rounding error.
    exact = Fraction(str(capacity)) * (1 + Fraction(1, 10**12))
    return min(math.floor(exact * problem.memory_scale), no_limit)


@njit(cache=True, nogil=True)
def earliest_starts(g: Graph, word: Ints, start: Ints, order: Ints) -> int:
    """Run every device through its word [T], each task as early as possible. Fills in the start of
    each task [T], by task number, and an order [T] in which each task follows all that it waits
    for. Returns the number of tasks that ran: all, unless devices deadlock."""
    word_at = g.word_at
    queue_of = g.queue_of
    offset = g.offset
    device = g.device
    before = g.before
    after = g.after
    delay = g.delay
    duration = g.duration
    devices = word_at.size - 1
    at = word_at[:-1].copy()
    free = np.zeros(devices, np.int64)
    done = np.zeros(offset.size, np.int64)
    stack = np.empty(2 * devices, np.int64)  # each device once initially, and once when woken
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
            b = before[q]
            begin = free[d]
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
                # Wake the device whose next task waited for this one.
                other = device[a]
                if at[other] < word_at[other + 1] and word[at[other]] == offset[a] + i:
                    stack[waiting] = other
                    waiting += 1
    return ran


@njit(cache=True, nogil=True)
def latency_of(g: Graph, word: Ints, start: Ints) -> int:
    """Return the end of the last task."""
    word_at = g.word_at
    queue_of = g.queue_of
    duration = g.duration
    latest = 0
    for d in range(word_at.size - 1):
        task = word[word_at[d + 1] - 1]
        latest = max(latest, start[task] + duration[queue_of[task]])
    return latest


@njit(cache=True, nogil=True)
def peak_memory(g: Graph, word: Ints, peaks: Ints) -> int:
    """Fill ``peaks`` [D] with each device's highest memory, and return the highest of all."""
    word_at = g.word_at
    queue_of = g.queue_of
    memory = g.memory
    highest = 0
    for d in range(peaks.size):
        total = 0
        peak = 0
        for k in range(word_at[d], word_at[d + 1]):
            total += memory[queue_of[word[k]]]
            peak = max(peak, total)
        peaks[d] = peak
        highest = max(highest, peak)
    return highest


def latency_bound(problem: Problem) -> int:
    """Return the lower bound of RLHFuse, section 7.3, over all subsets of a device's pipelines.

    A device cannot start on a set of pipelines before the first micro-batch of one of them arrives,
    must do all their work sequentially, and then one of them still has to drain. With both
    pipelines of the device this is the paper's bound. One pipeline can give a higher bound, because
    its work arrives later or drains longer.
    """
    graph = make_graph(problem)
    queues = graph.queues.reshape(-1, 4)[:, ::2]  # forwards: the actor's and the critic's [D, 2]
    before, after = heads(graph)[queues], tails(graph)[graph.mate[queues]]
    work = (graph.length * (graph.duration + graph.duration[graph.mate]))[queues]
    single, joint = before + work + after, before.min(1) + work.sum(1) + after.min(1)
    return int(max(single.max(), joint.max()))


def heads(graph: Graph) -> Ints:
    """Return the ticks [Q] before a task can start, with only its chain on the devices."""
    ticks = np.zeros_like(graph.length)
    for q in np.flatnonzero(graph.before < 0).tolist():
        while (after := int(graph.after[q])) >= 0:
            ticks[after] = ticks[q] + graph.duration[q] + graph.delay[after]
            q = after
    return ticks


def tails(graph: Graph) -> Ints:
    """Return the ticks [Q] that must follow the end of a task, with only its chain."""
    ends = heads(graph) + graph.duration
    chains = np.zeros(graph.pipeline[-1] + 1, np.int64)
    np.maximum.at(chains, graph.pipeline, ends)
    return np.asarray(chains[graph.pipeline] - ends)
