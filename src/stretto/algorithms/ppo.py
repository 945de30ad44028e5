"""PPO (Schulman et al. 2017) with a critic, and GRPO, which compares a group instead."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.algorithms.advantages import (
    WHITEN_EPS,
    gae,
    group_normalised,
    group_stats,
    normalised_then_summed,
    whiten,
)
from stretto.algorithms.experience import LossInputs, LossTerm, Scored, Targets
from stretto.algorithms.policy import policy_ratio, policy_term
from stretto.algorithms.reductions import Metrics, masked_mean, masked_var, weighted_sums
from stretto.algorithms.rewards import Rewards
from stretto.config import AlgorithmConfig
from stretto.errors import LearnerError


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """GAE advantages, whitened over the batch if configured, and returns for the critic. Each row
    is a trajectory of its own that earns the score of its episode. Rewards that the rest of the
    episode earned before a row's first token are a constant there, which biases no gradient.
    """
    if data.values is None:
        raise LearnerError(
            "PPO needs the critic's values, and there are none; score with a critic",
            "critic-values-missing",
        )
    tokens = rewards.tokens
    if settings.whiten_rewards:
        tokens = whiten(tokens, data.mask, shift_mean=False)
    advantages, returns = gae(tokens, data.values, data.mask, settings.gamma, settings.lam)
    return Targets(
        advantages=whiten(advantages, data.mask) if settings.whiten_advantages else advantages,
        tensors={"returns": returns, "old_values": data.values},
        stats=_stats(advantages, returns, data.values, data.mask),
    )


def cispo_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t min(rho_t, 1 + eps) A_t log pi(a_t)``, with no gradient through the ratio rho.
    CISPO (MiniMax-M1, 2025): a large ratio only bounds a token's weight, so no token is dropped.
    ``policy/clipfrac_avg`` is the share of tokens whose ratio is bounded.
    """
    w, adv = inputs.of_tokens(inputs.weights), inputs.of_tokens(inputs.advantages)
    bound = 1 + (settings.clip_high or settings.clip)
    ratio = policy_ratio(logprobs, inputs, settings).detach()
    loss = -(w * ratio.clamp(max=bound) * adv * inputs.of_tokens(logprobs)).sum()
    metrics = {"policy/clipfrac_avg": ratio > bound}
    return policy_term(loss, weighted_sums(inputs.of_tokens(inputs.means), metrics))


def value_loss(values: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """Squared error to the returns, with the value clipped near the old one.

    ::

        V_clip = V_old + clip(V - V_old, -eps, eps)
        L      = sum_t w_t max((V_t - R_t)^2, (V_clip_t - R_t)^2) / 2

    eps is ``algorithm.value_clip``. With 0 the loss is the plain squared error.
    ``val/clipfrac_avg`` is the share of tokens whose clipped branch is the larger loss.
    """
    eps, weights = settings.value_clip, inputs.of_tokens(inputs.weights)
    of_batch = (values, inputs.tensors["returns"], inputs.tensors["old_values"])
    values, returns, old_values = map(inputs.of_tokens, of_batch)

    squares = (values - returns).square()
    clipped = squares
    if eps:
        clipped = (old_values + (values - old_values).clamp(-eps, eps) - returns).square()
    per_token = torch.maximum(squares, clipped) / 2

    metrics = {"loss/value_avg": per_token, "val/clipfrac_avg": clipped > squares}
    return LossTerm((weights * per_token).sum(), Metrics(weighted_sums(weights, metrics)))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """``1 - Var(R - V) / Var(R)`` under the mask. NaN if the returns do not vary."""
    variance = masked_var(returns, mask)
    if variance <= WHITEN_EPS:
        return float("nan")
    return float(1 - masked_var(returns - values, mask) / variance)


def _stats(advantages: Tensor, returns: Tensor, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Return metrics over response tokens. ``advantages`` are those before whitening."""
    stats = {
        "critic/advantages/mean": masked_mean(advantages, mask).item(),
        "critic/advantages/std": masked_var(advantages, mask).sqrt().item(),
        "critic/returns/mean": masked_mean(returns, mask).item(),
        "critic/values/mean": masked_mean(values, mask).item(),
    }
    explained = explained_variance(values, returns, mask)
    if not math.isnan(explained):  # omitted rather than invented if returns do not vary
        stats["critic/explained_variance"] = explained
    return stats


def grpo_targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """``A_i = (R_i - mean R) / std R`` over the group, for all tokens of a response (no critic).

    GRPO (Shao et al. 2024) averages PPO's clipped surrogate over each response, with the KL (k3) in
    the loss. Dr. GRPO (Liu et al. 2025): ``scale_rewards = 'none'``, ``aggregation =
    'fixed_length'``. DAPO (Yu et al. 2025): ``clip_high = 0.28``, ``aggregation = 'token_mean'``,
    ``kl_coef = 0``.
    """
    first, place = data.responses()
    totals, groups = rewards.totals[first], data.groups[first]
    if settings.normalizes_sources and data.sources is not None and data.weights is not None:
        per_response = normalised_then_summed(data.sources[first], data.weights, groups)
    else:
        per_response = group_normalised(totals, groups, settings.scale_rewards)
    advantages = per_response[place]
    return Targets(
        advantages=torch.where(data.mask, advantages[:, None], 0.0),
        stats=group_stats(rewards.scores[first], groups),
    )
