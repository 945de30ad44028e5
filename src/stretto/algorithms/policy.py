"""Loss terms that algorithms share: clipped surrogate, entropy, KL, and policy-drift metrics.

All take inputs of b rows and T columns, and ``logprobs`` [b, T] of the policy under training.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stretto.algorithms.experience import LossInputs, LossTerm
from stretto.algorithms.kl import kl_estimate
from stretto.algorithms.reductions import Metrics, weighted_sums
from stretto.config import AlgorithmConfig

POLICY_LOSS = "loss/policy_avg"

SUM = "sampling/sum"
SQUARES = "sampling/squares"
TOKENS = "sampling/tokens"
"""Names of the sums of :func:`disagreement`."""

WEIGHT = "sampling/weight"
SQUARED_WEIGHT = "sampling/squared_weight"
"""Names of the means of :func:`response_weights`."""
ESS = "staleness/ess"

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped here: far beyond any clipping, and far from overflow."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, kept finite: the gradient of infinity, clipped or times 0, is NaN."""
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()


def policy_ratio(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """``pi / pi_old`` of tokens [N], or a response's geometric mean (GSPO, Zheng et al. 2025)."""
    log_ratio = logprobs - inputs.old_logprobs
    if settings.importance_sampling_level == "sequence":
        mean = inputs.of_response(log_ratio) / inputs.response_tokens.clamp_min(1)
        log_ratio = mean[:, None].expand_as(log_ratio)
    return bounded_ratio(inputs.of_tokens(log_ratio))


def clipped_surrogate(logprobs: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
    """The clipped surrogate of PPO (Schulman et al. 2017, equation 7), to be minimised.

    ::

        rho_t = exp(log pi(a_t) - log pi_old(a_t))
        L     = -sum_t w_t min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)

    ``algorithm.dual_clip`` bounds the first branch (Ye et al. 2020, equation 5).
    ``policy/clipfrac_avg`` is the share of tokens whose clipped branch is the larger loss.
    """
    w, adv = inputs.of_tokens(inputs.weights), inputs.of_tokens(inputs.advantages)
    low, high = settings.clip, settings.clip_high or settings.clip

    ratio = policy_ratio(logprobs, inputs, settings)
    unclipped = (ratio.clamp(max=settings.dual_clip) if settings.dual_clip else ratio) * adv
    clipped = ratio.clamp(1 - low, 1 + high) * adv
    loss = -(w * torch.minimum(unclipped, clipped)).sum()

    metrics = {"policy/clipfrac_avg": clipped < unclipped}
    return policy_term(loss, weighted_sums(inputs.of_tokens(inputs.means), metrics))


def policy_term(loss: Tensor, sums: dict[str, Tensor]) -> LossTerm:
    return LossTerm(loss, Metrics({POLICY_LOSS: loss.detach().double(), **sums}))


def entropy_bonus(
    entropy: Tensor, inputs: LossInputs, coef: float, *, token_mean: bool = False
) -> LossTerm:
    """``-coef * sum_t w_t H_t`` of the entropies [b, T], with ``policy/entropy_avg`` in nats. With
    ``token_mean`` the weights w_t are 1 / tokens, as in TRL, instead of the policy loss's.
    """
    per_token = inputs.of_tokens(entropy if coef else entropy.detach())  # saves its gradient
    means = inputs.of_tokens(inputs.means)
    w = means if token_mean else inputs.of_tokens(inputs.weights)
    sums = weighted_sums(means, {"policy/entropy_avg": per_token})
    return LossTerm(-coef * (w * per_token).sum(), Metrics(sums))


def kl_penalty(
    logprobs: Tensor, inputs: LossInputs, coef: float, settings: AlgorithmConfig
) -> LossTerm:
    """``beta * sum_t w_t KL_t``, with ``loss/kl_avg`` (GRPO, Shao et al. 2024, equation 3)."""
    assert inputs.ref_logprobs is not None  # checked with the weight of the KL
    policy_logprobs, reference = inputs.of_tokens(logprobs), inputs.of_tokens(inputs.ref_logprobs)
    per_token = kl_estimate(policy_logprobs, reference, settings.estimator)
    if settings.use_bias_correction_kl:
        per_token = per_token * policy_ratio(logprobs, inputs, settings)
    w, means = inputs.of_tokens(inputs.weights), inputs.of_tokens(inputs.means)
    sums = weighted_sums(means, {"loss/kl_avg": per_token})
    return LossTerm(coef * (w * per_token).sum(), Metrics(sums))


def drift(logprobs: Tensor, inputs: LossInputs) -> Metrics:
    """Measure the drift from the old policy: ``policy/approxkl_avg`` and ``val/ratio`` with its
    extremes. ``policy/approxkl_avg`` is half the mean squared log ratio.
    """
    log_ratio = inputs.of_tokens(logprobs.detach() - inputs.old_logprobs)
    ratio = log_ratio.exp()
    metrics = {"policy/approxkl_avg": log_ratio.square() / 2, "val/ratio": ratio}
    any_tokens = ratio.numel() > 0  # there is no minimum of nothing
    return Metrics(
        sums=weighted_sums(inputs.of_tokens(inputs.means), metrics),
        minima={"val/ratio_min": ratio.amin()} if any_tokens else {},
        maxima={"val/ratio_max": ratio.amax()} if any_tokens else {},
    )


def disagreement(logprobs: Tensor, inputs: LossInputs) -> Metrics:
    """Measure how much the log-probs of engine and learner differ under the same weights.

    Over fresh responses: the sums of the differences (learner less engine) and of their squares and
    the number of tokens, under :data:`SUM`, :data:`SQUARES` and :data:`TOKENS`, and
    ``sampling/logp_difference_max``.
    """
    if inputs.fresh is None or inputs.behaviour_logprobs is None:
        return Metrics()
    places = inputs.fresh_places if inputs.places is not None else inputs.located().fresh_places
    difference = (logprobs.detach() - inputs.behaviour_logprobs).flatten()[places].double()
    if not difference.numel():
        return Metrics()
    return Metrics(
        sums={
            SUM: difference.sum(),
            SQUARES: difference.square().sum(),
            TOKENS: difference.new_full((), difference.numel()),
        },
        maxima={"sampling/logp_difference_max": difference.abs().amax()},
    )


def response_ratios(logprobs: Tensor, inputs: LossInputs) -> Metrics:
    """Means of the importance weights ``w = prod_t pi(a_t) / pi_behave(a_t)`` of responses and of
    their squares, from which :func:`effective_sample_size` follows. Samples of an episode have
    weights of their own, because they may be in several micro-batches.
    """
    behaviour = inputs.behaviour_logprobs
    behaviour = inputs.old_logprobs if behaviour is None else behaviour
    log_ratio = torch.where(inputs.mask, logprobs.detach() - behaviour, 0.0).double()
    weights = bounded_ratio(log_ratio.sum(dim=1))
    means = {WEIGHT: weights, SQUARED_WEIGHT: weights.square()}
    return Metrics(weighted_sums(inputs.response_weights, means))


def with_effective_sample_size(metrics: Metrics) -> Metrics:
    """Replace the means of :func:`response_ratios` over an update's responses by :data:`ESS`, the
    effective sample size as a share of the responses (Kish 1965)::

        (sum_b w_b)^2 / (B sum_b w_b^2)
    """
    sums = dict(metrics.sums)
    if WEIGHT in sums:
        share = sums.pop(WEIGHT).square() / sums.pop(SQUARED_WEIGHT)
        sums[ESS] = share.clamp(max=1.0)  # weights 1 / B in float32 may sum to more than 1
    return replace(metrics, sums=sums)
