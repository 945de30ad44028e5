"""GRPO (Shao et al. 2024), with Dr. GRPO's and DAPO's changes as settings.

GRPO: rewards normalised within the group, PPO's clipped surrogate averaged over each response, the
KL (k3) in the loss. Dr. GRPO (Liu et al. 2025): ``group_std = false``,
``aggregation = 'fixed_length'``. DAPO (Yu et al. 2025): ``clip_high = 0.28``,
``aggregation = 'token_mean'``, ``kl_coef = 0``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.algorithms.algorithm import Algorithm
from stretto.algorithms.deferred import torch
from stretto.algorithms.experience import Scored, Targets
from stretto.algorithms.groups import group_normalised, group_stats
from stretto.algorithms.ppo import policy_loss  # the same clipped surrogate
from stretto.algorithms.rewards import Rewards

if TYPE_CHECKING:
    from stretto.config import AlgorithmConfig


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """``A_i = (R_i - mean R) / std R`` over the group, along the whole response. No critic."""
    advantages = group_normalised(rewards.totals, data.groups, settings.group_std)
    return Targets(
        advantages=torch.where(data.mask, advantages[:, None], 0.0),
        stats=group_stats(rewards.scores, data.groups),
    )


GRPO = Algorithm(
    name="grpo",
    targets=targets,
    policy_loss=policy_loss,
    settings=("algorithm.clip", "algorithm.clip_high", "algorithm.group_std"),
    kl_in="loss",
    aggregation="sequence_mean",
    ratio=True,
)
