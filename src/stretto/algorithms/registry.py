"""The functions of each algorithm, and the way of a scored batch to them.

What an algorithm needs of a run stands in ``config/algorithm.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.algorithms import ppo, preference, rloo
from stretto.algorithms.advantages import require_several
from stretto.algorithms.experience import Experience, LossInputs, LossTerm, Scored, Targets, check
from stretto.algorithms.rewards import Rewards, make_rewards
from stretto.config import AlgorithmConfig, RewardConfig

Loss = Callable[[Tensor, LossInputs, AlgorithmConfig], LossTerm]


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of an algorithm. docs/algorithms.md says how to add one.

    ``targets`` makes advantages, or the rows to train on, and further tensors that the losses take,
    of a scored batch and its rewards. ``policy_loss`` takes log-probs [b, T] of the policy under
    training; entropy and a KL in the loss are terms of their own. ``value_loss`` takes values [b,
    T] of the critic; ``None`` for algorithms without one.
    """

    targets: Callable[[Scored, Rewards, AlgorithmConfig], Targets]
    policy_loss: Loss
    value_loss: Loss | None = None


FUNCTIONS: Mapping[str, Functions] = {
    "ppo": Functions(ppo.targets, ppo.policy_loss, ppo.value_loss),
    "rloo": Functions(rloo.targets, rloo.policy_loss),
    "proximal-rloo": Functions(rloo.targets, rloo.proximal_loss),
    "copg": Functions(rloo.targets, rloo.copg_loss),
    "grpo": Functions(ppo.grpo_targets, ppo.policy_loss),
    "cispo": Functions(ppo.grpo_targets, ppo.cispo_loss),
    "online-dpo": Functions(preference.dpo_targets, preference.dpo_loss),
    "best-of-n": Functions(preference.best_targets, preference.best_loss),
}


def prepare(
    data: Scored,
    settings: AlgorithmConfig,
    reward: RewardConfig,
    kl_coef: float,
    proximal: Tensor | None = None,
) -> Experience:
    """Make the inputs of its losses of the scored batch of a whole step.

    Raises LearnerError if nothing can be learned from it: no tokens, numbers that are not finite, a
    missing reference or critic, or a prompt with too few responses. ``kl_coef`` is the present
    beta. Proximal log-probs [B, T] are of the policy before the step, where ratios are taken to
    that policy and training moves away from it; ``None`` takes those of the behaviour policy.
    """
    check(data, kl_coef)
    data = data.shared()
    if settings.definition.group > 1:
        require_several(data.groups[data.responses()[0]], settings.name)

    def clean(x: Tensor) -> Tensor:
        return torch.where(data.mask, x, 0.0)

    with torch.no_grad():
        rewards = make_rewards(data, reward, settings, kl_coef)
        targets = FUNCTIONS[settings.name].targets(data, rewards, settings)
        units: Sequence[Sequence[int]] = data.rows() if targets.units is None else targets.units
        if settings.mask_truncated_completions:
            units = [unit for unit in units if data.ended[list(unit)].all()]
        none = torch.zeros_like(targets.advantages)
        return Experience(
            mask=data.mask,
            weights=none,
            means=none,
            response_weights=none[:, 0],
            advantages=targets.advantages,
            old_logprobs=clean(data.logprobs if proximal is None else proximal),
            behaviour_logprobs=clean(data.logprobs),
            ref_logprobs=None if data.ref_logprobs is None else clean(data.ref_logprobs),
            tensors={name: clean(tensor) for name, tensor in targets.tensors.items()},
            episodes=data.episodes,
            units=units,
            apart=targets.units is None and not settings.of_whole_responses,
            rewards=rewards.scores,
            stats={**rewards.stats, **targets.stats},
        )
