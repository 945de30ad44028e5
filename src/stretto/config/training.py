"""Settings of training."""

from __future__ import annotations

from typing import Literal

from stretto.config.base import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
)


class OptimizerConfig(Section):
    """How weights are moved: AdamW on fp32 masters."""

    lr: Positive = 3e-6
    """Peak learning rate (of the actor)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rates rise from zero."""
    weight_decay: NonNegative = 0.0
    """AdamW's."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's."""
    grad_clip: NonNegative = 1.0
    """Largest gradient norm, of each model; 0 is off."""
    epochs: PositiveInt = 1
    """Passes over a batch; in supervised training, over the data."""
    microbatch_tokens: NonNegativeInt = 0
    """Tokens (padding counted) in one pass of a training or scoring model; no effect on the gradient. 0 takes 1,024 on a CPU, 16,384 on a GPU."""


class TrainingConfig(OptimizerConfig):
    """How the learner takes a step."""

    critic_lr: Positive = 1e-5
    """The critic's peak learning rate."""
    minibatches: PositiveInt = 1
    """Optimizer updates in one pass."""
    ratio_tolerance: NonNegative = 0.0
    """How far engine and learner may be apart, as the root mean square difference of their log-probs of responses of the very same weights. 0 measures at the start what rounding does, and allows twice that (docs/ppo.md)."""

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * self.minibatches
