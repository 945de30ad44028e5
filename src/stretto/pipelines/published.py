"""The search as published: annealing of whole schedules, for comparison."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from stretto.pipelines.compiler import njit
from stretto.pipelines.graph import Graph, Ints
from stretto.pipelines.kernels import earliest_starts, latency_of, peak_memory

if TYPE_CHECKING:
    from stretto.pipelines.record import Record


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


def as_published(record: Record, word: Ints, seed: int) -> None:
    """Anneal from the greedy schedule: latency until it is at the bound, then memory.

    As there, the temperature falls by a constant factor a move, and starts again when it is low.
    A quarter of the time at least is left to memory.
    """
    record.offer(word)
    chance, moves = np.random.default_rng(seed), 200 * word.size
    turn = record.begun + 0.75 * (record.deadline - record.begun)
    while record.latency > record.bound and time.monotonic() < turn:
        _pass(record, 0, moves, chance)
        moves *= 2
    moves = 200 * word.size
    while not record.done and time.monotonic() < record.deadline:
        _pass(record, record.latency, moves, chance)
        moves *= 2


def _pass(record: Record, limit: int, moves: int, chance: np.random.Generator) -> None:
    """One annealing from the best schedule, in pieces between which the time is looked at."""
    graph, word = record.graph, record.word.copy()
    largest = int(graph.memory.max())
    hot = float(largest) if limit else float(graph.duration.max())
    target = record.enough if limit else record.bound
    pieces = max(1, moves // 50_000)
    temperatures = np.geomspace(hot, hot / 100, pieces + 1)
    best = word.copy()
    for i in range(pieces):
        anneal_schedule(
            graph, word, limit, target, moves // pieces, temperatures[i], temperatures[i + 1],
            int(chance.integers(2**31)), best,
        )  # fmt: skip
        record.offer(best)
        if time.monotonic() > record.deadline or (limit == 0 and record.latency <= target):
            break
