"""Annealing on exchanges of neighbours along the critical path, with a price on too much memory.

Only an exchange on a critical path can make a schedule shorter at once, and it never makes devices
wait for each other in a circle (van Laarhoven, Aarts and Lenstra 1992). The tasks whose starts it
changes are few, so a move costs microseconds.

The cap on memory is a price that rises while the temperature falls. Under a hard cap the search
would be stuck: often a device has to hold one micro-batch more for a moment to get from one good
order to another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stretto.pipelines.compiler import njit
from stretto.pipelines.graph import BACKWARD, FORWARD, Graph, Ints
from stretto.pipelines.kernels import State, latency_of, length_after, swap


@njit(cache=True, nogil=True)
def critical_pairs(g: Graph, s: State, latency: int, pairs: Ints, edges: Ints) -> tuple[int, int]:
    """Neighbours of different queues on one critical path, by the place of the first of each two.

    The path is walked from the end; where two ways lead on, by chance. A *block* is a part of it
    on one device without a break. Exchanges inside a block cannot make the schedule shorter, those
    at its edges can.

    Args:
        edges: filled with the first and the last ones of each block.

    Returns:
        Numbers of pairs and of edges.
    """
    queue_of, offset, device, word_at = g.queue_of, g.offset, g.device, g.word_at
    before, delay, duration = g.before, g.delay, g.duration
    word, place, start = s.word, s.place, s.start
    task, ends = -1, 0
    for d in range(word_at.size - 1):
        last = word[word_at[d + 1] - 1]
        if start[last] + duration[queue_of[last]] == latency:
            ends += 1
            if np.random.randint(ends) == 0:
                task = last
    count, block, at_edges = 0, 0, 0
    while start[task] > 0:
        q = queue_of[task]
        p = place[task]
        b = before[q]
        chain, neighbour = -1, -1
        if b >= 0:
            earlier = offset[b] + task - offset[q]
            if start[earlier] + duration[b] + delay[q] == start[task]:
                chain = earlier
        if p > word_at[device[q]]:
            earlier = word[p - 1]
            if start[earlier] + duration[queue_of[earlier]] == start[task]:
                neighbour = earlier
        if neighbour >= 0 and neighbour != chain and (chain < 0 or np.random.random() < 0.5):
            if queue_of[neighbour] != q:
                pairs[count] = p - 1
                count += 1
            task = neighbour
        else:
            task = chain
        if (task == chain or start[task] == 0) and count > block:
            edges[at_edges], edges[at_edges + 1] = pairs[block], pairs[count - 1]
            at_edges += 2
            block = count
    return count, at_edges


@njit(cache=True, nogil=True)
def may_swap(g: Graph, s: State, k: int) -> bool:
    """Return whether places ``k`` and ``k + 1`` are of one device and may stand in either order."""
    first, second = s.word[k], s.word[k + 1]
    p, q = g.queue_of[first], g.queue_of[second]
    if p == q or g.device[p] != g.device[q]:
        return False
    return not (
        g.kind[q] == BACKWARD and g.mate[q] == p and first - g.offset[p] == second - g.offset[q]
    )


@njit(cache=True, nogil=True)
def excess_of(s: State, capacity: int, unit: int) -> int:
    """Memory over the capacity, in units rounded up, summed over all places."""
    excess = 0
    for k in range(s.held.size):
        if s.held[k] > capacity:
            excess += -((capacity - s.held[k]) // unit)
    return excess


@njit(cache=True, nogil=True)
def _overfull_pair(g: Graph, s: State, capacity: int) -> int:
    """Draw an exchange that may help where memory is over the capacity; return its first place.

    It moves a forward before that place to later, or a backward after that place to earlier. Mostly
    the nearest are drawn, but further ones too, as the nearest may belong together. -1 if none is
    met with.
    """
    word, held, queue_of, kind = s.word, s.held, g.queue_of, g.kind
    for _ in range(20):
        k = np.random.randint(1, word.size)
        if held[k] <= capacity:
            continue
        d = g.device[queue_of[word[k]]]
        earlier = np.random.random() < 0.5
        step, wanted = (-1, FORWARD) if earlier else (1, BACKWARD)
        if earlier:
            k -= 1
        while g.word_at[d] <= k < g.word_at[d + 1]:
            if kind[queue_of[word[k]]] == wanted and np.random.random() < 0.5:
                k = k if earlier else k - 1
                return k if g.word_at[d] <= k < g.word_at[d + 1] - 1 else -1
            k += step
    return -1


class Cooling(NamedTuple):
    """Course of temperature and price, both geometric, while moves are tried.

    Attributes:
        moves: number of moves to try.
        hot: temperature of the first move, in ticks.
        cold: temperature of the last move, in ticks.
        soft: price of a unit of memory over the capacity at the first move, in ticks.
        firm: price at the last move, in ticks.
        unit: unit of memory.
        repairs: share of moves that are tried where memory is over the capacity.
        edges: share of the others that are tried at the edges of blocks of the critical path.
    """

    moves: int
    hot: float
    cold: float
    soft: float
    firm: float
    unit: int
    repairs: float
    edges: float


@njit(cache=True, nogil=True)
def anneal_swaps(
    g: Graph,
    s: State,
    capacity: int,
    target: int,
    cooling: Cooling,
    seed: int,
    best: int,
    best_word: Ints,
) -> int:
    """Try exchanges; a schedule that is worse is taken by the rule of Metropolis.

    Args:
        s: the schedule to start from, left as the search ends.
        capacity: memory of each device, in the graph's units.
        target: latency at which to stop.
        best: the shortest latency within the capacity so far.
        best_word: [T] filled with a schedule of that latency or less, when there is one.

    Returns:
        The shortest latency within the capacity now.
    """
    np.random.seed(seed)
    moves, unit, held = cooling.moves, cooling.unit, s.held
    latency, excess = latency_of(g, s.word, s.start), excess_of(s, capacity, unit)
    pairs = np.empty(s.word.size, np.int64)
    edges = np.empty(2 * s.word.size, np.int64)
    left = count = at_edges = 0
    falling = math.log(cooling.cold / cooling.hot) / moves
    rising = math.log(cooling.firm / cooling.soft) / moves
    for move in range(moves):
        if best <= target:
            break
        if excess and np.random.random() < cooling.repairs:
            k = _overfull_pair(g, s, capacity)
        else:
            if left == 0:
                count, at_edges = critical_pairs(g, s, latency, pairs, edges)
                if count == 0:
                    break
                left = count
            left -= 1
            if np.random.random() < cooling.edges:
                k = edges[np.random.randint(at_edges)]
            else:
                k = pairs[np.random.randint(count)]
        if k < 0 or not may_swap(g, s, k):
            continue
        over = held[k] + g.memory[g.queue_of[s.word[k + 1]]] - capacity
        more = -(-max(0, over) // unit) + (capacity - max(capacity, held[k + 1])) // unit
        price = cooling.soft * math.exp(rising * move)
        worse = -cooling.hot * math.exp(falling * move) * math.log(np.random.random())
        at_most = latency + worse - price * more
        if length_after(g, s, k) > at_most or not swap(g, s, k):
            continue
        new = latency_of(g, s.word, s.start)
        if new > at_most:
            swap(g, s, k)
            continue
        latency = new
        excess += more
        left = 0
        if latency < best and excess == 0:
            best = latency
            best_word[:] = s.word
    if latency == best and excess == 0:
        best_word[:] = s.word  # as good, and further from where it started
    return best
