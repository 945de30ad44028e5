"""Best schedule that a search has found so far."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from stretto.pipelines.bounds import latency_bound, memory_floor
from stretto.pipelines.graph import Ints, capacity_units, make_graph
from stretto.pipelines.kernels import earliest_starts, latency_of, peak_memory
from stretto.pipelines.problem import Problem


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
        self.memory_bound = round(memory_floor(problem) * problem.memory_scale)
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
