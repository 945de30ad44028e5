"""The part of a rank in training: it holds a stage of each model, its masters and its AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.experience import LossTerm
from stretto.algorithms.reductions import Metrics
from stretto.config import OptimizerConfig
from stretto.models.backend import backend_of
from stretto.models.forward import states_at
from stretto.pipelines.executor.executor import PipelineExecutor, TaskWork
from stretto.pipelines.executor.instructions import Timings
from stretto.pipelines.executor.stages import Name, Stage, StageLayout
from stretto.pipelines.problem import Problem
from stretto.pipelines.schedule import PipelineSchedule
from stretto.training.losses import Losses
from stretto.training.partition import PaddedBatch, on_cpu
from stretto.training.trained import Course, TrainedModel


class StageTrainer:
    """A rank's part of the training of both models; made in the rank's process.

    State: that of the trainers of its two stages.

    Args:
        rank: which of the process group.
        layout: where each stage is.
        losses: of the run, for last stages.
        courses: learning rates, by model.
        device: that the whole models are on; each rank has one of its kind.
    """

    def __init__(
        self,
        rank: int,
        layout: StageLayout,
        losses: Losses,
        optimizer: OptimizerConfig,
        courses: Mapping[Name, Course],
        device: torch.device,
    ) -> None:
        self._rank, self._layout, self._losses = rank, layout, losses
        self._optimizer, self._courses = optimizer, courses
        self._device = backend_of(device).rank_device(rank)
        self._stages: dict[Name, Stage] = {}
        self._trained: dict[Name, TrainedModel] = {}

    def hold(self, actor: Stage, critic: Stage) -> None:
        """Take the stages to train."""
        stages: dict[Name, Stage] = {"actor": actor, "critic": critic}
        for name, stage in stages.items():
            course = self._courses[name]
            self._stages[name] = stage.to(self._device)
            self._trained[name] = TrainedModel(
                self._stages[name],
                course.lr,
                self._optimizer,
                updates=course.updates,
                warmup=course.warmup,
                may_be_frozen=True,  # in this part
            )
        self._executor = PipelineExecutor(actor, critic, self._layout, self._device)

    def run(
        self,
        schedule: PipelineSchedule,
        problem: Problem,
        batches: Sequence[PaddedBatch],
        kl_coef: float,
        trains_actor: bool,
    ) -> tuple[Timings, Mapping[Name, Metrics]]:
        """Make the passes of a mini-batch; gradients add up in the stages.

        An actor that is not to be trained has its passes too, and its gradients are discarded:
        fused schedules are of both models, and steps of a frozen actor are few.

        Returns:
            When this rank did what, and metrics of the micro-batches whose last stage it holds.
        """
        by_model: dict[Name, Metrics] = {"actor": Metrics(), "critic": Metrics()}

        def work(name: Name, batch: PaddedBatch) -> TaskWork:
            def loss(hidden: Tensor) -> Tensor:
                term = self._loss(name, batch, hidden, kl_coef)
                by_model[name] += term.metrics
                return term.loss

            return TaskWork(batch.tokens.to(self._device), loss)

        with self._trained["actor"].training(), self._trained["critic"].training():
            timings = self._executor.run(
                schedule,
                [work("actor", batch) for batch in batches],
                [work("critic", batch) for batch in batches],
                problem,
            )
        if not trains_actor:
            self._trained["actor"].discard()
        return timings, {
            name: Metrics(on_cpu(t.sums), on_cpu(t.minima), on_cpu(t.maxima))
            for name, t in by_model.items()
        }

    def _loss(self, name: Name, batch: PaddedBatch, hidden: Tensor, kl_coef: float) -> LossTerm:
        stage, part = self._stages[name], batch.part.to(self._device)
        chosen = states_at(hidden, batch.places)
        if name == "critic":
            return self._losses.of_critic(stage, chosen, part)
        targets = batch.targets.to(self._device)
        return self._losses.of_actor(stage.head, chosen, targets, part, kl_coef)

    def saved_bytes(self, batch: PaddedBatch) -> tuple[int, int]:
        """Return the bytes that the actor's and the critic's stages keep until a backward pass."""
        work = TaskWork(batch.tokens.to(self._device), Tensor.sum)
        with self._trained["actor"].training(), self._trained["critic"].training():
            kept = [self._executor.saved_bytes(name, work) for name in self._stages]
        return kept[0], kept[1]

    def update(self, name: Name) -> tuple[float, float]:
        """Take an optimizer step of a model, unless the norm of its gradients is not finite.

        Returns:
            That norm, over all stages, and the learning rate of the next update.
        """
        trained, names = self._trained[name], self._stages[name].names
        gradients = {names[own]: grad for own, grad in trained.gradients().items()}
        self._executor.reduce(name, gradients)
        norm = self._executor.norm(name, gradients)
        if math.isfinite(norm):
            trained.update(norm)
        return norm, trained.lr

    def skip(self, name: Name) -> float:
        """Let an update go by; return the learning rate of the next one."""
        self._trained[name].skip()
        return self._trained[name].lr

    def lr(self, name: Name) -> float:
        """The learning rate of a model's next update."""
        return self._trained[name].lr

    def weights(self, name: Name) -> Mapping[str, Tensor] | None:
        """The stage's trained weights by its own names."""
        return self._of_first_pipeline(name, TrainedModel.snapshot)

    def state(self, name: Name) -> Mapping[str, Any] | None:
        """The state of a stage's trainer."""
        return self._of_first_pipeline(name, TrainedModel.state_dict)

    def load(self, name: Name, state: dict[str, Any]) -> float:
        """Take a state of :meth:`state`; return the learning rate of the next update."""
        self._trained[name].load_state_dict(state)
        return self._trained[name].lr

    def _of_first_pipeline(
        self, name: Name, get: Callable[[TrainedModel], Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        pipeline, _ = self._layout.place(name, self._rank)
        return on_cpu(get(self._trained[name])) if pipeline == 0 else None
