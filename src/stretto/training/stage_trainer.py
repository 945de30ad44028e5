"""A rank's part in pipelined training: a stage of each model, its masters and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.reductions import Metrics
from stretto.config import OptimizerConfig
from stretto.models.backend import backend_of
from stretto.pipelines.executor.executor import PipelineExecutor, TaskWork, saved_bytes
from stretto.pipelines.executor.instructions import Timings
from stretto.pipelines.executor.stages import Name, Stage, StageLayout
from stretto.pipelines.pipeline_schedule import PipelineSchedule
from stretto.pipelines.problem import Problem
from stretto.training.losses import Losses, MicroBatch
from stretto.training.shard_files import in_memory
from stretto.training.trained import LearningRate, TrainedModel

BY_NAME = ("masters", "moments")
"""Parts of a model's state that are by names of parameters."""

Names = Mapping[str, str]
"""Maps a stage's names of trained parameters, in order, to their names in the full model."""


class StageTrainer:
    """Trains one rank's stages of both models, on a device of the full models' kind."""

    def __init__(
        self,
        rank: int,
        layout: StageLayout,
        losses: Losses,
        optimizer: OptimizerConfig,
        rates: Mapping[Name, LearningRate],
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._losses = losses
        self._optimizer, self._rates = optimizer, rates
        self._device = backend_of(device).rank_device(rank)

    def hold(self, actor: Stage, critic: Stage) -> Mapping[Name, float]:
        """Receive the stages to train. Return the learning rates of the first updates."""
        stages: dict[Name, Stage] = {"actor": actor, "critic": critic}
        self._stages = {name: stage.to(self._device) for name, stage in stages.items()}
        self._trained = {
            # In a partly frozen model, this stage may have nothing to train.
            name: TrainedModel(stage, self._rates[name], self._optimizer, may_be_frozen=True)
            for name, stage in self._stages.items()
        }
        self._executor = PipelineExecutor(actor, critic, self._layout, self._device)
        return {name: trained.lr for name, trained in self._trained.items()}

    def run(
        self,
        schedule: PipelineSchedule,
        problem: Problem,
        batches: Sequence[MicroBatch],
        kl_coef: float,
        trains_actor: bool,
    ) -> tuple[Timings, Mapping[Name, Metrics]]:
        """Run the passes of a mini-batch and accumulate gradients in the stages. An actor that is
        not trained has its passes too, and its gradients are discarded, because fused schedules
        cover both models and steps with a frozen actor are few. Returns the tasks' times, and
        metrics of the micro-batches whose last stage is on this rank.
        """
        by_model: dict[Name, Metrics] = {"actor": Metrics(), "critic": Metrics()}

        def work(name: Name, batch: MicroBatch) -> TaskWork:
            def loss(hidden: Tensor) -> Tensor:
                stage, local_batch = self._stages[name], batch.to(self._device)
                states = local_batch.states(hidden)
                if name == "critic":
                    term = self._losses.of_critic(stage, states, local_batch)
                else:
                    term = self._losses.of_actor(stage.head, states, local_batch, kl_coef)
                by_model[name] += term.metrics
                return term.loss

            return TaskWork(batch.tokens.to(self._device), loss)

        with self._trained["actor"].training(), self._trained["critic"].training():
            timings = self._executor.run(
                schedule,
                problem,
                [work("actor", batch) for batch in batches],
                [work("critic", batch) for batch in batches],
            )
        if not trains_actor:
            self._trained["actor"].discard()
        return timings, {name: metrics.on_cpu() for name, metrics in by_model.items()}

    def saved_bytes(self, batch: MicroBatch) -> tuple[int, int]:
        """Return the bytes that the actor's and the critic's stages keep until a backward pass."""
        tokens = batch.tokens.to(self._device)
        with self._trained["actor"].training(), self._trained["critic"].training():
            actor, critic = (saved_bytes(stage, tokens) for stage in self._stages.values())
        return actor, critic

    def update(self, name: Name) -> tuple[float, float]:
        """Take a model's optimizer step unless the gradient norm over all stages is not finite.
        Returns that norm and the learning rate of the next update.
        """
        trained, names = self._trained[name], self._stages[name].names
        gradients = {names[local_name]: grad for local_name, grad in trained.gradients().items()}
        self._executor.reduce(name, gradients)
        norm = self._executor.norm(name, gradients)
        if math.isfinite(norm):
            trained.update(norm)
        return norm, trained.lr

    def skip(self, name: Name) -> float:
        self._trained[name].skip()
        return self._trained[name].lr

    def weights(self, name: Name) -> Mapping[str, Tensor] | None:
        return self._of_first_pipeline(name, TrainedModel.snapshot)

    def state(self, name: Name) -> Mapping[str, Any] | None:
        return self._of_first_pipeline(name, TrainedModel.state_dict)

    def load(self, name: Name, state: dict[str, Any]) -> float:
        self._trained[name].load_state_dict(state)
        return self._trained[name].lr

    def _of_first_pipeline(
        self, name: Name, get: Callable[[TrainedModel], Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        pipeline, _ = self._layout.place(name, self._rank)
        return in_memory(get(self._trained[name])) if pipeline == 0 else None


def renamed(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a model's state with other names of parameters, and without those not named."""
    parts = {
        part: {new: state[part][old] for old, new in names.items() if old in state[part]}
        for part in BY_NAME
    }
    return {**state, **parts}
