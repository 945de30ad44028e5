"""The search: list scheduling for the latency, then annealing with decreasing memory caps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from stretto.pipelines.annealing import Cooling, anneal_swaps, make_state
from stretto.pipelines.graph import (
    FORWARD,
    Flags,
    Floats,
    Graph,
    Ints,
    capacity_units,
    earliest_starts,
    latency_bound,
    latency_of,
    make_graph,
    peak_memory,
)
from stretto.pipelines.listing import UNLIMITED, Rules, anneal_rules, urgency
from stretto.pipelines.problem import Problem

_DECODED_TASKS, _MOST_ROUNDS = 3_000_000, 5_000
"""Most decoded tasks, and most rounds, in one search for rules (a tenth of a second)."""
_SEGMENT_WORK = 300_000_000
"""Swaps between two checks of the clock, times tasks (tenths of a second)."""
_COLD, _SOFT = 0.05, 0.3  # last temperature, and first price of memory, in mean durations of a task
NOTHING = 2**60  # larger than any latency
_LISTED, _LISTED_ROUNDS = 64, 20
"""Short searches for rules before any annealing, and rounds of each."""
_HOT = (1.0, 2.0)
_WARM = (0.2, 0.3, 0.6)
_MILD = (0.15, 0.2)
"""First temperatures, in mean durations of a task: for a new schedule, for one that must change
much, and for one that is nearly right."""
_NEARLY, _FAR = 1.03, 1.15
"""Multiples of the bound. Below the first, a schedule within the capacity is nearly right. Above
the second, the capacity may be so tight that the bound is out of reach."""
_DROP = 0.07  # initial distance of a cap below the peak, as a share
_MOVES_A_TASK = 500
_MOST_MOVES_A_TASK = 2000
_TRIES_A_LENGTH = 2
"""Swaps per task in the first tries and in the longest, and failures until they double."""
_STUCK = 4  # failures after which more than one way is tried
_HOTTER = (1.0, 3.0, 8.0)
_FIRM, _FIRMER = 1.0, (1.0, 4.0, 16.0)
"""Last prices of memory, in mean durations: usual, and when stuck. Under a tight capacity, a
schedule over it can be shorter by more than a low price, and good schedules are further apart."""


class Improvement(NamedTuple):
    """A new best schedule: seconds since the search began, its latency and its memory."""

    seconds: float
    latency: int
    peak: float


class Incumbent:
    """The best schedule so far, ``word`` [T]: the shortest, and of those the one with the lowest
    peak. Memory is in the graph's units. ``enough`` is a peak that is low enough, ``bound`` a lower
    bound of the latency, ``memory_bound`` of the peak at the best latency."""

    def __init__(self, problem: Problem, seconds: float, enough: float) -> None:
        self.problem, self.graph = problem, make_graph(problem)
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.capacity = capacity_units(problem, problem.capacity)
        self.bound = latency_bound(problem)
        self.memory_bound = int(self.graph.memory.max())
        self.enough = max(self.memory_bound, capacity_units(problem, enough))
        self.word: Ints = np.empty(0, np.int64)
        self.latency = self.peak = int(np.iinfo(np.int64).max)
        self.trace: list[Improvement] = []

    def offer(self, word: Ints) -> bool:
        """Take a valid schedule [T] within the capacity if it is better. Return whether it is."""
        latency, peak = self.measure(word)
        if peak > self.capacity or (latency, peak) >= (self.latency, self.peak):
            return False
        self.word = word.copy()
        self.latency = latency
        self.peak = peak
        seconds = time.monotonic() - self.begun
        self.trace.append(Improvement(seconds, latency, peak / self.problem.memory_scale))
        return True

    def measure(self, word: Ints) -> tuple[int, int]:
        """Return latency and peak of a valid schedule [T]."""
        starts, order = np.empty(word.size, np.int64), np.empty(word.size, np.int64)
        earliest_starts(self.graph, word, starts, order)
        latency = int(latency_of(self.graph, word, starts))
        peak = int(peak_memory(self.graph, word, np.zeros(self.problem.devices, np.int64)))
        return latency, peak

    @property
    def done(self) -> bool:
        return self.latency <= self.bound and self.peak <= self.enough


@dataclass(frozen=True, slots=True)
class View:
    """The problem from its front or back. Many schedules are easy to build only from the back."""

    graph: Graph  # if ``backwards``, of the problem with time reversed
    backwards: bool
    left: Floats  # [T] urgency
    stages: Ints  # [Q] of its pipeline
    actor: Flags  # [Q] whether its pipeline is the actor's
    tick: float  # mean duration of a task, the unit of temperatures
    unit: int  # smallest nonzero activation, the unit of prices

    @classmethod
    def of(cls, problem: Problem, *, backwards: bool) -> View:
        """Make a view of a problem."""
        problem = problem.reversed() if backwards else problem
        graph = make_graph(problem)
        actor = graph.pipeline < problem.actor.pipelines
        stages = np.where(actor, problem.actor.stages, problem.critic.stages).astype(np.int64)
        tick = float(np.average(graph.duration, weights=graph.length))
        allocations = graph.memory[graph.memory > 0]
        unit = int(allocations.min()) if allocations.size else 1
        return cls(graph, backwards, urgency(graph), stages, actor, tick, unit)

    def turned(self, word: Ints) -> Ints:
        """Convert a word [T] of this view to one of the front, or back. A word of the back is read
        from its end, with forwards as backwards."""
        if not self.backwards:
            return word
        graph, queue = self.graph, self.graph.queue_of[word]
        last = graph.offset[graph.mate[queue]] + graph.length[queue] - 1
        tasks = last - (word - graph.offset[queue])
        return np.concatenate([tasks[a:b][::-1] for a, b in pairwise(graph.word_at.tolist())])


def random_rules(view: View, capacity: int, chance: np.random.Generator) -> Rules:
    """Return initial rules for a search, with more or less eager forwards."""
    graph = view.graph
    forwards = graph.kind == FORWARD
    bias = chance.normal(size=forwards.size) * chance.choice([0.0, 1.0, 5.0]) * view.tick
    bias += forwards * chance.choice([0.0, 3.0, 10.0, 300.0]) * view.tick
    limit = np.full(forwards.size, UNLIMITED)
    eager = chance.choice([1.0, 1.5, 2.0, 3.0, np.inf])
    if not np.isinf(eager):
        steps = chance.choice([0, 1, 2])
        limit = np.maximum(1, (eager * view.stages).astype(np.int64) - graph.stage * steps)
    polite = np.ones(forwards.size, np.bool_)
    largest = [graph.memory[view.actor == actor].max() for actor in (True, False)]
    rude = chance.choice(3) if sum(largest) <= capacity else chance.choice(2)
    if rude < 2:
        polite[view.actor == bool(rude)] = False
    window = np.full(graph.word_at.size - 1, float(chance.choice([0, 1, 2])))
    return Rules(bias, limit, polite, np.rint(window * view.tick / 3))


def list_schedule(
    view: View, capacity: int, target: int, rounds: int, chance: np.random.Generator
) -> tuple[int, Ints]:
    """Return the latency and the shortest schedule of a search for rules."""
    rules = random_rules(view, capacity, chance)
    word = np.empty(view.left.size, np.int64)
    latency = anneal_rules(
        view.graph, view.left, rules, capacity, target, rounds,
        chance.choice([0.5, 2.0, 4.0]) * view.tick, 0.1 * view.tick,
        chance.choice([1.0, 3.0, 10.0]) * view.tick, int(chance.integers(2**31)), word,
    )  # fmt: skip
    assert latency >= 0  # one model is polite to the other, or both have room
    return int(latency), word


def rounds_for(view: View) -> int:
    return max(1, min(_MOST_ROUNDS, _DECODED_TASKS // view.left.size))


def squeeze(
    view: View,
    word: Ints,
    capacity: int,
    target: int,
    moves: int,
    hot: float,
    firm: float,
    chance: np.random.Generator,
    over: Callable[[], bool],
) -> Ints:
    """Anneal a schedule [T] towards a target latency within a capacity. It may miss either. The
    first temperature and the last price of memory are in a task's mean duration. Returns the
    shortest schedule found within the capacity, or ``word`` if there was none."""
    state = make_state(view.graph, word)
    best, best_word = NOTHING, word.copy()
    segments = max(8, moves * word.size // _SEGMENT_WORK)
    temperatures = pairwise(np.geomspace(hot, _COLD, segments + 1) * view.tick)
    prices = pairwise(np.geomspace(_SOFT, firm, segments + 1) * view.tick)
    for temperature, price in zip(temperatures, prices, strict=True):
        cooling = Cooling(max(1, moves // segments), *temperature, *price, view.unit)
        seed = int(chance.integers(2**31))
        best = anneal_swaps(view.graph, state, capacity, target, cooling, seed, best, best_word)
        if best <= target or over():
            break
    return best_word


Kind = Literal["lower", "shorten"]


class Descent:
    """A search that goes on until nothing can improve or the time is over.

    Tries have their own random numbers, from the seed and the try's number, and ``threads`` tries
    run in parallel. The search builds list schedules from random rules first, which reach the bound
    in most problems without a capacity. After that it anneals:

    - It *lowers* a schedule at the bound, by squeezing it under a cap below its peak.
    - If none is at the bound, it *shortens* one within the capacity: a new one, or, by mild
      annealing, the last one as short as the best, because not every schedule has better ones near
      it. After repeated failures, it also lowers the shortest, which may be optimal.
    - With a capacity, it lowers a schedule at the bound that exceeds the capacity. This is often
      faster than to shorten one within the capacity.

    With each failure, caps come closer to the peak, and annealing takes longer.
    """

    def __init__(self, best: Incumbent, seed: int, threads: int, deadline: float) -> None:
        self._best = best
        self._seed = seed
        self._threads = threads
        self._deadline = deadline
        self._views = [View.of(best.problem, backwards=back) for back in (False, True)]
        self._rounds = self._tries = 0
        unlimited, enough = replace(best.problem, capacity=None), best.problem.capacity or 0.0
        self._loose = Incumbent(unlimited, deadline - best.begun, enough)
        self._failed: dict[Kind, int] = {"lower": 0, "shorten": 0}

    def run(self) -> None:
        """Improve the incumbent. Raises KeyboardInterrupt soon after Ctrl-C."""
        best = self._best
        self._list(best)
        if best.latency > best.bound and best.problem.capacity is not None:
            self._list(self._loose)
        self._last = best.word
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                while not (best.done or self._over()):
                    self._round(pool)
            except KeyboardInterrupt:
                self._deadline = 0.0  # the pool waits for its threads, which check the deadline
                raise

    def _over(self) -> bool:
        return time.monotonic() > self._deadline

    def _next(self) -> tuple[np.random.Generator, View]:
        self._tries += 1
        return np.random.default_rng((self._seed, self._tries)), self._views[self._tries % 2]

    def _list(self, best: Incumbent) -> None:
        for _ in range(_LISTED):
            chance, view = self._next()
            rounds = min(_LISTED_ROUNDS, rounds_for(view))
            _, word = list_schedule(view, best.capacity, best.bound, rounds, chance)
            best.offer(view.turned(word))
            if best.latency <= best.bound or self._over():
                break

    def _round(self, pool: ThreadPoolExecutor) -> None:
        self._rounds += 1
        kind, best = self._kind(), self._best
        make = self._lower if kind == "lower" else self._shorten
        tries = [make(i) for i in range(self._threads)]
        for word in list(pool.map(lambda attempt: attempt(), tries)):
            better = [best.offer(word), self._loose.offer(word)]
            self._failed[kind] = 0 if any(better) else self._failed[kind] + 1
            latency, peak = best.measure(word)
            if latency <= best.latency and peak <= best.capacity:
                self._last = word

    def _kind(self) -> Kind:
        best, bound = self._best, self._best.bound
        if best.latency <= bound:
            return "lower"
        quarters = 0
        if self._loose.latency <= bound:
            quarters = 1 if self._nearly_right else 3
        elif self._failed["shorten"] > _STUCK and best.peak > best.enough:
            quarters = 2  # it may be optimal
        return "lower" if self._rounds % 4 < quarters else "shorten"

    @property
    def _nearly_right(self) -> bool:
        return self._best.latency <= _NEARLY * self._best.bound

    def _shorten(self, _: int) -> Callable[[], Ints]:
        chance, view = self._next()
        start = None
        probability = (
            0.8 if self._nearly_right else 0.5 if self._failed["shorten"] > _STUCK else 0.0
        )
        if chance.random() < probability:
            start = view.turned(self._last), chance.choice(_MILD)
        capacity, bound = self._best.capacity, self._best.bound
        return partial(self._attempt, "shorten", view, chance, capacity, bound, start)

    def _lower(self, i: int) -> Callable[[], Ints]:
        best = self._best
        if self._loose.latency <= best.bound < best.latency:
            best = self._loose
        chance, view = self._next()
        failed = self._failed["lower"]
        drop = _DROP * (1 + i) * 0.5 ** (failed / 3)
        if failed > _STUCK and chance.random() < 0.7:
            # Peaks in between may not exist, or be no easier.
            random_drop = _DROP * (1 + chance.random())
            full_drop = 1 - best.enough / best.peak
            drop = full_drop if full_drop < 3 * _DROP else random_drop
        cap = max(best.enough, min(best.peak - 1, int(best.peak * (1 - drop))))
        start = None
        if failed <= _STUCK or chance.random() >= 0.2:
            start = view.turned(best.word), chance.choice(_WARM)
        return partial(self._attempt, "lower", view, chance, cap, best.latency, start)

    def _attempt(
        self,
        kind: Kind,
        view: View,
        chance: np.random.Generator,
        cap: int,
        target: int,
        start: tuple[Ints, float] | None,
    ) -> Ints:
        is_far = self._best.latency > _FAR * self._best.bound
        stuck = is_far and self._failed[kind] > 1
        if start is None:
            latency, word = list_schedule(view, cap, target, rounds_for(view), chance)
            if latency <= target:
                return view.turned(word)
            start = word, chance.choice(_HOTTER if stuck else _HOT)
        word, hot = start
        longer = _MOVES_A_TASK * 2 ** (self._failed[kind] / _TRIES_A_LENGTH)
        moves = int(word.size * min(longer, _MOST_MOVES_A_TASK))
        firm = chance.choice(_FIRMER) if stuck else _FIRM
        better = squeeze(view, word, cap, target, moves, hot, firm, chance, self._over)
        return view.turned(better)
