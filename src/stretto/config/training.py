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
