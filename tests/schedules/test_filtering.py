"""Which scored rollouts have a reward, and what it is."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from raising import raises
from stretto.errors import RewardError
from stretto.plain import is_finite
from stretto.schedules.rollout import Rollout, reasons_to_reject, total_reward, train_batch
from stretto.training.collate import collate, describe
from stretto.types import FORKS, FinishReason, Prompt, Score


def scored(rollout_id: int, rewards: Mapping[str, float | None], prompt: int = 0) -> Rollout:
    """A finished rollout; ``None`` is a source that does not apply."""
    r = Rollout(rollout_id, Prompt(prompt, (1,), f"question {prompt}"), prompt)
    r.tokens, r.logprobs, r.versions = array("i", [1]), array("f", [-1.0]), array("i", [0])
    r.finish = FinishReason.STOP
    for name, reward in rewards.items():
        values = np.array([] if reward is None else [reward], np.float32)
        r.scores[name] = Score(rollout_id, name, "reward", values)
    return r


def test_what_does_not_apply_is_left_out_of_sum_and_mean() -> None:
    weights = {"math": 2.0, "code": -1.0, "never": 3.0}
    batch = [
        scored(0, {"math": 1.0, "code": None, "never": None}),
        scored(1, {"math": None, "code": 4.0, "never": None}),
        scored(2, {"math": 0.5, "code": 2.0, "never": None}),
    ]
    assert reasons_to_reject(batch, failures_allowed=0.0, group_at_least=1, weights=weights) == {}
    assert [total_reward(r, weights) for r in batch] == [2.0, -4.0, -1.0]
    assert [total_reward(r) for r in batch] == [1.0, 4.0, 2.5]
    assert collate(train_batch(batch), weights).scores.tolist() == [2.0, -4.0, -1.0]
    figures = {
        name: value for name, value in describe(train_batch(batch)).items() if "reward/" in name
    }
    assert figures == {"reward/math": 0.75, "reward/code": 3.0}


def test_a_rollout_that_no_source_applies_to_has_failed() -> None:
    batch = [
        scored(0, {"a": None, "b": None}, prompt=5),
        scored(1, {"a": None, "b": 0.0}, prompt=5),
        scored(2, {"a": 1.0, "b": None}, prompt=6),
    ]
    unscored = "no reward source applies"
    assert reasons_to_reject(batch, failures_allowed=1.0, group_at_least=1) == {0: unscored}
    pair = [*batch, scored(3, {"a": 1.0}, prompt=6)]
    reasons = reasons_to_reject(pair, failures_allowed=1.0, group_at_least=2)
    assert reasons == {0: unscored, 1: "group too small"}
    facts = unscored, "rollout 0: a, b", "1 of 3 responses", "'question 5'"
    with raises(RewardError, "responses-without-reward", *facts):
        reasons_to_reject(batch, failures_allowed=0.0, group_at_least=1)
    batch[0].scores["reference"] = Score(0, "reference", "logprobs", np.zeros(1, np.float32))
    assert 0 in reasons_to_reject(batch, failures_allowed=1.0, group_at_least=1)


def test_failures_above_the_allowed_share_end_the_run() -> None:
    batch = [scored(n, {"a": None if n < 2 else 1.0}) for n in range(8)]
    for allowed in (0.25, 0.5, 1.0):
        assert set(reasons_to_reject(batch, failures_allowed=allowed, group_at_least=1)) == {0, 1}
    for allowed in (0.0, 0.24):
        with raises(RewardError, "responses-without-reward", "2 of 8 responses"):
            reasons_to_reject(batch, failures_allowed=allowed, group_at_least=1)


def test_scores_that_are_no_rewards_make_no_failure() -> None:
    batch = [scored(0, {})]
    batch[0].scores["critic"] = Score(0, "critic", "values", np.zeros(0, np.float32))
    assert reasons_to_reject(batch, failures_allowed=0.0, group_at_least=1) == {}


@pytest.mark.parametrize("reward", [3e38, -3e38, float("nan"), float("inf")])
def test_a_sum_that_is_not_finite_as_float32_is_a_failure(reward: float) -> None:
    """3e38 is a float32, and 1.5 times as much is none."""
    weights = {"a": 1.5, "b": 1.0}
    batch = [scored(0, {"a": reward, "b": 1.0}), scored(1, {"a": 1.0, "b": 1.0})]
    reasons = reasons_to_reject(batch, failures_allowed=1.0, group_at_least=1, weights=weights)
    assert reasons == {0: "reward not finite"}
    terms = f"1.5 x {float(np.float32(reward))} (a) + 1 x 1.0 (b)"
    with raises(RewardError, "responses-without-reward", "rollout 0", terms):
        reasons_to_reject(batch, failures_allowed=0.0, group_at_least=1, weights=weights)


def test_finite_is_finite_as_float32() -> None:
    """As torch rounds: the next float64 after the last that rounds to float32's largest."""
    largest = torch.finfo(torch.float32).max
    edge = largest + 2.0**103
    numbers = [0.0, 1.0, -largest, np.nextafter(edge, 0), edge, -edge, 1e300, float("nan")]
    numbers += [float("inf"), -float("inf"), 1e-300]
    rounded = torch.tensor(numbers, dtype=torch.float64).float()
    assert [is_finite(number) for number in numbers] == rounded.isfinite().tolist()


def test_a_source_counts_once_in_an_episode_of_several_samples() -> None:
    """A function scores the sample that ends it; of a model's scores of all samples the mean
    counts. Both have their weights."""
    batch = [
        scored(0, {"f": None, "model": 1.0}),
        scored(FORKS, {"f": 0.5, "model": 4.0}),
        scored(1, {"f": 0.25, "model": 2.0}),
    ]
    assert reasons_to_reject(batch, failures_allowed=0.0, group_at_least=1) == {}
    weights = {"f": 8.0, "model": 2.0}
    assert train_batch(batch).totals(weights).tolist() == [9.0, 9.0, 6.0]
    figures = describe(train_batch(batch))
    assert (figures["reward/f"], figures["reward/model"]) == (0.375, 2.25)
    functions = [scored(0, {"f": None}), scored(FORKS, {"f": 0.5}), scored(1, {"f": None})]
    reasons = reasons_to_reject(functions, failures_allowed=1.0, group_at_least=1)
    assert reasons == {1: "no reward source applies"}
    assert train_batch(functions[:2]).totals().tolist() == [0.5, 0.5]
