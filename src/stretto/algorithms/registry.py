"""The algorithms by name, and what they all go through on their way to a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.algorithms import (
    best_of_n,
    copg,
    grpo,
    online_dpo,
    ppo,
    proximal_rloo,
    rloo,
)
from stretto.algorithms.experience import Experience, LossTerm, Part, Scored, Targets, check
from stretto.algorithms.groups import require_several
from stretto.algorithms.rewards import Rewards, make_rewards
from stretto.config import AlgorithmConfig, RewardConfig
from stretto.config.algorithm import AlgorithmName


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What is learned.

    Attributes:
        targets: a scored batch and its rewards to advantages, or to the rows to train on.
        policy_loss: log-probs [b, T] of the policy under training, and a part of the experience,
            to a loss.
    """

    targets: Callable[[Scored, Rewards, AlgorithmConfig], Targets]
    policy_loss: Callable[[Tensor, Part, AlgorithmConfig], LossTerm]


ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    "ppo": Algorithm(ppo.targets, ppo.policy_loss),
    "rloo": Algorithm(rloo.targets, rloo.policy_loss),
    "proximal-rloo": Algorithm(proximal_rloo.targets, proximal_rloo.policy_loss),
    "copg": Algorithm(copg.targets, copg.policy_loss),
    "grpo": Algorithm(grpo.targets, grpo.policy_loss),
    "online-dpo": Algorithm(online_dpo.targets, online_dpo.policy_loss),
    "best-of-n": Algorithm(best_of_n.targets, best_of_n.policy_loss),
}
"""What each needs of a run stands in :data:`stretto.config.TRAITS`."""


@torch.no_grad()
def prepare(
    data: Scored,
    settings: AlgorithmConfig,
    reward: RewardConfig,
    kl_coef: float,
    proximal: Tensor | None = None,
) -> Experience:
    """A scored batch to all that its losses need.

    Takes the whole batch of a step at once, as groups and whitening need all of it.

    Args:
        data: the batch.
        settings: of the algorithm.
        reward: the rule for missing ends.
        kl_coef: the present beta, which may differ from the setting's starting value.
        proximal: [B, T], log-probs of the policy before the step, where ratios are taken to that
            and it will not be the one under training; ``None``: those of the behaviour policy.

    Raises:
        LearnerError: nothing can be learned from the batch: no tokens, numbers that are not finite,
            a missing reference or critic, or a prompt with too few responses.
    """
    check(data, kl_coef)
    if settings.traits.group > 1:
        require_several(data.groups, settings.name)
    rewards = make_rewards(data, reward, settings, kl_coef)
    targets = ALGORITHMS[settings.name].targets(data, rewards, settings)
    singles = [(row,) for row in range(len(data.mask))]

    def clean(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(data.mask, x, 0.0)

    return Experience(
        mask=data.mask,
        advantages=targets.advantages,
        old_logprobs=torch.where(data.mask, data.logprobs if proximal is None else proximal, 0.0),
        behaviour_logprobs=torch.where(data.mask, data.logprobs, 0.0),
        ref_logprobs=clean(data.ref_logprobs),
        returns=targets.returns,
        old_values=clean(data.values),
        units=singles if targets.units is None else targets.units,
        rewards=rewards.scores,
        stats={**rewards.stats, **targets.stats},
    )
