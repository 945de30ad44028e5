"""GRPO (Shao et al. 2024), with Dr. GRPO's and DAPO's changes as settings.

GRPO: rewards normalised within the group, PPO's clipped surrogate averaged over each response, the
KL (k3) in the loss. Dr. GRPO (Liu et al. 2025): ``group_std = false``,
``aggregation = 'fixed_length'``. DAPO (Yu et al. 2025): ``clip_high = 0.28``,
``aggregation = 'token_mean'``, ``kl_coef = 0``.
"""

from __future__ import annotations

import torch

from stretto.algorithms.experience import Scored, Targets
from stretto.algorithms.groups import group_normalised, group_stats
from stretto.algorithms.ppo import policy_loss as policy_loss  # the same clipped surrogate
from stretto.algorithms.rewards import Rewards
from stretto.config import AlgorithmConfig


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """``A_i = (R_i - mean R) / std R`` over the group, along the whole response. No critic."""
    advantages = group_normalised(rewards.totals, data.groups, settings.group_std)
    return Targets(
        advantages=torch.where(data.mask, advantages[:, None], 0.0),
        stats=group_stats(rewards.scores, data.groups),
    )
