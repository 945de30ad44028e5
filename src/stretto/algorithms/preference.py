"""Algorithms that rank the responses to a prompt: Online DPO and best-of-n."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.algorithms.advantages import best_and_worst, group_stats
from stretto.algorithms.experience import LossInputs, LossTerm, Scored, Targets
from stretto.algorithms.policy import policy_term
from stretto.algorithms.reductions import weighted_sums
from stretto.algorithms.rewards import Rewards
from stretto.config import AlgorithmConfig
from stretto.errors import LearnerError


def dpo_targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """Pairs of rows: the best of each group, and its worst.

    A group whose scores are all the same has no preference and is left out. So is a pair with an
    empty response. ``dpo/pairs`` is the number of pairs that are left.
    """
    tokens = data.mask.sum(dim=1)
    pairs = [
        (best, worst)
        for best, worst in best_and_worst(rewards.scores, data.groups)
        if rewards.scores[best] > rewards.scores[worst] and tokens[best] and tokens[worst]
    ]
    stats = group_stats(rewards.scores, data.groups)
    return Targets(
        advantages=torch.zeros_like(data.logprobs),
        units=pairs,
        stats={**stats, "dpo/pairs": float(len(pairs))},
    )


def dpo_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """Online DPO (Guo et al. 2024; Rafailov et al. 2023): the logistic loss on pairs' margins.

    Rows are best, worst, best, worst, ... ::

        margin = beta (log pi(y+)/pi_ref(y+) - log pi(y-)/pi_ref(y-))
        L      = -sum_pairs w log sigmoid(margin)

    ``dpo/accuracy`` is the share of margins above 0.
    """
    if inputs.ref_logprobs is None:
        raise LearnerError(
            "the loss of 'online-dpo' needs the reference's log-probabilities, and there are none; "
            "score with the reference",
            "reference-missing",
        )
    log_ratio = inputs.of_response(logprobs - inputs.ref_logprobs)
    margin = settings.kl_coef * (log_ratio[0::2] - log_ratio[1::2])
    w = inputs.response_weights[0::2] + inputs.response_weights[1::2]
    loss = -(w * torch.nn.functional.logsigmoid(margin)).sum()

    figures = {"dpo/margin": margin, "dpo/accuracy": margin > 0}
    return policy_term(loss, weighted_sums(w, figures))


def best_targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """The best row of each group; the others are left out. Of equals the first is best."""
    return Targets(
        advantages=torch.zeros_like(data.logprobs),
        units=[(best,) for best, _ in best_and_worst(rewards.totals, data.groups)],
        stats=group_stats(rewards.scores, data.groups),
    )


def best_loss(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """``-sum_t w_t log pi(y_t)``: the cross-entropy of the best responses."""
    w, own = inputs.of_tokens(inputs.weights), inputs.of_tokens(logprobs)
    return policy_term(-(w * own).sum(), {})
