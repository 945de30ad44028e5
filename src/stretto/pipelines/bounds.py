"""A latency that no schedule can beat, whatever memory it is given."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np

from stretto.pipelines.graph import BACKWARD, FORWARD, Graph, make_graph
from stretto.pipelines.problem import Problem


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
