"""Annealing that swaps neighbours on the critical path, with a price on excess memory.

Only a swap on a critical path can shorten a schedule at once, and it never deadlocks devices (van
Laarhoven, Aarts and Lenstra 1992). It changes the starts of few tasks, so a move costs
microseconds.

The cap on memory is a price that rises while the temperature falls. A hard cap would trap the
search, because often a device has to hold one more micro-batch for a moment between one good order
and another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stretto.pipelines.graph import (
    BACKWARD,
    FORWARD,
    Flags,
    Graph,
    Ints,
    earliest_starts,
    latency_of,
    njit,
)

_REPAIRS, _EDGES = 0.2, 0.5
"""Share of moves that are tried at places over the capacity, and share of the remaining moves that
are tried at the edges of blocks of the critical path."""


class State(NamedTuple):
    """A schedule that can be changed locally. All arrays are [T], by task or by place."""

    word: Ints  # tasks, device after device
    place: Ints  # of each task in the word
    start: Ints  # earliest start of each task
    tail: Ints  # ticks that must follow the end of each task
    order: Ints  # tasks in an order that respects dependencies
    rank: Ints  # of each task in the order
    held: Ints  # memory on the device before the task at each place starts
    stale: Flags  # scratch: tasks to recompute, all false between calls
    moved: Flags  # scratch: dependants of the task to move back, all false between calls
    later: Ints  # scratch: the tasks in ``moved``
    old_order: Ints  # scratch: a part of the previous order


@njit(cache=True, nogil=True)
def make_state(g: Graph, word: Ints) -> State:
    """Make the state of a word, which must not deadlock."""
    size = word.size
    start = np.empty(size, np.int64)
    order = np.empty(size, np.int64)
    earliest_starts(g, word, start, order)
    # Sorting by time keeps few tasks between two neighbours on a device.
    order = order[np.argsort(start[order], kind="mergesort")]
    state = State(
        word.copy(), np.empty(size, np.int64), start, np.zeros(size, np.int64), order,
        np.empty(size, np.int64), np.empty(size, np.int64), np.zeros(size, np.bool_),
        np.zeros(size, np.bool_), np.empty(size, np.int64), np.empty(size, np.int64),
    )  # fmt: skip
    for k in range(size):
        state.rank[order[k]] = k
        state.place[word[k]] = k
    for d in range(g.word_at.size - 1):
        memory = 0
        for k in range(g.word_at[d], g.word_at[d + 1]):
            state.held[k] = memory
            memory += g.memory[g.queue_of[word[k]]]
    state.stale[:] = True
    _renew(g, state, -1, size - 1, size)
    return state


@njit(cache=True, nogil=True)
def length_after(g: Graph, s: State, k: int) -> int:
    """Return the longest path through the tasks at places ``k`` and ``k + 1`` after a swap. The
    swap lengthens no other path (Taillard 1994) if it does not deadlock devices. So if this exceeds
    the current latency, it is the new latency."""
    queue_of = g.queue_of
    offset = g.offset
    word_at = g.word_at
    duration = g.duration
    word = s.word
    start = s.start
    tail = s.tail
    first, second = word[k], word[k + 1]
    p, q = queue_of[first], queue_of[second]
    d = g.device[q]
    begin = 0
    if k > word_at[d]:
        begin = start[word[k - 1]] + duration[queue_of[word[k - 1]]]
    b = g.before[q]
    if b >= 0:
        begin = max(begin, start[offset[b] + second - offset[q]] + duration[b] + g.delay[q])
    end = begin + duration[q]
    later_end = end  # end of the first task, now second
    b = g.before[p]
    if b >= 0:
        later_end = max(later_end, start[offset[b] + first - offset[p]] + duration[b] + g.delay[p])
    later_end += duration[p]
    remaining = 0
    if k + 2 < word_at[d + 1]:
        remaining = duration[queue_of[word[k + 2]]] + tail[word[k + 2]]
    a = g.after[p]
    if a >= 0:
        remaining = max(remaining, g.delay[a] + duration[a] + tail[offset[a] + first - offset[p]])
    longest = later_end + remaining
    remaining += duration[p]
    a = g.after[q]
    if a >= 0:
        remaining = max(remaining, g.delay[a] + duration[a] + tail[offset[a] + second - offset[q]])
    return int(max(longest, end + remaining))


@njit(cache=True, nogil=True)
def swap(g: Graph, s: State, k: int) -> bool:
    """Swap the tasks at places ``k`` and ``k + 1`` of one device, if :func:`may_swap`. A second
    call undoes it. Only starts and tails that can have changed are recomputed. Returns False,
    without a change, if devices would deadlock. If the second task starts when the first ends, that
    is impossible, because another path from one to the other would take time."""
    if not _reorder(g, s, k):
        return False
    word = s.word
    place = s.place
    stale = s.stale
    first, second = word[k], word[k + 1]
    d = g.device[g.queue_of[first]]
    s.held[k + 1] = s.held[k] + g.memory[g.queue_of[second]]
    word[k], word[k + 1] = second, first
    place[second], place[first] = k, k + 1
    stale[first] = stale[second] = True
    has_next = k + 2 < g.word_at[d + 1]
    if has_next:
        stale[word[k + 2]] = True
    _renew(g, s, 1, s.rank[second], 2 + has_next)
    stale[first] = stale[second] = True
    has_previous = k > g.word_at[d]
    if has_previous:
        stale[word[k - 1]] = True
    _renew(g, s, -1, s.rank[first], 2 + has_previous)
    return True


@njit(cache=True, nogil=True)
def _reorder(g: Graph, s: State, k: int) -> bool:
    queue_of = g.queue_of
    offset = g.offset
    before = g.before
    device = g.device
    word_at = g.word_at
    word = s.word
    place = s.place
    order = s.order
    rank = s.rank
    is_moved = s.moved
    old_order = s.old_order
    first, second = word[k], word[k + 1]
    low, high = rank[first], rank[second]
    for r in range(low, high + 1):
        old_order[r - low] = order[r]
    is_moved[first] = True
    later = s.later
    later[0] = first
    count, write = 1, low
    for r in range(low + 1, high):
        task = old_order[r - low]
        q = queue_of[task]
        b = before[q]
        p = place[task]
        if (b >= 0 and is_moved[offset[b] + task - offset[q]]) or (
            p > word_at[device[q]] and is_moved[word[p - 1]]
        ):
            is_moved[task] = True
            later[count] = task
            count += 1
        else:
            order[write] = task
            rank[task] = write
            write += 1
    q = queue_of[second]
    b = before[q]
    circle = b >= 0 and is_moved[offset[b] + second - offset[q]]
    for j in range(count):
        is_moved[later[j]] = False
    if circle:
        for r in range(low, high + 1):
            order[r] = old_order[r - low]
            rank[order[r]] = r
        return False
    order[write] = second
    rank[second] = write
    for j in range(count):
        order[write + 1 + j] = later[j]
        rank[later[j]] = write + 1 + j
    return True


@njit(cache=True, nogil=True, inline="always")  # makes the step a constant
def _renew(g: Graph, s: State, step: int, r: int, pending: int) -> None:
    """Recompute stale starts (``step`` 1) or tails (-1) and dependants, from rank ``r`` on."""
    queue_of = g.queue_of
    offset = g.offset
    device = g.device
    word_at = g.word_at
    delay, duration = g.delay, g.duration
    word = s.word
    place = s.place
    order = s.order
    stale = s.stale
    values = s.start
    earlier = g.before
    later = g.after
    if step < 0:
        values = s.tail
        earlier = g.after
        later = g.before
    while pending:
        task = order[r]
        r += step
        if not stale[task]:
            continue
        stale[task] = False
        pending -= 1
        q = queue_of[task]
        i = task - offset[q]
        p = place[task]
        low, high = word_at[device[q]], word_at[device[q] + 1]
        ticks = 0
        e = earlier[q]
        if e >= 0:
            ticks = values[offset[e] + i] + duration[e] + delay[q if step > 0 else e]
        if low <= p - step < high:
            neighbour = word[p - step]
            ticks = max(ticks, values[neighbour] + duration[queue_of[neighbour]])
        if ticks == values[task]:
            continue
        values[task] = ticks
        if low <= p + step < high and not stale[word[p + step]]:
            stale[word[p + step]] = True
            pending += 1
        e = later[q]
        if e >= 0 and not stale[offset[e] + i]:
            stale[offset[e] + i] = True
            pending += 1


@njit(cache=True, nogil=True)
def critical_pairs(g: Graph, s: State, latency: int, pairs: Ints, edges: Ints) -> tuple[int, int]:
    """Fill in the first places of neighbours of different queues on one critical path. The path is
    walked from the end, choosing randomly if two ways lead on. A *block* is an unbroken part of it
    on one device. Swaps inside a block cannot shorten the schedule, but swaps at its edges (first
    and last) can. Returns the numbers of pairs and of edges."""
    queue_of = g.queue_of
    offset = g.offset
    device = g.device
    word_at = g.word_at
    before = g.before
    delay = g.delay
    duration = g.duration
    word = s.word
    place = s.place
    start = s.start
    task, ends = -1, 0
    for d in range(word_at.size - 1):
        last = word[word_at[d + 1] - 1]
        if start[last] + duration[queue_of[last]] == latency:
            ends += 1
            if np.random.randint(ends) == 0:
                task = last
    count = 0
    block = 0
    at_edges = 0
    while start[task] > 0:
        q = queue_of[task]
        p = place[task]
        b = before[q]
        chain = offset[b] + task - offset[q] if b >= 0 else -1
        if chain >= 0 and start[chain] + duration[b] + delay[q] < start[task]:
            chain = -1
        neighbour = word[p - 1] if p > word_at[device[q]] else -1
        if neighbour >= 0 and start[neighbour] + duration[queue_of[neighbour]] < start[task]:
            neighbour = -1
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
    """Return whether places ``k`` and ``k + 1`` are of one device and their order is free."""
    first, second = s.word[k], s.word[k + 1]
    p, q = g.queue_of[first], g.queue_of[second]
    mates = g.mate[q] == p and first - g.offset[p] == second - g.offset[q]
    return bool(p != q and g.device[p] == g.device[q] and not (mates and g.kind[q] == BACKWARD))


@njit(cache=True, nogil=True)
def excess_of(s: State, capacity: int, unit: int) -> int:
    """Return memory over the capacity, in units rounded up, summed over all places."""
    excess = 0
    for k in range(s.held.size):
        if s.held[k] > capacity:
            excess += -((capacity - s.held[k]) // unit)
    return excess


@njit(cache=True, nogil=True)
def _overfull_pair(g: Graph, s: State, capacity: int) -> int:
    """Draw the place of a swap that may reduce memory over the capacity, or -1. It delays a forward
    before that place, or advances a backward after it. It mostly draws the nearest, but also more
    distant ones, because the nearest pair may have to stay in order."""
    word = s.word
    memory = s.held
    queue_of = g.queue_of
    kind = g.kind
    for _ in range(20):
        k = np.random.randint(1, word.size)
        if memory[k] <= capacity:
            continue
        d = g.device[queue_of[word[k]]]
        earlier = np.random.random() < 0.5
        step, target_kind = (-1, FORWARD) if earlier else (1, BACKWARD)
        if earlier:
            k -= 1
        while g.word_at[d] <= k < g.word_at[d + 1]:
            if kind[queue_of[word[k]]] == target_kind and np.random.random() < 0.5:
                k = k if earlier else k - 1
                return k if g.word_at[d] <= k < g.word_at[d + 1] - 1 else -1
            k += step
    return -1


class Cooling(NamedTuple):
    """Geometric courses of temperature and of the price per excess memory ``unit``, in ticks."""

    moves: int
    hot: float
    cold: float
    soft: float
    firm: float
    unit: int


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
    """Try swaps from a state, accepting worse schedules by the Metropolis rule. The search stops at
    a target latency. ``best`` is the shortest latency within the capacity so far. An equal or
    shorter one goes to ``best_word``. Returns the shortest latency."""
    np.random.seed(seed)
    moves = cooling.moves
    unit = cooling.unit
    memory = s.held
    latency, excess = latency_of(g, s.word, s.start), excess_of(s, capacity, unit)
    pairs = np.empty(s.word.size, np.int64)
    edges = np.empty(2 * s.word.size, np.int64)
    tries_left = count = at_edges = 0
    decay = math.log(cooling.cold / cooling.hot) / moves
    growth = math.log(cooling.firm / cooling.soft) / moves
    for move in range(moves):
        if best <= target:
            break
        if excess and np.random.random() < _REPAIRS:
            k = _overfull_pair(g, s, capacity)
        else:
            if tries_left == 0:
                count, at_edges = critical_pairs(g, s, latency, pairs, edges)
                if count == 0:
                    break
                tries_left = count
            tries_left -= 1
            if np.random.random() < _EDGES:
                k = edges[np.random.randint(at_edges)]
            else:
                k = pairs[np.random.randint(count)]
        if k < 0 or not may_swap(g, s, k):
            continue
        over = memory[k] + g.memory[g.queue_of[s.word[k + 1]]] - capacity
        change = (max(0, over) + unit - 1) // unit + (
            capacity - max(capacity, memory[k + 1])
        ) // unit
        price = cooling.soft * math.exp(growth * move)
        tolerance = -cooling.hot * math.exp(decay * move) * math.log(np.random.random())
        at_most = latency + tolerance - price * change
        if length_after(g, s, k) > at_most or not swap(g, s, k):
            continue
        new = latency_of(g, s.word, s.start)
        if new > at_most:
            swap(g, s, k)
            continue
        latency = new
        excess += change
        tries_left = 0
        if latency < best and excess == 0:
            best = latency
            best_word[:] = s.word
    if latency == best and excess == 0:
        best_word[:] = s.word  # as good, and further from its start
    return best
