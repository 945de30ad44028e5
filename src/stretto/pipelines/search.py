"""One attempt at a schedule of a given latency within a given memory; and tries at random rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stretto.pipelines.anneal import Cooling, anneal_swaps
from stretto.pipelines.graph import FORWARD, Flags, Floats, Graph, Ints, make_graph
from stretto.pipelines.kernels import make_state
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
