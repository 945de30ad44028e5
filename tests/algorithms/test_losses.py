"""Every loss against plain-Python references, finite differences, and what must not change it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loss_helpers import (
    BETA,
    GARBAGE,
    VARIANTS,
    inputs_of,
    loss_of,
    mask_of,
    naive_gae,
    randn,
    soiled,
)
from raising import raises
from rounding import rounding
from stretto.algorithms.advantages import (
    best_and_worst,
    group_normalised,
    group_stats,
    leave_one_out,
)
from stretto.algorithms.correction import importance_weights, settled
from stretto.algorithms.experience import Experience, LossInputs, Scored
from stretto.algorithms.policy import (
    ESS,
    SQUARES,
    SUM,
    TOKENS,
    disagreement,
    drift,
    kl_penalty,
    response_ratios,
    with_effective_sample_size,
)
from stretto.algorithms.reductions import Metrics
from stretto.algorithms.registry import FUNCTIONS, prepare
from stretto.config import AlgorithmConfig, RewardConfig
from stretto.config.algorithm import ALGORITHMS
from stretto.errors import LearnerError

LENGTHS = (5, 3, 1, 6, 2, 4, 3)
GROUPS = (9, 4, 9, 9, 4, 7, 7)
"""Prompts, in no order: three responses to 9, two to 4 and to 7."""
LONGEST = 16
REWARD = RewardConfig(missing_eos="subtract", missing_eos_penalty=-1.0)
STD_EPS = 1e-6
PER_TOKEN = ("advantages", "old_logprobs", "behaviour_logprobs", "ref_logprobs")


def settings_of(variant: str, **changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(VARIANTS[variant] | changes)


def scored(
    lengths: Sequence[int] = LENGTHS,
    groups: Sequence[int] = GROUPS,
    *,
    width: int = 0,
    garbage: float = 0.0,
    reference: bool = True,
    **changes: Any,
) -> Scored:
    """A batch in float64 whose numbers do not depend on its width."""
    mask = mask_of(tuple(lengths), width)
    shape = (len(lengths), max(lengths))

    def numbers(seed: int) -> Tensor:
        return soiled(-randn(seed, *shape, dtype=torch.float64).abs(), mask, garbage)

    given = {
        "mask": mask,
        "logprobs": numbers(30),
        "ref_logprobs": numbers(31) if reference else None,
        "values": numbers(32),
        "scores": randn(33, len(lengths), dtype=torch.float64),
        "ended": torch.tensor([b % 3 != 1 for b in range(len(lengths))]),
        "groups": torch.tensor(groups),
    }
    return Scored(**(given | changes))


def prepared(
    a: AlgorithmConfig, data: Scored | None = None, proximal: Tensor | None = None
) -> Experience:
    data = data or scored(reference=a.beta > 0)
    return prepare(data, a, REWARD, BETA if a.beta else 0.0, proximal)


def whole(e: Experience, a: AlgorithmConfig) -> tuple[list[int], LossInputs]:
    """All that is trained on, as one mini-batch: rows of the batch, and their inputs."""
    rows = [row for unit in e.units for row in unit]
    common = {n: None if (t := getattr(e, n)) is None else t[rows].double() for n in PER_TOKEN}
    own = {name: tensor[rows].double() for name, tensor in e.tensors.items()}
    return rows, inputs_of(e.mask[rows], a.averaging, LONGEST, tensors=own, **common)


def shifted(e: Experience, seed: int = 40, by: float = 0.3) -> Tensor:
    """The policy after some updates."""
    return e.old_logprobs.double() + by * randn(seed, *e.mask.shape, dtype=torch.float64)


# -- references in plain Python ------------------------------------------------------------------


def naive_kl(kind: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def std(numbers: Sequence[float]) -> float:
    return math.sqrt(sum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1))


def rows_in(data: Scored) -> dict[str, list[Any]]:
    """The batch as lists, each response as long as it is."""
    lengths = data.mask.sum(1).tolist()

    def cut(x: Tensor | None) -> list[list[float]]:
        return [[0.0] * n if x is None else x[b, :n].tolist() for b, n in enumerate(lengths)]

    scores = data.scores.tolist()
    scores = [s if e else s - 1.0 for s, e in zip(scores, data.ended.tolist(), strict=True)]
    return {
        "scores": scores,
        "old": cut(data.logprobs),
        "ref": cut(data.ref_logprobs),
        "values": cut(data.values),
        "groups": data.groups.tolist(),
    }


def naive_advantages(a: AlgorithmConfig, d: Mapping[str, list[Any]]) -> list[list[float]]:
    """One number a token, by loops over groups and tokens."""
    in_reward = a.kl_place == "reward" and a.kl_coef
    cost = [
        [BETA * naive_kl(a.estimator, x - y) if in_reward else 0.0 for x, y in zip(o, r)]  # noqa: B905
        for o, r in zip(d["old"], d["ref"], strict=True)
    ]
    if a.name == "ppo":
        out = []
        for c, score, values in zip(cost, d["scores"], d["values"], strict=True):
            rewards = [-x for x in c]
            if rewards:
                rewards[-1] += score
            out.append(naive_gae(rewards, values, a.gamma, a.lam)[0])
        if a.whiten_advantages:
            flat = list(chain(*out))
            out = [[(x - mean(flat)) / math.sqrt(std(flat) ** 2 + 1e-8) for x in r] for r in out]
        return out
    totals = [s - sum(c) for s, c in zip(d["scores"], cost, strict=True)]
    if a.name == "distill":
        of_scores = naive_advantages(settings_of("grpo"), d) if a.reward_coef else d["old"]
        pairs = list(zip(d["old"], d["ref"], strict=True))
        return [
            [
                teacher - student + a.reward_coef * of_score
                for student, teacher, of_score in zip(*pairs[i], of_scores[i], strict=True)
            ]
            for i in range(len(pairs))
        ]
    out = []
    for i, (group, old) in enumerate(zip(d["groups"], d["old"], strict=True)):
        same = [totals[j] for j, g in enumerate(d["groups"]) if g == group]
        others = [totals[j] for j, g in enumerate(d["groups"]) if g == group and j != i]
        if a.name in ("grpo", "cispo"):
            value = totals[i] - mean(same)
            if a.scale_rewards != "none":
                value /= std(same if a.scale_rewards == "group" else totals) + STD_EPS
        elif a.name == "best-of-n":
            best = next(
                j for j, g in enumerate(d["groups"]) if g == group and totals[j] == max(same)
            )
            value = float(best == i)  # here: whether it is trained on
        else:
            value = totals[i] - mean(others)
        out.append([value] * len(old))
    return out


def naive_weights(a: AlgorithmConfig, lengths: Sequence[int]) -> list[float]:
    """Of each token of a response, by response; 0 is the length of one that is left out."""
    count, tokens = sum(n > 0 for n in lengths), sum(lengths)
    mode = a.averaging
    return [
        0.0
        if n == 0
        else {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / (n * count),
            "sequence_sum": 1 / count,
            "fixed_length": 1 / (LONGEST * count),
        }[mode]
        for n in lengths
    ]


def naive_dpo(a: AlgorithmConfig, d: Mapping[str, list[Any]], now: list[list[float]]) -> float:
    losses = []
    for group in sorted(set(d["groups"])):
        rows = [i for i, g in enumerate(d["groups"]) if g == group]
        best = max(rows, key=lambda i: d["scores"][i])
        worst = min(rows, key=lambda i: d["scores"][i])
        ratio = {i: sum(now[i]) - sum(d["ref"][i]) for i in rows}
        losses.append(math.log(1 + math.exp(-BETA * (ratio[best] - ratio[worst]))))
    return mean(losses)


def naive_policy_loss(a: AlgorithmConfig, ratio: float, value: float, logprob: float) -> float:
    """Of a token, or for Proximal RLOO of a response, with its ratio and advantage."""
    low, high = 1 - a.clip, 1 + (a.clip_high or a.clip)
    if a.name in ("ppo", "grpo", "proximal-rloo", "distill"):
        first = min(ratio, a.dual_clip or ratio)
        return -min(first * value, min(max(ratio, low), high) * value)
    if a.name == "cispo":
        return -min(ratio, high) * value * logprob
    if a.name == "copg":
        return -value * math.log(ratio)
    return -(1.0 if a.name == "best-of-n" else value) * logprob


def naive_loss(a: AlgorithmConfig, data: Scored, logprobs: Tensor) -> float:
    """Scored responses and the present policy to the loss of one mini-batch of all of them."""
    d = rows_in(data)
    now = [logprobs[b, : len(o)].tolist() for b, o in enumerate(d["old"])]
    if a.name == "online-dpo":
        return naive_dpo(a, d, now)
    advantages = naive_advantages(a, d)
    lengths = [len(o) for o in d["old"]]
    if a.name == "best-of-n":
        lengths = [n if n and advantages[i][0] else 0 for i, n in enumerate(lengths)]
    if a.mask_truncated_completions:
        lengths = [n if e else 0 for n, e in zip(lengths, data.ended.tolist(), strict=True)]
    weights = naive_weights(a, lengths)
    loss = 0.0
    for new, old, ref, adv, w, n in zip(
        now, d["old"], d["ref"], advantages, weights, lengths, strict=True
    ):
        if not n:
            continue
        count = sum(x > 0 for x in lengths)
        whole = math.exp(sum(new) - sum(old))
        if a.name == "proximal-rloo":
            loss += naive_policy_loss(a, whole, adv[0], 0.0) / count
        for x, y, z, value in zip(new, old, ref, adv, strict=True):
            of_sequence = a.importance_sampling_level == "sequence"
            ratio = whole ** (1 / n) if of_sequence else math.exp(x - y)
            if a.name != "proximal-rloo":
                loss += w * naive_policy_loss(a, ratio, value, x)
            if a.kl_place == "loss" and a.kl_coef:
                factor = ratio if a.use_bias_correction_kl else 1.0
                loss += w * BETA * factor * naive_kl(a.estimator, x - z)
    return loss


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lengths", [LENGTHS, (5, 0, 1, 6, 2, 4, 3)])
def test_losses_equal_plain_loops(variant: str, lengths: tuple[int, ...]) -> None:
    """From scores to the loss; also with an empty response, which still counts in its group."""
    if variant == "online-dpo" and 0 in lengths:
        pytest.skip("a pair with an empty side is left out: a test of its own")
    a = settings_of(variant)
    data = scored(lengths, reference=a.kl_coef > 0)
    e = prepared(a, data)
    now = shifted(e)
    rows, inputs = whole(e, a)
    got = loss_of(a, now[rows], inputs).loss.item()
    assert got == pytest.approx(naive_loss(a, data, now), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "cispo"])
def test_gradients_equal_finite_differences(variant: str) -> None:
    a = settings_of(variant)
    e = prepared(a)
    rows, inputs = whole(e, a)
    now = shifted(e)[rows].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(a, x, inputs).loss, now)


def test_a_ratio_without_gradient_weighs_every_token() -> None:
    a = settings_of("cispo", kl_coef=0)
    e = prepared(a)
    rows, inputs = whole(e, a)
    now = shifted(e)[rows].requires_grad_()
    (found,) = torch.autograd.grad(loss_of(a, now, inputs).loss, now)
    bounded = (now - inputs.old_logprobs).exp().clamp(max=1.1)
    torch.testing.assert_close(found, -inputs.weights * bounded * inputs.advantages)


def test_every_algorithm_is_tested() -> None:
    assert {variant["name"] for variant in VARIANTS.values()} == set(ALGORITHMS)


# -- groups --------------------------------------------------------------------------------------


def test_baselines_by_hand() -> None:
    # Group 9 holds 1, 2, 6 (rows 0, 2, 3), group 4 holds 5, 3 (rows 1, 4).
    rewards = torch.tensor([1.0, 5.0, 2.0, 6.0, 3.0])
    groups = torch.tensor([9, 4, 9, 9, 4])
    assert leave_one_out(rewards, groups).tolist() == [1 - 4, 5 - 3, 2 - 3.5, 6 - 1.5, 3 - 5]
    assert group_normalised(rewards, groups, "none").tolist() == [-2.0, 1.0, -1.0, 3.0, -1.0]
    sd9, sd4 = math.sqrt((4 + 1 + 9) / 2), math.sqrt(2)
    np.testing.assert_allclose(
        group_normalised(rewards, groups, "group"),
        [-2 / sd9, 1 / sd4, -1 / sd9, 3 / sd9, -1 / sd4],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        group_normalised(rewards, groups, "batch"),
        np.array([-2, 1, -1, 3, -1]) / math.sqrt((2.4**2 + 1.6**2 + 1.4**2 + 2.6**2 + 0.4**2) / 4),
        rtol=1e-5,
    )
    assert best_and_worst(rewards, groups) == [(1, 4), (3, 0)]
    stats = group_stats(rewards, groups)
    assert stats == {
        "group/reward_std": pytest.approx((3 * sd9 + 2 * sd4) / 5),
        "group/all_equal": 0.0,
    }


def test_truncated_responses_count_in_their_group_and_are_not_trained_on() -> None:
    a, masked = settings_of("grpo"), settings_of("grpo of whole responses")
    data = scored()
    e, every = prepared(masked, data), prepared(a, data)
    assert [unit for unit in every.units if unit not in e.units] == [(1,), (4,)]
    assert torch.equal(e.advantages, every.advantages)
    pairs = prepared(settings_of("online-dpo", mask_truncated_completions=True), data).units
    assert all(data.ended[list(pair)].all() for pair in pairs)


def test_groups_of_equal_rewards_have_nothing_to_learn() -> None:
    rewards = torch.tensor([0.1, 0.7, 0.1, 0.1, 0.2])
    groups = torch.tensor([0, 1, 0, 0, 1])
    for scale in ("group", "none"):
        found = group_normalised(rewards, groups, scale)
        assert found[[0, 2, 3]].abs().max() < 1e-9
        assert found[1] > 0.2
    assert leave_one_out(rewards, groups)[[0, 2, 3]].abs().max() < 1e-7
    assert best_and_worst(rewards, groups)[0] == (0, 0)
    assert group_stats(rewards, groups)["group/all_equal"] == 0.5


def test_rewards_far_from_zero_keep_their_differences() -> None:
    """In float32 alone the baseline would be rounded to the nearest 0.06."""
    rewards = torch.tensor([1e6, 1e6 + 0.125, 1e6 + 0.25])
    groups = torch.zeros(3, dtype=torch.long)
    assert leave_one_out(rewards, groups).tolist() == [-0.1875, 0.0, 0.1875]
    assert group_normalised(rewards, groups, "none").tolist() == [-0.125, 0.0, 0.125]


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if ALGORITHMS[n].group > 1])
def test_a_prompt_with_one_response_is_refused(name: str) -> None:
    data = scored((5, 3, 1, 6, 2, 4, 3, 2), (9, 4, 9, 9, 4, 8, 7, 7))
    with raises(LearnerError, "one-response-to-prompt", name, "1 of 4", "prompt 8"):
        prepared(AlgorithmConfig(name=name), data)  # type: ignore[arg-type]


# -- by hand -------------------------------------------------------------------------------------


def plain(lengths: Sequence[int], scores: Sequence[float], groups: Sequence[int]) -> Scored:
    """Responses that ended, log-probs of -1 a token everywhere."""
    mask = mask_of(tuple(lengths))
    minus_one = torch.where(mask, -1.0, 0.0)
    return Scored(
        mask=mask,
        logprobs=minus_one,
        ref_logprobs=minus_one,
        values=None,
        scores=torch.tensor(scores),
        ended=torch.ones(len(lengths), dtype=torch.bool),
        groups=torch.tensor(groups),
    )


def test_rloo_by_hand() -> None:
    """Rewards 3 and 1: advantages 2 and -2; the mean over responses of -A log pi(y)."""
    a = AlgorithmConfig(name="rloo")
    e = prepared(a, plain((2, 3), (3.0, 1.0), (5, 5)))
    assert e.advantages.tolist() == [[2, 2, 0], [-2, -2, -2]]
    _, inputs = whole(e, a)
    logprobs = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, -0.5, -1.0]])
    term = loss_of(a, logprobs, inputs)
    assert term.loss.item() == pytest.approx((-2 * -3.0 + 2 * -2.0) / 2)
    assert term.metrics.floats() == {"loss/policy_avg": pytest.approx(1.0)}
    assert loss_of(AlgorithmConfig(name="copg"), logprobs, inputs).loss.item() == pytest.approx(
        (-2 * (-3 + 2) + 2 * (-2 + 3)) / 2
    )


def test_proximal_rloo_by_hand() -> None:
    """Ratios of whole responses 1.5, 0.5, 1.5 and 0.5, advantages 2, -2, -2 and 2, clip 0.2:
    min(3, 2.4), min(-1, -1.6), min(-3, -2.4), min(1, 1.6).
    """
    a = AlgorithmConfig(name="proximal-rloo")
    e = prepared(a, plain((2, 1, 2, 1), (3.0, 1.0, 1.0, 3.0), (0, 0, 1, 1)))
    _, inputs = whole(e, a)
    logprobs = inputs.old_logprobs.clone().float()
    logprobs[:, 0] += torch.tensor([1.5, 0.5, 1.5, 0.5]).log() - torch.tensor([0.1, 0, 0.1, 0])
    logprobs[[0, 2], 1] += 0.1
    term = loss_of(a, logprobs, inputs)
    assert term.loss.item() == pytest.approx(-(2.4 - 1.6 - 3.0 + 1.0) / 4, rel=1e-5)
    assert term.metrics.floats() == {
        "loss/policy_avg": pytest.approx(0.3, rel=1e-5),
        "policy/clipfrac_avg": 0.5,
        "policy/sequence_ratio": pytest.approx(1.0, rel=1e-5),
    }


def test_dpo_by_hand() -> None:
    """K = 3: the best is row 1, the worst row 2; the middle one is not looked at."""
    a = AlgorithmConfig(name="online-dpo", kl_coef=0.5)
    e = prepared(a, plain((2, 3, 1), (1.0, 2.0, -1.0), (0, 0, 0)))
    assert list(e.units) == [(1, 2)]
    assert e.stats["dpo/pairs"] == 1
    rows, inputs = whole(e, a)
    logprobs = torch.tensor([[7.0, 7.0, 7.0], [-1.0, -0.5, -0.5], [-3.0, 9.0, 9.0]])
    term = loss_of(a, logprobs[rows], inputs)
    margin = 0.5 * ((-2 + 3) - (-3 + 1))  # beta (log ratio of the best - log ratio of the worst)
    assert term.loss.item() == pytest.approx(math.log(1 + math.exp(-margin)), rel=1e-6)
    assert term.metrics.floats() == {
        "loss/policy_avg": pytest.approx(math.log(1 + math.exp(-margin)), rel=1e-6),
        "dpo/margin": pytest.approx(1.5),
        "dpo/accuracy": 1.0,
    }


def test_dpo_starts_at_log_2() -> None:
    a = settings_of("online-dpo")
    data = scored()
    e = prepared(a, data)
    rows, inputs = whole(e, a)
    logprobs = data.ref_logprobs[rows].clone().requires_grad_()
    term = loss_of(a, logprobs, inputs)
    assert term.loss.item() == pytest.approx(math.log(2), rel=rounding(1))
    figures = term.metrics.floats()
    assert figures["dpo/margin"] == 0
    assert figures["dpo/accuracy"] == 0
    # There its gradient is beta / 2 towards the best of each pair, and away from the worst.
    (gradient,) = torch.autograd.grad(term.loss, logprobs)
    sign = torch.tensor([-1.0, 1.0] * 3)[:, None]
    expected = torch.where(inputs.mask, sign * BETA / 2 / 3, 0.0)
    torch.testing.assert_close(gradient, expected.double(), rtol=1e-6, atol=0)


def test_dpo_leaves_out_what_prefers_nothing() -> None:
    """Equal scores (group 0), an empty side (group 1); what is left weighs all."""
    a = AlgorithmConfig(name="online-dpo")
    data = plain((2, 2, 3, 0, 1, 2), (1.0, 1.0, 5.0, 2.0, 0.0, 4.0), (0, 0, 1, 1, 2, 2))
    e = prepared(a, data)
    assert list(e.units) == [(5, 4)]
    assert e.stats["dpo/pairs"] == 1
    assert e.stats["group/all_equal"] == pytest.approx(1 / 3)
    rows, inputs = whole(e, a)
    assert loss_of(a, data.logprobs[rows], inputs).loss.item() == pytest.approx(math.log(2))
    none = prepared(a, plain((2, 2, 3, 3), (1.0, 1.0, -1.0, -1.0), (0, 0, 1, 1)))
    assert (list(none.units), none.stats["dpo/pairs"]) == ([], 0.0)


def test_dpo_prefers_by_the_score_after_the_rule_for_missing_ends() -> None:
    """The KL is not part of it: the loss is made of it already."""
    a = AlgorithmConfig(name="online-dpo")
    data = scored((2, 2), (0, 0), scores=torch.tensor([5.0, 1.0]))
    for ended, unit in (([True, True], (0, 1)), ([False, True], (0, 1))):
        assert list(prepared(a, replace(data, ended=torch.tensor(ended))).units) == [unit]
    replaced = RewardConfig(missing_eos="replace", missing_eos_penalty=-1.0)
    cut = replace(data, ended=torch.tensor([False, True]))
    assert list(prepare(cut, a, replaced, BETA).units) == [(1, 0)]


def test_best_of_n_is_cross_entropy_on_the_best() -> None:
    a = AlgorithmConfig(name="best-of-n", kl_coef=0)
    data = plain((2, 3, 1, 2), (1.0, 2.0, 4.0, 4.0), (3, 3, 1, 1))
    e = prepared(a, data)
    assert list(e.units) == [(2,), (1,)]  # of equals, the first
    rows, inputs = whole(e, a)
    logprobs = torch.tensor([[9.0] * 3, [-1.0, -2.0, -3.0], [-4.0, 9.0, 9.0], [9.0] * 3])
    assert loss_of(a, logprobs[rows], inputs).loss.item() == pytest.approx((4 + 1 + 2 + 3) / 4)
    by_response = AlgorithmConfig(name="best-of-n", kl_coef=0, aggregation="sequence_mean")
    rows, inputs = whole(e, by_response)
    assert loss_of(by_response, logprobs[rows], inputs).loss.item() == pytest.approx((4 + 2) / 2)


def test_best_of_n_with_a_kl_in_the_reward_weighs_it_in() -> None:
    """Scores 2 and 1.5; the first costs 0.3 x (2 x 1) nats of KL more."""
    data = plain((2, 2), (2.0, 1.5), (0, 0))
    far = torch.tensor([[-2.0, -2.0], [-1.0, -1.0]])
    data = replace(data, ref_logprobs=far)
    assert list(prepared(AlgorithmConfig(name="best-of-n"), data).units) == [(1,)]
    plain_best = AlgorithmConfig(name="best-of-n", kl_in="loss")
    assert list(prepared(plain_best, data).units) == [(0,)]


# -- the same gradient where they should be ------------------------------------------------------

SUMS = {"aggregation": "sequence_sum", "kl_in": "reward"}
ONE_GRADIENT = {
    "ppo": SUMS,
    "rloo": {},
    "copg": {},
    "proximal-rloo": {},
    "grpo": SUMS,
}


def fixed_part(seed: int = 50) -> LossInputs:
    """Advantages of whole responses, the same for every algorithm."""
    mask = mask_of(LENGTHS)
    advantages = randn(seed, len(LENGTHS), 1, dtype=torch.float64).expand_as(mask)
    old = -randn(seed + 1, *mask.shape, dtype=torch.float64).abs()
    return inputs_of(
        mask, "sequence_sum", advantages=torch.where(mask, advantages, 0.0), old_logprobs=old
    )


def gradient(a: AlgorithmConfig, logprobs: Tensor, inputs: LossInputs) -> Tensor:
    x = logprobs.detach().clone().requires_grad_()
    inputs, _ = settled(inputs, logprobs, a)
    return torch.autograd.grad(FUNCTIONS[a.name].policy_loss(x, inputs, a).loss, x)[0]


@pytest.mark.parametrize("name", ONE_GRADIENT)
def test_on_policy_gradients_are_the_same_at_fixed_advantages(name: str) -> None:
    """REINFORCE's: minus the advantage over the number of responses, at every token."""
    inputs = fixed_part()
    a = AlgorithmConfig.model_validate({"name": name, **ONE_GRADIENT[name]})
    expected = torch.where(inputs.mask, -inputs.advantages / len(LENGTHS), 0.0)
    found = gradient(a, inputs.old_logprobs, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_copg_has_rloos_gradient_off_policy_too() -> None:
    inputs = fixed_part()
    logprobs = inputs.old_logprobs + randn(52, *inputs.mask.shape, dtype=torch.float64)
    rloo, copg = AlgorithmConfig(name="rloo"), AlgorithmConfig(name="copg")
    assert torch.equal(gradient(rloo, logprobs, inputs), gradient(copg, logprobs, inputs))
    clipped = gradient(AlgorithmConfig(name="proximal-rloo"), logprobs, inputs)
    assert not torch.allclose(clipped, gradient(rloo, logprobs, inputs))


@pytest.mark.parametrize("variant", ["ppo sums", "grpo", "proximal-rloo"])
@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_a_ratio_beyond_all_bounds_is_clipped_and_makes_no_nan(
    variant: str, advantage: float
) -> None:
    """exp overflows float32 at 88.7 nats: for a long response no more than 0.2 a token."""
    mask = mask_of((600,))
    a = settings_of(variant, kl_coef=0)
    by = torch.full(mask.shape, 0.2) if a.name == "proximal-rloo" else torch.full(mask.shape, 90.0)
    inputs = inputs_of(
        mask, a.averaging, advantages=torch.full(mask.shape, advantage), old_logprobs=-1 - by
    )
    logprobs = torch.full(mask.shape, -1.0, requires_grad=True)
    term = loss_of(a, logprobs, inputs)
    total = {"sequence_sum": 600, "sequence_mean": 1}[a.averaging]
    assert term.loss.item() == pytest.approx(-(1 + a.clip) * advantage * total, rel=1e-5)
    (found,) = torch.autograd.grad(term.loss, logprobs)
    assert torch.equal(found, torch.zeros_like(found))


# -- the KL in the loss --------------------------------------------------------------------------


def in_loss(estimator: str, **more: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": "grpo", "kl_estimator": estimator, **more})


@pytest.mark.parametrize(
    ("kind", "slope"),
    [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d))],
)
def test_the_gradient_of_the_kl_in_the_loss(kind: str, slope: Any) -> None:
    mask = mask_of((3, 1))
    ref = -randn(60, *mask.shape, dtype=torch.float64).abs()
    inputs = inputs_of(mask, "sequence_mean", ref_logprobs=ref)
    logprobs = (ref + randn(61, *mask.shape, dtype=torch.float64)).requires_grad_()
    term = kl_penalty(logprobs, inputs, 0.7, in_loss(kind))
    (found,) = torch.autograd.grad(term.loss, logprobs)
    d = (logprobs - ref).detach()
    value = 0.0
    for b, n in enumerate((3, 1)):
        for t in range(n):
            w = 1 / (2 * n)
            assert found[b, t].item() == pytest.approx(0.7 * w * slope(d[b, t].item()), rel=1e-6)
            value += 0.7 * w * naive_kl(kind, d[b, t].item())
    assert term.loss.item() == pytest.approx(value, rel=1e-6)
    per_token = [naive_kl(kind, x) for x in d[mask].tolist()]
    assert term.metrics.floats() == {"loss/kl_avg": pytest.approx(mean(per_token), rel=1e-6)}


def test_what_each_estimator_drives_the_policy_to_in_expectation() -> None:
    """On samples of the policy itself: k1 to nowhere, k2 along the KL, k3 along that of the
    reference to the policy.
    """
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    p = logits.softmax(0)
    (exact,) = torch.autograd.grad((p * (p / q).log()).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((q * (q / p).log()).sum(), logits, retain_graph=True)
    mask, nowhere = mask_of((3,)), torch.zeros(3, dtype=torch.float64)
    for kind, expected in (("k1", nowhere), ("k2", exact), ("k3", reverse)):
        inputs = inputs_of(mask, ref_logprobs=q.log()[None])
        inputs = replace(inputs, weights=p.detach()[None])
        term = kl_penalty(logits.log_softmax(0)[None], inputs, 1.0, in_loss(kind))
        (found,) = torch.autograd.grad(term.loss, logits, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_kl_times_the_ratio_has_the_gradient_of_the_kl() -> None:
    """In expectation over samples of the policy itself, of which k3 alone has another one."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    own = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((own.exp() * (own - q.log())).sum(), logits, retain_graph=True)
    old = own.detach()[None]
    inputs = inputs_of(mask_of((3,)), ref_logprobs=q.log()[None], old_logprobs=old)
    inputs = replace(inputs, weights=old.exp())
    term = kl_penalty(own[None], inputs, 1.0, in_loss("k3", use_bias_correction_kl=True))
    (found,) = torch.autograd.grad(term.loss, logits)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("a", [in_loss("k3"), AlgorithmConfig(name="online-dpo")])
def test_a_kl_in_the_loss_needs_a_reference(a: AlgorithmConfig) -> None:
    with raises(LearnerError, "reference-missing", "algorithm.kl_coef = 0"):
        prepared(a, scored(reference=False))


# -- what must not change them -------------------------------------------------------------------


def with_gradient(
    a: AlgorithmConfig, logprobs: Tensor, pieces: Sequence[tuple[list[int], LossInputs]]
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and figures, summed over pieces of a mini-batch."""
    x = logprobs.detach().clone().requires_grad_()
    parts = [loss_of(a, x[rows], inputs) for rows, inputs in pieces]
    loss = torch.stack([p.loss for p in parts]).sum()
    metrics = sum((p.metrics for p in parts), Metrics())
    for rows, inputs in pieces:
        metrics += drift(x[rows], inputs)
    return loss.item(), torch.autograd.grad(loss, x)[0], metrics.floats()


def split(
    rows: list[int], inputs: LossInputs, sizes: Sequence[int], unit: int
) -> list[tuple[list[int], LossInputs]]:
    pieces, start = [], 0
    for size in sizes:
        here = list(range(start, min(start + size * unit, len(rows))))
        start += size * unit
        if here:
            pieces.append(([rows[i] for i in here], inputs.pick(here)))
    return pieces


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [[1] * 7, [2, 1, 4], [1, 6]])
def test_parts_add_up_to_the_whole(variant: str, sizes: list[int]) -> None:
    """Micro-batches and ranks: any split between units, weights counting over the whole."""
    a = settings_of(variant)
    e = prepared(a, scored((5, 3, 1, 6, 2, 4, 0), reference=a.kl_coef > 0))
    rows, inputs = whole(e, a)
    unit = 2 if a.name == "online-dpo" else 1
    now = shifted(e)
    one = with_gradient(a, now, [(rows, inputs)])
    many = with_gradient(a, now, split(rows, inputs, sizes, unit))
    assert many[0] == pytest.approx(one[0], rel=1e-12)
    torch.testing.assert_close(many[1], one[1], rtol=1e-12, atol=1e-15)
    assert many[2] == pytest.approx(one[2], rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_the_batch_does_not_matter(variant: str) -> None:
    """Groups are by prompt, wherever their responses stand; ties aside, there are none here."""
    a = settings_of(variant)
    data = scored(reference=a.kl_coef > 0)
    e = prepared(a, data)
    now = shifted(e)
    rows, inputs = whole(e, a)
    expected = with_gradient(a, now, [(rows, inputs)])
    for seed in range(4):
        order = random.Random(seed).sample(range(7), 7)
        mixed = {n: None if (t := getattr(data, n)) is None else t[order] for n in Scored.__slots__}
        e2 = prepared(a, Scored(**mixed))
        assert e2.stats == pytest.approx(e.stats, rel=1e-5)
        rows2, part2 = whole(e2, a)
        loss, found, figures = with_gradient(a, now[order], [(rows2, part2)])
        assert loss == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(found, expected[1][order], rtol=1e-5, atol=1e-7)
        assert figures == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_stands_outside_the_mask_is_never_seen(variant: str, garbage: float) -> None:
    """From scores to gradients, in wider tensors, the proximal policy included."""
    corrected = ALGORITHMS[VARIANTS[variant]["name"]].corrects
    changes = {"old_policy": "proximal", "correction": "truncate", "correction_level": "sequence"}
    a = settings_of(variant, **(changes if corrected else {}))
    results = []
    for width, soil in ((0, 0.0), (11, garbage)):
        data = scored((5, 0, 1, 6, 2, 4, 3), width=width, garbage=soil, reference=a.kl_coef > 0)
        proximal = data.logprobs + 0.1 if corrected else None
        e = prepared(a, data, proximal)
        rows, inputs = whole(e, a)
        for tensor in (e.advantages, e.old_logprobs, *e.tensors.values()):
            assert not tensor[~e.mask].any()
        now = data.logprobs + 0.2 * soiled(randn(70, 7, 6, dtype=torch.float64), data.mask, soil)
        dirty = [n for n in PER_TOKEN if getattr(inputs, n) is not None]
        inputs = replace(
            inputs,
            **{n: soiled(getattr(inputs, n), inputs.mask, soil) for n in dirty},
            tensors={n: soiled(t, inputs.mask, soil) for n, t in inputs.tensors.items()},
        )
        results.append((with_gradient(a, now, [(rows, inputs)]), dict(e.stats)))
    (clean, clean_stats), (found, stats) = results
    assert found[0] == clean[0]
    assert torch.equal(found[1][:, :6], clean[1])
    assert not found[1][:, 6:].any()
    assert found[2] == clean[2]
    assert stats == clean_stats


# -- the effective sample size -------------------------------------------------------------------


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("parts", [1, 2, 6])
def test_effective_sample_size_equals_plain_loops(parts: int, garbage: float) -> None:
    """Over responses with tokens, however they are split into micro-batches."""
    lengths = (5, 0, 3, 1, 6, 2)
    mask = mask_of(lengths, 8)
    now = soiled(randn(70, 6, 6, dtype=torch.float64), mask, garbage)
    behaviour = soiled(randn(71, 6, 6, dtype=torch.float64), mask, -garbage)
    inputs = inputs_of(mask, old_logprobs=now, behaviour_logprobs=behaviour)
    weights = []
    for b, n in enumerate(lengths):
        if n:
            weights.append(math.exp(sum(now[b, :n].tolist()) - sum(behaviour[b, :n].tolist())))
    expected = sum(weights) ** 2 / (5 * sum(w * w for w in weights))
    metrics = Metrics()
    for rows in torch.arange(6).chunk(parts):
        metrics += response_ratios(now[rows], inputs.pick(rows.tolist()))
    ess = with_effective_sample_size(metrics).floats()
    assert ess == {ESS: pytest.approx(expected, rel=rounding(5))}  # 1 / 5 in float32
    assert 0.2 < expected < 0.9


def test_effective_sample_size_of_current_weights_is_1() -> None:
    inputs = inputs_of(mask_of((2, 3, 1)), old_logprobs=randn(72, 3, 3))
    for logprobs, expected in ((inputs.old_logprobs, 1.0), (inputs.old_logprobs + 1e4, 1.0)):
        metrics = with_effective_sample_size(response_ratios(logprobs, inputs))
        assert metrics.floats() == {ESS: pytest.approx(expected)}


def test_one_response_far_off_is_the_whole_sample() -> None:
    """Its log ratio of 1,000 is capped at 20, so that no number overflows."""
    inputs = inputs_of(mask_of((1, 1, 1, 1)), old_logprobs=torch.zeros(4, 1))
    now = torch.tensor([[1000.0], [0.0], [0.0], [0.0]])
    metrics = with_effective_sample_size(response_ratios(now, inputs))
    assert metrics.floats() == {ESS: pytest.approx(1 / 4)}
    assert with_effective_sample_size(Metrics()) == Metrics()


# -- off-policy corrections ----------------------------------------------------------------------


def naive_importance(
    proximal: list[float], behaviour: list[float], kind: str, level: str, cap: float
) -> list[float]:
    if level == "token":
        ratios = [math.exp(p - b) for p, b in zip(proximal, behaviour, strict=True)]
    else:
        ratios = [math.exp(sum(proximal) - sum(behaviour))] * len(proximal)
    if kind == "truncate":
        return [min(r, cap) for r in ratios]
    return [r if 1 / cap <= r <= cap else 0.0 for r in ratios]


def corrected(kind: Any, level: Any, cap: float) -> AlgorithmConfig:
    return AlgorithmConfig(
        old_policy="proximal", correction=kind, correction_level=level, correction_cap=cap
    )


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_importance_weights_equal_plain_loops(kind: Any, level: Any, garbage: float) -> None:
    lengths = (5, 0, 3, 1, 6)
    mask = mask_of(lengths, 8)
    proximal = soiled(randn(80, 5, 6, dtype=torch.float64), mask, garbage)
    behaviour = soiled(randn(81, 5, 6, dtype=torch.float64), mask, -garbage)
    found = importance_weights(proximal, behaviour, mask, corrected(kind, level, 1.7))
    for b, n in enumerate(lengths):
        expected = naive_importance(
            proximal[b, :n].tolist(), behaviour[b, :n].tolist(), kind, level, 1.7
        )
        assert found[b, :n].tolist() == pytest.approx(expected, rel=1e-12)
    assert not found[~mask].any()
    assert 0 < (found[mask] == (1.7 if kind == "truncate" else 0.0)).double().mean() < 1


def test_weights_of_responses_that_overflow_are_cut_off() -> None:
    mask = mask_of((600, 600))
    proximal = torch.tensor([[0.5], [-0.5]]).expand(2, 600)
    behaviour = torch.zeros(2, 600)
    cut = importance_weights(proximal, behaviour, mask, corrected("truncate", "sequence", 2.0))
    assert cut.tolist() == [[2.0] * 600, [0.0] * 600]
    masked = importance_weights(proximal, behaviour, mask, corrected("mask", "sequence", 2.0))
    assert masked.tolist() == [[0.0] * 600] * 2


@pytest.mark.parametrize("kind", ["off", "truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_ppo_equals_plain_loops(kind: str, level: str) -> None:
    """Ratio and clipping to the proximal policy, weights of proximal over behaviour; gradients by
    differences of the loops.
    """
    a = settings_of(
        "ppo", old_policy="proximal", correction=kind, correction_level=level, correction_cap=1.5
    )
    data = scored()
    proximal = data.logprobs + 0.5 * randn(90, *data.mask.shape, dtype=torch.float64)
    e = prepared(a, data, proximal)
    rows, inputs = whole(e, a)
    assert rows == list(range(7))
    d = rows_in(data)
    advantages = naive_advantages(a, d)
    all_weights = []

    def loops(now: list[list[float]]) -> float:
        loss = 0.0
        all_weights.clear()
        for b, n in enumerate(LENGTHS):
            prox = proximal[b, :n].tolist()
            weights = [1.0] * n
            if kind != "off":
                weights = naive_importance(prox, d["old"][b], kind, level, 1.5)
            all_weights.extend(weights)
            for t in range(n):
                rho, adv = math.exp(now[b][t] - prox[t]), advantages[b][t]
                clipped = min(max(rho, 0.8), 1.2)
                loss -= weights[t] * min(rho * adv, clipped * adv) / sum(LENGTHS)
        return loss

    now = proximal + 0.3 * randn(91, *data.mask.shape, dtype=torch.float64)
    lists = [now[b, :n].tolist() for b, n in enumerate(LENGTHS)]
    loss, found, figures = with_gradient(a, now, [(rows, inputs)])
    assert loss == pytest.approx(loops(lists), rel=1e-5)
    if kind != "off":
        assert figures["correction/weight_mean"] == pytest.approx(mean(all_weights), rel=1e-5)
    for b, n in enumerate(LENGTHS):
        for t in range(n):
            sides = []
            for step in (1e-6, -1e-6):
                lists[b][t] += step
                sides.append(loops(lists))
                lists[b][t] -= step
            slope = (sides[0] - sides[1]) / 2e-6
            assert found[b, t].item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("variant", ["rloo", "copg", "proximal-rloo", "grpo"])
def test_weights_of_responses_scale_the_losses_of_responses(variant: str) -> None:
    """At the proximal policy the gradient is w A, whichever loss it is."""
    changes = {"old_policy": "proximal", "correction": "truncate", "correction_level": "sequence"}
    a = settings_of(variant, **changes, correction_cap=1.5)
    if variant == "grpo":
        a = a.model_copy(update={"aggregation": "sequence_sum"})
    data = scored()
    proximal = data.logprobs + 0.3 * randn(92, *data.mask.shape, dtype=torch.float64)
    e = prepared(a, data, proximal)
    _, inputs = whole(e, a)
    assert torch.equal(e.old_logprobs, torch.where(e.mask, proximal, 0.0))
    d = rows_in(data)
    advantages = naive_advantages(a, d)
    found = gradient(a, proximal, inputs)
    for b, n in enumerate(LENGTHS):
        w = naive_importance(proximal[b, :n].tolist(), d["old"][b], "truncate", "sequence", 1.5)
        expected = [-w[0] * advantages[b][0] / 7] * n
        assert found[b, :n].tolist() == pytest.approx(expected, rel=1e-5)


def test_on_policy_data_has_weights_of_one() -> None:
    a = settings_of("ppo", old_policy="proximal", correction="mask", correction_cap=1.0)
    data = scored()
    _, inputs = whole(prepared(a, data, data.logprobs.clone()), a)
    found, metrics = settled(inputs, inputs.old_logprobs, a)
    assert torch.equal(found.advantages, inputs.advantages)
    assert torch.equal(found.old_logprobs, inputs.behaviour_logprobs)
    assert metrics.floats() == {"correction/weight_mean": pytest.approx(1.0)}


# -- the policy under training as its own old policy ---------------------------------------------


@pytest.mark.parametrize("name", ONE_GRADIENT)
def test_to_itself_a_policy_has_ratio_1_and_the_plain_policy_gradient(name: str) -> None:
    """Whatever the engine said, however far off; bit for bit what its own log-probs would give."""
    a = AlgorithmConfig.model_validate({"name": name, **ONE_GRADIENT[name]})
    inputs = fixed_part()
    now = inputs.old_logprobs + 3 * randn(60, *inputs.mask.shape, dtype=torch.float64)
    inputs = replace(inputs, own=torch.ones(len(LENGTHS), dtype=torch.bool))
    found = gradient(a, now, inputs)
    expected = torch.where(inputs.mask, -inputs.advantages / len(LENGTHS), 0.0)
    torch.testing.assert_close(found, expected, rtol=rounding(1), atol=0)  # 1 / 7 in float32
    assert torch.equal(found, gradient(a, now, replace(inputs, own=None, old_logprobs=now)))
    seen, _ = settled(inputs, now, a)
    figures = drift(now, seen).floats()
    assert figures["val/ratio_min"] == figures["val/ratio_max"] == 1.0
    assert figures["policy/approxkl_avg"] == 0.0


def test_rows_of_older_weights_keep_the_policy_that_sampled_them() -> None:
    """By hand: PPO over four tokens, weights 1 / 4, advantages 2 and -1, clip 0.2.

    ========  ===  =================  ===========
    response  own  ratios             d L / d log pi
    ========  ===  =================  ===========
    0         yes  1, 1               -2 / 4 each
    1         no   1.1, 0.5           1.1 / 4, 0 (clipped: 0.8 x -1 is the smaller)
    ========  ===  =================  ===========
    """
    mask = mask_of((2, 2))
    now = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.float64)
    off = torch.tensor([[1.5, 0.5], [1.1, 0.5]], dtype=torch.float64)
    inputs = inputs_of(
        mask,
        advantages=torch.tensor([[2.0, 2.0], [-1.0, -1.0]], dtype=torch.float64),
        old_logprobs=now - off.log(),
        own=torch.tensor([True, False]),
    )
    found = gradient(AlgorithmConfig(), now, inputs)
    expected = torch.tensor([[-0.5, -0.5], [1.1 / 4, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_of_the_policy_itself(level: str) -> None:
    """By hand: w = pi / pi_engine, cut off at 1.5, times the plain gradient, -A / 4."""
    now = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.float64)
    off = torch.tensor([[1.6, 0.5], [1.2, 1.1]], dtype=torch.float64)
    inputs = inputs_of(
        mask_of((2, 2)),
        advantages=torch.tensor([[2.0, 2.0], [-1.0, -1.0]], dtype=torch.float64),
        old_logprobs=now - off.log(),
        own=torch.tensor([True, True]),
    )
    settings = {"old_policy": "proximal", "correction": "truncate", "correction_level": level}
    a = AlgorithmConfig.model_validate({**settings, "correction_cap": 1.5})
    weights = {"token": [[1.5, 0.5], [1.2, 1.1]], "sequence": [[0.8, 0.8], [1.32, 1.32]]}[level]
    w = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(gradient(a, now, inputs), -w * inputs.advantages / 4)
    _, metrics = settled(inputs, now, a)
    assert metrics.floats()["correction/weight_mean"] == pytest.approx(w.mean().item())


def test_the_disagreement_is_of_fresh_responses_alone() -> None:
    """Differences 0.3, -0.4 of one response; the others are of older weights, or empty."""
    mask = mask_of((2, 1, 0))
    behaviour = -torch.ones(3, 2)
    now = behaviour + torch.tensor([[0.3, -0.4], [5.0, 0.0], [0.0, 0.0]])
    inputs = inputs_of(mask, behaviour_logprobs=behaviour, fresh=torch.tensor([True, False, True]))
    found = disagreement(now, inputs).floats()
    largest = {"sampling/logp_difference_max": 0.4}
    assert found == pytest.approx({SUM: -0.1, SQUARES: 0.25, TOKENS: 2, **largest}, rel=rounding(2))
    for fresh in (None, torch.tensor([False, False, True])):
        assert disagreement(now, replace(inputs, fresh=fresh)).floats() == {}
