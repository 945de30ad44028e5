"""The rewards of responses: scores, the rule for missing ends, and the KL where it is a cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.algorithms.experience import Scored, require_finite
from stretto.algorithms.kl import kl_estimate
from stretto.algorithms.reductions import joined
from stretto.config import AlgorithmConfig, RewardConfig

MissingEos = Literal["off", "replace", "subtract"]


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of a batch, with the KL's cost where that is in the reward; unlike the sum over
    tokens, totals hold scores of empty responses too.
    """

    scores: Tensor  # [B], after the rule for missing ends
    tokens: Tensor  # [B, T], 0 outside the mask: the score where it is earned, less each one's KL
    totals: Tensor  # [B], the score less the KL's cost over the whole response
    stats: Mapping[str, float]


def apply_missing_eos(scores: Tensor, ended: Tensor, mode: MissingEos, penalty: float) -> Tensor:
    """Penalise the scores [B] of responses that did not end by themselves, as the engine says.

    ``replace`` puts the penalty in the score's place (asynchronous RLHF, Noukhovitch et al. 2025);
    ``subtract`` takes its absolute value off (TRL); ``off`` keeps the score.
    """
    if mode == "off":
        return scores
    penalised = torch.full_like(scores, penalty) if mode == "replace" else scores - abs(penalty)
    return torch.where(ended, scores, penalised)


def token_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, turns: Tensor | None = None
) -> Tensor:
    """``r_t = -beta KL_t``, plus the score at the last response token.

    Ziegler et al. 2019, section 2.2. Of scores [B] and estimates [B, T] to [B, T], 0 outside the
    mask. An empty response has no last token: its score goes nowhere. What was given for turns
    [B, T] stays in its places, and only the rest of the score is at the last token.
    """
    is_last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    tokens = torch.where(mask, -kl_coef * kl, 0.0)
    if turns is not None:
        turns = torch.where(mask, turns, 0.0)
        tokens, scores = tokens + turns, scores - turns.sum(dim=1)
    return tokens + torch.where(is_last, scores[:, None], 0.0)


def make_rewards(
    data: Scored, reward: RewardConfig, algorithm: AlgorithmConfig, kl_coef: float
) -> Rewards:
    """Make rewards of scores and KL, by the rules of a run and the present beta."""
    scores = apply_missing_eos(
        data.scores, data.ended, reward.missing_eos, reward.missing_eos_penalty
    )
    reference = data.logprobs if data.ref_logprobs is None else data.ref_logprobs
    kl = torch.where(data.mask, kl_estimate(data.logprobs, reference, algorithm.estimator), 0.0)
    cost = kl_coef if algorithm.kl_place == "reward" else 0.0
    tokens = token_rewards(scores, kl, data.mask, cost, data.turn_rewards)
    require_finite("reward", tokens)
    has_reference = data.ref_logprobs is not None
    return Rewards(
        scores,
        tokens,
        totals=scores - cost * joined(kl.sum(dim=1), data.episodes),
        stats=_stats(
            scores[data.responses()[0]], kl[data.mask] if has_reference else None, kl_coef, cost
        ),
    )


def _stats(scores: Tensor, kl: Tensor | None, kl_coef: float, cost: float) -> dict[str, float]:
    """Return means over responses, of the KL [N] by the estimator that the penalty uses."""
    score = scores.mean().item()
    spread = {"objective/scores_std": scores.std().item()} if len(scores) > 1 else {}
    if kl is None:
        return {"objective/scores": score, **spread, "objective/rlhf_reward": score}
    response_kl = kl.sum().item() / len(scores)
    return {
        "objective/scores": score,
        **spread,
        "objective/kl": response_kl,
        "objective/kl_coef": kl_coef,
        "objective/non_score_reward": -cost * response_kl,
        "objective/rlhf_reward": score - cost * response_kl,
    }
