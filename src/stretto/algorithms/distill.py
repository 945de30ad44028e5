"""On-policy distillation: the reverse KL to a teacher on the student's own tokens."""

from __future__ import annotations

import torch

from stretto.algorithms.advantages import group_normalised, group_stats
from stretto.algorithms.experience import Scored, Targets
from stretto.algorithms.reductions import masked_mean
from stretto.algorithms.rewards import Rewards
from stretto.config import AlgorithmConfig


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """``A_t = log pi_teacher(a_t) - log pi_behave(a_t)``, plus ``reward_coef`` times GRPO's
    advantage of the response.

    A token is credited with its own log ratio only, so future tokens are discounted by 0. With
    PPO's surrogate the gradient on fresh samples is that of the reverse KL at each sampled prefix
    (Agarwal et al. 2023, GKD with student samples; Thinking Machines Lab 2025).
    """
    assert data.ref_logprobs is not None  # the teacher's, checked with the weight of the KL
    gap = torch.where(data.mask, data.logprobs - data.ref_logprobs, 0.0)
    stats = {"distill/reverse_kl": masked_mean(gap, data.mask).item()}
    advantages = -gap
    if settings.reward_coef:
        first, place = data.responses()
        totals, groups = rewards.totals[first], data.groups[first]
        per_response = group_normalised(totals, groups, settings.scale_rewards)[place]
        of_rewards = settings.reward_coef * per_response[:, None]
        advantages = torch.where(data.mask, advantages + of_rewards, 0.0)
        stats |= group_stats(rewards.scores[first], groups)
    return Targets(advantages=advantages, stats=stats)
