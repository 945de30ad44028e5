"""The functions of each algorithm, and the conversion of a scored batch to their inputs.

``config/algorithm.py`` declares what each built-in algorithm requires, without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto import outside
from stretto.algorithms import distill, ppo, preference, rloo
from stretto.algorithms.advantages import require_several
from stretto.algorithms.experience import Experience, LossInputs, LossTerm, Scored, Targets, check
from stretto.algorithms.policy import clipped_surrogate
from stretto.algorithms.rewards import Rewards, make_rewards
from stretto.config import AlgorithmConfig, RewardConfig
from stretto.config.algorithm import AlgorithmSpec
from stretto.errors import ConfigError

T = TypeVar("T")
Loss = Callable[[Tensor, LossInputs, AlgorithmConfig], LossTerm]


@dataclass(frozen=True)
class Functions:
    """The functions of an algorithm. docs/algorithms.md explains how to add one.

    ``targets`` turns a scored batch and its rewards into advantages, or the rows to train on, and
    further tensors for the losses. ``policy_loss`` takes log-probs [b, T] of the policy under
    training. Entropy and a KL in the loss are separate terms. ``value_loss`` takes values [b, T] of
    the critic, and is ``None`` for algorithms without one.
    """

    targets: Callable[[Scored, Rewards, AlgorithmConfig], Targets]
    policy_loss: Loss
    value_loss: Loss | None = None


@dataclass(frozen=True)
class Algorithm(Functions, AlgorithmSpec):
    """An algorithm from outside the package: its functions and requirements, by keyword.
    ``algorithm.name`` gives the import path of such an object. Each process that computes losses
    imports it, so it is never pickled.
    """


FUNCTIONS: Mapping[str, Functions] = {
    "ppo": Functions(ppo.targets, clipped_surrogate, ppo.value_loss),
    "rloo": Functions(rloo.targets, rloo.policy_loss),
    "proximal-rloo": Functions(rloo.targets, rloo.proximal_loss),
    "copg": Functions(rloo.targets, rloo.copg_loss),
    "grpo": Functions(ppo.grpo_targets, clipped_surrogate),
    "cispo": Functions(ppo.grpo_targets, ppo.cispo_loss),
    "online-dpo": Functions(preference.dpo_targets, preference.dpo_loss),
    "best-of-n": Functions(preference.best_targets, preference.best_loss),
    "distill": Functions(distill.targets, clipped_surrogate),
}


def functions_of(settings: AlgorithmConfig) -> Functions:
    """Raises ConfigError if the user's code cannot be imported or is not an Algorithm."""
    if settings.is_outside:
        algorithm: Algorithm = outside.load(settings.name, "algorithm.name", Algorithm)
        return algorithm
    return FUNCTIONS[settings.name]


def call(settings: AlgorithmConfig, function: Callable[..., T], kind: type[T], *inputs: Any) -> T:
    """Call a function of an algorithm. Raises ConfigError if the user's code raises an exception or
    returns a wrong type or shape.
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
    """Turn the scored batch of a full step into loss inputs.

    Raises LearnerError if the batch cannot be trained on: no tokens, non-finite numbers, a
    missing reference or critic, or a prompt with too few responses. ``kl_coef`` is the current
    beta. ``proximal`` [B, T] are log-probs of the policy before the step, if ratios are taken to
    that policy. ``None`` takes those of the behaviour policy.
    """
    check(data, kl_coef)
    data = data.shared()
    if settings.group > 1:
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
            groups=data.groups if settings.has_optimal_baseline else None,
            units=units,
            apart=targets.units is None and not settings.of_whole_responses,
            rewards=rewards.scores,
            stats={**rewards.stats, **targets.stats},
        )
