"""The rewards of responses: scores, the missing-EOS rule, and the KL cost if in the reward."""

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
    """The rewards of a batch, less the KL cost if it is in the reward. ``totals`` include the
    scores of empty responses, unlike the sum over ``tokens``.
    """

    scores: Tensor  # [B], after the missing-EOS rule
    tokens: Tensor  # [B, T], 0 outside the mask: scores where they are earned, less KL costs
    totals: Tensor  # [B], the score less the KL cost of the full response
    stats: Mapping[str, float]


def apply_missing_eos(scores: Tensor, ended: Tensor, mode: MissingEos, penalty: float) -> Tensor:
    """Penalise the scores [B] of responses that the engine reports as not ended by themselves.
    ``replace`` sets the score to the penalty (asynchronous RLHF, Noukhovitch et al. 2025).
    ``subtract`` subtracts the penalty's absolute value (TRL). ``off`` keeps the score.
    """
    if mode == "off":
        return scores
    penalised = torch.full_like(scores, penalty) if mode == "replace" else scores - abs(penalty)
    return torch.where(ended, scores, penalised)


def token_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, turns: Tensor | None = None
) -> Tensor:
    """``r_t = -beta KL_t``, plus the score at the last response token.

    Ziegler et al. 2019, section 2.2. Maps scores [B] and estimates [B, T] to [B, T], 0 outside the
    mask. The score of an empty response is dropped, as it has no last token. Rewards of ``turns``
    [B, T] stay at their tokens, and the last token gets the rest of the score.
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
    """Combine scores and KL into rewards, by the run's settings and the current beta."""
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
    """Return means over responses. ``kl`` is [N], by the estimator that the penalty uses."""
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
