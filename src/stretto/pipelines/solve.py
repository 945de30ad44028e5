"""Search for the shortest schedule within the memory, then for less memory at that latency."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from stretto.errors import ConfigError
from stretto.pipelines.pipeline_schedule import PipelineSchedule, ScheduleMetrics, evaluate
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.pipelines.search import Descent, Improvement, Incumbent, View, list_schedule, squeeze

SEEDS = 2**31  # seeds are below this


def descend(best: Incumbent, seed: int, threads: int) -> None:
    Descent(best, seed, threads, best.deadline).run()


@dataclass(frozen=True, slots=True)
class Solution:
    """The best schedule of a search."""

    schedule: PipelineSchedule
    evaluation: ScheduleMetrics
    bound: int  # lower bound on latency, in ticks
    memory_bound: float  # lower bound on memory at this latency
    seconds: float
    trace: tuple[Improvement, ...]
    interrupted: bool = False

    @property
    def makespan(self) -> int:
        return self.evaluation.latency

    @property
    def peak(self) -> float:
        return self.evaluation.peak

    @property
    def status(self) -> str:
        return "at the bound" if self.makespan <= self.bound else "best found"

    @property
    def memory_proved(self) -> bool:
        return self.memory_bound >= self.peak


def solve(
    problem: Problem,
    *,
    seconds: float = 60.0,
    seed: int = 0,
    threads: int = 1,
    memory: float = 0.0,
    keep_interrupted: bool = False,
    search: Callable[[Incumbent, int, int], None] = descend,
) -> Solution:
    """Find the shortest schedule, then one of that latency that needs less memory.

    Every schedule keeps the problem's capacity. Raises ConfigError if a number is out of range.

    Args:
        seconds: longest search. It ends earlier if neither latency nor memory can improve.
        seed: of the random numbers. A seed fixes the order of tries. Their number depends on the
            machine.
        threads: number of parallel searches.
        memory: a peak low enough to stop at, once the latency is at the bound.
        keep_interrupted: return the best schedule so far, if any, on Ctrl-C.
        search: improves the incumbent until its deadline, given the seed and the threads.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds {seconds:g}: must be more than 0", "seconds-not-positive")
    if threads < 1:
        raise ConfigError(f"threads {threads}: must be 1 or more", "no-threads")
    if not 0 <= seed < SEEDS:
        rule = f"must be 0 or more, and less than {SEEDS:,}"
        raise ConfigError(f"seed {seed}: {rule}", "seed-out-of-range")
    _compile()
    best, interrupted = Incumbent(problem, seconds, memory), False
    try:
        search(best, seed, threads)
    except KeyboardInterrupt:
        if not keep_interrupted or not best.word.size:
            raise
        interrupted = True
    schedule = PipelineSchedule.of_tasks(best.graph, best.word)
    evaluation, seconds = evaluate(problem, schedule), time.monotonic() - best.begun
    memory_bound, trace = best.memory_bound / problem.memory_scale, tuple(best.trace)
    return Solution(schedule, evaluation, best.bound, memory_bound, seconds, trace, interrupted)


@cache
def _compile() -> None:
    one = ModelPipelines.of(1, 1, 2, forward=1, backward=1, activation=1.0)
    best = Incumbent(Problem(one, one), 60.0, 0.0)
    chance = np.random.default_rng(0)
    view = View.of(best.problem, backwards=False)
    _, word = list_schedule(view, best.capacity, 0, 2, chance)
    best.offer(squeeze(view, word, 1, 0, 100, 1.0, 1.0, chance, lambda: False))
