"""Algorithms that rank the responses to a prompt: Online DPO and best-of-n."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.algorithms.advantages import best_and_worst, group_stats
from stretto.algorithms.experience import LossInputs, LossTerm, Scored, Targets
from stretto.algorithms.policy import policy_term
from stretto.algorithms.reductions import joined, weighted_sums
from stretto.algorithms.rewards import Rewards
from stretto.config import AlgorithmConfig


def dpo_targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """Pair the best and the worst response of each group, each with all its rows. Skips groups
    whose scores are all equal, as they express no preference, and pairs with an empty response.
    ``dpo/pairs`` is the number of pairs that remain.
    """
    first, rows = data.responses()[0], data.rows()
    tokens = joined(data.mask.sum(dim=1), data.episodes)[first]
    scores, groups = rewards.scores[first], data.groups[first]
    pairs = [
        (best, worst)
        for best, worst in best_and_worst(scores, groups)
        if scores[best] > scores[worst] and tokens[best] and tokens[worst]
    ]
    sides = torch.zeros_like(data.logprobs)
    for number, (best, worst) in enumerate(pairs, 1):
        sides[list(rows[best])], sides[list(rows[worst])] = number, -number
    return Targets(
        advantages=torch.zeros_like(data.logprobs),
        units=[(*rows[best], *rows[worst]) for best, worst in pairs],
        tensors={} if data.episodes is None else {"sides": sides},
        stats={**group_stats(scores, groups), "dpo/pairs": float(len(pairs))},
    )


def dpo_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """Online DPO (Guo et al. 2024; Rafailov et al. 2023): the logistic loss on pairs' margins.

    Rows alternate: best, worst, best, worst, ... If episodes have several rows, ``sides`` holds the
    number of each row's pair instead, negative for the worst. ::

        margin = beta (log pi(y+)/pi_ref(y+) - log pi(y-)/pi_ref(y-))
        L      = -sum_pairs w log sigmoid(margin)

    ``dpo/accuracy`` is the share of margins above 0.
    """
    assert inputs.ref_logprobs is not None  # checked with the weight of the KL
    log_ratio = torch.where(inputs.mask, logprobs - inputs.ref_logprobs, 0.0).sum(dim=1)
    if "sides" in inputs.tensors:
        side = inputs.tensors["sides"][:, 0]
        margin = settings.kl_coef * joined(side.sign() * log_ratio, side.abs())
        w = inputs.response_weights
    else:
        margin = settings.kl_coef * (log_ratio[0::2] - log_ratio[1::2])
        w = inputs.response_weights[0::2] + inputs.response_weights[1::2]
    loss = -(w * torch.nn.functional.logsigmoid(margin)).sum()

    metrics = {"dpo/margin": margin, "dpo/accuracy": margin > 0}
    return policy_term(loss, weighted_sums(w, metrics))


def best_targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """Train on the best response of each group only. Among equal scores the first wins."""
    first, rows = data.responses()[0], data.rows()
    groups = data.groups[first]
    return Targets(
        advantages=torch.zeros_like(data.logprobs),
        units=[rows[best] for best, _ in best_and_worst(rewards.totals[first], groups)],
        stats=group_stats(rewards.scores[first], groups),
    )


def best_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t log pi(y_t)``: the cross-entropy of the best responses."""
    w, token_logprobs = inputs.of_tokens(inputs.weights), inputs.of_tokens(logprobs)
    return policy_term(-(w * token_logprobs).sum(), {})
