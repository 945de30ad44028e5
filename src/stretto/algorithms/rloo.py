"""RLOO, Proximal RLOO and CoPG: leave-one-out advantages with three losses."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.algorithms.advantages import group_normalised, group_stats, leave_one_out
from stretto.algorithms.experience import LossInputs, LossTerm, Scored, Targets
from stretto.algorithms.policy import bounded_ratio, policy_term
from stretto.algorithms.reductions import weighted_sums
from stretto.algorithms.rewards import Rewards
from stretto.config import AlgorithmConfig


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """``A_i = R_i - mean of the group's other R``, for all its tokens (Ahmadian et al. 2024).

    With an optimal baseline, the mean is that of the group, and the learner subtracts the rest.
    """
    first, place = data.responses()
    totals, groups = rewards.totals[first], data.groups[first]
    if settings.has_optimal_baseline:
        advantages = group_normalised(totals, groups, "none")[place]
    else:
        advantages = leave_one_out(totals, groups)[place]
    return Targets(
        advantages=torch.where(data.mask, advantages[:, None], 0.0),
        stats=group_stats(rewards.scores[first], groups),
    )


def policy_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t A log pi(y_t)``. With weights of 1 / B that is ``-mean A log pi(y)``."""
    per_token = inputs.of_tokens(inputs.advantages) * inputs.of_tokens(logprobs)
    return policy_term(-(inputs.of_tokens(inputs.weights) * per_token).sum(), {})


def copg_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t A (log pi(y_t) - log pi_old(y_t))``: the same gradient as RLOO, another value.
    Contrastive policy gradient (Flet-Berliac et al. 2024), as in the paper on asynchronous RLHF.
    """
    log_ratio = inputs.of_tokens(logprobs - inputs.old_logprobs)
    per_token = inputs.of_tokens(inputs.advantages) * log_ratio
    return policy_term(-(inputs.of_tokens(inputs.weights) * per_token).sum(), {})


def proximal_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """Clipped surrogate on full responses (Noukhovitch et al. 2025, appendix).

    Tolerates data many versions old::

        rho = exp(log pi(y) - log pi_old(y))
        L   = -sum_b w_b min(rho A, clip(rho, 1 - eps, 1 + eps) A)

    Here ``policy/clipfrac_avg`` counts responses.
    """
    w = inputs.response_weights
    advantages = torch.where(inputs.mask, inputs.advantages, 0.0)[:, 0]  # the same along a response
    low, high = settings.clip, settings.clip_high or settings.clip

    ratio = bounded_ratio(inputs.of_response(logprobs - inputs.old_logprobs))
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    loss = -(w * torch.minimum(unclipped, clipped)).sum()

    metrics = {"policy/clipfrac_avg": clipped < unclipped, "policy/sequence_ratio": ratio}
    return policy_term(loss, weighted_sums(w, metrics))
