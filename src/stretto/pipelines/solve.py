"""Finding a schedule: the shortest within the memory, then less memory at that latency."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from stretto.errors import ConfigError
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.pipelines.schedule import Evaluation, PipelineSchedule, evaluate_tasks
from stretto.pipelines.search import (
    Descent,
    Improvement,
    Record,
    list_schedule,
    make_views,
    squeeze,
)

SEEDS = 2**31
"""Seeds are below this."""
Status = Literal["proved optimal", "at the bound", "best found"]


def descend(record: Record, seed: int, threads: int) -> None:
    """Fill a record until nothing can get better or time is over; see :class:`Descent`."""
    Descent(record, seed, threads, record.deadline).run()


@dataclass(frozen=True, slots=True)
class Solution:
    """The best schedule of a search.

    Attributes:
        schedule: the schedule.
        evaluation: its latency, memory and bubbles.
        bound: latency below which there is no schedule, in ticks.
        status: of its latency: ``at the bound``, which proves it the shortest; ``proved optimal``,
            above the bound of the formula, where the search can prove it; or ``best found``.
        memory_bound: memory below which there is no schedule of this latency.
        seconds: duration of the search.
        trace: its improvements.
        interrupted: whether the search was ended by an interrupt.
    """

    schedule: PipelineSchedule
    evaluation: Evaluation
    bound: int
    status: Status
    memory_bound: float
    seconds: float
    trace: tuple[Improvement, ...]
    interrupted: bool = False

    @property
    def makespan(self) -> int:
        """Latency of the schedule, in ticks."""
        return self.evaluation.latency

    @property
    def peak(self) -> float:
        """Highest memory of the schedule on any device."""
        return self.evaluation.peak

    @property
    def memory_proved(self) -> bool:
        """Return whether it is proved that no schedule of this latency needs less memory."""
        return self.memory_bound >= self.peak


def solve(
    problem: Problem,
    *,
    seconds: float = 60.0,
    seed: int = 0,
    threads: int = 1,
    memory: float = 0.0,
    keep_interrupted: bool = False,
    search: Callable[[Record, int, int], None] = descend,
) -> Solution:
    """Look for the shortest schedule, then for one of that latency that needs less memory.

    Args:
        problem: with its capacity, which every schedule keeps.
        seconds: longest search; it is shorter if latency and memory cannot get any better.
        seed: of the random numbers. The same seed tries the same things in the same order; how far
            it gets depends on the machine.
        threads: number of threads that search at the same time.
        memory: a peak that is low enough to stop at, once the latency is at the bound.
        keep_interrupted: return what has been found when Ctrl-C strikes, instead of raising.
        search: fills the record until its deadline, given the seed and the threads.

    Raises:
        ConfigError: a number is out of range.
        KeyboardInterrupt: it struck, and was not to be kept, or before there was any schedule.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds {seconds:g}: must be more than 0", "seconds-not-positive")
    if threads < 1:
        raise ConfigError(f"threads {threads}: must be 1 or more", "no-threads")
    if not 0 <= seed < SEEDS:
        rule = f"must be 0 or more, and less than {SEEDS:,}"
        raise ConfigError(f"seed {seed}: {rule}", "seed-out-of-range")
    _compile()
    record = Record(problem, seconds, memory)
    try:
        search(record, seed, threads)
    except KeyboardInterrupt:
        if not keep_interrupted or not record.word.size:
            raise
        return replace(_solution(record), interrupted=True)
    return _solution(record)


@cache
def _compile() -> None:
    one = ModelPipelines.of(1, 1, 2, forward=1, backward=1, activation=1.0)
    record = Record(Problem(one, one), 60.0, 0.0)
    chance = np.random.default_rng(0)
    view, _ = make_views(record.problem)
    _, word = list_schedule(view, record.capacity, 0, 2, chance)
    record.offer(squeeze(view, word, 1, 0, 100, 1.0, 1.0, chance, lambda: False))


def _solution(record: Record) -> Solution:
    problem = record.problem
    status: Status = "best found"
    if record.latency == record.formula:
        status = "at the bound"
    elif record.latency <= record.bound:
        status = "proved optimal"
    return Solution(
        schedule=PipelineSchedule.of_tasks(record.graph, record.word),
        evaluation=evaluate_tasks(problem, record.graph, record.word),
        bound=record.bound,
        status=status,
        memory_bound=record.memory_bound / problem.memory_scale,
        seconds=time.monotonic() - record.begun,
        trace=tuple(record.trace),
    )
