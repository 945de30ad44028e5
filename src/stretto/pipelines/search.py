"""The search: list scheduling for the latency, then annealing under caps that go down."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

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
"""Most tasks decoded, and most rounds, in one search for rules; a tenth of a second."""
_SEGMENT_WORK = 300_000_000
"""Exchanges between two looks at the clock, times tasks: tenths of a second."""
_COLD, _SOFT = 0.05, 0.3
"""Last temperature, and first price of memory, in mean durations of a task."""
_REPAIRS, _EDGES = 0.2, 0.5
NOTHING = 2**60
"""A latency above all."""
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


@dataclass(frozen=True, slots=True)
class Improvement:
    """A better schedule than before.

    Attributes:
        seconds: since the search began.
        latency: of the schedule.
        peak: its memory.
    """

    seconds: float
    latency: int
    peak: float


class Record:
    """The best schedule: the shortest, and of those the one with the lowest peak of memory.

    Attributes:
        problem: that is solved.
        graph: its arrays.
        begun: when the search began.
        deadline: when it has to end.
        capacity: of memory, in the graph's units.
        enough: a peak that is low enough, in the graph's units.
        formula: the lower bound of the latency by formula.
        bound: the best lower bound of the latency.
        memory_bound: the best lower bound of the peak at the best latency, in the graph's units.
        word: [T] the best schedule.
        latency: its latency.
        peak: its peak, in the graph's units.
        trace: how it became better.
    """

    def __init__(self, problem: Problem, seconds: float, enough: float) -> None:
        self.problem = problem
        self.graph = make_graph(problem)
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.capacity = capacity_units(problem, problem.capacity)
        self.formula = self.bound = latency_bound(problem)
        self.memory_bound = int(self.graph.memory.max())
        self.enough = max(self.memory_bound, capacity_units(problem, enough))
        self.word: Ints = np.empty(0, np.int64)
        self.latency = self.peak = int(np.iinfo(np.int64).max)
        self.trace: list[Improvement] = []

    def offer(self, word: Ints) -> bool:
        """Take a valid schedule [T] within the capacity if it is better; returns whether it is."""
        latency, peak = self.measure(word)
        if peak > self.capacity or (latency, peak) >= (self.latency, self.peak):
            return False
        self.word, self.latency, self.peak = word.copy(), latency, peak
        self.trace.append(
            Improvement(time.monotonic() - self.begun, latency, peak / self.problem.memory_scale)
        )
        return True

    def measure(self, word: Ints) -> tuple[int, int]:
        """Latency and peak, in the graph's units, of a valid schedule [T]."""
        starts, order = np.empty(word.size, np.int64), np.empty(word.size, np.int64)
        earliest_starts(self.graph, word, starts, order)
        latency = int(latency_of(self.graph, word, starts))
        peak = int(peak_memory(self.graph, word, np.zeros(self.problem.devices, np.int64)))
        return latency, peak

    @property
    def done(self) -> bool:
        """Return whether latency and memory are as good as can be, or as was asked for."""
        return self.latency <= self.bound and self.peak <= self.enough


@dataclass(frozen=True, slots=True)
class View:
    """The problem from one of its ends.

    A schedule that is easy to build from the front may be hard to build from the back, and the
    other way round; so both are tried.

    Attributes:
        graph: the problem's, or that of the problem with time running backwards.
        backwards: whether time runs backwards.
        left: [T] of :func:`~stretto.pipelines.listing.urgency`.
        stages: [Q] of each queue's pipeline.
        actor: [Q] whether the queue is the actor's.
        tick: mean duration of a task; temperatures are multiples of it.
        unit: the smallest activation that takes memory; prices are for so much too much.
    """

    graph: Graph
    backwards: bool
    left: Floats
    stages: Ints
    actor: Flags
    tick: float
    unit: int


def make_views(problem: Problem) -> tuple[View, View]:
    """Make the views of the problem from the front and from the back."""
    return _view(problem, backwards=False), _view(problem.reversed(), backwards=True)


def _view(problem: Problem, *, backwards: bool) -> View:
    graph = make_graph(problem)
    actor = graph.pipeline < problem.actor.pipelines
    taken = graph.memory[graph.memory > 0]
    return View(
        graph=graph,
        backwards=backwards,
        left=urgency(graph),
        stages=np.where(actor, problem.actor.stages, problem.critic.stages).astype(np.int64),
        actor=actor,
        tick=float(np.average(graph.duration, weights=graph.length)),
        unit=int(taken.min()) if taken.size else 1,
    )


def turned(view: View, word: Ints) -> Ints:
    """A word [T] of one view as a word of the other: read from its end, forwards as backwards."""
    graph = view.graph
    queue = graph.queue_of[word]
    mate = graph.mate[queue]
    tasks = graph.offset[mate] + graph.length[queue] - 1 - (word - graph.offset[queue])
    at = graph.word_at.tolist()
    return np.concatenate([tasks[a:b][::-1] for a, b in pairwise(at)])


def random_rules(view: View, capacity: int, chance: np.random.Generator) -> Rules:
    """A place to start the search for rules from: forwards more or less eager, by all means."""
    graph = view.graph
    forwards = graph.kind == FORWARD
    bias = chance.normal(size=forwards.size) * chance.choice([0.0, 1.0, 5.0]) * view.tick
    bias += forwards * chance.choice([0.0, 3.0, 10.0, 300.0]) * view.tick
    eager = chance.choice([1.0, 1.5, 2.0, 3.0, np.inf])
    if np.isinf(eager):
        limit = np.full(forwards.size, UNLIMITED)
    else:
        steps = chance.choice([0, 1, 2])
        limit = np.maximum(1, (eager * view.stages).astype(np.int64) - graph.stage * steps)
    polite = np.ones(forwards.size, np.bool_)
    largest = [graph.memory[view.actor == side].max() for side in (True, False)]
    rude = chance.choice(3) if sum(largest) <= capacity else chance.choice(2)
    if rude < 2:
        polite[view.actor == bool(rude)] = False
    window = np.full(graph.word_at.size - 1, float(chance.choice([0, 1, 2])))
    return Rules(bias, limit, polite, np.rint(window * view.tick / 3))


def list_schedule(
    view: View, capacity: int, target: int, rounds: int, chance: np.random.Generator
) -> tuple[int, Ints]:
    """The shortest schedule of a search for rules, and its latency."""
    rules = random_rules(view, capacity, chance)
    word = np.empty(view.left.size, np.int64)
    latency = anneal_rules(
        view.graph, view.left, rules, capacity, target, rounds,
        chance.choice([0.5, 2.0, 4.0]) * view.tick, 0.1 * view.tick,
        chance.choice([1.0, 3.0, 10.0]) * view.tick, int(chance.integers(2**31)), word,
    )  # fmt: skip
    assert latency >= 0  # one model is polite to the other, or there is room for both
    return int(latency), word


def rounds_for(view: View) -> int:
    """Schedules to build in one search for rules."""
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
    """Anneal a schedule towards a latency within a capacity; it may miss either.

    Args:
        word: [T] to start from.
        capacity: memory of each device, in the graph's units.
        target: latency at which to stop.
        hot: first temperature, as a multiple of a task's mean duration.

    Returns:
        The shortest schedule within the capacity that was met; ``word`` if there was none.
    """
    state = make_state(view.graph, word)
    best, best_word = NOTHING, word.copy()
    segments = max(8, moves * word.size // _SEGMENT_WORK)
    temperatures = np.geomspace(hot, _COLD, segments + 1) * view.tick
    prices = np.geomspace(_SOFT, firm, segments + 1) * view.tick
    for i in range(segments):
        cooling = Cooling(
            max(1, moves // segments), temperatures[i], temperatures[i + 1],
            prices[i], prices[i + 1], view.unit, _REPAIRS, _EDGES,
        )  # fmt: skip
        seed = int(chance.integers(2**31))
        best = anneal_swaps(view.graph, state, capacity, target, cooling, seed, best, best_word)
        if best <= target or over():
            break
    return best_word


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
