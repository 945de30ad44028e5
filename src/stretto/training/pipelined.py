"""Training through fused pipelines, from the learner's side: the stages run in other processes.

This process keeps both full models to generate, score and save. The ranks hold the stages under
training, with their masters and AdamW. A mini-batch goes to them as tensors. They return metrics
and norms, and at the end of a step the new weights.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from stretto.algorithms.reductions import Metrics
from stretto.config import Config, PipelineConfig
from stretto.config.training_config import token_budget
from stretto.errors import ConfigError, ModelError
from stretto.models.backend import backend_of
from stretto.models.forward import by_token_budget
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.executor.instructions import Timings, makespan_us, profile
from stretto.pipelines.executor.stages import (
    NAMES,
    Name,
    StageLayout,
    check_stages,
    cut,
    for_sending,
)
from stretto.pipelines.pipeline_schedule import PipelineSchedule, evaluate
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.pipelines.solve import SEEDS, solve
from stretto.training.backprop import divided
from stretto.training.losses import Losses, MicroBatch
from stretto.training.shard_files import in_memory
from stretto.training.stage_trainer import BY_NAME, Names, StageTrainer, renamed
from stretto.training.trained import (
    LearningRate,
    Snapshots,
    Trained,
    require_finite_norm,
    require_trained,
)
from stretto.types import Stats
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec
from stretto.workers.threads import Method

MEASURED_RUN = 2
"""The mini-batch whose latencies are measured. The first is slow for unrelated reasons."""

WORDS: Mapping[Callable[..., Any], str] = {
    StageTrainer.hold: "the transfer of stages",
    StageTrainer.run: "the passes of a mini-batch",
    StageTrainer.saved_bytes: "the measuring of memory",
    StageTrainer.update: "an update of the weights",
    StageTrainer.skip: "an update of the weights",
    StageTrainer.weights: "the transfer of new weights",
    StageTrainer.state: "the transfer of the state",
    StageTrainer.load: "the transfer of a saved state",
}
"""Names of the :class:`~stretto.training.stage_trainer.StageTrainer`'s methods in messages."""


class StagedModel(Trained):
    """A model whose stages are trained by ranks. Its state has the form of a
    :class:`TrainedModel`'s, so that a run can resume with any number of ranks, or none. ``names``
    holds the trained parameters of each stage.
    """

    def __init__(
        self, name: Name, model: nn.Module, ranks: RankGroup, names: Sequence[Names], lr: float
    ) -> None:
        super().__init__(model)
        self._name = name
        self._ranks = ranks
        self._names = names
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._snapshots = Snapshots(self._weights)
        self._lr, self._behind = lr, False

    @property
    def lr(self) -> float:
        return self._lr

    def update(self) -> float:
        """Take an optimizer step on the ranks. :meth:`fetch` then updates the full model."""
        norm, self._lr = self._ranks.call(StageTrainer.update, self._name)[0]
        self._behind = True
        require_finite_norm(norm)
        return float(norm)

    def skip(self) -> None:
        self._lr = float(self._ranks.call(StageTrainer.skip, self._name)[0])

    @torch.no_grad()
    def fetch(self) -> None:
        """Copy the stages' weights to the full model, if they have changed."""
        if not self._behind:
            return
        new: dict[str, Tensor] = {}
        for names, weights in self._of_stages(StageTrainer.weights):
            new |= {names[local_name]: weight for local_name, weight in weights.items()}
        with self._gate.passing():  # shutdown must find the weights of a single step
            torch._foreach_copy_([*self._weights.values()], [new[n] for n in self._weights])
        self._behind = False

    def state_dict(self) -> dict[str, Any]:
        stages = [renamed(state, names) for names, state in self._of_stages(StageTrainer.state)]
        merged = {part: {n: v for s in stages for n, v in s[part].items()} for part in BY_NAME}
        in_order = {name: name for name in self._weights}
        return renamed({**stages[0], **merged}, in_order)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own_names = ({full: local for local, full in names.items()} for names in self._names)
        parts = ((self._name, in_memory(renamed(state, names))) for names in own_names)
        self._lr = float(self._ranks.call_each(StageTrainer.load, parts)[0])
        self._behind = True
        self.fetch()

    def _of_stages(self, method: Method[Name, Any]) -> list[tuple[Names, Mapping[str, Any]]]:
        replies = self._ranks.call(method, self._name)
        return [(n, s) for n, s in zip(self._names, replies, strict=True) if s is not None]


class PipelinedBackprop:
    """Runs the passes of both models together, by a schedule. Latencies are measured in the second
    mini-batch, and new schedules are made for them. If a mini-batch has fewer responses than there
    are pipelines, blank micro-batches fill the rest. ``budget`` limits a micro-batch's tokens if
    the settings do not give a number of micro-batches.
    """

    def __init__(
        self,
        ranks: RankGroup,
        models: Mapping[Name, StagedModel],
        planner: Planner,
        layout: StageLayout,
        config: PipelineConfig,
        budget: int,
    ) -> None:
        self.ranks, self.models = ranks, models
        self._planner = planner
        self._layout = layout
        self._config = config
        self._budget = budget
        self._runs = 0
        # Per mini-batch: first to last task, a rank's mean work, predicted time.
        self._seconds: list[tuple[float, float, float]] = []

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        count = self._config.micro_batches or len(by_token_budget(tokens, self._budget))
        return divided(tokens, count, self._config.multiple)

    def run(
        self, batches: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        missing = -len(batches) % self._config.multiple
        batches = [*batches, *[MicroBatch.blank(batches[0])] * missing]
        plan = self._planner.plan(len(batches))
        reports: list[tuple[Timings, Mapping[Name, Metrics]]] = self.ranks.call(
            StageTrainer.run, plan.schedule, plan.problem, batches, kl_coef, trains_actor
        )
        timings = [times for times, _ in reports]
        busy_s = fmean(sum(t.end) - sum(t.start) for t in timings)
        self._runs += 1
        self._seconds.append((makespan_us(timings) / 1e6, busy_s, plan.predicted_us / 1e6))
        if self._runs >= MEASURED_RUN and not (missing or self._planner.measured):
            saved_bytes = self.ranks.call(StageTrainer.saved_bytes, batches[0])
            self._planner.measure(profile(self._layout, timings, saved_bytes))
        names: Sequence[Name] = ("critic", "actor") if trains_actor else ("critic",)
        return {name: sum((metrics[name] for _, metrics in reports), Metrics()) for name in names}

    def finish(self) -> Stats:
        """Copy the new weights to the full models and return metrics. ``pipeline/step_s`` has the
        seconds from the first task of each mini-batch to its last, ``pipeline/bubble_fraction`` the
        share of the ranks' time spent waiting and, once latencies are measured,
        ``pipeline/predicted_s`` the predicted seconds.
        """
        for model in self.models.values():
            model.fetch()
        seconds, self._seconds = self._seconds, []
        if not seconds:
            return {}
        step_s, busy_s, predicted_s = map(sum, zip(*seconds, strict=True))
        stats = {"pipeline/step_s": step_s, "pipeline/bubble_fraction": 1 - busy_s / step_s}
        return stats if math.isnan(predicted_s) else {**stats, "pipeline/predicted_s": predicted_s}


def start(
    actor: nn.Module,
    critic: nn.Module,
    config: Config,
    rates: Mapping[Name, LearningRate],
    threads: int,
) -> PipelinedBackprop:
    """Cut the models, start the ranks, and send each its stages. The models also stay in this
    process, and follow the ranks' updates. ``threads`` is the total over all ranks. Raises
    ConfigError if there are fewer GPUs than ranks, LearnerError if a model has nothing to train,
    ModelError if a model cannot be cut into that many stages or be pickled.
    """
    p, t = config.pipeline, config.training
    models: dict[Name, nn.Module] = {"actor": actor, "critic": critic}
    device = next(actor.parameters()).device
    _check_devices(device, p.ranks)
    for name, model in models.items():
        require_trained(f"the {name}", model)
        _check_importable(name, model)
        check_stages(p, name, model)
    layout = layout_of(p)
    losses = Losses(config.algorithm, config.rollout.temperature)
    collectives = backend_of(device).collectives
    ranks = RankGroup(
        GroupSpec(p.ranks, collectives, max(threads // p.ranks, 1)),
        StageTrainer,
        (layout, losses, t, rates, device),
        words=WORDS,
    )
    ranks.start()
    try:
        stages = {
            name: [cut(model, p.stages(name), layout.place(name, r)[1]) for r in range(p.ranks)]
            for name, model in models.items()
        }
        pairs = zip(stages["actor"], stages["critic"], strict=True)
        sent = ((for_sending(actor), for_sending(critic)) for actor, critic in pairs)
        lr = ranks.call_each(StageTrainer.hold, sent)[0]
        names = {
            name: [{n: s.names[n] for n, p in s.named_parameters() if p.requires_grad} for s in of]
            for name, of in stages.items()
        }
        staged_models = {n: StagedModel(n, models[n], ranks, names[n], lr[n]) for n in NAMES}
        parameters = {name: sum(w.numel() for w in m.parameters()) for name, m in models.items()}
        planner = Planner(p, parameters, config.seed)
        budget = token_budget(t.microbatch_tokens, device)
        if config.observe.checkpoints:
            ranks.remedy = "resume from the last checkpoint, if one was written"
        return PipelinedBackprop(ranks, staged_models, planner, layout, p, budget)
    except pickle.PicklingError as error:
        ranks.close()
        raise ModelError(
            f"the models cannot be sent to the ranks: {error}. {_SENDABLE}", "unpicklable-model"
        ) from error
    except BaseException:
        ranks.close()
        raise


def layout_of(config: PipelineConfig) -> StageLayout:
    actor, critic = ((config.stages(name), config.pipelines(name)) for name in NAMES)
    return StageLayout(*actor, *critic)


_SENDABLE = (
    "Have them made of classes in modules that can be imported, with no hooks that are local "
    "functions, or set pipeline.ranks = 0"
)


def _check_importable(name: Name, model: nn.Module) -> None:
    for path, module in model.named_modules():
        module_class = type(module)
        if module_class.__module__ == "__main__":
            raise ModelError(
                f"'{path}' of the {name} is of the class '{module_class.__qualname__}', which is "
                f"defined in the script that runs; the ranks cannot import it. {_SENDABLE}",
                "class-in-script",
            )


def _check_devices(device: torch.device, ranks: int) -> None:
    max_ranks = backend_of(device).most_ranks()
    if max_ranks is not None and max_ranks < ranks:
        raise ConfigError(
            f"pipeline.ranks = {ranks} needs as many GPUs, and there are {max_ranks}; lower it, or "
            "set model.device = 'cpu'",
            "too-few-gpus",
        )


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
    backward takes two forwards.
    """

    def __init__(self, config: PipelineConfig, parameters: Mapping[Name, int], seed: int) -> None:
        self._config = config
        self._seed = seed % SEEDS
        self.measured = False
        self._plans: dict[int, PipelinePlan] = {}
        sizes = {model: parameters[model] / config.stages(model) for model in NAMES}
        actor, critic = (self._guess(model, sizes[model] / max(sizes.values())) for model in NAMES)
        self._problem = Problem(actor, critic)

    def _guess(self, model: Name, size: float) -> ModelPipelines:
        """Guess latencies of a model's stages from ``size``, relative to the larger stages."""
        forward = max(round(GUESSED_TICKS * size), 1)
        return ModelPipelines.of(
            self._config.stages(model),
            self._config.pipelines(model),
            1,
            forward=forward,
            backward=2 * forward,
            activation=forward,
        )

    def measure(self, problem: Problem) -> None:
        self._problem, self.measured = problem, True
        self._plans.clear()

    def plan(self, micro_batches: int) -> PipelinePlan:
        """Plan this number of micro-batches of each model, over all its pipelines."""
        if micro_batches in self._plans:
            return self._plans[micro_batches]
        actor, critic = (
            replace(model, micro_batches=micro_batches // model.pipelines)
            for model in self._problem.models
        )
        problem = Problem(actor, critic)
        if self._config.schedule == "serial":
            schedule = one_f_one_b(problem)
        else:
            schedule = solve(problem, seconds=self._config.seconds, seed=self._seed).schedule
        latency = evaluate(problem, schedule).latency if self.measured else math.nan
        self._plans[micro_batches] = PipelinePlan(problem, schedule, latency)
        return self._plans[micro_batches]
