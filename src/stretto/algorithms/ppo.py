"""PPO (Schulman et al. 2017) with a per-token KL penalty in the reward (Ziegler et al. 2019).

B responses, T tokens; alignment as in the package's docstring. Two halves: :func:`prepare` turns
scored data into advantages and returns, once a step and over the whole batch; the loss terms are
evaluated on rows of the batch, any number at a time, and add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.algorithms.advantages import WHITEN_EPS, gae, whiten
from stretto.algorithms.kl import kl_estimate
from stretto.algorithms.reductions import Tally, masked_mean, masked_var, weighted_sums
from stretto.config import AlgorithmConfig, RewardConfig
from stretto.errors import LearnerError

MissingEos = Literal["off", "replace", "subtract"]


@dataclass(frozen=True, slots=True)
class Experience:
    """What the loss needs of a batch besides the trained models; all 0 outside the mask.

    Attributes:
        advantages: [B, T], whitened where asked for.
        returns: [B, T], what the critic is fitted to.
        old_logprobs: [B, T], of the policy that the ratio is taken to.
        old_values: [B, T], V(s_t) of the critic before the step.
        mask: [B, T] bool.
        stats: figures of the batch, by metric name.
    """

    advantages: Tensor
    returns: Tensor
    old_logprobs: Tensor
    old_values: Tensor
    mask: Tensor
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A loss over some rows of a batch, and what to report of it.

    Attributes:
        loss: [], differentiable; adds over the parts of a batch.
        tally: adds over parts; its weighted sums become means under the loss's weights.
    """

    loss: Tensor
    tally: Tally


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, clip: float
) -> LossTerm:
    """The clipped surrogate (equation 7), to be minimised.

    ::

        rho_t = exp(log pi(a_t) - log pi_old(a_t))
        L     = -sum_t w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)

    Args:
        logprobs, old_logprobs, advantages: [B, T].
        weights: [B, T], rows of :func:`~stretto.algorithms.reductions.token_weights`; tokens of
            weight 0 are not looked at.
        clip: eps.

    Returns:
        the loss, with ``policy/approxkl_avg`` (half the mean squared log ratio),
        ``policy/clipfrac_avg`` (where the clipped branch is the larger loss), ``val/ratio`` and
        its extremes.
    """
    mask = weights > 0
    w, new, old, adv = weights[mask], logprobs[mask], old_logprobs[mask], advantages[mask]

    log_ratio = new - old
    ratio = log_ratio.exp()
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - clip, 1 + clip) * adv
    per_token = -torch.minimum(unclipped, clipped)

    figures = {
        "loss/policy_avg": per_token,
        "policy/approxkl_avg": log_ratio.square() / 2,
        "policy/clipfrac_avg": clipped < unclipped,
        "val/ratio": ratio,
    }
    any_tokens = ratio.numel() > 0  # the least of nothing does not exist
    tally = Tally(
        sums=weighted_sums(w, figures),
        minima={"val/ratio_min": ratio.detach().amin()} if any_tokens else {},
        maxima={"val/ratio_max": ratio.detach().amax()} if any_tokens else {},
    )
    return LossTerm((w * per_token).sum(), tally)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, value_clip: float
) -> LossTerm:
    """Squared error to the returns, with the value held near the old one.

    ::

        V_clip = V_old + clip(V - V_old, -eps, eps)
        L      = sum_t w_t max((V_t - R_t)^2, (V_clip_t - R_t)^2) / 2

    Args:
        values, old_values, returns: [B, T].
        weights: as in :func:`policy_loss`.
        value_clip: eps; 0 leaves the plain squared error.

    Returns:
        the loss, with ``val/clipfrac_avg`` (where the clipped branch is the larger loss).
    """
    mask = weights > 0
    w, new, old, target = weights[mask], values[mask], old_values[mask], returns[mask]

    squares = (new - target).square()
    clipped = squares
    if value_clip:
        clipped = (old + (new - old).clamp(-value_clip, value_clip) - target).square()
    per_token = torch.maximum(squares, clipped) / 2

    figures = {"loss/value_avg": per_token, "val/clipfrac_avg": clipped > squares}
    return LossTerm((w * per_token).sum(), Tally(weighted_sums(w, figures)))


def entropy_bonus(entropy: Tensor, weights: Tensor, coef: float) -> LossTerm:
    """``-coef * sum_t w_t H_t``, with ``policy/entropy_avg`` in nats.

    Args:
        entropy: [B, T], of the distribution that token t was drawn from.
        weights: as in :func:`policy_loss`.
        coef: 0 only reports the entropy.
    """
    mask = weights > 0
    w, per_token = weights[mask], entropy[mask]
    tally = Tally(weighted_sums(w, {"policy/entropy_avg": per_token}))
    return LossTerm(-coef * (w * per_token).sum(), tally)


def apply_missing_eos(scores: Tensor, ended: Tensor, mode: MissingEos, penalty: float) -> Tensor:
    """Scores, [B], with those of responses that did not end by themselves penalised.

    Args:
        scores: [B].
        ended: [B] bool; what the engine says, never read off the padding.
        mode: ``replace`` puts the penalty in the score's place (asynchronous RLHF, Noukhovitch et
            al. 2025); ``subtract`` takes its absolute value off (TRL); ``off`` keeps the score.
        penalty: in units of the score.
    """
    if mode == "off":
        return scores
    penalised = torch.full_like(scores, penalty) if mode == "replace" else scores - abs(penalty)
    return torch.where(ended, scores, penalised)


def token_rewards(
    scores: Tensor,
    kl: Tensor,
    mask: Tensor,
    ended: Tensor,
    kl_coef: float,
    missing_eos: MissingEos,
    penalty: float,
) -> Tensor:
    """``r_t = -beta KL_t``, plus the score at the last response token.

    Ziegler et al. 2019, section 2.2.

    Args:
        scores: [B].
        kl: [B, T], per-token estimates.
        mask: [B, T] bool.
        ended: [B] bool.
        kl_coef: beta.
        missing_eos, penalty: as in :func:`apply_missing_eos`.

    Returns:
        [B, T], 0 outside the mask. An empty response has no last token: its score goes nowhere.
    """
    scores = apply_missing_eos(scores, ended, missing_eos, penalty)
    is_last = mask & ~pad(mask[:, 1:], (0, 1))
    return torch.where(mask, -kl_coef * kl, 0.0) + torch.where(is_last, scores[:, None], 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """``1 - Var(R - V) / Var(R)`` under the mask; NaN where the returns do not vary."""
    variance = masked_var(returns, mask)
    if variance <= WHITEN_EPS:
        return float("nan")
    return float(1 - masked_var(returns - values, mask) / variance)


@torch.no_grad()
def prepare(
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    old_values: Tensor,
    scores: Tensor,
    mask: Tensor,
    ended: Tensor,
    algorithm: AlgorithmConfig,
    reward: RewardConfig,
    kl_coef: float,
) -> Experience:
    """Scored data to advantages and returns.

    Takes the whole batch of a step at once: whitening needs all of it.

    Args:
        old_logprobs, old_values, mask: [B, T].
        ref_logprobs: [B, T]; None only where ``kl_coef`` is 0, and then no KL is reported.
        scores: [B]; ended: [B] bool.
        kl_coef: the present beta, which may differ from the setting's starting value.

    Raises:
        LearnerError: there is no response token, an input is not finite inside the mask, or the
            reference is missing.
    """
    _check(old_logprobs, ref_logprobs, old_values, scores, mask, kl_coef)
    reference = old_logprobs if ref_logprobs is None else ref_logprobs
    kl = torch.where(mask, kl_estimate(old_logprobs, reference, algorithm.kl_estimator), 0.0)
    missing_eos, penalty = reward.missing_eos, reward.missing_eos_penalty
    rewards = token_rewards(scores, kl, mask, ended, kl_coef, missing_eos, penalty)
    _require_finite("reward", rewards)
    if algorithm.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    raw_advantages, returns = gae(rewards, old_values, mask, algorithm.gamma, algorithm.lam)
    whitened = algorithm.whiten_advantages

    final_scores = apply_missing_eos(scores, ended, missing_eos, penalty)
    stats = _reward_stats(final_scores, kl[mask] if ref_logprobs is not None else None, kl_coef)
    return Experience(
        advantages=whiten(raw_advantages, mask) if whitened else raw_advantages,
        returns=returns,
        old_logprobs=torch.where(mask, old_logprobs, 0.0),
        old_values=torch.where(mask, old_values, 0.0),
        mask=mask,
        stats=stats | _critic_stats(raw_advantages, returns, old_values, mask),
    )


def _reward_stats(scores: Tensor, kl: Tensor | None, kl_coef: float) -> dict[str, float]:
    """Means over responses; ``objective/kl`` is of the estimator that the penalty uses.

    Args:
        scores: [B].
        kl: of all response tokens, in one row; None without a reference.
    """
    score = scores.mean().item()
    if kl is None:
        return {"objective/scores": score, "objective/rlhf_reward": score}
    response_kl = kl.sum().item() / len(scores)
    return {
        "objective/scores": score,
        "objective/kl": response_kl,
        "objective/kl_coef": kl_coef,
        "objective/non_score_reward": -kl_coef * response_kl,
        "objective/rlhf_reward": score - kl_coef * response_kl,
    }


def _critic_stats(
    advantages: Tensor, returns: Tensor, values: Tensor, mask: Tensor
) -> dict[str, float]:
    """Figures over response tokens, of advantages before whitening."""
    stats = {
        "critic/advantages/mean": masked_mean(advantages, mask).item(),
        "critic/advantages/std": masked_var(advantages, mask).sqrt().item(),
        "critic/returns/mean": masked_mean(returns, mask).item(),
        "critic/values/mean": masked_mean(values, mask).item(),
    }
    explained = explained_variance(values, returns, mask)
    if not math.isnan(explained):  # left out, rather than made up, where returns do not vary
        stats["critic/explained_variance"] = explained
    return stats


def _check(
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    old_values: Tensor,
    scores: Tensor,
    mask: Tensor,
    kl_coef: float,
) -> None:
    if not mask.any():
        raise LearnerError(
            f"a batch must hold at least one response token; all {len(mask)} responses are empty. "
            "Check the model's end-of-sequence tokens and rollout.stop"
        )
    if ref_logprobs is None and kl_coef:
        raise LearnerError(
            f"the KL penalty of weight {kl_coef} needs the reference's log-probabilities, and "
            "there are none. Score with the reference, or set algorithm.kl_coef = 0"
        )
    for name, tensor in (
        ("log-prob", old_logprobs[mask]),
        ("reference log-prob", None if ref_logprobs is None else ref_logprobs[mask]),
        ("value", old_values[mask]),
        ("score", scores),
    ):
        if tensor is not None:
            _require_finite(name, tensor)


def _require_finite(name: str, tensor: Tensor) -> None:
    bad = tensor[~tensor.isfinite()]
    if bad.numel():
        raise LearnerError(
            f"every {name} must be finite; {bad.numel()} of {tensor.numel()} are not, the first is "
            f"{bad[0].item()}. Find where it comes from before training on: a reward source, or "
            "weights that have diverged (lower training.lr)"
        )
