"""Compiled loops over a schedule's tasks: starts, memory, and both again after a local change.

``graph.py`` says what the arrays are. Functions take the fields they need out of the graph first:
reading a field of a tuple in a loop costs more than the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.pipelines.compiler import njit
from stretto.pipelines.graph import Flags, Graph, Ints


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


class State(NamedTuple):
    """A schedule that can be changed locally; all arrays are [T].

    Attributes:
        word: tasks, device after device.
        place: of each task in ``word``.
        start: earliest start of each task.
        tail: ticks that must follow the end of each task.
        order: tasks, each after all it waits for.
        rank: of each task in ``order``.
        held: memory on the device before the task at each place starts.
        stale: scratch; tasks that have to be computed again. All false between calls.
        moved: scratch; tasks that wait for the one that is moved back. All false between calls.
        later: scratch; these tasks.
        old_order: scratch; a part of ``order`` as it was.
    """

    word: Ints
    place: Ints
    start: Ints
    tail: Ints
    order: Ints
    rank: Ints
    held: Ints
    stale: Flags
    moved: Flags
    later: Ints
    old_order: Ints


@njit(cache=True, nogil=True)
def make_state(g: Graph, word: Ints) -> State:
    """Make the state of a word, which must not deadlock."""
    size = word.size
    start = np.empty(size, np.int64)
    order = np.empty(size, np.int64)
    earliest_starts(g, word, start, order)
    # Sorted by time, the tasks between two neighbours on a device are few.
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
        held = 0
        for k in range(g.word_at[d], g.word_at[d + 1]):
            state.held[k] = held
            held += g.memory[g.queue_of[word[k]]]
    state.stale[:] = True
    _renew_tails(g, state, size - 1, size)
    return state


@njit(cache=True, nogil=True)
def length_after(g: Graph, s: State, k: int) -> int:
    """The longest path through the tasks at places ``k`` and ``k + 1`` if they were exchanged.

    No other path gets longer by the exchange. So the schedule's latency will be this if this is
    more than the latency now, and else at most what it is now. It takes no more than a few steps
    (Taillard 1994), if devices would not wait for each other in a circle.
    """
    queue_of, offset, word_at, duration = g.queue_of, g.offset, g.word_at, g.duration
    word, start, tail = s.word, s.start, s.tail
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
    then = end  # of the first task, which comes second
    b = g.before[p]
    if b >= 0:
        then = max(then, start[offset[b] + first - offset[p]] + duration[b] + g.delay[p])
    then += duration[p]
    left = 0
    if k + 2 < word_at[d + 1]:
        left = duration[queue_of[word[k + 2]]] + tail[word[k + 2]]
    a = g.after[p]
    if a >= 0:
        left = max(left, g.delay[a] + duration[a] + tail[offset[a] + first - offset[p]])
    longest = then + left
    left += duration[p]
    a = g.after[q]
    if a >= 0:
        left = max(left, g.delay[a] + duration[a] + tail[offset[a] + second - offset[q]])
    return int(max(longest, end + left))


@njit(cache=True, nogil=True)
def swap(g: Graph, s: State, k: int) -> bool:
    """Exchange the tasks at places ``k`` and ``k + 1`` of one device; a second time undoes it.

    They must be of different queues, and not the forward and the backward of one micro-batch on its
    last stage. Only what can have changed is computed: tasks are visited in an order in which each
    comes after all it waits for, until none is left of which something before it has moved; and
    the same from the end for the tails.

    Returns:
        Whether it was done. Otherwise devices would wait for each other in a circle, and nothing
        has changed. Two tasks of which the second starts when the first ends never give a circle: a
        second way from one to the other would take time.
    """
    if not _reorder(g, s, k):
        return False
    word, place, stale = s.word, s.place, s.stale
    first, second = word[k], word[k + 1]
    d = g.device[g.queue_of[first]]
    s.held[k + 1] = s.held[k] + g.memory[g.queue_of[second]]
    word[k], word[k + 1] = second, first
    place[second], place[first] = k, k + 1
    stale[first] = stale[second] = True
    pending = 2
    if k + 2 < g.word_at[d + 1]:
        stale[word[k + 2]] = True
        pending = 3
    _renew_starts(g, s, s.rank[second], pending)
    stale[first] = stale[second] = True
    pending = 2
    if k > g.word_at[d]:
        stale[word[k - 1]] = True
        pending = 3
    _renew_tails(g, s, s.rank[first], pending)
    return True


@njit(cache=True, nogil=True)
def _reorder(g: Graph, s: State, k: int) -> bool:
    """Bring ``order`` and ``rank`` in line with an exchange of places ``k`` and ``k + 1``."""
    queue_of, offset, before, device, word_at = g.queue_of, g.offset, g.before, g.device, g.word_at
    word, place, order, rank, moved, old = s.word, s.place, s.order, s.rank, s.moved, s.old_order
    first, second = word[k], word[k + 1]
    low, high = rank[first], rank[second]
    for r in range(low, high + 1):
        old[r - low] = order[r]
    moved[first] = True
    later = s.later
    later[0] = first
    count, write = 1, low
    for r in range(low + 1, high):
        task = old[r - low]
        q = queue_of[task]
        b = before[q]
        p = place[task]
        if (b >= 0 and moved[offset[b] + task - offset[q]]) or (
            p > word_at[device[q]] and moved[word[p - 1]]
        ):
            moved[task] = True
            later[count] = task
            count += 1
        else:
            order[write] = task
            rank[task] = write
            write += 1
    q = queue_of[second]
    b = before[q]
    circle = b >= 0 and moved[offset[b] + second - offset[q]]
    for j in range(count):
        moved[later[j]] = False
    if circle:
        for r in range(low, high + 1):
            order[r] = old[r - low]
            rank[order[r]] = r
        return False
    order[write] = second
    rank[second] = write
    for j in range(count):
        order[write + 1 + j] = later[j]
        rank[later[j]] = write + 1 + j
    return True


@njit(cache=True, nogil=True)
def _renew_starts(g: Graph, s: State, r: int, pending: int) -> None:
    """Compute starts of stale tasks, all of rank ``r`` or higher, and of what depends on them."""
    queue_of, offset, device, word_at = g.queue_of, g.offset, g.device, g.word_at
    before, after, delay, duration = g.before, g.after, g.delay, g.duration
    word, place, start, order, stale = s.word, s.place, s.start, s.order, s.stale
    while pending:
        task = order[r]
        r += 1
        if not stale[task]:
            continue
        stale[task] = False
        pending -= 1
        q = queue_of[task]
        i = task - offset[q]
        p = place[task]
        begin = 0
        b = before[q]
        if b >= 0:
            begin = start[offset[b] + i] + duration[b] + delay[q]
        if p > word_at[device[q]]:
            previous = word[p - 1]
            begin = max(begin, start[previous] + duration[queue_of[previous]])
        if begin == start[task]:
            continue
        start[task] = begin
        if p + 1 < word_at[device[q] + 1] and not stale[word[p + 1]]:
            stale[word[p + 1]] = True
            pending += 1
        a = after[q]
        if a >= 0 and not stale[offset[a] + i]:
            stale[offset[a] + i] = True
            pending += 1


@njit(cache=True, nogil=True)
def _renew_tails(g: Graph, s: State, r: int, pending: int) -> None:
    """Compute tails of stale tasks, all of rank ``r`` or lower, and of what they depend on."""
    queue_of, offset, device, word_at = g.queue_of, g.offset, g.device, g.word_at
    before, after, delay, duration = g.before, g.after, g.delay, g.duration
    word, place, tail, order, stale = s.word, s.place, s.tail, s.order, s.stale
    while pending:
        task = order[r]
        r -= 1
        if not stale[task]:
            continue
        stale[task] = False
        pending -= 1
        q = queue_of[task]
        i = task - offset[q]
        p = place[task]
        ticks = 0
        a = after[q]
        if a >= 0:
            ticks = delay[a] + duration[a] + tail[offset[a] + i]
        if p + 1 < word_at[device[q] + 1]:
            following = word[p + 1]
            ticks = max(ticks, duration[queue_of[following]] + tail[following])
        if ticks == tail[task]:
            continue
        tail[task] = ticks
        if p > word_at[device[q]] and not stale[word[p - 1]]:
            stale[word[p - 1]] = True
            pending += 1
        b = before[q]
        if b >= 0 and not stale[offset[b] + i]:
            stale[offset[b] + i] = True
            pending += 1
