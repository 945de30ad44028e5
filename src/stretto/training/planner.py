"""The choice of a mini-batch's schedule, and the latencies that it is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.config import PipelineConfig
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.executor.stages import Name
from stretto.pipelines.problem import Problem, Side
from stretto.pipelines.schedule import PipelineSchedule, evaluate
from stretto.pipelines.solve import SEEDS, solve

GUESSED_TICKS = 1000
"""The guessed forward latency of the larger model's stages, before anything is measured."""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The plan by which a mini-batch runs.

    Attributes:
        problem: that the schedule was made for.
        schedule: it.
        predicted_us: microseconds that it takes by the measured latencies; ``None`` before there
            are any.
    """

    problem: Problem
    schedule: PipelineSchedule
    predicted_us: int | None


class Planner:
    """Schedules, one for each number of micro-batches, made when it first comes.

    Before latencies are measured all stages of a model count alike, in proportion to its
    parameters, and a backward as two forwards.

    Args:
        parameters: of each model.
    """

    def __init__(self, config: PipelineConfig, parameters: Mapping[Name, int], seed: int) -> None:
        self._config, self._seed = config, seed % SEEDS
        self._plans: dict[int, PipelinePlan] = {}
        self._measured = False
        largest = max(parameters[m] / config.stages(m) for m in ("actor", "critic"))
        self._problem = Problem(
            self._guess("actor", parameters["actor"] / largest),
            self._guess("critic", parameters["critic"] / largest),
        )

    @property
    def measured(self) -> bool:
        """Return whether :meth:`measure` has been called."""
        return self._measured

    def measure(self, problem: Problem) -> None:
        """Plan by these latencies, in microseconds, from now on."""
        self._problem, self._measured = problem, True
        self._plans.clear()

    def plan(self, micro_batches: int) -> PipelinePlan:
        """Plan so many micro-batches of each model, over all its pipelines."""
        if micro_batches not in self._plans:
            self._plans[micro_batches] = self._make(micro_batches)
        return self._plans[micro_batches]

    def _make(self, micro_batches: int) -> PipelinePlan:
        actor, critic = (
            replace(side, micro_batches=micro_batches // side.pipelines)
            for side in self._problem.sides
        )
        problem = Problem(actor, critic)
        if self._config.schedule == "serial":
            schedule = one_f_one_b(problem)
        else:
            schedule = solve(problem, seconds=self._config.seconds, seed=self._seed).schedule
        latency = evaluate(problem, schedule).latency
        return PipelinePlan(problem, schedule, latency if self._measured else None)

    def _guess(self, model: Name, parameters: float) -> Side:
        """Guess a model's side of the problem; ``parameters`` relative to the larger stages'."""
        stages = self._config.stages(model)
        forward = max(round(GUESSED_TICKS * parameters / stages), 1)
        return Side.of(
            stages,
            self._config.pipelines(model),
            1,
            forward=forward,
            backward=2 * forward,
            activation=forward,
        )
