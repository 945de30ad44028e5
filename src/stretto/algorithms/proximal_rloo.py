"""Proximal RLOO: RLOO with PPO's clipping of the ratio of whole responses.

From Noukhovitch et al. 2025 (asynchronous RLHF), appendix. It copes with data that is many versions
old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.algorithms.algorithm import Algorithm
from stretto.algorithms.deferred import torch
from stretto.algorithms.experience import LossTerm, Part
from stretto.algorithms.policy import bounded_ratio, policy_term
from stretto.algorithms.reductions import weighted_sums
from stretto.algorithms.rloo import targets  # the same leave-one-out advantages

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import AlgorithmConfig


def policy_loss(logprobs: Tensor, part: Part, settings: AlgorithmConfig) -> LossTerm:
    """The clipped surrogate of whole responses.

    ::

        rho = exp(log pi(y) - log pi_old(y))
        L   = -sum_b w_b min(rho A, clip(rho, 1 - eps, 1 + eps) A)

    Returns:
        the loss, with ``policy/clipfrac_avg`` over responses and ``policy/sequence_ratio``.
    """
    w = part.response_weights
    advantages = torch.where(part.mask, part.advantages, 0.0)[:, 0]  # the same along a response
    low, high = settings.clip, settings.clip_high or settings.clip

    ratio = bounded_ratio(part.of_response(logprobs - part.old_logprobs))
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    loss = -(w * torch.minimum(unclipped, clipped)).sum()

    figures = {"policy/clipfrac_avg": clipped < unclipped, "policy/sequence_ratio": ratio}
    return policy_term(loss, weighted_sums(w, figures))


PROXIMAL_RLOO = Algorithm(
    name="proximal-rloo",
    targets=targets,
    policy_loss=policy_loss,
    settings=("algorithm.clip", "algorithm.clip_high"),
    aggregation=None,
    ratio=True,
)
