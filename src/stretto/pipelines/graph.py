"""The problem as arrays, for compiled code.

Tasks of one pipeline, stage and kind (forward or backward) are a *queue*: they run in the order of
their micro-batches, on one device. Task ``i`` of queue ``q`` has the number ``offset[q] + i``. The
words of all devices stand one after the other in one array of tasks; device ``d`` has the places
``word_at[d]`` to ``word_at[d + 1]``.

Letters in shapes: Q queues, D devices, T tasks.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stretto.pipelines.problem import Problem

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
    for direction, side in zip((1, -1), problem.sides, strict=True):
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
