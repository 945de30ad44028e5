"""The search: list scheduling for the latency, then annealing under caps that go down."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stretto.pipelines.graph import Ints
from stretto.pipelines.record import Record
from stretto.pipelines.search import (
    NOTHING,
    View,
    list_schedule,
    make_views,
    rounds_for,
    squeeze,
    turned,
)

_LISTED = 64
"""Searches for rules, short ones, before anything is squeezed."""
_LISTED_ROUNDS = 20
_HOT, _WARM, _MILD = (1.0, 2.0), (0.2, 0.3, 0.6), (0.15, 0.2)
"""First temperatures, in mean durations of a task: for a new schedule, for one that has to change
much, and for one that is nearly right."""
_NEARLY, _FAR = 1.03, 1.15
"""Multiples of the bound. Below the first, a schedule within the capacity is nearly right. Above
the second, the capacity may be so tight that the bound is out of reach."""
_DROP = 0.07
"""Share by which a cap is first put below the peak."""
_MOVES_A_TASK, _MOST_MOVES_A_TASK, _TRIES_A_LENGTH = 500, 2000, 2
"""Exchanges per task in the first tries and in the longest, and failures until they double."""
_STUCK = 4
"""Failures after which more than one way is tried."""
_HOTTER = (1.0, 3.0, 8.0)
_FIRM, _FIRMER = 1.0, (1.0, 4.0, 16.0)
"""Last prices of memory, in mean durations: mostly, and when stuck. Under a tight capacity a
schedule that breaks it can be shorter by more than a low price; and good ones lie further apart.
"""
_PATIENCE = 4
"""Rounds without a shorter schedule, after which a walk starts anew."""
Try = Callable[[], Ints]


@dataclass
class _Walk:
    """A walk from one schedule within the capacity to others that are no longer, by mild annealing.

    Not every schedule has better ones near it. So a walk goes on from any that is as short. If that
    does not help, it starts anew somewhere else, and after that from the best schedule again.

    Attributes:
        word: [T] schedule at which the walk is.
        latency: of that schedule, in ticks.
        failed: tries since the latency fell.
        apart: the walk did not start from the best schedule.
    """

    word: Ints
    latency: int
    failed: int = 0
    apart: bool = False


class Descent:
    """A search that goes on until nothing can get better or time is over.

    Tries have random numbers of their own, by the seed and the try's number, and ``threads`` of
    them run at the same time. First, list schedules are built from random rules; without a capacity
    most problems are at the bound then. After that, annealing. It *lowers* a schedule at the bound:
    squeezes it under a cap below its peak. And where there is none yet, it *shortens* one within
    the capacity; where that fails again and again, the shortest is lowered in between, as it may be
    as short as can be. Caps come closer to the peak, and annealing takes longer, while tries fail.

    With a capacity, a schedule at the bound that breaks it is lowered too, until it keeps it: this
    is often faster than to shorten one that keeps it.
    """

    def __init__(self, record: Record, seed: int, threads: int, deadline: float) -> None:
        self._record, self._seed, self._threads = record, seed, threads
        self._deadline = deadline
        self._rounds = 0
        self._views = make_views(record.problem)
        self._tries = 0
        unlimited = replace(record.problem, capacity=None)
        enough = record.problem.capacity or 0.0
        self._loose = Record(unlimited, deadline - record.begun, enough)
        self._failed = {"lower": 0, "shorten": 0}
        self._walks: list[_Walk] = []

    def run(self) -> None:
        """Fill the record.

        Raises:
            KeyboardInterrupt: soon after it has struck; the record holds what was found until then.
        """
        record, loose = self._record, self._loose
        self._list(record)
        if record.latency > record.bound and record.problem.capacity is not None:
            self._list(loose)
        self._walks = [_Walk(record.word, record.latency) for _ in range(self._threads)]
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                while not (record.done or self._over()):
                    self._round(pool)
            except KeyboardInterrupt:
                self._deadline = 0.0  # the pool waits for its threads, and these look at it
                raise

    @property
    def _nearly_right(self) -> bool:
        return self._record.latency <= _NEARLY * self._record.bound

    def _stuck(self, kind: str) -> bool:
        return self._failed[kind] > 1 and self._record.latency > _FAR * self._record.bound

    def _over(self) -> bool:
        return time.monotonic() > self._deadline

    def _round(self, pool: ThreadPoolExecutor) -> None:
        """A try in each thread, all of one kind: so they take about equally long."""
        self._rounds += 1
        kind = self._kind()
        tries = [
            self._lower(i) if kind == "lower" else self._shorten(i) for i in range(self._threads)
        ]
        for i, word in enumerate(list(pool.map(lambda attempt: attempt(), tries))):
            better = [self._record.offer(word), self._loose.offer(word)]
            self._failed[kind] = 0 if any(better) else self._failed[kind] + 1
            self._walk(i, word)

    def _walk(self, i: int, word: Ints) -> None:
        """Take a try's schedule, or the best one, if that leads on."""
        walk, record = self._walks[i], self._record
        latency, peak = record.measure(word)
        walk.failed += 1
        if peak <= record.capacity and latency <= walk.latency:
            walk.failed = 0 if latency < walk.latency else walk.failed
            walk.word, walk.latency = word, latency
        if walk.latency > record.latency and not walk.apart:
            walk.word, walk.latency, walk.failed = record.word, record.latency, 0

    def _step(self, i: int, view: View, chance: np.random.Generator) -> tuple[Ints, float]:
        """A schedule to anneal, and how warm."""
        walk, loose = self._walks[i], self._loose
        if walk.failed > _PATIENCE:
            walk.failed, walk.apart = 0, not walk.apart
            if walk.apart and loose.word.size:
                walk.latency = NOTHING
                return self._seen_from(view, loose.word), chance.choice(_WARM)
            walk.word, walk.latency = self._record.word, self._record.latency
        return self._seen_from(view, walk.word), chance.choice(_MILD)

    def _kind(self) -> str:
        """Kind of the next round's tries: ``lower`` or ``shorten``."""
        record, bound = self._record, self._record.bound
        if record.latency <= bound:
            return "lower"
        of_four = 0
        if self._loose.latency <= bound:
            of_four = 1 if self._nearly_right else 3
        elif self._failed["shorten"] > _STUCK and record.peak > record.enough:
            of_four = 2  # it may be as short as can be
        return "lower" if self._rounds % 4 < of_four else "shorten"

    def _next(self) -> tuple[np.random.Generator, View]:
        self._tries += 1
        return np.random.default_rng((self._seed, self._tries)), self._views[self._tries % 2]

    def _list(self, record: Record) -> None:
        for _ in range(_LISTED):
            chance, view = self._next()
            rounds = min(_LISTED_ROUNDS, rounds_for(view))
            _, word = list_schedule(view, record.capacity, record.bound, rounds, chance)
            record.offer(_from_front(view, word))
            if record.latency <= record.bound or self._over():
                break

    def _shorten(self, i: int) -> Try:
        """A try at a lower latency within the capacity."""
        record = self._record
        chance, view = self._next()
        goes_on = 0.8 if self._nearly_right else 0.5 if self._failed["shorten"] > _STUCK else 0.0
        if chance.random() < goes_on:
            word, hot = self._step(i, view, chance)
            return partial(
                self._squeezed, "shorten", view, word, record.capacity, record.bound, hot, chance
            )
        return partial(self._new, "shorten", view, record.capacity, record.bound, chance)

    def _lower(self, i: int) -> Try:
        """A try at less memory without more latency."""
        record = self._record
        if self._loose.latency <= record.bound < record.latency:
            record = self._loose
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
        word, hot = self._seen_from(view, record.word), chance.choice(_WARM)
        return partial(self._squeezed, "lower", view, word, cap, record.latency, hot, chance)

    def _seen_from(self, view: View, word: Ints) -> Ints:
        return turned(self._views[0], word) if view.backwards else word

    def _new(
        self, kind: str, view: View, cap: int, target: int, chance: np.random.Generator
    ) -> Ints:
        latency, word = list_schedule(view, cap, target, rounds_for(view), chance)
        if latency <= target:
            return _from_front(view, word)
        hot = chance.choice(_HOTTER if self._stuck(kind) else _HOT)
        return self._squeezed(kind, view, word, cap, target, hot, chance)

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
        firm = chance.choice(_FIRMER) if self._stuck(kind) else _FIRM
        better = squeeze(view, word, cap, target, moves, hot, firm, chance, self._over)
        return _from_front(view, better)


def _from_front(view: View, word: Ints) -> Ints:
    return turned(view, word) if view.backwards else word
