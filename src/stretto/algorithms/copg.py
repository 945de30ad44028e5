"""CoPG: contrastive policy gradient (Flet-Berliac et al. 2024), as asynchronous RLHF writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.algorithms.algorithm import Algorithm
from stretto.algorithms.experience import LossTerm, Part
from stretto.algorithms.policy import policy_term
from stretto.algorithms.rloo import targets  # the same leave-one-out advantages

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import AlgorithmConfig


def policy_loss(logprobs: Tensor, part: Part, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t A (log pi(y_t) - log pi_old(y_t))``: RLOO's gradient, another value."""
    mask = part.mask
    per_token = part.advantages[mask] * (logprobs[mask] - part.old_logprobs[mask])
    return policy_term(-(part.weights[mask] * per_token).sum(), {})


COPG = Algorithm(name="copg", targets=targets, policy_loss=policy_loss)
