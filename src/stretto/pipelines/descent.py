"""The search: list scheduling for the latency, then annealing under caps that go down."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from stretto.pipelines.graph import Ints
from stretto.pipelines.record import Record
from stretto.pipelines.search import View, list_schedule, make_views, rounds_for, squeeze, turned

_LISTED = 64
"""Searches for rules, short ones, before anything is squeezed."""
_LISTED_ROUNDS = 20
_HOT, _WARM, _MILD = (1.0, 2.0), (0.2, 0.3), (0.1, 0.15, 0.2)
"""First temperatures, in mean durations of a task: for a new schedule, for one that has to change
much, and for one that is nearly right."""
_NEARLY = 1.03
"""Times the bound, below which a schedule within the capacity is nearly right."""
_DROP = 0.07
"""Share by which a cap is first put below the peak."""
_MOVES_A_TASK, _MOST_MOVES_A_TASK, _TRIES_A_LENGTH = 500, 4000, 2
"""Exchanges a task of the first tries and of the longest, and failures until they are doubled."""
_STUCK = 4
"""Failures after which more than one way is tried."""
Try = Callable[[], Ints]


class Descent:
    """Searches until nothing can get better or time is over.

    Tries have random numbers of their own, by the seed and the try's number, and ``threads`` of
    them run at the same time. First, list schedules are built from random rules; without a capacity
    most problems are at the bound then. After that, annealing. It *lowers* a schedule at the bound:
    squeezes it under a cap below its peak. And where there is none yet, it *shortens* one within
    the capacity. Caps come closer to the peak, and annealing takes longer, while tries fail.

    With a capacity, a schedule at the bound that breaks it is lowered too, until it keeps it: this
    is often faster than to shorten one that keeps it.
    """

    def __init__(self, record: Record, seed: int, threads: int, deadline: float) -> None:
        self._record, self._seed, self._threads = record, seed, threads
        self._deadline = deadline
        self._views = make_views(record.problem)
        self._tries = 0
        unlimited = replace(record.problem, capacity=None)
        enough = record.problem.capacity or 0.0
        self._loose = Record(unlimited, deadline - record.begun, enough)
        self._failed = {"lower": 0, "shorten": 0}

    def run(self) -> None:
        """Fill the record."""
        record, loose = self._record, self._loose
        self._list(record)
        if record.latency > record.bound and record.problem.capacity is not None:
            self._list(loose)
        with ThreadPoolExecutor(self._threads) as pool:
            while not record.done and time.monotonic() < self._deadline:
                kind = self._kind()  # of one kind, they take about equally long
                tries = [
                    self._lower(i) if kind == "lower" else self._shorten()
                    for i in range(self._threads)
                ]
                for word in list(pool.map(lambda attempt: attempt(), tries)):
                    better = [record.offer(word), loose.offer(word)]
                    self._failed[kind] = 0 if any(better) else self._failed[kind] + 1

    def _kind(self) -> str:
        """Of the tries that come next."""
        latency, bound = self._record.latency, self._record.bound
        lowered = 1 if latency <= _NEARLY * bound else 3
        lowers = latency <= bound or (
            self._loose.latency <= bound and self._tries // self._threads % 4 < lowered
        )
        return "lower" if lowers else "shorten"

    def _next(self) -> tuple[np.random.Generator, View]:
        """Random numbers and a view of the next try's own."""
        self._tries += 1
        return np.random.default_rng((self._seed, self._tries)), self._views[self._tries % 2]

    def _list(self, record: Record) -> None:
        for _ in range(_LISTED):
            chance, view = self._next()
            _, word = list_schedule(view, record.capacity, record.bound, _LISTED_ROUNDS, chance)
            record.offer(_from_front(view, word))
            if record.latency <= record.bound or time.monotonic() > self._deadline:
                break

    def _shorten(self) -> Try:
        """A try at a lower latency within the capacity."""
        record = self._record
        chance, view = self._next()
        if record.latency <= _NEARLY * record.bound or (
            self._failed["shorten"] > _STUCK and chance.random() < 0.5
        ):
            word, hot = self._seen_from(view, record), chance.choice(_MILD)
            return partial(
                self._squeezed, "shorten", view, word, record.capacity, record.bound, hot, chance
            )
        return partial(self._new, "shorten", view, record.capacity, record.bound, chance)

    def _lower(self, i: int) -> Try:
        """A try at less memory without more latency."""
        at_bound = self._record.latency <= self._record.bound
        record = self._record if at_bound else self._loose
        chance, view = self._next()
        failed = self._failed["lower"]
        drop = _DROP * (1 + i) * 0.5 ** (failed / 3)
        if failed > _STUCK and chance.random() < 0.7:
            # Peaks between may not exist, or be no easier.
            far = _DROP * (1 + chance.random())
            wanted = 1 - record.enough / record.peak
            drop = wanted if wanted < 3 * _DROP else far
        cap = max(record.enough, min(record.peak - 1, int(record.peak * (1 - drop))))
        if failed > _STUCK and chance.random() < 0.2:
            return partial(self._new, "lower", view, cap, record.latency, chance)
        word, hot = self._seen_from(view, record), chance.choice(_WARM)
        return partial(self._squeezed, "lower", view, word, cap, record.latency, hot, chance)

    def _seen_from(self, view: View, record: Record) -> Ints:
        return turned(self._views[0], record.word) if view.backwards else record.word

    def _new(
        self, kind: str, view: View, cap: int, target: int, chance: np.random.Generator
    ) -> Ints:
        """A list schedule, squeezed if it is too long."""
        latency, word = list_schedule(view, cap, target, rounds_for(view), chance)
        if latency <= target:
            return _from_front(view, word)
        return self._squeezed(kind, view, word, cap, target, chance.choice(_HOT), chance)

    def _squeezed(
        self,
        kind: str,
        view: View,
        word: Ints,
        cap: int,
        target: int,
        hot: float,
        chance: np.random.Generator,
    ) -> Ints:
        longer = _MOVES_A_TASK * 2 ** (self._failed[kind] / _TRIES_A_LENGTH)
        moves = int(word.size * min(longer, _MOST_MOVES_A_TASK))
        better = squeeze(view, word, cap, target, moves, hot, chance, self._deadline)
        return _from_front(view, better)


def _from_front(view: View, word: Ints) -> Ints:
    return turned(view, word) if view.backwards else word
