"""The functions of each algorithm, and the way of a scored batch to them.

``config/algorithm.py`` declares the needs of Stretto's own algorithms, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto import outside
from stretto.algorithms import ppo, preference, rloo
from stretto.algorithms.advantages import require_several
from stretto.algorithms.experience import Experience, LossInputs, LossTerm, Scored, Targets, check
from stretto.algorithms.rewards import Rewards, make_rewards
from stretto.config import AlgorithmConfig, RewardConfig
from stretto.config.algorithm import AlgorithmSpec
from stretto.errors import ConfigError

T = TypeVar("T")
Loss = Callable[[Tensor, LossInputs, AlgorithmConfig], LossTerm]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Algorithm(Functions, AlgorithmSpec):
    """An algorithm outside the package: its functions and what it needs of a run, by keyword.

    ``algorithm.name`` names such an object by its import path. Each process that computes losses
    imports it, so nothing of it is sent to other processes.
    """


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


def functions_of(settings: AlgorithmConfig) -> Functions:
    """Raises ConfigError if the user's own code cannot be imported or is no Algorithm."""
    if settings.is_outside:
        algorithm: Algorithm = outside.load(settings.name, "algorithm.name", Algorithm)
        return algorithm
    return FUNCTIONS[settings.name]


def call(settings: AlgorithmConfig, function: Callable[..., T], kind: type[T], *inputs: Any) -> T:
    """Call a function of an algorithm. Raises ConfigError if the user's own code raises an
    exception, or returns another type or shape than ``kind`` has.
    """
    if not settings.is_outside:
        return function(*inputs, settings)
    with outside.raising(settings.name, "algorithm.name"):
        result = function(*inputs, settings)
    what = f"algorithm.name: the result of {function} of '{settings.name}'"
    outside.require(result, kind, what)
    tensors, shape = {}, torch.Size()
    if isinstance(result, LossTerm):
        tensors = {"loss": result.loss}
    elif isinstance(result, Targets):
        tensors, shape = {"advantages": result.advantages, **result.tensors}, inputs[0].mask.shape
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ConfigError(
                f"{what} has {name} of shape {list(tensor.shape)}, which must be {list(shape)}",
                "algorithm-shape",
            )
    return result


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
        make = functions_of(settings).targets
        targets = call(settings, make, Targets, data, rewards)
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
