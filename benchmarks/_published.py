"""The search as published: annealing of whole schedules, for comparison."""

from __future__ import annotations

import math
import time

import numpy as np

from stretto.errors import ConfigError
from stretto.pipelines.graph import (
    BACKWARD,
    Graph,
    Ints,
    earliest_starts,
    latency_of,
    make_graph,
    njit,
    peak_memory,
)
from stretto.pipelines.listing import UNLIMITED, Rules, decode
from stretto.pipelines.pipeline_schedule import PipelineSchedule
from stretto.pipelines.problem import Problem
from stretto.pipelines.search import Incumbent


def plain_rules(g: Graph) -> Rules:
    """Rules without bias, limits or waiting, by which both models are polite."""
    queues = g.length.size
    return Rules(
        np.zeros(queues),
        np.full(queues, UNLIMITED),
        np.ones(queues, np.bool_),
        np.zeros(g.word_at.size - 1),
    )


def greedy(problem: Problem) -> PipelineSchedule:
    """RLHFuse's start: whatever is ready runs, of the larger model first; memory has no limit."""
    graph = make_graph(problem)
    work = [side.stages * (max(side.forward) + max(side.backward)) for side in problem.models]
    larger = 0 if work[0] >= work[1] else 1
    of_larger = (graph.pipeline >= problem.actor.pipelines) == bool(larger)
    key = (2.0 * of_larger + (graph.kind == BACKWARD))[graph.queue_of]
    word, start = np.empty(key.size, np.int64), np.empty(key.size, np.int64)
    decode(graph, key, plain_rules(graph), UNLIMITED, word, start)
    return PipelineSchedule.of_tasks(graph, word)


@njit(cache=True, nogil=True)
def anneal_schedule(
    g: Graph,
    word: Ints,
    limit: int,
    target: int,
    moves: int,
    hot: float,
    cold: float,
    seed: int,
    best_word: Ints,
) -> int:
    """RLHFuse's Algorithm 1, and its second pass: exchange any two neighbours, evaluate it all.

    Args:
        word: [T] to start from, left as the search ends.
        limit: 0 to minimise latency; or the latency that schedules may have while the peak of
            memory is minimised.
        target: value at which to stop.
        hot: first temperature, in ticks or units of memory.
        best_word: [T] filled with the best schedule.

    Returns:
        Its latency, or its peak.
    """
    np.random.seed(seed)
    start, order = np.empty(word.size, np.int64), np.empty(word.size, np.int64)
    peaks = np.zeros(g.word_at.size - 1, np.int64)
    earliest_starts(g, word, start, order)
    energy = peak_memory(g, word, peaks) if limit else latency_of(g, word, start)
    best = energy
    best_word[:] = word
    falling = math.log(cold / hot) / moves
    for move in range(moves):
        if best <= target:
            break
        k = np.random.randint(word.size - 1)
        p, q = g.queue_of[word[k]], g.queue_of[word[k + 1]]
        if p == q or g.device[p] != g.device[q]:
            continue
        word[k], word[k + 1] = word[k + 1], word[k]
        new = -1
        if earliest_starts(g, word, start, order) == word.size:
            new = latency_of(g, word, start)
            if limit:
                new = peak_memory(g, word, peaks) if new <= limit else -1
        worse = -hot * math.exp(falling * move) * math.log(np.random.random())
        if new < 0 or new > energy + worse:
            word[k], word[k + 1] = word[k + 1], word[k]
            continue
        energy = new
        if energy < best:
            best = energy
            best_word[:] = word
    return best


def as_published(incumbent: Incumbent, seed: int, threads: int) -> None:
    """Anneal from the greedy schedule: latency until it is at the bound, then memory.

    As there, the temperature falls by a constant factor a move, and starts again when it is low.
    A quarter of the time at least is left to memory. It is on one thread.

    Raises:
        ConfigError: the problem has a capacity, which this search cannot keep.
    """
    if incumbent.problem.capacity is not None:
        raise ConfigError("the published annealing knows no capacity: leave the capacity out")
    word = greedy(incumbent.problem).tasks(incumbent.problem)
    anneal_schedule(incumbent.graph, word.copy(), 0, 0, 2, 1.0, 1.0, 0, word.copy())  # compile
    incumbent.offer(word)
    chance, moves = np.random.default_rng(seed), 200 * word.size
    turn = incumbent.begun + 0.75 * (incumbent.deadline - incumbent.begun)
    while incumbent.latency > incumbent.bound and time.monotonic() < turn:
        _pass(incumbent, 0, moves, chance)
        moves *= 2
    moves = 200 * word.size
    while not incumbent.done and time.monotonic() < incumbent.deadline:
        _pass(incumbent, incumbent.latency, moves, chance)
        moves *= 2


def _pass(incumbent: Incumbent, limit: int, moves: int, chance: np.random.Generator) -> None:
    """One annealing from the best schedule, in pieces between which the time is looked at."""
    graph, word = incumbent.graph, incumbent.word.copy()
    largest = int(graph.memory.max())
    hot = float(largest) if limit else float(graph.duration.max())
    target = incumbent.enough if limit else incumbent.bound
    pieces = max(1, moves // 50_000)
    temperatures = np.geomspace(hot, hot / 100, pieces + 1)
    best = word.copy()
    for i in range(pieces):
        anneal_schedule(
            graph, word, limit, target, moves // pieces, temperatures[i], temperatures[i + 1],
            int(chance.integers(2**31)), best,
        )  # fmt: skip
        incumbent.offer(best)
        if time.monotonic() > incumbent.deadline or (limit == 0 and incumbent.latency <= target):
            break
