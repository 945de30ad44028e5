"""Advantages, KL, reductions, rewards and PPO against hand-computed cases and naive loops."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loss_helpers import GARBAGE, inputs_of, mask_of, naive_gae, randn, soiled
from raising import raises
from rounding import rounding
from stretto.algorithms.advantages import gae, whiten
from stretto.algorithms.experience import Experience, LossInputs, LossTerm, Scored
from stretto.algorithms.kl import AdaptiveKL, kl_estimate
from stretto.algorithms.policy import clipped_surrogate, drift, entropy_bonus
from stretto.algorithms.ppo import explained_variance, value_loss
from stretto.algorithms.reductions import (
    Metrics,
    masked_mean,
    masked_var,
    response_weights,
    token_weights,
)
from stretto.algorithms.registry import prepare
from stretto.algorithms.rewards import apply_missing_eos, make_rewards, token_rewards
from stretto.config import AlgorithmConfig, RewardConfig
from stretto.errors import LearnerError, StateError

LENGTHS = (5, 0, 3, 1, 6)


# -- advantages ----------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5, so the discount of deltas is 0.25.
    # delta_2 = 4 - 3             =  1     A_2 = 1
    # delta_1 = 0 + 0.5 * 3 - 2   = -0.5   A_1 = -0.5 + 0.25 * 1      = -0.25
    # delta_0 = 1 + 0.5 * 2 - 1   =  1     A_0 =  1   + 0.25 * -0.25  =  0.9375
    advantages, returns = gae(
        torch.tensor([[1.0, 0.0, 4.0]]), torch.tensor([[1.0, 2.0, 3.0]]), mask_of((3,)), 0.5, 0.5
    )
    assert advantages.tolist() == [[0.9375, -0.25, 1.0]]
    assert returns.tolist() == [[1.9375, 1.75, 4.0]]


def test_gae_limits_are_monte_carlo_and_td() -> None:
    rewards, values = randn(0, 1, 7), randn(1, 1, 7)
    mask = mask_of((7,))
    _, returns = gae(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))
    advantages, _ = gae(rewards, values, mask, 0.9, 0.0)
    following = torch.cat([values[:, 1:], torch.zeros(1, 1)], dim=1)
    torch.testing.assert_close(advantages, rewards + 0.9 * following - values)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    padding=st.integers(1, 13),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 10_000),
    garbage=st.sampled_from(GARBAGE),
)
def test_gae_equals_the_double_loop_bitwise_free_of_padding(
    lengths: list[int], padding: int, gamma: float, lam: float, seed: int, garbage: float
) -> None:
    width = max(*lengths, 1)
    mask, wide_mask = mask_of(tuple(lengths), width), mask_of(tuple(lengths), width + padding)
    rewards, values = randn(seed, *mask.shape), randn(seed + 1, *mask.shape)

    advantages, returns = gae(
        soiled(rewards, wide_mask, garbage),
        soiled(values, wide_mask, garbage),
        wide_mask,
        gamma,
        lam,
    )
    for b, n in enumerate(lengths):
        expected = naive_gae(rewards[b, :n].tolist(), values[b, :n].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[b, :n], expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(returns[b, :n], expected[1], rtol=1e-4, atol=1e-5)
    assert not advantages[~wide_mask].any()
    assert not returns[~wide_mask].any()

    narrow = gae(rewards, values, mask, gamma, lam)
    assert torch.equal(advantages[:, :width], narrow[0])
    assert torch.equal(returns[:, :width], narrow[1])


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_equals_numpy(shift_mean: bool) -> None:
    mask = mask_of(LENGTHS)
    x = 3 + 5 * randn(2, *mask.shape)
    selected = x[mask].double().numpy()
    expected = (selected - selected.mean()) / np.sqrt(selected.var(ddof=1) + 1e-8)
    if not shift_mean:
        expected += selected.mean()
    result = whiten(x, mask, shift_mean)
    np.testing.assert_allclose(result[mask], expected, rtol=1e-5, atol=1e-6)
    assert not result[~mask].any()

    wide = mask_of(LENGTHS, 11)
    for garbage in GARBAGE:
        assert torch.equal(whiten(soiled(x, wide, garbage), wide, shift_mean)[:, :6], result)


def test_whitening_one_token_gives_zero() -> None:
    assert whiten(torch.tensor([[7.0, 9.0]]), mask_of((1,), 2)).tolist() == [[0.0, 0.0]]


# -- KL ------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand() -> None:
    logp, ref = torch.log(torch.tensor([[0.5, 0.2]])), torch.log(torch.tensor([[0.25, 0.4]]))
    ln2 = math.log(2)
    for kind, expected in (
        ("k1", [ln2, -ln2]),
        ("k2", [ln2**2 / 2, ln2**2 / 2]),
        ("k3", [0.5 - 1 + ln2, 2 - 1 - ln2]),  # pi_ref / pi - 1 - log(pi_ref / pi)
    ):
        np.testing.assert_allclose(kl_estimate(logp, ref, kind)[0], expected, rtol=rounding(4))  # type: ignore[arg-type]


def test_k1_and_k3_are_unbiased() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    for kind in ("k1", "k3"):
        expectation = (p * kl_estimate(p.log(), q.log(), kind)).sum().item()  # type: ignore[arg-type]
        assert expectation == pytest.approx(exact, rel=1e-12)


def test_adaptive_kl() -> None:
    beta = AdaptiveKL(coef=0.1, target=4.0, horizon=1000)
    beta.update(kl=4.4, n=100)  # error 0.1: 0.1 * (1 + 0.1 * 0.1)
    assert beta.coef == pytest.approx(0.101, rel=1e-12)
    beta.update(kl=400.0, n=100)  # error clipped to 0.2
    assert beta.coef == pytest.approx(0.101 * 1.02, rel=1e-12)
    beta.update(kl=-3.0, n=100)  # and to -0.2
    assert beta.coef == pytest.approx(0.101 * 1.02 * 0.98, rel=1e-12)

    other = AdaptiveKL(coef=9.0, target=4.0, horizon=1000)
    other.load_state_dict(beta.state_dict())
    assert other.coef == beta.coef
    with raises(LearnerError, "kl-not-finite", "nan"):
        beta.update(kl=float("nan"), n=1)
    with raises(StateError, "foreign-state", ["beta"]):
        beta.load_state_dict({"beta": 1.0})


def test_fixed_kl_stays() -> None:
    beta = AdaptiveKL(coef=0.05, target=0.0, horizon=10)
    beta.load_state_dict({"coef": 0.7})  # of a run with other settings
    beta.update(kl=1e9, n=1000)
    assert beta.coef == 0.05


# -- reductions ----------------------------------------------------------------------------------


def test_token_weights_by_hand() -> None:
    mask = mask_of((2, 0, 1), 3)
    third: Any = 1 / 3
    np.testing.assert_allclose(
        token_weights(mask, "token_mean"), [[third, third, 0], [0, 0, 0], [third, 0, 0]], rtol=1e-6
    )
    # Two responses have tokens: each weighs one half.
    np.testing.assert_allclose(
        token_weights(mask, "sequence_mean"),
        [[0.25, 0.25, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        token_weights(mask, "sequence_sum"),
        [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        token_weights(mask, "fixed_length", 8),
        [[1 / 16, 1 / 16, 0.0], [0.0, 0.0, 0.0], [1 / 16, 0.0, 0.0]],
        rtol=1e-6,
    )
    for mode in ("token_mean", "sequence_mean", "sequence_sum", "fixed_length"):
        assert not token_weights(mask_of((0, 0), 3), mode, 3).any()  # type: ignore[arg-type]
    assert response_weights(mask).tolist() == [0.5, 0.0, 0.5]
    assert response_weights(mask_of((0, 0), 3)).tolist() == [0.0, 0.0]


def test_masked_moments_equal_numpy() -> None:
    mask = mask_of(LENGTHS, 9)
    x = randn(3, *mask.shape)
    selected = x[mask].double().numpy()
    assert masked_mean(x, mask).item() == pytest.approx(selected.mean(), rel=1e-5)
    assert masked_var(x, mask).item() == pytest.approx(selected.var(ddof=1), rel=1e-5)
    assert masked_var(x, mask_of((1,) + (0,) * 4, 9)).item() == 0


def test_tallies_of_parts_keep_what_only_one_of_them_has() -> None:
    a = Metrics({"s": torch.tensor(1.0)}, {"low": torch.tensor(2.0)}, {"high": torch.tensor(2.0)})
    b = Metrics({"s": torch.tensor(4.0), "only": torch.tensor(7.0)}, {"low": torch.tensor(-1.0)})
    assert (a + b + Metrics()).floats() == {"s": 5.0, "only": 7.0, "low": -1.0, "high": 2.0}


# -- the losses ----------------------------------------------------------------------------------


def test_policy_loss_by_hand() -> None:
    # Four tokens of weight 1/4, eps = 0.2; ratios 1.5, 1.5, 0.5, 0.5 and advantages 1, -1, 1, -1:
    # min(1.5, 1.2) = 1.2   min(-1.5, -1.2) = -1.5   min(0.5, 0.8) = 0.5   min(-0.5, -0.8) = -0.8
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5]])
    old = torch.tensor([[-1.0, -2.0, -0.5, -3.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    inputs = inputs_of(mask_of((4,)), advantages=advantages, old_logprobs=old)
    new = old + ratios.log()
    term = clipped_surrogate(new, inputs, AlgorithmConfig(clip=0.2))
    assert term.loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4, rel=1e-6)
    stats = (term.metrics + drift(new, inputs)).floats()
    assert stats["loss/policy_avg"] == pytest.approx(0.15, rel=1e-5)
    assert stats["policy/clipfrac_avg"] == 0.5  # the first and the last
    assert stats["val/ratio"] == pytest.approx(1.0, rel=1e-6)
    assert stats["val/ratio_min"] == pytest.approx(0.5, rel=1e-6)
    assert stats["val/ratio_max"] == pytest.approx(1.5, rel=1e-6)
    approxkl = (math.log(1.5) ** 2 + math.log(0.5) ** 2) / 4
    assert stats["policy/approxkl_avg"] == pytest.approx(approxkl, rel=1e-5)


def test_value_loss_by_hand() -> None:
    # Old value 1, eps 0.5, returns 2. New values 1.2, 3, 0: clipped to 1.2, 1.5, 0.5.
    # squares: 0.64, 1, 4; clipped: 0.64, 0.25, 2.25; larger: 0.64, 1, 4.
    # And a token whose value ran past the return: V = 2 clipped to 1.5: max(0, 0.25) = 0.25.
    # The second response has one token; nothing outside the mask counts.
    values = torch.tensor([[1.2, 3.0, 0.0], [2.0, 9.0, 9.0]])
    own = {"old_values": torch.ones(2, 3), "returns": torch.full((2, 3), 2.0)}
    inputs = inputs_of(mask_of((3, 1)), tensors=own)
    term = value_loss(values, inputs, AlgorithmConfig(value_clip=0.5))
    assert term.loss.item() == pytest.approx(0.5 * (0.64 + 1 + 4 + 0.25) / 4, rel=1e-6)
    assert term.metrics.floats()["val/clipfrac_avg"] == 0.25
    plain = value_loss(values, inputs, AlgorithmConfig(value_clip=0))
    assert plain.loss.item() == pytest.approx(0.5 * (0.64 + 1 + 4 + 0) / 4, rel=1e-6)
    assert plain.metrics.floats()["val/clipfrac_avg"] == 0


def test_entropy_bonus_by_hand() -> None:
    inputs = inputs_of(mask_of((1, 2)), "sequence_mean")
    term = entropy_bonus(torch.tensor([[2.0, float("nan")], [1.0, 3.0]]), inputs, 0.1)
    assert term.loss.item() == pytest.approx(-0.1 * (2 + 2) / 2, rel=1e-6)
    # The loss averages as it is asked to; the figure is over tokens, always.
    assert term.metrics.floats() == {"policy/entropy_avg": pytest.approx(2.0, rel=1e-6)}
    inputs = inputs_of(mask_of((1, 3)), "sequence_mean")
    term = entropy_bonus(torch.tensor([[8.0, 0.0, 0.0], [4.0, 4.0, 4.0]]), inputs, 0.1)
    assert term.loss.item() == pytest.approx(-0.1 * (8 + 4) / 2, rel=1e-6)
    assert term.metrics.floats() == {"policy/entropy_avg": pytest.approx(5.0, rel=1e-6)}
    term = entropy_bonus(
        torch.tensor([[8.0, 0.0, 0.0], [4.0, 4.0, 4.0]]), inputs, 0.1, token_mean=True
    )
    assert term.loss.item() == pytest.approx(-0.1 * (8 + 4 + 4 + 4) / 4, rel=1e-6)


def terms(logprobs: Tensor, values: Tensor, inputs: LossInputs) -> list[LossTerm]:
    return [
        clipped_surrogate(logprobs, inputs, AlgorithmConfig(clip=0.2)),
        value_loss(values, inputs, AlgorithmConfig(value_clip=0.3)),
        entropy_bonus(-logprobs, inputs, 0.01),
        LossTerm(torch.zeros(()), drift(logprobs, inputs)),
    ]


def fixed_of(
    mask: Tensor, mode: str = "token_mean", dtype: torch.dtype = torch.float32
) -> LossInputs:
    old, old_values, advantages, returns = (
        randn(seed, *mask.shape, dtype=dtype) for seed in range(4, 8)
    )
    own = {"old_values": old_values, "returns": returns}
    return inputs_of(mask, mode, old_logprobs=old, advantages=advantages, tensors=own)


def total(parts: list[LossTerm]) -> Tensor:
    return torch.stack([part.loss for part in parts]).sum()


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_losses_and_gradients_do_not_depend_on_the_split(mode: str) -> None:
    mask = mask_of(LENGTHS)
    fixed = fixed_of(mask, mode)
    new = (fixed.old_logprobs + 0.3 * randn(8, *mask.shape)).requires_grad_()
    values = (fixed.tensors["old_values"] + 0.3 * randn(9, *mask.shape)).requires_grad_()

    whole = terms(new, values, fixed)
    expected = torch.autograd.grad(total(whole), [new, values])
    stats = sum((term.metrics for term in whole), Metrics()).floats()

    # The second part is an empty response alone.
    for bounds in ((0, 1, 2, 5), (0, 3, 5), (0, 1, 2, 3, 4, 5)):
        parts = [
            term
            for start, stop in pairwise(bounds)
            for term in terms(new[start:stop], values[start:stop], fixed.pick(slice(start, stop)))
        ]
        assert total(parts).item() == pytest.approx(total(whole).item(), rel=1e-5)
        for got, want in zip(
            torch.autograd.grad(total(parts), [new, values]), expected, strict=True
        ):
            assert torch.equal(got, want)
        merged = sum((part.metrics for part in parts), Metrics()).floats()
        # The loss itself is a sum in float32; figures are added up in float64.
        assert merged.pop("loss/policy_avg") == pytest.approx(
            stats["loss/policy_avg"], rel=rounding(32)
        )
        assert merged == pytest.approx(
            {k: v for k, v in stats.items() if k != "loss/policy_avg"}, rel=1e-12
        )


@pytest.mark.parametrize("garbage", GARBAGE)
def test_losses_and_gradients_do_not_see_padding(garbage: float) -> None:
    mask, wide = mask_of(LENGTHS), mask_of(LENGTHS, 9)
    fixed = fixed_of(mask)
    new, values = fixed.old_logprobs + 0.3 * randn(8, *mask.shape), randn(9, *mask.shape)

    clean_inputs = [new.requires_grad_(), values.requires_grad_()]
    clean = terms(clean_inputs[0], clean_inputs[1], fixed)
    clean_gradients = torch.autograd.grad(total(clean), clean_inputs)

    soiled_fixed = inputs_of(
        wide,
        old_logprobs=soiled(fixed.old_logprobs, wide, garbage),
        advantages=soiled(fixed.advantages, wide, garbage),
        tensors={n: soiled(t, wide, garbage) for n, t in fixed.tensors.items()},
    )
    inputs = [soiled(x.detach(), wide, garbage).requires_grad_() for x in clean_inputs]
    found = terms(inputs[0], inputs[1], soiled_fixed)
    for dirty, term in zip(found, clean, strict=True):
        assert torch.equal(dirty.loss, term.loss)
        assert dirty.metrics.floats() == term.metrics.floats()
    for got, want in zip(torch.autograd.grad(total(found), inputs), clean_gradients, strict=True):
        assert torch.equal(got[:, :6], want)
        assert not got[~wide].any()


def test_gradients_equal_finite_differences() -> None:
    mask = mask_of((4, 2))
    fixed = fixed_of(mask, "sequence_mean", torch.float64)
    new = (fixed.old_logprobs + 0.3 * randn(10, *mask.shape)).requires_grad_()
    values = (fixed.tensors["old_values"] + 0.4 * randn(11, *mask.shape)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: terms(x, values, fixed)[0].loss, new)
    assert torch.autograd.gradcheck(lambda v: terms(new, v, fixed)[1].loss, values)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    mask = mask_of(LENGTHS)
    fixed = fixed_of(mask)
    logprobs = fixed.old_logprobs.clone().requires_grad_()
    term = clipped_surrogate(logprobs, fixed, AlgorithmConfig(clip=0.2))
    (gradient,) = torch.autograd.grad(term.loss, logprobs)
    assert torch.equal(gradient, torch.where(mask, -fixed.weights * fixed.advantages, 0.0))
    assert drift(logprobs, fixed).floats()["val/ratio"] == pytest.approx(1.0, rel=1e-6)
    assert term.metrics.floats()["policy/clipfrac_avg"] == 0


# -- from scores to experience -------------------------------------------------------------------


def test_missing_eos() -> None:
    scores, ended = torch.tensor([2.0, 0.5]), torch.tensor([True, False])
    assert apply_missing_eos(scores, ended, "off", -1.0).tolist() == [2.0, 0.5]
    assert apply_missing_eos(scores, ended, "replace", -1.0).tolist() == [2.0, -1.0]
    for penalty in (1.0, -1.0):
        assert apply_missing_eos(scores, ended, "subtract", penalty).tolist() == [2.0, -0.5]


def test_token_rewards_by_hand() -> None:
    scores = apply_missing_eos(
        torch.tensor([3.0, 5.0, 7.0]), torch.tensor([True, False, True]), "replace", -1.0
    )
    rewards = token_rewards(
        scores=scores,
        kl=torch.tensor([[1.0, 2.0, float("nan")], [4.0, -2.0, 6.0], [float("inf")] * 3]),
        mask=mask_of((2, 3, 0)),
        kl_coef=0.5,
    )
    assert rewards.tolist() == [[-0.5, 2.0, 0.0], [-2.0, 1.0, -4.0], [0.0, 0.0, 0.0]]


def test_explained_variance_by_hand() -> None:
    mask = mask_of((3,), 4)
    returns = torch.tensor([[1.0, 2.0, 3.0, float("nan")]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.zeros(1, 4), returns, mask) == 0.0
    # returns - values = -1, 2, -1 has variance 3, and the returns 1: 1 - 3.
    assert explained_variance(torch.tensor([[2.0, 0, 4, 9]]), returns, mask) == pytest.approx(-2.0)
    assert math.isnan(explained_variance(returns, torch.ones(1, 4), mask))


def scored(mask: Tensor, garbage: float = 0.0, **changes: Any) -> Scored:
    """Three responses of up to four tokens, each to a prompt of its own."""
    given = {
        "mask": mask,
        "logprobs": soiled(-randn(20, 3, 4).abs(), mask, garbage),
        "ref_logprobs": soiled(-randn(21, 3, 4).abs(), mask, garbage),
        "values": soiled(randn(22, 3, 4), mask, garbage),
        "scores": torch.tensor([1.0, -2.0, 4.0]),
        "ended": torch.tensor([True, True, False]),
        "groups": torch.arange(3),
    }
    return Scored(**(given | changes))


SUBTRACT = RewardConfig(missing_eos="subtract", missing_eos_penalty=-1.0)


def prepared(mask: Tensor, garbage: float = 0.0, **settings: object) -> Experience:
    algorithm = AlgorithmConfig.model_validate(settings)
    changes = {} if algorithm.kl_coef else {"ref_logprobs": None}
    data = scored(mask, garbage, **changes)
    return prepare(data, algorithm, SUBTRACT, 0.5 if algorithm.kl_coef else 0.0)


def test_prepare_against_a_plain_computation() -> None:
    lengths = (4, 2, 3)
    mask = mask_of(lengths)
    logp, ref = -randn(20, 3, 4).abs(), -randn(21, 3, 4).abs()
    values, scores = randn(22, 3, 4), [1.0, -2.0, 3.0]  # the third did not end: 4 - 1
    advantages, returns, kls = [], [], []
    for b, n in enumerate(lengths):
        kl = (logp[b, :n] - ref[b, :n]).tolist()
        rewards = [-0.5 * k for k in kl]
        rewards[-1] += scores[b]
        a, r = naive_gae(rewards, values[b, :n].tolist(), 0.9, 0.8)
        advantages += a
        returns += r
        kls.append(sum(kl))
    every_a, every_r = np.array(advantages), np.array(returns)

    result = prepared(mask, gamma=0.9, lam=0.8)
    whitened = (every_a - every_a.mean()) / np.sqrt(every_a.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(result.advantages[mask], whitened, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.tensors["returns"][mask], every_r, rtol=1e-4, atol=1e-5)
    errors = every_r - values[mask].numpy()
    score, kl = np.mean(scores), np.mean(kls)
    assert dict(result.stats) == pytest.approx(
        {
            "objective/scores": score,
            "objective/scores_std": np.std(scores, ddof=1),
            "objective/kl": kl,
            "objective/kl_coef": 0.5,
            "objective/non_score_reward": -0.5 * kl,
            "objective/rlhf_reward": score - 0.5 * kl,
            "critic/advantages/mean": every_a.mean(),
            "critic/advantages/std": every_a.std(ddof=1),
            "critic/returns/mean": every_r.mean(),
            "critic/values/mean": values[mask].mean().item(),
            "critic/explained_variance": 1 - errors.var(ddof=1) / every_r.var(ddof=1),
        },
        rel=1e-4,
    )
    unwhitened = prepared(mask, gamma=0.9, lam=0.8, whiten_advantages=False)
    np.testing.assert_allclose(unwhitened.advantages[mask], every_a, rtol=1e-4, atol=1e-5)


def test_whitened_rewards_keep_their_mean() -> None:
    mask = mask_of((4, 2, 3))
    # With gamma = lambda = 1, the return of a response's first token is the sum of its rewards.
    rewards = prepared(mask, gamma=1, lam=1).tensors["returns"]
    whitened = prepared(mask, gamma=1, lam=1, whiten_rewards=True).tensors["returns"]
    ahead = torch.nn.functional.pad(rewards[:, 1:], (0, 1))
    per_token = torch.where(mask, rewards - ahead, 0.0)[mask].double().numpy()
    expected = (per_token - per_token.mean()) / per_token.std(ddof=1) + per_token.mean()
    assert whitened[:, 0].sum().item() == pytest.approx(expected.sum(), rel=1e-4)
    assert whitened[0, 0].item() == pytest.approx(expected[:4].sum(), rel=1e-4)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_prepare_does_not_see_padding(garbage: float) -> None:
    lengths = (4, 0, 3)
    clean = prepared(mask_of(lengths), whiten_rewards=True)
    wide = prepared(mask_of(lengths, 9), garbage, whiten_rewards=True)
    assert wide.stats == clean.stats
    seen, expected = (
        {"advantages": e.advantages, "old_logprobs": e.old_logprobs, **e.tensors}
        for e in (wide, clean)
    )
    assert seen.keys() == expected.keys() >= {"returns", "old_values"}
    for name, got in seen.items():
        assert torch.equal(got[:, :4], expected[name]), name
        assert not got[:, 4:].any(), name


def test_without_a_reference_no_kl_is_made_up() -> None:
    stats = prepared(mask_of((4, 2, 3)), kl_coef=0.0).stats
    assert "objective/kl" not in stats
    assert stats["objective/rlhf_reward"] == stats["objective/scores"] == pytest.approx(2 / 3)


def test_rewards_of_whole_responses_are_scores_less_the_cost_of_the_kl() -> None:
    """Also of an empty response, whose score no token carries."""
    lengths = (4, 0, 3)
    mask = mask_of(lengths)
    data = scored(mask, float("nan"))
    found = make_rewards(data, SUBTRACT, AlgorithmConfig(), 0.5)
    kl = [
        sum(float(data.logprobs[b, t] - data.ref_logprobs[b, t]) for t in range(n))
        for b, n in enumerate(lengths)
    ]
    expected = [1 - 0.5 * kl[0], -2, 3 - 0.5 * kl[2]]
    np.testing.assert_allclose(found.totals, expected, rtol=1e-5)
    np.testing.assert_allclose(found.tokens.sum(1), [expected[0], 0, expected[2]], rtol=1e-5)
    assert found.stats["objective/scores"] == pytest.approx((1 - 2 + 3) / 3)


def test_a_kl_in_the_loss_costs_no_reward() -> None:
    """It is one or the other, never both."""
    mask = mask_of((4, 2, 3))
    in_loss = AlgorithmConfig(kl_in="loss")
    found = make_rewards(scored(mask), SUBTRACT, in_loss, 0.5)
    assert found.totals.tolist() == found.scores.tolist() == [1.0, -2.0, 3.0]
    is_last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    assert found.tokens.tolist() == torch.where(is_last, found.scores[:, None], 0.0).tolist()
    assert found.stats["objective/rlhf_reward"] == found.stats["objective/scores"]
    assert found.stats["objective/non_score_reward"] == 0
    k3 = kl_estimate(scored(mask).logprobs, -randn(21, 3, 4).abs(), "k3")[mask].sum().item() / 3
    assert found.stats["objective/kl"] == pytest.approx(k3, rel=1e-5)  # reported all the same
    assert found.stats["objective/kl_coef"] == 0.5


def test_prepare_refuses_numbers_it_cannot_learn_from() -> None:
    good = {
        "logprobs": torch.zeros(1, 2),
        "ref_logprobs": torch.zeros(1, 2),
        "values": torch.zeros(1, 2),
        "scores": torch.zeros(1),
        "mask": mask_of((2,)),
        "ended": torch.tensor([True]),
        "groups": torch.zeros(1, dtype=torch.long),
    }
    infinite, nan = float("inf"), float("nan")
    for change, code, fact in (
        ({"scores": torch.tensor([nan])}, "numbers-not-finite", "score must be finite; 1 of 1"),
        ({"values": torch.tensor([[0.0, infinite]])}, "numbers-not-finite", "value"),
        ({"logprobs": torch.tensor([[0.0, -infinite]])}, "numbers-not-finite", "every log-prob"),
        ({"ref_logprobs": torch.tensor([[-infinite, 0]])}, "numbers-not-finite", "reference"),
        ({"mask": torch.zeros(1, 2, dtype=torch.bool)}, "no-response-tokens", 1),
        ({"ref_logprobs": None}, "reference-missing", 0.1),
        ({"values": None}, "critic-values-missing", ""),
    ):
        with raises(LearnerError, code, fact):
            prepare(Scored(**(good | change)), AlgorithmConfig(), RewardConfig(), 0.1)
