"""Proofs by constraint programming: CP-SAT of OR-tools."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from stretto.pipelines.graph import FORWARD, Ints, earliest_starts, heads, tails
from stretto.pipelines.search import Descent, Incumbent

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntervalVar, IntVar


def by_cp_sat(incumbent: Incumbent, seed: int, threads: int) -> None:
    """Improve, and prove, what the usual search has found in a quarter of the time."""
    Descent(
        incumbent, seed, threads, incumbent.begun + (incumbent.deadline - incumbent.begun) / 4
    ).run()
    improve(incumbent, seed, threads)


def improve(incumbent: Incumbent, seed: int, threads: int) -> None:
    """Better an incumbent until it is proved to be the best, or time is over.

    Above the bound, half of the time that is left goes into a lower latency or the proof that there
    is none; then memory is minimised at the latency reached.
    """
    if incumbent.latency > incumbent.bound:
        model, at, holding = _model(incumbent)
        if incumbent.problem.capacity is not None:
            _cap(model, holding, incumbent.capacity)
        end = model.new_int_var(incumbent.bound, incumbent.latency, "latency")
        graph = incumbent.graph
        for q in np.flatnonzero(graph.after < 0).tolist():
            last = int(graph.offset[q] + graph.length[q]) - 1
            model.add(end >= at[last] + int(graph.duration[q]))
        model.minimize(end)
        seconds = (incumbent.deadline - time.monotonic()) / 2
        incumbent.bound = max(incumbent.bound, _solve(incumbent, model, at, seconds, seed, threads))
    if not incumbent.done:
        model, at, holding = _model(incumbent)
        peak = model.new_int_var(incumbent.memory_bound, incumbent.peak, "peak")
        _cap(model, holding, peak)
        model.minimize(peak)
        seconds = incumbent.deadline - time.monotonic()
        lowest = _solve(incumbent, model, at, seconds, seed, threads)
        incumbent.memory_bound = max(incumbent.memory_bound, lowest)


def _starts(incumbent: Incumbent) -> Ints:
    starts = np.empty(incumbent.word.size, np.int64)
    earliest_starts(incumbent.graph, incumbent.word, starts, np.empty_like(starts))
    return starts


def _model(
    incumbent: Incumbent,
) -> tuple[CpModel, list[IntVar], list[list[tuple[IntervalVar, int]]]]:
    """The CP-SAT model: starts of all tasks [T] by the latency so far, and memory by device."""
    from ortools.sat.python.cp_model import CpModel

    problem, graph, latency = incumbent.problem, incumbent.graph, incumbent.latency
    model = CpModel()
    at: list[IntVar] = []
    for q, (first, rest) in enumerate(
        zip(heads(graph).tolist(), tails(graph).tolist(), strict=True)
    ):
        ticks, count = int(graph.duration[q]), int(graph.length[q])
        at += [
            model.new_int_var(first + i * ticks, latency - rest - (count - i) * ticks, f"{q}.{i}")
            for i in range(count)
        ]
    running: list[list[IntervalVar]] = [[] for _ in range(problem.devices)]
    holding: list[list[tuple[IntervalVar, int]]] = [[] for _ in range(problem.devices)]
    for task, start in enumerate(at):
        q = int(graph.queue_of[task])
        d, i, ticks = int(graph.device[q]), task - int(graph.offset[q]), int(graph.duration[q])
        running[d].append(model.new_fixed_size_interval_var(start, ticks, f"run {task}"))
        if i:
            model.add(start >= at[task - 1] + ticks)
        b = int(graph.before[q])
        if b >= 0:
            earlier = at[int(graph.offset[b]) + i]
            model.add(start >= earlier + int(graph.duration[b] + graph.delay[q]))
        if graph.kind[q] == FORWARD and graph.memory[q]:
            mate = int(graph.mate[q])
            end = at[int(graph.offset[mate]) + i] + int(graph.duration[mate])
            held = model.new_int_var(0, latency, f"held {task}")
            interval = model.new_interval_var(start, held, end, f"hold {task}")
            holding[d].append((interval, int(graph.memory[q])))
    for intervals in running:
        model.add_no_overlap(intervals)
    return model, at, holding


def _cap(
    model: CpModel,
    holding: Sequence[Sequence[tuple[IntervalVar, int]]],
    capacity: IntVar | int,
) -> None:
    for of_device in holding:
        intervals, memory = [i for i, _ in of_device], [m for _, m in of_device]
        model.add_cumulative(intervals, memory, capacity)


def _solve(
    incumbent: Incumbent,
    model: CpModel,
    at: Sequence[IntVar],
    seconds: float,
    seed: int,
    threads: int,
) -> int:
    """Start from the incumbent, offer it what is found, and return a bound of the objective."""
    from ortools.sat.python import cp_model

    for variable, start in zip(at, _starts(incumbent).tolist(), strict=True):
        model.add_hint(variable, start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.1)
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed
    # Its own handler of Ctrl-C would swallow it, and leave none behind: the next one would end the
    # process. On a thread the search can be told to stop.
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as thread:
        solving = thread.submit(solver.solve, model)
        try:
            status = solving.result()
        except BaseException:
            solver.stop_search()
            raise
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        starts = np.array([solver.value(variable) for variable in at])
        device = incumbent.graph.device[incumbent.graph.queue_of]
        incumbent.offer(np.lexsort((starts, device)).astype(np.int64))
    bound: float = solver.best_objective_bound  # before the first one, minus infinity
    return math.ceil(max(0.0, bound) - 1e-6)
