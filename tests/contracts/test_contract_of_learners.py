"""What every learner must do, and those of virtual time with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_helpers import Virtual
from helpers import critic_of, llama, make_learner, make_rollouts
from stretto.runtime.sim.cluster import LearnerRole
from stretto.runtime.sim.costs import TrainCost
from stretto.runtime.sim.resources import Device, SimWorker
from stretto.runtime.sim.sim_roles import SimLearner
from stretto.schedules.rollout import train_batch
from stretto.testing import FakeLearner, World


def own() -> Any:
    actor = llama()
    return make_learner(actor, critic_of(actor))


LEARNERS: dict[str, Callable[[], Any]] = {
    "own": own,
    "simulated": lambda: Virtual(
        SimLearner(
            SimWorker("learner", [Device(0)], World([])),
            LearnerRole(trains=("actor", "critic"), cost=TrainCost()),
        )
    ),
    "scripted": lambda: Virtual(FakeLearner(World([3]))),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_step_reports_the_mean_reward_and_one_for_each_response(name: str) -> None:
    made = make_rollouts(llama(), critic_of(llama()), [(3, 5), (2, 4), (6, 1)], noise=0.0)
    learner, batch = LEARNERS[name](), train_batch(made)
    for _ in range(2):
        out = learner.train(batch)
        assert np.isfinite(out.stats["objective/scores"])
        assert len(out.rewards) == len(batch.ids)
        learner.publish()


@pytest.mark.parametrize("name", LEARNERS)
def test_versions_are_numbered_from_one(name: str) -> None:
    learner = LEARNERS[name]()
    for version in (1, 2, 3):
        refs = learner.publish()
        assert set(refs) == {"actor", "critic"}
        assert {ref.version for ref in refs.values()} == {version}
        assert {ref.model for ref in refs.values()} == set(refs)
