"""Training through fused pipelines: every rank holds a stage of the actor and one of the critic.

All ranks have the same learner, and get the same calls with the same batches (SPMD), as ranks that
hold shards do (:mod:`stretto.training.sharded`). Each rank runs its own tasks of a schedule that
covers all ranks, and takes part in the sums of metrics and norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.algorithms.reductions import Metrics
from stretto.bounds import shares
from stretto.config import Config, PipelineConfig
from stretto.config.training_config import token_budget
from stretto.models.forward import by_token_budget
from stretto.models.mapped import take
from stretto.models.shards import full_parameters, of_all_ranks
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.executor.executor import PipelineExecutor, TaskWork, join_slices
from stretto.pipelines.executor.instructions import Timings, makespan_us, profile
from stretto.pipelines.executor.stages import (
    NAMES,
    Name,
    Stage,
    StageOwners,
    check_stages,
    cut,
    layout_of,
    slice_stage,
)
from stretto.pipelines.pipeline_schedule import PipelineSchedule, evaluate
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.pipelines.solve import SEEDS, solve
from stretto.training.backprop import divided
from stretto.training.divided import Division
from stretto.training.losses import Losses, MicroBatch
from stretto.training.staged import StageModel
from stretto.training.trained import LearningRate, require_trained
from stretto.types import Stats

MEASURED_RUN = 2
"""The mini-batch whose latencies are measured. The first is slow for unrelated reasons."""


@dataclass(eq=False)
class PipelinedBackprop:
    """Runs this rank's passes of both models, by a schedule of all ranks. Latencies are measured in
    the second mini-batch, and new schedules are made for them. If a mini-batch has fewer responses
    than there are pipelines, blank micro-batches fill the rest. ``budget`` limits a micro-batch's
    tokens if the settings do not give a number of micro-batches.
    """

    models: Mapping[Name, StageModel]
    executor: PipelineExecutor
    losses: Losses
    planner: Planner
    config: PipelineConfig
    budget: int

    def __post_init__(self) -> None:
        self._runs = 0
        # Per mini-batch: first to last task, a rank's mean work, predicted time.
        self._seconds: list[tuple[float, float, float]] = []

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        count = self.config.micro_batches or len(by_token_budget(tokens, self.budget))
        return divided(tokens, count, self.config.multiple)

    def run(
        self, batches: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Run the passes of a mini-batch. An actor that is not trained has its passes too, and its
        gradients are discarded, because fused schedules cover both models and steps with a frozen
        actor are few. A collective.
        """
        missing = -len(batches) % self.config.multiple
        batches = [*batches, *[MicroBatch.blank(batches[0])] * missing]
        layout = self.executor.layout
        batches = shares(batches, layout.replicas)[layout.replica(self.executor.rank)]
        plan = self.planner.plan(len(batches))
        timings, metrics = self.passes(plan, batches, kl_coef)
        if not trains_actor:
            self.models["actor"].discard()
        self._time(of_all_ranks(timings), plan, measures=not missing)
        names: Sequence[Name] = ("critic", "actor") if trains_actor else ("critic",)
        # Tensors on another rank's GPU cannot be added here.
        by_rank = of_all_ranks({name: metrics[name].on_cpu() for name in names})
        return {name: sum((part[name] for part in by_rank), Metrics()) for name in names}

    def passes(
        self, plan: PipelinePlan, batches: Sequence[MicroBatch], kl_coef: float
    ) -> tuple[Timings, Mapping[Name, Metrics]]:
        """Run this rank's passes. Returns the tasks' times, and metrics of the micro-batches whose
        last stage is here. A collective.
        """
        metrics: dict[Name, Metrics] = {name: Metrics() for name in NAMES}
        actor, critic = (
            [self._work(name, batch, kl_coef, metrics) for batch in batches] for name in NAMES
        )
        with self.models["actor"].training(), self.models["critic"].training():
            timings = self.executor.run(plan.schedule, plan.problem, actor, critic)
        for name in NAMES:
            if self.executor.layout.column(name, self.executor.rank):
                metrics[name] = Metrics()  # those of a last stage's first slice count
        return timings, metrics

    def _work(
        self, name: Name, batch: MicroBatch, kl_coef: float, metrics: dict[Name, Metrics]
    ) -> TaskWork:
        stage, device = self.models[name].model, self.models[name].device

        def loss(hidden: Tensor) -> Tensor:
            local_batch = batch.to(device)
            states = local_batch.states(hidden)
            if name == "critic":
                term = self.losses.of_critic(stage, states, local_batch)
            else:
                term = self.losses.of_actor(stage.head, states, local_batch, kl_coef)
            metrics[name] += term.metrics
            return term.loss

        return TaskWork(batch.tokens.to(device), loss)

    def _time(self, timings: Sequence[Timings], plan: PipelinePlan, *, measures: bool) -> None:
        busy_s = fmean(sum(t.end) - sum(t.start) for t in timings)
        self._runs += 1
        self._seconds.append((makespan_us(timings) / 1e6, busy_s, plan.predicted_us / 1e6))
        if self._runs >= MEASURED_RUN and measures and not self.planner.measured:
            problem = profile(self.executor.layout, timings, self.planner.problem)
            self.planner.measure(problem)

    def finish(self) -> Stats:
        """Return metrics. ``pipeline/step_s`` has the seconds from the first task of each
        mini-batch to its last, ``pipeline/bubble_fraction`` the share of the ranks' time spent
        waiting and, once latencies are measured, ``pipeline/predicted_s`` the predicted seconds.
        """
        seconds, self._seconds = self._seconds, []
        if not seconds:
            return {}
        step_s, busy_s, predicted_s = map(sum, zip(*seconds, strict=True))
        stats = {"pipeline/step_s": step_s, "pipeline/bubble_fraction": 1 - busy_s / step_s}
        return stats if math.isnan(predicted_s) else {**stats, "pipeline/predicted_s": predicted_s}


def make(
    actor: nn.Module,
    critic: nn.Module,
    config: Config,
    rates: Mapping[Name, LearningRate],
    device: torch.device,
) -> PipelinedBackprop:
    """Cut full models, keep this rank's stages, and put those on its device. All ranks must call
    this at once. Weights of other stages may be left in files (:mod:`stretto.models.mapped`), and
    are free once the caller drops the models. Raises LearnerError if a model has nothing to train,
    ModelError if it cannot be cut into that many stages.
    """
    p, t = config.pipeline, config.training
    full: dict[Name, nn.Module] = {"actor": actor, "critic": critic}
    for name, model in full.items():
        require_trained(f"the {name}", model)
        check_stages(p, name, model)
    layout, rank = layout_of(p), dist.get_rank()
    # Raises on all ranks at once, before any of them waits for another.
    owners = {name: StageOwners.of(model, name, layout) for name, model in full.items()}
    gloo_group = dist.new_group(backend="gloo")
    divisions, stages = dict[Name, Division](), dict[Name, Stage]()
    for name, model in full.items():
        wholes = full_parameters(model, owners[name].cuts.dims)
        divisions[name] = Division(model, wholes, owners[name], gloo_group)
        stage = cut(model, p.stages_of(name), layout.place(name, rank)[1])
        slice_stage(stage, owners[name].cuts, join_slices(layout, name, rank))
        stages[name] = take(stage, device)
    executor = PipelineExecutor(stages["actor"], stages["critic"], layout, device)
    models = {
        name: StageModel(name, stages[name], full[name], divisions[name], executor, rates[name], t)
        for name in NAMES
    }
    parameters = {
        name: sum(math.prod(w.shape) for w in divisions[name].wholes.values()) for name in NAMES
    }
    losses = Losses(config.algorithm, config.rollout.temperature)
    planner = Planner(p, parameters, config.seed)
    budget = token_budget(t.microbatch_tokens, device)
    return PipelinedBackprop(models, executor, losses, planner, p, budget)


GUESSED_TICKS = 1000
"""The assumed forward latency of the larger model's stages before any measurement."""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A schedule for a mini-batch, and the problem that it solves."""

    problem: Problem
    schedule: PipelineSchedule
    predicted_us: float  # by the measured latencies; NaN before there are any


class Planner:
    """Makes and caches a schedule for each number of micro-batches. Until latencies are measured,
    all stages of a model have equal latencies in proportion to the number of its parameters, and a
    backward takes two forwards. Activation memory is always in that proportion. If several ranks
    plan, they take the first one's schedule, because a search that ends by its time limit finds
    another one on each.
    """

    def __init__(self, config: PipelineConfig, parameters: Mapping[Name, int], seed: int) -> None:
        self._config = config
        self._seed = seed % SEEDS
        self.measured = False
        self._plans: dict[int, PipelinePlan] = {}
        sizes = {model: parameters[model] / config.stages_of(model) for model in NAMES}
        actor, critic = (self._guess(model, sizes[model] / max(sizes.values())) for model in NAMES)
        self.problem = Problem(actor, critic)

    def _guess(self, model: Name, size: float) -> ModelPipelines:
        """Guess latencies of a model's stages from ``size``, relative to the larger stages."""
        forward = max(round(GUESSED_TICKS * size), 1)
        stages = ModelPipelines.of(
            self._config.stages_of(model),
            self._config.pipelines(model),
            1,
            forward=forward,
            backward=2 * forward,
            activation=forward,
        )
        return stages.merged(self._config.merged(model))

    def measure(self, problem: Problem) -> None:
        self.problem, self.measured = problem, True
        self._plans.clear()

    def plan(self, micro_batches: int) -> PipelinePlan:
        """Plan this number of micro-batches of each model, over all its pipelines."""
        if micro_batches in self._plans:
            return self._plans[micro_batches]
        actor, critic = (
            replace(model, micro_batches=micro_batches // model.pipelines)
            for model in self.problem.models
        )
        problem = Problem(actor, critic)
        if self._config.schedule == "serial":
            schedule = one_f_one_b(problem)
        else:
            schedule = self._search(problem)
        latency = evaluate(problem, schedule).latency if self.measured else math.nan
        self._plans[micro_batches] = PipelinePlan(problem, schedule, latency)
        return self._plans[micro_batches]

    def _search(self, problem: Problem) -> PipelineSchedule:
        solutions: list[Any] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            solutions = [solve(problem, seconds=self._config.seconds, seed=self._seed).schedule]
        if dist.is_initialized():
            dist.broadcast_object_list(solutions)
        schedule: PipelineSchedule = solutions[0]
        return schedule
