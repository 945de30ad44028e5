"""Mini-batches out of plain tensors, all losses by name, and what they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.correction import settled
from stretto.algorithms.experience import LossInputs, LossTerm
from stretto.algorithms.policy import kl_penalty
from stretto.algorithms.reductions import response_weights, token_weights
from stretto.algorithms.registry import FUNCTIONS
from stretto.config import AlgorithmConfig
from stretto.config.algorithm import ALGORITHMS

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)
BETA = 0.3
"""The coefficient of the KL."""

VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "gamma": 0.9, "lam": 0.8},
    "ppo sums": {"name": "ppo", "aggregation": "sequence_sum", "whiten_advantages": False},
    "ppo, KL in the loss": {"name": "ppo", "kl_in": "loss", "kl_estimator": "k2"},
    "rloo": {"name": "rloo"},
    "rloo, k3 in the reward": {"name": "rloo", "kl_estimator": "k3", "aggregation": "token_mean"},
    "rloo, KL in the loss": {"name": "rloo", "kl_in": "loss", "kl_estimator": "k1"},
    "copg": {"name": "copg"},
    "proximal-rloo": {"name": "proximal-rloo", "clip": 0.1},
    "proximal-rloo, higher": {"name": "proximal-rloo", "clip": 0.1, "clip_high": 0.4},
    "grpo": {"name": "grpo"},
    "grpo, KL in the reward": {"name": "grpo", "kl_in": "reward"},
    "dr-grpo": {
        "name": "grpo",
        "scale_rewards": "none",
        "aggregation": "fixed_length",
        "kl_coef": 0,
    },
    "gspo": {"name": "grpo", "importance_sampling_level": "sequence", "clip": 0.05},
    "grpo, dual clip": {"name": "grpo", "dual_clip": 1.3, "scale_rewards": "batch"},
    "grpo, KL times the ratio": {"name": "grpo", "use_bias_correction_kl": True},
    "grpo of whole responses": {"name": "grpo", "mask_truncated_completions": True},
    "cispo": {"name": "cispo", "clip_high": 0.1},
    "dapo": {"name": "grpo", "clip_high": 0.28, "aggregation": "token_mean", "kl_coef": 0},
    "online-dpo": {"name": "online-dpo", "kl_coef": BETA},
    "best-of-n": {"name": "best-of-n"},
    "distill": {"name": "distill", "teacher": "teacher"},
    "distill with rewards": {
        "name": "distill",
        "teacher": "teacher",
        "reward_coef": 0.7,
        "clip_high": 0.3,
        "dual_clip": 1.5,
    },
    "best-of-n of responses": {"name": "best-of-n", "aggregation": "sequence_mean", "kl_coef": 0},
}


def named(name: str) -> dict[str, Any]:
    """The fewest settings of an algorithm."""
    return {"name": name, "teacher": "teacher"} if ALGORITHMS[name].teacher else {"name": name}


def mask_of(lengths: tuple[int, ...], width: int = 0) -> Tensor:
    return torch.arange(width or max(lengths))[None, :] < torch.tensor(lengths)[:, None]


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def soiled(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """``x`` with ``value`` outside the mask, in a mask that may be wider than ``x``."""
    wide = torch.full(mask.shape, value, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return torch.where(mask, wide, value)


def inputs_of(mask: Tensor, mode: Any = "token_mean", longest: int = 1, **named: Any) -> LossInputs:
    """A whole mini-batch; advantages and old log-probs are 0 where not given."""
    dtype = next((t.dtype for t in named.values() if isinstance(t, Tensor)), torch.float32)
    zeros = torch.zeros(mask.shape, dtype=dtype)
    return LossInputs(
        mask=mask,
        weights=token_weights(mask, mode, longest).to(dtype),
        means=token_weights(mask, "token_mean").to(dtype),
        response_weights=response_weights(mask).to(dtype),
        **{"advantages": zeros, "old_logprobs": zeros, **named},
    )


def naive_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    length = len(rewards)
    advantages = []
    for t in range(length):
        total = 0.0
        for i in range(t, length):
            following = values[i + 1] if i + 1 < length else 0.0
            delta = rewards[i] + gamma * following - values[i]
            total += (gamma * lam) ** (i - t) * delta
        advantages.append(total)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def loss_of(a: AlgorithmConfig, logprobs: Tensor, inputs: LossInputs) -> LossTerm:
    """As the learner adds it up, but for the entropy."""
    inputs, metrics = settled(inputs, logprobs.detach(), a)
    term = FUNCTIONS[a.name].policy_loss(logprobs, inputs, a)
    if a.kl_place == "loss" and a.kl_coef:
        term += kl_penalty(logprobs, inputs, BETA, a)
    return LossTerm(term.loss, term.metrics + metrics)
