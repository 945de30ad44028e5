"""Schedules whose knobs change between rounds, with scripted roles in virtual time. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config.knobs import RoundKnobs, Settings
from stretto.runtime.sim.loop import run
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.controller import Feedback
from stretto.schedules.controls import Controls
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.rollout import Step
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.stateful import Stateful
from stretto.testing import FakeGenerator, FakeLearner, FakeScorer, World

BATCH, CARRIES, MOST_LAG = 4, 2, 1


class Scripted(Stateful):
    """A tuner with given knobs, one per round. The last ones stay."""

    saved = ("_place",)

    def __init__(self, values: Sequence[RoundKnobs]) -> None:
        self._values = values
        self._place = 0

    @property
    def knobs(self) -> RoundKnobs:
        return self._values[min(self._place, len(self._values) - 1)]

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def take_news(self) -> Sequence[str]:
        return [f"place {self._place}"]

    def observe(self, feedback: Feedback) -> None:
        self._place += 1


def schedule_of(world: World, values: Sequence[RoundKnobs], steps: int) -> Schedule:
    limits = Settings(
        BATCH,
        1,
        100,
        steps,
        score_on="chunk",
        lag=MOST_LAG,
        train_on="group",
        max_carries=CARRIES,
    )
    return Schedule(
        world.next_prompt,
        [FakeGenerator(world, f"gen{i}") for i in range(2)],
        [
            ScorerReplica(FakeScorer(world, "judge")),
            ScorerReplica(FakeScorer(world, "critic", "values", follows="critic")),
        ],
        FakeLearner(world, 2.0),
        Controls(limits, FixedChunk(4), FixedOvercommit(0), tuner=Scripted(values)),
        world.clock,
        world,
    )


def taken(
    lengths: Sequence[int],
    values: Sequence[RoundKnobs],
    *,
    shuffle: bool = False,
    world: World | None = None,
) -> list[Step]:
    async def main() -> list[Step]:
        schedule = schedule_of(world or World(lengths), values, len(values))
        async with schedule:
            return [await schedule.step() for _ in values]

    return run(main(), seed=1, shuffle=shuffle)


def permitted(knobs: RoundKnobs) -> RoundKnobs:
    on_groups = knobs.score_on != "batch" and not knobs.lag
    return knobs if on_groups else replace(knobs, train_on="batch")


KNOBS = st.builds(
    RoundKnobs,
    score_on=st.sampled_from(["batch", "rollout", "chunk"]),
    delta=st.sampled_from([0, 0, 1, 4]),
    lag=st.sampled_from([0, 0, 1]),
    chunk_tokens=st.sampled_from([1, 3, 100]),
    train_on=st.sampled_from(["batch", "group"]),
).map(permitted)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(KNOBS, min_size=2, max_size=9),
    st.lists(st.integers(1, 12), min_size=1, max_size=11),
    st.booleans(),
)
def test_any_change_between_rounds_trains_each_rollout_once_with_all_scores(
    values: list[RoundKnobs], lengths: list[int], shuffle: bool
) -> None:
    rollouts = [r for step in taken(lengths, values, shuffle=shuffle) for r in step.batch]
    assert len(rollouts) == BATCH * len(values)
    assert len({r.id for r in rollouts}) == len(rollouts)
    for rollout in rollouts:
        assert rollout.scores.keys() == {"judge", "critic"}
        assert len(rollout) == lengths[rollout.id % len(lengths)]


@settings(deadline=None, max_examples=100)
@given(st.lists(KNOBS, min_size=2, max_size=9), st.lists(st.integers(1, 12), min_size=1))
def test_the_age_of_data_stays_below_the_largest_lag_plus_carries(
    values: list[RoundKnobs], lengths: list[int]
) -> None:
    for trained, step in enumerate(taken(lengths, values)):
        for rollout in step.batch:
            assert trained - min(rollout.versions) <= MOST_LAG + CARRIES
            assert rollout.carries <= CARRIES


def test_without_lag_and_delta_each_batch_comes_from_the_newest_weights() -> None:
    values = [RoundKnobs(score_on) for score_on in ("batch", "chunk", "rollout", "batch", "chunk")]
    for trained, step in enumerate(taken([3, 9, 5, 1, 2], values)):
        assert {version for r in step.batch for version in r.versions} == {trained}


@pytest.mark.parametrize(
    ("lags", "versions"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        # The lag of a step's end decides on the round after it, which the next one trains on.
        ([0, 1, 1, 0, 0, 0], [0, 1, 1, 2, 4, 5]),
    ],
)
def test_a_change_of_lag_takes_effect_in_the_next_round(
    lags: list[int], versions: list[int]
) -> None:
    steps = taken([5], [RoundKnobs("rollout", lag=lag) for lag in lags])
    assert [step.decisions for step in steps] == [[f"place {i}"] for i in range(1, len(lags) + 1)]
    assert [min(step.batch[0].versions) for step in steps] == versions


def test_the_learner_starts_on_groups_in_the_rounds_that_say_so() -> None:
    """With a lag of 1, the fourth round begins before its knobs are known."""
    on_groups = RoundKnobs("rollout", chunk_tokens=1, train_on="group")
    late = RoundKnobs("rollout", lag=1)
    world = World([3, 9, 5, 1])
    steps = taken([], [RoundKnobs("rollout"), on_groups, late, on_groups, on_groups], world=world)
    calls = re.findall(r"^\S+ (accumulate|train) \[(.*)\]$", "\n".join(world.log), re.M)
    trained, early = [], list[str]()
    for name, ids in calls:
        early += ids.split(", ") if name == "accumulate" else []
        if name == "train":
            assert set(early) <= set(ids.split(", "))
            trained.append(len(early))
            early.clear()
    assert len(steps) == len(trained) == 5
    assert [count > 0 for count in trained] == [False, True, False, False, True]


def test_a_resumed_schedule_continues_with_the_knobs_of_its_rounds() -> None:
    values = [
        RoundKnobs("chunk", delta=2, chunk_tokens=2),
        RoundKnobs("batch", delta=1, chunk_tokens=3),
        RoundKnobs("rollout", lag=1, chunk_tokens=3),
        RoundKnobs("chunk", chunk_tokens=2, train_on="group"),
        RoundKnobs("batch", delta=3, chunk_tokens=3),
        RoundKnobs("rollout", chunk_tokens=3),
    ]
    lengths = [3, 9, 5, 1, 2, 12, 7]

    async def main(since: int, state: dict[str, object] | None) -> list[tuple[list[int], object]]:
        world = World(lengths)
        schedule = schedule_of(world, values, len(values))
        if state:
            world.places = state["counts"][0]  # type: ignore[index]
            schedule._learner.version = state["counts"][3]  # type: ignore
            world.loaded = dict.fromkeys(world.loaded, state["counts"][4])  # type: ignore[index]
            schedule.load_state_dict(deepcopy(state), world.prompt)
        outcomes = []
        async with schedule:
            for _ in range(since, len(values)):
                step = await schedule.step()
                async with schedule.weights_lock:
                    outcomes.append((len(step.batch), deepcopy(schedule.state_dict())))
        return outcomes  # type: ignore[return-value]

    whole = run(main(0, None))
    for i, (_, state) in enumerate(whole[:-1], 1):
        again = run(main(i, state))  # type: ignore[arg-type]
        assert [n for n, _ in again] == [BATCH] * (len(values) - i)
        knobs = [s["tuner"] for _, s in again]  # type: ignore[index]
        assert knobs == [s["tuner"] for _, s in whole[i:]]  # type: ignore[index]
