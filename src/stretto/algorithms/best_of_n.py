"""Best-of-n: supervised training on the best of n responses to each prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.algorithms.algorithm import Algorithm
from stretto.algorithms.deferred import torch
from stretto.algorithms.experience import LossTerm, Part, Scored, Targets
from stretto.algorithms.groups import best_and_worst, group_stats
from stretto.algorithms.policy import policy_term
from stretto.algorithms.rewards import Rewards

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import AlgorithmConfig


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """The best row of each group; the others are left out. Of equals the first is best."""
    return Targets(
        advantages=torch.zeros_like(data.logprobs),
        units=[(best,) for best, _ in best_and_worst(rewards.totals, data.groups)],
        stats=group_stats(rewards.scores, data.groups),
    )


def policy_loss(logprobs: Tensor, part: Part, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t log pi(y_t)``: the cross-entropy of the best responses."""
    return policy_term(-(part.weights[part.mask] * logprobs[part.mask]).sum(), {})


BEST_OF_N = Algorithm(
    name="best-of-n",
    targets=targets,
    policy_loss=policy_loss,
    aggregation="token_mean",
    corrects=False,
    per_group=True,
)
