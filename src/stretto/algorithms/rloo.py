"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.algorithms.algorithm import Algorithm
from stretto.algorithms.deferred import torch
from stretto.algorithms.experience import LossTerm, Part, Scored, Targets
from stretto.algorithms.groups import group_stats, leave_one_out
from stretto.algorithms.policy import policy_term
from stretto.algorithms.rewards import Rewards

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import AlgorithmConfig


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """``A_i = R_i - mean of the others' R``, along the whole response. No critic."""
    advantages = leave_one_out(rewards.totals, data.groups)
    return Targets(
        advantages=torch.where(data.mask, advantages[:, None], 0.0),
        stats=group_stats(rewards.scores, data.groups),
    )


def policy_loss(logprobs: Tensor, part: Part, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t A log pi(y_t)``; with weights of 1 / B that is ``-mean A log pi(y)``."""
    mask = part.mask
    per_token = part.advantages[mask] * logprobs[mask]
    return policy_term(-(part.weights[mask] * per_token).sum(), {})


RLOO = Algorithm(name="rloo", targets=targets, policy_loss=policy_loss)
