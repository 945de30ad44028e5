"""Proofs by constraint programming: CP-SAT of OR-tools."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from stretto.pipelines.graph import FORWARD, Ints, earliest_starts, heads, tails
from stretto.pipelines.search import Descent, Record

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntervalVar, IntVar


def by_cp_sat(record: Record, seed: int, threads: int) -> None:
    """Improve, and prove, what the usual search has found in a quarter of the time."""
    Descent(record, seed, threads, record.begun + (record.deadline - record.begun) / 4).run()
    improve(record, seed, threads)


def improve(record: Record, seed: int, threads: int) -> None:
    """Better a record until it is proved to be the best, or time is over.

    Above the bound, half of the time that is left goes into a lower latency or the proof that there
    is none; then memory is minimised at the latency reached.
    """
    if record.latency > record.bound:
        model, at, holding = _model(record)
        if record.problem.capacity is not None:
            _cap(model, holding, record.capacity)
        end = model.new_int_var(record.bound, record.latency, "latency")
        graph = record.graph
        for q in np.flatnonzero(graph.after < 0).tolist():
            last = int(graph.offset[q] + graph.length[q]) - 1
            model.add(end >= at[last] + int(graph.duration[q]))
        model.minimize(end)
        seconds = (record.deadline - time.monotonic()) / 2
        record.bound = max(record.bound, _solve(record, model, at, seconds, seed, threads))
    if not record.done:
        model, at, holding = _model(record)
        peak = model.new_int_var(record.memory_bound, record.peak, "peak")
        _cap(model, holding, peak)
        model.minimize(peak)
        seconds = record.deadline - time.monotonic()
        lowest = _solve(record, model, at, seconds, seed, threads)
        record.memory_bound = max(record.memory_bound, lowest)


def _starts(record: Record) -> Ints:
    starts = np.empty(record.word.size, np.int64)
    earliest_starts(record.graph, record.word, starts, np.empty_like(starts))
    return starts


def _model(
    record: Record,
) -> tuple[CpModel, list[IntVar], list[list[tuple[IntervalVar, int]]]]:
    """The CP-SAT model: starts of all tasks [T] by the record's latency, and memory by device."""
    from ortools.sat.python.cp_model import CpModel

    problem, graph, latency = record.problem, record.graph, record.latency
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
    record: Record, model: CpModel, at: Sequence[IntVar], seconds: float, seed: int, threads: int
) -> int:
    """Start from the record, offer it what is found, and return a bound of the objective."""
    from ortools.sat.python import cp_model

    for variable, start in zip(at, _starts(record).tolist(), strict=True):
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
        device = record.graph.device[record.graph.queue_of]
        record.offer(np.lexsort((starts, device)).astype(np.int64))
    bound: float = solver.best_objective_bound  # before the first one, minus infinity
    return math.ceil(max(0.0, bound) - 1e-6)
