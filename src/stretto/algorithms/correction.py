"""Importance weights for data sampled by a policy other than the one under training.

Asynchronous and carried rollouts are sampled by a *behaviour* policy, whose version may differ from
token to token. Decoupled PPO (Hilton et al. 2022) takes the clipped ratio to a *proximal* policy,
the learner's own before the step, and weighs each token by proximal / behaviour:

    rho = pi / pi_prox
    w   = pi_prox / pi_behave
    L   = -E w min(rho A, clip(rho, 1 - eps, 1 + eps) A)

The weights are never negative, so they can be multiplied into the advantages. This suits every loss
linear in the advantages.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stretto.algorithms.experience import LossInputs
from stretto.algorithms.reductions import Metrics, joined, weighted_sums
from stretto.config import AlgorithmConfig


def settled(
    inputs: LossInputs, logprobs: Tensor, settings: AlgorithmConfig
) -> tuple[LossInputs, Metrics]:
    """Choose the old policy's log-probs and multiply importance weights into the advantages.

    ``logprobs`` [b, T] are detached and of the policy under training. They replace the old
    log-probs in the rows that ``inputs.own`` marks. With a correction, also returns
    ``correction/weight_mean``.
    """
    old, behaviour = inputs.old_logprobs, inputs.behaviour_logprobs
    behaviour = old if behaviour is None else behaviour
    if inputs.own is not None:
        old = torch.where(inputs.own[:, None], logprobs, old)
    if settings.correction == "off":
        return replace(inputs, old_logprobs=old), Metrics()
    weights = importance_weights(old, behaviour, inputs.mask, settings, inputs.episodes)
    figures = {"correction/weight_mean": inputs.of_tokens(weights)}
    metrics = Metrics(weighted_sums(inputs.of_tokens(inputs.means), figures))
    return replace(inputs, old_logprobs=old, advantages=inputs.advantages * weights), metrics


def importance_weights(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    settings: AlgorithmConfig,
    episodes: Tensor | None = None,
) -> Tensor:
    """Return ``w = pi_prox / pi_behave`` [B, T], bounded by ``correction_cap``, and 0 outside the
    mask.

    Correction ``truncate`` gives min(w, cap) (Espeholt et al. 2018). ``mask`` keeps weights between
    1 / cap and cap, and sets the rest to 0. Level ``token`` has a weight per token. Level
    ``sequence`` gives all tokens of a response, or of all rows of an episode, the product of their
    weights.
    """
    cap = settings.correction_cap
    log_ratio = torch.where(mask, proximal - behaviour, 0.0)
    if settings.correction_level == "sequence":
        log_ratio = joined(log_ratio.sum(dim=1), episodes)[:, None].expand_as(mask)
    weights = log_ratio.exp()
    if settings.correction == "truncate":
        weights = weights.clamp(max=cap)
    else:
        weights = torch.where((weights >= 1 / cap) & (weights <= cap), weights, 0.0)
    return torch.where(mask, weights, 0.0)
