"""The way of a scored batch to the losses, the same for all algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.algorithms.deferred import torch
from stretto.algorithms.experience import Experience, Scored, check
from stretto.algorithms.groups import require_several
from stretto.algorithms.rewards import make_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import AlgorithmConfig, RewardConfig


def prepare(
    data: Scored,
    settings: AlgorithmConfig,
    reward: RewardConfig,
    kl_coef: float,
    proximal: Tensor | None = None,
) -> Experience:
    """Make a scored batch into the inputs of its losses.

    The batch is that of a whole step, as groups and whitening need all of it.

    Args:
        reward: the rule for missing ends.
        kl_coef: the present beta, which may differ from the setting's starting value.
        proximal: [B, T], log-probs of the policy before the step, where ratios are taken to that
            policy and training moves away from it; ``None`` takes those of the behaviour policy.

    Raises:
        LearnerError: nothing can be learned from the batch: no tokens, numbers that are not finite,
            a missing reference or critic, or a prompt with too few responses.
    """
    check(data, kl_coef)
    algorithm = settings.definition
    if algorithm.group > 1:
        require_several(data.groups, settings.name)

    def clean(x: Tensor) -> Tensor:
        return torch.where(data.mask, x, 0.0)

    with torch.no_grad():
        rewards = make_rewards(data, reward, settings, kl_coef)
        targets = algorithm.targets(data, rewards, settings)
        singles = [(row,) for row in range(len(data.mask))]
        return Experience(
            mask=data.mask,
            advantages=targets.advantages,
            old_logprobs=clean(data.logprobs if proximal is None else proximal),
            behaviour_logprobs=clean(data.logprobs),
            ref_logprobs=None if data.ref_logprobs is None else clean(data.ref_logprobs),
            tensors={name: clean(tensor) for name, tensor in targets.tensors.items()},
            units=singles if targets.units is None else targets.units,
            rewards=rewards.scores,
            stats={**rewards.stats, **targets.stats},
        )
