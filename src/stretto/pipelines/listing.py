"""List scheduling with capped memory, and annealing of its parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stretto.pipelines.graph import FORWARD, Flags, Floats, Graph, Ints, njit, tails

_NEVER = np.int64(2**60)
UNLIMITED = np.iinfo(np.int64).max // 4


class Rules(NamedTuple):
    """Rules by which a device chooses its next task. ``limit`` and ``polite`` apply to forward
    queues. The queues of at least one model must be polite, because otherwise devices can deadlock.
    """

    bias: Floats  # [Q] ticks added to the keys of a queue's tasks
    limit: Ints  # [Q] most micro-batches in flight, at least 1
    polite: Flags  # [Q] whether to leave room for the other pipeline's next micro-batch
    window: Floats  # [D] ticks that a device may wait for an arriving task of a higher key


def urgency(g: Graph) -> Floats:
    """Return the least ticks [T] left from each task's start: its own chain to the end, and the
    later tasks of its queue one after the other."""
    remaining = g.duration + tails(g)
    later_tasks = g.length[g.queue_of] - 1 - (np.arange(g.queue_of.size) - g.offset[g.queue_of])
    work = (g.duration + g.duration[g.mate])[g.queue_of]
    return np.asarray(remaining[g.queue_of] + later_tasks * work, dtype=np.float64)


@njit(cache=True, nogil=True)
def decode(g: Graph, key: Floats, rules: Rules, capacity: int, word: Ints, start: Ints) -> int:
    """Build a schedule in order of time: each free device takes the ready task with the highest
    key.

    A forward starts only if the memory allows it. A polite forward must also leave room for one
    micro-batch of the device's other pipeline, if that has forwards to run and none in flight. So
    the oldest unfinished micro-batch of a model to which the other is polite can always go on,
    until that model is done, and then the other can. Nothing deadlocks under any capacity that
    holds one micro-batch.

    Fills in the tasks [T], device after device, and their starts [T]. Returns the latency, or -1 if
    nothing can start, because both models are polite and the capacity does not hold one micro-batch
    of both.
    """
    length = g.length
    offset = g.offset
    duration = g.duration
    device = g.device
    before = g.before
    after = g.after
    delay = g.delay
    memory = g.memory
    queues = g.queues
    window = rules.window
    devices = window.size
    free = np.zeros(devices, np.int64)
    usage = np.zeros(devices, np.int64)
    at = g.word_at[:-1].copy()
    done = np.zeros(length.size, np.int64)
    arrival = np.full(length.size, _NEVER)
    when = np.full(devices, _NEVER)
    fits = np.zeros(length.size, np.bool_)
    for d in range(devices):
        _admit(g, rules, capacity, d, usage[d], done, fits)
    for q in range(length.size):
        if before[q] < 0:
            arrival[q] = 0
            if fits[q]:
                when[device[q]] = 0
    latency = 0
    for _ in range(word.size):
        d = int(np.argmin(when))
        if when[d] == _NEVER:
            return -1
        q = _highest(queues, offset, key, done, fits, arrival, d, when[d] + window[d])
        i = done[q]
        start[offset[q] + i] = max(free[d], arrival[q])
        end = start[offset[q] + i] + duration[q]
        word[at[d]] = offset[q] + i
        at[d] += 1
        free[d] = end
        usage[d] += memory[q]
        done[q] = i + 1
        latency = max(latency, end)
        b = before[q]
        arrival[q] = _NEVER
        if i + 1 < length[q]:
            if b < 0:
                arrival[q] = 0
            elif done[b] > i + 1:
                arrival[q] = start[offset[b] + i + 1] + duration[b] + delay[q]
        _admit(g, rules, capacity, d, usage[d], done, fits)
        a = after[q]
        if a >= 0 and done[a] == i:
            arrival[a] = end + delay[a]
            other = device[a]
            if fits[a]:
                when[other] = min(when[other], max(arrival[a], free[other]))
        when[d] = _soonest(queues, fits, arrival, d, end)
    return latency


@njit(cache=True, nogil=True)
def _soonest(queues: Ints, fits: Flags, arrival: Ints, d: int, free: np.int64) -> np.int64:
    soonest = _NEVER
    for j in range(4 * d, 4 * d + 4):
        if fits[queues[j]]:
            soonest = min(soonest, max(arrival[queues[j]], free))
    return soonest


@njit(cache=True, nogil=True)
def _highest(
    queues: Ints,
    offset: Ints,
    key: Floats,
    done: Ints,
    fits: Flags,
    arrival: Ints,
    d: int,
    until: float,
) -> int:
    best_queue, highest = -1, -np.inf
    for j in range(4 * d, 4 * d + 4):
        q = queues[j]
        if fits[q] and arrival[q] <= until and key[offset[q] + done[q]] > highest:
            best_queue, highest = q, key[offset[q] + done[q]]
    return best_queue


@njit(cache=True, nogil=True)
def _admit(
    g: Graph, rules: Rules, capacity: int, d: int, usage: int, done: Ints, fits: Flags
) -> None:
    length = g.length
    memory = g.memory
    mate = g.mate
    rival = g.rival
    kind = g.kind
    queues = g.queues
    for j in range(4 * d, 4 * d + 4):
        q = queues[j]
        if kind[q] != FORWARD:
            fits[q] = True
            continue
        need = usage + memory[q]
        r = rival[q]
        if rules.polite[q] and done[r] < length[r] and done[r] == done[mate[r]]:
            need += memory[r]
        fits[q] = need <= capacity and done[q] - done[mate[q]] < rules.limit[q]


@njit(cache=True, nogil=True)
def _mutate(g: Graph, rules: Rules, spread: float) -> None:
    for _ in range(1 + np.random.randint(3)):
        draw = np.random.random()
        q = np.random.randint(rules.bias.size)
        if draw < 0.5:
            rules.bias[q] += np.random.normal() * spread
        elif draw < 0.85:
            if g.kind[q] != FORWARD:
                q = g.mate[q]
            limit = rules.limit[q] + np.random.randint(-2, 3)
            rules.limit[q] = max(1, min(g.length[q], limit))
        else:
            d = np.random.randint(rules.window.size)
            rules.window[d] = max(0.0, rules.window[d] + np.random.randint(-1, 2))


@njit(cache=True, nogil=True)
def anneal_rules(
    g: Graph,
    left: Floats,
    rules: Rules,
    capacity: int,
    target: int,
    rounds: int,
    hot: float,
    cold: float,
    spread: float,
    seed: int,
    best_word: Ints,
) -> int:
    """Search, from initial rules, for rules with a short schedule by :func:`decode`. Return its
    latency. The search stops at a target latency. ``spread`` is the standard deviation of a change
    of bias, in ticks. ``left`` has the keys without bias. ``best_word`` is filled in."""
    np.random.seed(seed)
    word, start = np.empty(left.size, np.int64), np.empty(left.size, np.int64)
    latency = decode(g, left + rules.bias[g.queue_of], rules, capacity, best_word, start)
    best = latency
    decay = math.log(cold / hot) / rounds
    for r in range(rounds):
        if best <= target:
            break
        bias = rules.bias.copy()
        limit = rules.limit.copy()
        window = rules.window.copy()
        _mutate(g, rules, spread)
        new = decode(g, left + rules.bias[g.queue_of], rules, capacity, word, start)
        if new <= latency - hot * math.exp(decay * r) * math.log(np.random.random()):
            latency = new
            if new < best:
                best = new
                best_word[:] = word
        else:
            rules.bias[:] = bias
            rules.limit[:] = limit
            rules.window[:] = window
    return best
