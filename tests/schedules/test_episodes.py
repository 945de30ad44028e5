"""Episodes with scripted roles in virtual time: turns, waits, rewards, losses, restarts. No torch.

A token takes a second, an opening one, an answer three, and has two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raising import raises
from schedule_helpers import Setting, schedule_of
from stretto.config.schedule import Settings
from stretto.errors import EpisodeLostError, RewardError
from stretto.runtime.sim.loop import run
from stretto.schedules.rollout import Step, train_batch
from stretto.schedules.schedule import Schedule
from stretto.testing import World
from stretto.types import CONTEXT, FORKS, FinishReason, Observation, Prompt, Sampling, episode_of

EPISODES = Sampling(100, max_turn_tokens=100)


def settings(batch: int, samples: int = 1, steps: int = 1, **options: Any) -> Settings:
    return Settings(batch, samples, 100, steps, episodes=EPISODES, **options)


def take(
    setting: Setting,
    world: World,
    prepare: Callable[[Schedule], None] = lambda schedule: None,
) -> list[Step]:
    """All steps of a setting."""

    async def main() -> list[Step]:
        schedule = schedule_of(setting, world)
        prepare(schedule)
        async with schedule:
            return [await schedule.step() for _ in range(setting.settings.steps)]

    return run(main(), seed=setting.order or 0, shuffle=setting.order is not None)


def test_turns_go_in_lockstep_while_all_knobs_are_zero() -> None:
    """Rollout 0: 2 tokens, an answer, 1 token. Rollout 1: 4 tokens, no more turns."""
    turns = [(2, 1), (4,)]
    world = World([], turns=turns)
    [step] = take(Setting(settings(2), turns=turns, critic=False), world)
    assert (
        world.log
        == [
            "0 env open 0 0",
            "0 env open 1 0",
            "1 gen0 admit [0, 1]",
            "8 env step 0 turn 1",  # after 4 tokens of rollout 1 and the 3 seconds of an answer
            "8 env step 1 turn 1",
            "8 gen0 admit [0]",
            "12 env step 0 turn 2",
            *world.log[7:],
        ]
    )
    first, second = step.batch
    assert [first.turns, second.turns] == [[2, 5], [4]]
    assert [first.context, second.context] == [[(2, 4)], []]
    assert list(first.versions) == [0, 0, CONTEXT, CONTEXT, 0]
    assert [first.turn_rewards, second.turn_rewards] == [[1.0, 2.0], [1.0]]
    assert {r.finish for r in step.batch} == {FinishReason.STOP}
    assert {r.ended_by for r in step.batch} == {"environment"}


def test_lockstep_does_not_depend_on_how_long_answers_take() -> None:
    """What generators are asked for is the same, and in the same order."""
    turns = [(2, 1, 3), (4,), (1, 1), (3, 5)]
    logs = []
    for waits_s in ((3.0,), (9.0, 0.5, 4.0, 1.0), (0.25, 7.0, 0.5, 8.0)):
        world = World([], turns=turns)
        steps = take(Setting(settings(4, steps=3), turns=turns, waits_s=waits_s), world)
        assert [[r.id for r in s.batch] for s in steps] == [
            [i, *range(i + 1, i + 4)] for i in (0, 4, 8)
        ]
        logs.append([line.split(" ", 1)[1] for line in world.log if " gen0 " in line])
    assert logs[0] == logs[1] == logs[2]


def test_others_are_decoded_while_an_episode_waits() -> None:
    """With scores asked for early, the answer comes in the middle of the other's turn."""
    turns = [(2, 1), (12,)]
    world = World([], turns=turns)
    setting = Setting(settings(2, score_on="rollout"), turns=turns, critic=False, chunk=2)
    [step] = take(setting, world)
    admitted = [line for line in world.log if "gen0 admit" in line]
    assert admitted[-1] == "7 gen0 admit [0]"  # 1 + 2 tokens + 3 of the answer, then a chunk's end
    assert [len(r) for r in step.batch] == [5, 12]


def test_the_generator_is_said_to_wait_for_environments() -> None:
    turns = [(2, 1)]
    world = World([], turns=turns)
    take(Setting(settings(1, score_on="rollout"), turns=turns, critic=False), world)
    spans = [span for span in world.spans if span[:2] == ("generator", "environment")]
    assert [(start, end) for *_, start, end in spans] == [(0, 1), (3, 6), (7, 10)]
    steps = [span for span in world.spans if span[0] == "environment"]
    assert [(name, end - start) for _, name, start, end in steps] == [
        ("open", 1),
        ("step", 3),
        ("step", 3),
    ]


def test_scorers_read_a_transcript_while_its_environment_works() -> None:
    """The turn's tokens alone would not be worth a call before the end."""
    turns = [(4, 2)]
    world = World([], turns=turns)
    read: list[tuple[float, int]] = []

    def watch(schedule: Schedule) -> None:
        [queue] = schedule._scoring.queues
        queue.scorer.info = replace(queue.scorer.info, worthwhile_tokens=1000)  # type: ignore[misc]
        admit, extend = queue.scorer.admit, queue.scorer.extend

        async def admitted(responses: Sequence[Any]) -> None:
            read.append((world.clock.now(), sum(map(len, responses))))
            await admit(responses)

        async def extended(chunks: Sequence[Any]) -> None:
            read.append((world.clock.now(), sum(len(c.tokens) for c in chunks)))
            await extend(chunks)

        queue.scorer.admit, queue.scorer.extend = admitted, extended  # type: ignore[method-assign]

    setting = Setting(settings(1, score_on="chunk"), turns=turns, critic=False, chunk=4)

    async def main() -> Step:
        schedule = schedule_of(setting, world)
        del schedule._scoring.queues[1:]
        schedule._scoring._groups = schedule._scoring._groups[:1]
        schedule._scoring._streaming = schedule._scoring._streaming[:1]
        schedule._scoring._frozen = schedule._scoring._frozen[:1]
        watch(schedule)
        async with schedule:
            return await schedule.step()

    run(main())
    assert read == [(5, 4), (10, 4), (13, 0)]  # in the waits for answers, and at the end


def test_rewards_of_turns_are_a_source_and_stand_at_the_last_tokens_of_turns() -> None:
    turns = [(2, 1), (4,)]
    world = World([], turns=turns)
    setting = Setting(settings(2, environment_rewards=True), turns=turns)
    [step] = take(setting, world)
    assert [r.scores["environment"].scalar for r in step.batch] == [3.0, 1.0]
    columns = train_batch(step.batch)
    assert columns.rewards["environment"].tolist() == [3.0, 1.0]
    assert columns.turn_rewards is not None
    assert columns.sampled is not None
    assert columns.sampled.tolist() == [True, True, False, False, True, *[True] * 4]
    assert columns.turn_rewards.tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0]
    assert columns.lengths.tolist() == [5, 4]
    assert columns.per_token["values"].shape == (7,)
    assert columns.episodes is None


@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_an_episode_goes_on_under_new_weights_that_came_while_it_waited(seconds: float) -> None:
    turns = [(1, 1), (1,), (1,)]
    world = World([], turns=turns)
    options: dict[str, Any] = {"score_on": "rollout", "lag": 1}
    setting = Setting(
        settings(2, steps=6, **options), turns=turns, waits_s=(seconds, 1.0, 1.0), delta=2
    )
    steps = take(setting, world)
    trained = [r for s in steps for r in s.batch]
    assert len({r.id for r in trained}) == len(trained) == 12
    carried = [r for r in trained if r.carries]
    assert carried
    for rollout in carried:
        drawn = [v for v in rollout.versions if v != CONTEXT]
        assert drawn == sorted(drawn)


def test_a_lost_episode_is_begun_anew() -> None:
    """Whatever had been read of it is forgotten, by scorers that stream it too."""
    turns = [(2, 3), (9,)]
    world = World([], turns=turns)

    def lose(schedule: Schedule) -> None:
        schedule._episodes._environment.lost.add(0)  # type: ignore[union-attr,attr-defined]

    setting = Setting(settings(2, score_on="chunk"), turns=turns)
    [step] = take(setting, world, lose)
    assert [line.split(" ", 1)[1] for line in world.log if "env open" in line] == [
        "env open 0 0",
        "env open 1 0",
        "env open 0 0",
    ]
    assert [r.turns for r in step.batch] == [[2, 7], [9]]
    assert [len(r.log) for r in step.batch] == [3, 2]


def test_an_episode_that_is_lost_again_and_again_ends_the_run() -> None:
    turns = [(2,)]
    world = World([], turns=turns)

    def lose(schedule: Schedule) -> None:
        class Always(set[int]):
            def __contains__(self, item: object) -> bool:
                return True

        schedule._episodes._environment.lost = Always()  # type: ignore[union-attr,attr-defined]

    with raises(EpisodeLostError, "", "of 0 is lost"):
        take(Setting(settings(1), turns=turns), world, lose)
    assert sum("env open" in line for line in world.log) == 3


class Forking:
    """An environment whose first answer to a rollout is a fork of it, and whose last one ends both.

    Its prompt has three tokens.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.released: list[int] = []

    async def open(self, response: Any, log: Sequence[Observation] = ()) -> Observation:
        return Observation(response.id, 0, np.empty(0, np.int32))

    async def step(self, response: Any) -> Observation:
        id_, none = response.id, np.empty(0, np.int32)
        if id_ < FORKS:
            prompt = Prompt(7, (5, 5, 5), "rewritten")
            return Observation(id_ + FORKS, 1, none, prompt=prompt, reward=1.0)
        return Observation(id_, 2, none, reward=10.0 + episode_of(id_), ended_by="environment")

    async def release(self, rollout_ids: Sequence[int]) -> None:
        self.released += rollout_ids


class Unopened(Forking):
    """An environment that cannot be opened for rollout 0."""

    async def open(self, response: Any, log: Sequence[Observation] = ()) -> Observation:
        opening = await super().open(response, log)
        if response.id:
            return opening
        return replace(opening, ended_by="environment", record={"failure": "no opening"})

    async def step(self, response: Any) -> Observation:
        none = np.empty(0, np.int32)
        return Observation(response.id, 1, none, reward=1.0, ended_by="environment")


@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("score_on", ["batch", "chunk"])
@pytest.mark.parametrize("drop", [True, False])
def test_an_episode_that_cannot_be_opened_is_a_failure(
    score_on: Any, *, drop: bool, rewards: bool
) -> None:
    turns = [(0,), (3,)]
    world = World([], turns=turns)
    options: dict[str, Any] = {"environment_rewards": rewards, "drop_failures": drop}
    setting = Setting(settings(2, score_on=score_on, **options), turns=turns)

    def unopened(schedule: Schedule) -> None:
        schedule._episodes._environment = Unopened(world)  # type: ignore[union-attr]

    if not drop:
        with raises(RewardError, "responses-without-reward", "no opening"):
            take(setting, world, unopened)
        return
    (step,) = take(setting, world, unopened)
    assert ([r.id for r in step.batch], [r.id for r in step.rejected]) == ([1], [0])


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
def test_samples_of_an_episode_share_its_reward_and_count_once(score_on: Any) -> None:
    turns = [(2,), (3,)]
    world = World([], turns=turns)
    setting = Setting(
        settings(2, 2, steps=2, environment_rewards=True, score_on=score_on), turns=turns
    )

    def fork(schedule: Schedule) -> None:
        schedule._episodes._environment = Forking(world)  # type: ignore[union-attr]

    steps = take(setting, world, fork)
    for step, (one, two) in zip(steps, [(0, 1), (2, 3)], strict=True):
        assert [r.id for r in step.batch] == [one, one + FORKS, two, two + FORKS]
        rewards = [r.scores["environment"].scalar for r in step.batch]
        assert rewards == [11.0 + one, 11.0 + one, 11.0 + two, 11.0 + two]
        assert len({r.group for r in step.batch}) == 1
        assert [r.prompt.tokens for r in step.batch[1::2]] == [(5, 5, 5)] * 2
        assert len({r.prompt.id for r in step.batch}) == 1
        columns = train_batch(step.batch)
        assert columns.episodes is not None
        assert columns.episodes.tolist() == [one, one, two, two]
