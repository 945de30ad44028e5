"""Importance weights for data of another policy than the one that is trained.

Asynchronous and carried rollouts are sampled by a *behaviour* policy, token by token its own
version. Decoupled PPO (Hilton et al. 2022) takes the ratio that is clipped to a *proximal* policy,
the learner's own before the step, and weighs each token by proximal / behaviour:

    rho = pi / pi_prox
    w   = pi_prox / pi_behave
    L   = -E w min(rho A, clip(rho, 1 - eps, 1 + eps) A)

The weights are never negative, so they can be part of the advantages: every loss that is linear in
the advantages is weighted so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from stretto.algorithms.experience import LossInputs
from stretto.algorithms.reductions import Metrics, joined, weighted_sums
from stretto.config import AlgorithmConfig


def settled(
    inputs: LossInputs, logprobs: Tensor, settings: AlgorithmConfig
) -> tuple[LossInputs, Metrics]:
    """Settle the old policy's log-probs, and put importance weights on the advantages.

    Log-probs [b, T] are of the policy under training, detached; they are the old ones in rows whose
    old policy is that. Returns ``correction/weight_mean``, too, where there is a correction.
    """
    old, behaviour = inputs.old_logprobs, inputs.behaviour_logprobs
    behaviour = old if behaviour is None else behaviour
    if inputs.own is not None:
        old = torch.where(inputs.own[:, None], logprobs, old)
    if settings.correction == "off":
        return replace(inputs, old_logprobs=old), Metrics()
    weights = importance_weights(
        old,
        behaviour,
        inputs.mask,
        settings.correction,
        settings.correction_level,
        settings.correction_cap,
        inputs.episodes,
    )
    figures = {"correction/weight_mean": inputs.of_tokens(weights)}
    metrics = Metrics(weighted_sums(inputs.of_tokens(inputs.means), figures))
    return replace(inputs, old_logprobs=old, advantages=inputs.advantages * weights), metrics


def importance_weights(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    kind: Literal["truncate", "mask"],
    level: Literal["token", "sequence"],
    cap: float,
    episodes: Tensor | None = None,
) -> Tensor:
    """Return ``w = pi_prox / pi_behave`` [B, T], kept small; 0 outside the mask.

    ``truncate`` gives min(w, cap) (Espeholt et al. 2018); ``mask`` keeps w within 1 / cap to cap,
    and gives 0 outside. The level is a weight a token, or the product over the response, an
    episode's over all its rows, for all its tokens.
    """
    log_ratio = torch.where(mask, proximal - behaviour, 0.0)
    if level == "sequence":
        log_ratio = joined(log_ratio.sum(dim=1), episodes)[:, None].expand_as(mask)
    weights = log_ratio.exp()
    if kind == "truncate":
        weights = weights.clamp(max=cap)
    else:
        weights = torch.where((weights >= 1 / cap) & (weights <= cap), weights, 0.0)
    return torch.where(mask, weights, 0.0)
