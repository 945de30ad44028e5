"""Advantages of several reward sources that are normalised one by one, by hand."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch

from raising import raises
from stretto.algorithms.advantages import GDPO_EPS, group_normalised, normalised_then_summed
from stretto.algorithms.experience import Scored
from stretto.algorithms.registry import prepare
from stretto.config import AlgorithmConfig, RewardConfig, recipes
from stretto.errors import ConfigError
from stretto.types import TrainBatch

GROUPS = torch.tensor([4, 4, 7, 7])
NAN = math.nan


def by_hand(z: list[float]) -> list[float]:
    return [(each - mean(z)) / (stdev(z) + GDPO_EPS) for each in z]


def half(distance: float) -> float:
    """The larger of two rewards at this distance, normalised: nearly 1 / sqrt 2."""
    return distance / 2 / (distance / math.sqrt(2) + GDPO_EPS)


def test_each_source_is_normalised_in_its_group() -> None:
    """The weights are 1 and 0.5; rewards that are equal add nothing."""
    sources = torch.tensor([[1.0, 300.0], [0.0, 100.0], [1.0, 2.0], [1.0, 4.0]]).double()
    found = normalised_then_summed(sources, torch.tensor([1.0, 0.5]).double(), GROUPS)
    first, second = half(1) + 0.5 * half(200), 0.5 * half(2)
    z = [first, -first, -second, second]
    assert found.tolist() == pytest.approx(by_hand(z), abs=1e-5)


def test_a_source_that_does_not_apply_adds_nothing() -> None:
    """The second source applies to one response of the first group, and so compares nothing."""
    sources = torch.tensor([[1.0, 5.0], [0.0, NAN], [0.0, 1.0], [NAN, 3.0]]).double()
    found = normalised_then_summed(sources, torch.ones(2).double(), GROUPS)
    z = [half(1), -half(1), -half(2), half(2)]
    assert found.tolist() == pytest.approx(by_hand(z), abs=1e-5)


def test_one_source_is_grpos_advantage_brought_to_variance_one() -> None:
    rewards = torch.tensor([1.0, 0.0, 3.0, 7.0]).double()
    found = normalised_then_summed(rewards[:, None], torch.ones(1).double(), GROUPS)
    grpo = group_normalised(rewards, GROUPS, "group", GDPO_EPS).tolist()
    assert found.tolist() == pytest.approx(by_hand(grpo), abs=1e-6)


def test_small_deviations_are_divided_as_trl_does() -> None:
    """TRL 1.16 (``grpo_trainer.py``) adds 1e-4 to each deviation: rewards 0.001 apart have the
    deviation 0.001 / sqrt 2, and 1e-4 more makes them 12 % smaller."""
    sources = torch.tensor([[0.001, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).double()
    found = normalised_then_summed(sources, torch.tensor([1.0, 2.0]).double(), GROUPS)
    grouped = sources.view(2, 2, 2)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    rewards = centred / (grouped.std(dim=1, keepdim=True) + 1e-4)
    total = (rewards.view(4, 2) * torch.tensor([1.0, 2.0])).sum(dim=1)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_sources_that_do_not_differ_teach_nothing() -> None:
    found = normalised_then_summed(torch.ones(4, 2).double(), torch.ones(2).double(), GROUPS)
    assert found.tolist() == [0.0] * 4


@pytest.mark.parametrize("way", ["normalize_then_sum", "sum_then_normalize"])
@pytest.mark.parametrize("name", ["grpo", "cispo"])
def test_targets_are_made_by_the_way_that_is_set(name: str, way: str) -> None:
    """Both responses of the second group have the sum 3, and only their sources differ."""
    sources = torch.tensor([[1.0, 5.0], [0.0, 1.0], [1.0, 2.0], [2.0, 1.0]]).double()
    ones = torch.ones(4, 3)
    data = Scored(
        mask=ones.bool(),
        logprobs=-ones,
        ref_logprobs=None,
        values=None,
        scores=sources.sum(dim=1).float(),
        ended=ones[:, 0].bool(),
        groups=GROUPS,
        sources=sources,
        weights=torch.tensor([2.0, 1.0]).double(),
    )
    settings: Any = {"name": name, "kl_coef": 0.0, "multi_objective_aggregation": way}
    reward = RewardConfig(missing_eos="off")
    found = prepare(data, AlgorithmConfig(**settings), reward, 0.0).advantages[:, 0].tolist()
    first, second = 2 * half(1) + half(4), half(1)
    summed = [1 / math.sqrt(2), -1 / math.sqrt(2), 0.0, 0.0]
    apart = by_hand([first, -first, -second, second])
    expected = apart if way == "normalize_then_sum" else summed
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_batch_s_rewards_by_source() -> None:
    """The samples of an episode have the mean of those that a source applies to."""
    none = np.zeros(0)
    batch = TrainBatch(
        ids=np.arange(3),
        prompts=[(0,)] * 3,
        prompt_ids=np.zeros(3, np.int64),
        lengths=np.zeros(3, np.int64),
        ended=np.ones(3, np.bool_),
        tokens=none.astype(np.int32),
        logprobs=none.astype(np.float32),
        versions=none.astype(np.int64),
        rewards={"a": np.array([1, 3, 5], np.float32), "b": np.array([0, 2, 0], np.float32)},
        applies={"a": np.ones(3, np.bool_), "b": np.array([False, True, False])},
        episodes=np.array([8, 8, 9]),
    )
    expected = np.array([[2, 2], [2, 2], [5, NAN]])
    assert np.array_equal(batch.by_source(), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("algorithm", "reward", "code"),
    [
        ({"name": "rloo"}, {}, "sources-apart-without-groups"),
        ({"name": "ppo"}, {}, "sources-apart-without-groups"),
        ({"kl_in": "reward"}, {}, "sources-apart-with-kl"),
        ({"scale_rewards": "batch"}, {}, "sources-apart-scaled"),
        ({}, {"missing_eos": "replace"}, "sources-apart-with-missing-eos"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    algorithm: dict[str, Any], reward: dict[str, Any], code: str
) -> None:
    apart = {"name": "grpo", "multi_objective_aggregation": "normalize_then_sum"}
    rollout = {"batch": 4, "samples_per_prompt": 2}
    off = {"missing_eos": "off"}
    recipes.build({"algorithm": apart, "reward": off, "rollout": rollout}, "here")
    changed = {"algorithm": apart | algorithm, "reward": off | reward, "rollout": rollout}
    with raises(ConfigError, code):
        recipes.build(changed, "here")
