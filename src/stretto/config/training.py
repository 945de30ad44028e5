"""Settings of training: the optimizer, the learner, and fused actor-critic pipelines."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import model_validator

from stretto.config.base import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
)


class OptimizerConfig(Section):
    """Optimizer: AdamW on fp32 masters."""

    lr: Positive = 3e-6
    """Peak learning rate (of the actor)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to zero at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rates rise from zero."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Betas of AdamW."""
    grad_clip: NonNegative = 1.0
    """Largest gradient norm, of each model; 0 is off."""
    epochs: PositiveInt = 1
    """Passes over a batch; in supervised training, over the data."""
    microbatch_tokens: NonNegativeInt = 0
    """Tokens (padding counted) in one pass of a training or scoring model; no effect on the gradient. 0 takes 1,024 on a CPU, 16,384 on a GPU."""


def token_budget(setting: int, device: object) -> int:
    """Tokens in one pass: the setting, or what suits the device where that is 0.

    A CPU works fastest on what its caches hold, and small passes pad less; a GPU needs more to be
    full.

    Args:
        setting: ``microbatch_tokens``.
        device: of torch, or its name.
    """
    return setting or (1024 if str(device).startswith("cpu") else 16_384)


class TrainingConfig(OptimizerConfig):
    """Steps of the learner."""

    critic_lr: Positive = 1e-5
    """The critic's peak learning rate."""
    minibatches: PositiveInt = 1
    """Optimizer updates in one pass."""
    ratio_tolerance: NonNegative = 0.0
    """Largest root mean square difference between the log-probs of engine and learner, on responses of the very same weights. 0 measures the effect of rounding at the start, and allows twice that (docs/ppo.md)."""

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * self.minibatches


class PipelineConfig(Section):
    """Training of actor and critic in this process, or cut into stages on several ranks."""

    ranks: NonNegativeInt = 0
    """Processes that train, each with a stage of the actor and one of the critic, on CPUs (whose threads they share out) or a GPU each; 0 trains in this process."""
    actor_stages: NonNegativeInt = 0
    """Pipeline stages of the actor; divides ranks, which hold ranks / actor_stages pipelines of it (data parallelism). 0 takes as many as ranks."""
    critic_stages: NonNegativeInt = 0
    """Pipeline stages of the critic, by the same rule."""
    schedule: Literal["fused", "serial"] = "fused"
    """fused: both models at once, in opposite directions, so that each fills the other's bubbles, by a schedule that is searched for. serial: 1F1B of the actor, then of the critic."""
    micro_batches: NonNegativeInt = 0
    """Micro-batches of a mini-batch, over all pipelines; fewer where responses were dropped and too few are left. 0 goes by training.microbatch_tokens, rounded up until every pipeline gets as many, or down where a mini-batch has too few responses for that."""
    seconds: Positive = 2.0
    """Longest search for a fused schedule; made for each new number of micro-batches, and again once latencies are measured."""

    def stages(self, model: Literal["actor", "critic"]) -> int:
        """Stages of a model's pipelines."""
        return (self.actor_stages if model == "actor" else self.critic_stages) or self.ranks

    def describe_stages(self, model: Literal["actor", "critic"]) -> str:
        """The setting and its value, for messages."""
        given = self.actor_stages if model == "actor" else self.critic_stages
        derived = "" if given else " (as many as pipeline.ranks)"
        return f"pipeline.{model}_stages = {self.stages(model)}{derived}"

    def pipelines(self, model: Literal["actor", "critic"]) -> int:
        """Number of pipelines of a model."""
        return self.ranks // self.stages(model)

    @property
    def multiple(self) -> int:
        """Divisor that the number of micro-batches must have, so that pipelines share evenly."""
        return math.lcm(self.pipelines("actor"), self.pipelines("critic"))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.ranks:
            return self
        if self.ranks == 1:
            raise ValueError(
                "pipeline.ranks = 1 makes one stage of a model, which is no pipeline; set it to 2 or "
                "more, or to 0 to train in this process"
            )
        for model, stages in (("actor", self.actor_stages), ("critic", self.critic_stages)):
            if stages and self.ranks % stages:
                raise ValueError(
                    f"pipeline.{model}_stages = {stages} does not divide pipeline.ranks = "
                    f"{self.ranks}; choose a divisor, or 0 for as many as ranks"
                )
        if self.micro_batches % self.multiple:
            raise ValueError(
                f"pipeline.micro_batches = {self.micro_batches} cannot be shared evenly by "
                f"{self.pipelines('actor')} pipelines of the actor and {self.pipelines('critic')} "
                f"of the critic; choose a multiple of {self.multiple}, or 0"
            )
        return self
