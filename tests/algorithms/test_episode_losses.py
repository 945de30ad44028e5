"""Losses of episodes, with context, turns' rewards and forks, against loops over their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from episode_helpers import WEIGHTS, as_episodes, episodes_of, naive_loss
from helpers import llama
from learner_helpers import SHAPES, make_batch
from loss_helpers import BETA, VARIANTS, loss_of
from raising import raises
from stretto.algorithms.experience import Experience, LossInputs, Scored
from stretto.algorithms.reductions import first_rows, joined, response_weights, token_weights
from stretto.algorithms.registry import prepare
from stretto.algorithms.rewards import token_rewards
from stretto.config import ENVIRONMENT, AlgorithmConfig, RewardConfig
from stretto.config.algorithm import ALGORITHMS
from stretto.errors import LearnerError
from stretto.schedules.rollout import Rollout, train_batch
from stretto.training.collate import collate, describe

LONGEST = 16
REWARD = RewardConfig(missing_eos="subtract", missing_eos_penalty=-1.0)
CORRECTED = {"old_policy": "proximal", "correction": "truncate", "correction_cap": 1.05}
EMPTY = [(3, 7), (40, 5), (5, 0), (2, 9), (8, 6), (3, 4), (6, 2), (4, 8)]


def batch_of(
    algorithm: dict[str, Any], shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[Rollout]:
    return as_episodes(make_batch(llama(), algorithm, shapes))


def shifted(batch: Sequence[Rollout], by: float = 0.3) -> list[Tensor]:
    """Log-probs [T] of each response after some updates, context among them."""
    seeded = torch.Generator().manual_seed(2)
    return [
        (
            torch.tensor(r.logprobs, dtype=torch.float64)
            + by * torch.randn(len(r), generator=seeded)
        ).requires_grad_()
        for r in batch
    ]


def drawn(batch: Sequence[Rollout], numbers: Sequence[Tensor]) -> Tensor:
    """Numbers of the tokens that the policy drew, [B, T]."""
    rows = [x[torch.from_numpy(r.sampled)] for r, x in zip(batch, numbers, strict=True)]
    return pad_sequence(rows, batch_first=True)


def whole(e: Experience, a: AlgorithmConfig) -> tuple[list[int], LossInputs]:
    rows = [row for unit in e.units for row in unit]
    inputs = e.pick(rows).weighted(a.averaging, LONGEST)
    return rows, inputs.each(lambda x: x.double() if x.is_floating_point() else x)


def accepted(variant: str, corrected: dict[str, Any]) -> bool:
    """Whether the settings allow the correction."""
    spec = ALGORITHMS[VARIANTS[variant]["name"]]
    of_tokens = spec.aggregation is not None
    return not corrected or (spec.corrects and (of_tokens or "correction_level" in corrected))


CASES = [
    (variant, corrected)
    for variant in VARIANTS
    for corrected in ({}, CORRECTED, CORRECTED | {"correction_level": "sequence"})
    if accepted(variant, corrected)
]


@pytest.mark.parametrize("shapes", [SHAPES, EMPTY], ids=["full", "empty sample"])
@pytest.mark.parametrize(("variant", "corrected"), CASES)
def test_losses_and_gradients_equal_loops_over_tokens(
    variant: str, corrected: dict[str, Any], shapes: Sequence[tuple[int, int]]
) -> None:
    a = AlgorithmConfig.model_validate(VARIANTS[variant] | corrected)
    batch = batch_of(VARIANTS[variant] | corrected, shapes)
    now = shifted(batch)
    old = shifted(batch, 0.1) if corrected else None
    beta = BETA if a.beta else 0.0
    data = collate(train_batch(batch), WEIGHTS)
    proximal = None if old is None else drawn(batch, old).detach().float()
    e = prepare(data, a, REWARD, beta, proximal)
    rows, inputs = whole(e, a)
    ours = loss_of(a, drawn(batch, now)[rows], inputs).loss
    got = torch.autograd.grad(ours, now, allow_unused=True)

    episodes = episodes_of(batch, now, penalty=lambda score: score - 1.0)
    if old is not None:
        of_proximal = episodes_of(batch, old, proximal=True, penalty=float)
        for ours_, theirs in zip(episodes, of_proximal, strict=True):
            for t, p in zip(ours_.tokens, theirs.tokens, strict=True):
                t.old = p.old
    want = naive_loss(a, episodes, beta=beta, longest=LONGEST)
    assert ours.item() == pytest.approx(want.item(), rel=2e-5, abs=1e-6)
    expected = torch.autograd.grad(want, now, allow_unused=True)
    for r, x, y in zip(batch, got, expected, strict=True):
        x, y = (torch.zeros(len(r)) if g is None else g for g in (x, y))
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-6)
        assert not x[torch.from_numpy(~r.sampled)].any()


def test_an_empty_sample_is_in_no_loss_and_its_episode_is() -> None:
    batch = batch_of({"name": "proximal-rloo"}, EMPTY)
    a = AlgorithmConfig(name="proximal-rloo")
    e = prepare(collate(train_batch(batch), WEIGHTS), a, REWARD, BETA)
    assert (0, 2) in e.units
    _, inputs = whole(e, a)
    assert inputs.response_weights.sum().item() == pytest.approx(1)
    assert inputs.response_weights[1] == 0


# -- by hand -------------------------------------------------------------------------------------


def test_turns_rewards_stay_in_their_places_by_hand() -> None:
    """Score 2, of which 0.5 for the first turn and -1 for the second: 2.5 are for the end."""
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    turns = torch.tensor([[0.0, 0.5, 0.0, -1.0], [0.0, float("nan"), 0.0, 0.0]]).nan_to_num(3.0)
    kl = torch.ones(2, 4)
    found = token_rewards(torch.tensor([2.0, 1.0]), kl, mask, 0.1, turns)
    expected = [[-0.1, 0.4, -0.1, 1.4], [-0.1, 0.9, 0.0, 0.0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_weights_of_episodes_by_hand() -> None:
    """Rows 0 and 2 are a response of 4 tokens, row 1 is one of 2 with an empty sample, row 3."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]).bool()
    episodes = torch.tensor([7, 3, 7, 3])
    weights = {mode: token_weights(mask, mode, 8, episodes)[:, 0].tolist() for mode in MODES}  # type: ignore[arg-type]
    sixth = pytest.approx(1 / 6)
    assert weights == {
        "token_mean": [sixth, sixth, sixth, 0],
        "sequence_mean": [1 / 8, 1 / 4, 1 / 8, 0],
        "sequence_sum": [1 / 2, 1 / 2, 1 / 2, 0],
        "fixed_length": [1 / 16, 1 / 16, 1 / 16, 0],
    }
    assert response_weights(mask, episodes).tolist() == [0.25, 0.5, 0.25, 0.0]
    assert joined(torch.tensor([1, 2, 3, 4]), episodes).tolist() == [4, 6, 4, 6]
    rows, places = first_rows(episodes)
    assert (rows.tolist(), places.tolist()) == ([0, 1], [0, 1, 0, 1])


MODES = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")


def test_an_episode_counts_once_in_its_group_by_hand() -> None:
    """Scores 4 (three samples), 1 and 1: the mean of the others is 1, and 2.5."""
    mask = torch.ones(5, 2, dtype=torch.bool)
    data = Scored(
        mask=mask,
        logprobs=-mask.float(),
        ref_logprobs=None,
        values=None,
        scores=torch.tensor([4.0, 1.0, 4.0, 1.0, 4.0]),
        ended=torch.ones(5, dtype=torch.bool),
        groups=torch.zeros(5, dtype=torch.long),
        episodes=torch.tensor([0, 1, 0, 2, 0]),
    )
    rloo = prepare(data, AlgorithmConfig(name="rloo", kl_coef=0), REWARD, 0.0)
    assert rloo.advantages[:, 0].tolist() == [3.0, -1.5, 3.0, -1.5, 3.0]
    assert rloo.stats["objective/scores"] == 2.0
    assert list(rloo.units) == [(0, 2, 4), (1,), (3,)]
    dr = prepare(data, AlgorithmConfig(name="grpo", kl_coef=0, scale_rewards="none"), REWARD, 0.0)
    assert dr.advantages[:, 0].tolist() == [2.0, -1.0, 2.0, -1.0, 2.0]
    best = prepare(data, AlgorithmConfig(name="best-of-n", kl_coef=0), REWARD, 0.0)
    assert list(best.units) == [(0, 2, 4)]
    with raises(LearnerError, "one-response-to-prompt", "1 of 1"):
        one = replace(data, episodes=torch.zeros(5, dtype=torch.long))
        prepare(one, AlgorithmConfig(name="rloo", kl_coef=0), REWARD, 0.0)


def test_an_episode_has_one_score_and_ends_where_all_its_samples_do() -> None:
    data = Scored(
        mask=torch.ones(3, 1, dtype=torch.bool),
        logprobs=-torch.ones(3, 1),
        ref_logprobs=None,
        values=None,
        scores=torch.tensor([1.0, 0.25, 2.0]),
        ended=torch.tensor([True, True, False]),
        groups=torch.zeros(3, dtype=torch.long),
        episodes=torch.tensor([5, 6, 5]),
    )
    shared = data.shared()
    assert shared.scores.tolist() == [1.5, 0.25, 1.5]
    assert shared.ended.tolist() == [False, True, False]


def test_rewards_of_turns_count_as_their_source_does() -> None:
    """By its weight; not where the environment failed, or is no source."""
    rollouts = batch_of({"name": "ppo"})
    failed = rollouts[3].scores[ENVIRONMENT]
    rollouts[3].scores[ENVIRONMENT] = replace(failed, values=failed.values[:0])
    batch = train_batch(rollouts)
    turns = collate(batch, WEIGHTS).turn_rewards
    assert turns is not None
    ends = [[r.sampled[:end].sum() - 1 for end in r.turns] for r in rollouts]
    expected = torch.zeros_like(turns)
    for row, r in enumerate(rollouts):
        if row != 3:
            expected[row, ends[row]] = 0.5 * torch.tensor(r.turn_rewards)
    torch.testing.assert_close(turns, expected)
    without = {source: r for source, r in batch.rewards.items() if source != ENVIRONMENT}
    assert collate(replace(batch, rewards=without), {"task": 1.0}).turn_rewards is None


# -- one turn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mask_that_is_true_everywhere_and_episodes_of_one_sample_change_no_bit(
    variant: str,
) -> None:
    a = AlgorithmConfig.model_validate(VARIANTS[variant])
    plain = train_batch(make_batch(llama(), VARIANTS[variant]))
    assert plain.sampled is None
    assert plain.turn_rewards is None
    assert plain.episodes is None
    beta = BETA if a.beta else 0.0

    def taken(batch: Any) -> tuple[Tensor, Experience]:
        e = prepare(collate(batch, WEIGHTS), a, REWARD, beta)
        rows, inputs = whole(e, a)
        now = e.old_logprobs.double()[rows] + 0.1
        return loss_of(a, now, inputs).loss, e

    loss, e = taken(plain)
    drawn_by_policy = replace(plain, sampled=np.ones(len(plain.tokens), np.bool_))
    same, f = taken(drawn_by_policy)
    assert torch.equal(loss, same)
    assert torch.equal(e.advantages, f.advantages)
    assert e.stats == f.stats
    alone, g = taken(replace(plain, episodes=plain.ids))
    assert torch.equal(e.advantages, g.advantages)
    assert list(e.units) == list(g.units)
    assert e.stats == g.stats
    if a.name != "online-dpo":  # whose sums have another order
        assert torch.equal(loss, alone)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12)


# -- metrics -------------------------------------------------------------------------------------


def test_lengths_are_of_sampled_tokens_and_episodes_count_once() -> None:
    batch = train_batch(batch_of({"name": "rloo"}))
    stats = describe(batch)
    # Sampled tokens: 7 - 2 and 1, 5 - 2 and 2, 9 - 3, 6, 4 - 1, 8 - 4.
    lengths = [6, 5, 6, 6, 3, 4]
    assert stats["response/length_mean"] == pytest.approx(sum(lengths) / 6)
    assert stats["response/length_max"] == 6
    # Both samples must have ended: rows 0, 3 and 6 have not, of which 0 and 6 are of forked ones.
    assert stats["response/ended"] == pytest.approx(3 / 6)
