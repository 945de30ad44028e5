"""Episodes with scripted roles in virtual time: turns, waits, rewards, losses, restarts. No torch.

A token takes a second, an opening one, an answer three, and has two tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raising import raises
from schedule_helpers import Setting, schedule_of
from stretto.config.knobs import Settings
from stretto.errors import EpisodeLostError, RewardError
from stretto.runtime.sim.loop import run
from stretto.schedules.evaluation import Evaluation
from stretto.schedules.rollout import Rollout, Step, train_batch
from stretto.schedules.schedule import Schedule
from stretto.testing import World
from stretto.types import (
    CONTEXT,
    FORKS,
    Chunk,
    FinishReason,
    Message,
    Observation,
    Prompt,
    Sampling,
    episode_of,
)

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
    setting = Setting(settings(2, environment_rewards=("environment",)), turns=turns)
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
        schedule._episodes.environment.lost.add(0)  # type: ignore[union-attr,attr-defined]

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

        schedule._episodes.environment.lost = Always()  # type: ignore[union-attr,attr-defined]

    with raises(EpisodeLostError, "", "of 0 is lost"):
        take(Setting(settings(1), turns=turns), world, lose)
    assert sum("env open" in line for line in world.log) == 3


class Forking:
    """An environment whose first answer to a rollout is a fork of it, and whose last one ends both.

    Its prompt has three tokens.
    """

    def __init__(self, world: World, seconds: float = 0.0, lost: Sequence[int] = ()) -> None:
        self.world, self.seconds, self.lost = world, seconds, set(lost)
        self.released: list[int] = []

    async def open(self, response: Any, log: Sequence[Observation] = ()) -> Observation:
        await asyncio.sleep(0.1 * (response.id % 3))
        return Observation(response.id, 0, np.empty(0, np.int32))

    async def step(self, response: Any) -> Observation:
        id_, none = response.id, np.empty(0, np.int32)
        await asyncio.sleep(self.seconds)
        if id_ in self.lost:
            self.lost.discard(id_)
            raise EpisodeLostError("lost", [id_])
        if id_ < FORKS:
            prompt = Prompt(7, (5, 5, 5), "rewritten")
            return Observation(id_ + FORKS, 1, none, prompt=prompt, reward=1.0)
        return Observation(id_, 2, none, reward=10.0 + episode_of(id_), ended_by="environment")

    async def release(self, rollout_ids: Sequence[int]) -> None:
        self.released += rollout_ids


def with_environment(environment: Any) -> Callable[[Schedule], None]:
    def put(schedule: Schedule) -> None:
        schedule._episodes.environment = environment  # type: ignore[union-attr]

    return put


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
    given = ("environment",) if rewards else ()
    options: dict[str, Any] = {"environment_rewards": given, "failures_allowed": float(drop)}
    setting = Setting(settings(2, score_on=score_on, **options), turns=turns)

    unopened = with_environment(Unopened(world))
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
        settings(2, 2, steps=2, environment_rewards=("environment",), score_on=score_on),
        turns=turns,
    )

    forking = Forking(world)
    steps = take(setting, world, with_environment(forking))
    assert sorted(forking.released) == sorted(r.id for s in steps for r in s.batch)
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


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
def test_a_fork_that_comes_late_is_decoded_by_one_of_several_generators(score_on: Any) -> None:
    """The other one has nothing left to decode by then, and waits."""
    turns = [(2,), (30,)]
    world = World([], turns=turns)
    setting = Setting(settings(2, score_on=score_on), turns=turns, engines=2, critic=False)
    [step] = take(setting, world, with_environment(Forking(world, 1.0)))
    assert [r.id for r in step.batch] == [0, FORKS, 1, 1 + FORKS]


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
def test_a_forked_episode_that_is_lost_is_begun_anew(score_on: Any) -> None:
    """Its fork comes again by the same id, also at scorers that stream."""
    turns = [(2,)]
    world = World([], turns=turns)
    setting = Setting(
        settings(1, score_on=score_on, environment_rewards=("environment",)), turns=turns
    )
    [step] = take(setting, world, with_environment(Forking(world, 1.0, lost=[FORKS])))
    assert [(r.id, r.scores["environment"].scalar) for r in step.batch] == [(0, 11), (FORKS, 11)]


def test_generators_are_told_of_ended_episodes_before_the_learner_trains() -> None:
    """What they keep of these is room that the learner may need."""
    turns = [(2, 1), (4,)]
    world = World([], turns=turns)
    kept = []

    def watch(schedule: Schedule) -> None:
        [engine] = schedule._pool._engines
        train = schedule._learner.train

        async def trained(batch: Any) -> Any:
            kept.append(dict(engine.generator.parked))  # type: ignore[attr-defined]
            return await train(batch)

        schedule._learner.train = trained  # type: ignore[method-assign]

    take(Setting(settings(2, steps=3), turns=turns), world, watch)
    assert kept == [{}, {}, {}]


@pytest.mark.parametrize(("max_carries", "drawn"), [(8, 8), (1, 6)])
def test_over_commitment_counts_slots_and_not_what_waits(max_carries: int, drawn: int) -> None:
    """Of four episodes two wait for 100 s; two others are drawn for them, if there is time left."""
    turns = [(2,), (2, 3), (2,), (2, 3), (2,), (2,)]
    world = World([], turns=turns)
    own = settings(2, steps=2, max_carries=max_carries)
    waits = (1.0, 100.0, 1.0, 100.0, 1.0, 1.0)
    first, second = take(Setting(own, turns=turns, waits_s=waits, delta=2), world)
    assert [r.id for r in first.batch] == [0, 2]
    opened = {line.split()[3] for line in world.log if " env open " in line}
    assert len(opened) == drawn
    assert second.stats["schedule/overcommit"] == 2


@pytest.mark.parametrize("lost", [False, True])
def test_stragglers_that_wait_are_gathered_before_their_answers_come(lost: bool) -> None:
    """Rollout 1 waits from 4 to 24 s, and moves once the two short ones have ended."""
    turns = [(40,), (2, 3), (2,), (4,)]
    world = World([], turns=turns)
    setting = Setting(
        settings(4), turns=turns, waits_s=(1.0, 20.0, 1.0, 1.0), engines=2, migrate=0.5, chunk=2
    )

    def lose(schedule: Schedule) -> None:
        if lost:
            environment = schedule._episodes.environment  # type: ignore[union-attr]
            environment.lost.add(1)  # type: ignore[attr-defined]

    [step] = take(setting, world, lose)
    assert [len(r.turns) for r in step.batch] == [1, 2, 1, 1]
    log = [line.split(" ", 1)[1] for line in world.log]
    places = [log.index(f"gen{at}") for at in ("1 export [1] True", "0 accept [1]")]
    answer = log.index("env step 1 turn 1")
    assert places == sorted(places)
    assert places[1] < answer < log.index("gen0 admit [1]", places[1])
    assert not any(engine.startswith("gen1 admit [1]") for engine in log[answer:])


def _asked(world: World, name: str) -> list[str]:
    """What a role was asked for, without times."""
    return [line.split(" ", 1)[1] for line in world.log if f" {name} " in line]


def test_where_rollouts_go_does_not_depend_on_how_long_openings_take() -> None:
    """With several generators: in lockstep, which rollouts are decoded together is always alike."""
    turns = [(2, 1, 3), (4,), (1, 1), (3, 5)]
    logs = []
    for wait in (lambda id_: 1.0, lambda id_: 3.0 - id_ % 3, lambda id_: float(id_ % 4)):
        world = World([], turns=turns)

        def slow(schedule: Schedule, wait: Callable[[int], float] = wait) -> None:
            environment = schedule._episodes.environment  # type: ignore[union-attr]
            begin = environment.open

            async def opened(response: Any, log: Sequence[Observation] = ()) -> Observation:
                await asyncio.sleep(wait(response.id))
                return await begin(response, log)

            environment.open = opened  # type: ignore[method-assign]

        take(Setting(settings(4, steps=2), turns=turns, engines=2), world, slow)
        logs.append(
            {i: [x.split(" ", 1)[1] for x in world.log if f" gen{i} " in x] for i in (0, 1)}
        )
    assert logs[0] == logs[1] == logs[2]


class Ending:
    """An environment whose episodes are over before the policy says anything."""

    async def open(self, response: Any, log: Sequence[Observation] = ()) -> Observation:
        none = np.empty(0, np.int32)
        return Observation(response.id, 0, none, reward=1.0, ended_by="environment")

    async def release(self, rollout_ids: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
def test_an_episode_may_be_over_at_its_opening(score_on: Any) -> None:
    turns = [(2,)]
    world = World([], turns=turns)
    world.length = lambda rollout_id: 0  # type: ignore[method-assign]
    setting = Setting(settings(2, score_on=score_on), turns=turns, critic=False)
    [step] = take(setting, world, with_environment(Ending()))
    assert [(len(r), r.finish) for r in step.batch] == [(0, FinishReason.STOP)] * 2


def test_nothing_is_kept_of_rollouts_that_no_scorer_is_asked_about() -> None:
    turns = [(2,)]
    world = World([], turns=turns)
    found = []

    def none(schedule: Schedule) -> None:
        scoring = schedule._scoring
        scoring.queues = []
        scoring._groups, scoring._streaming, scoring._frozen, scoring._following = [], [], [], []
        found.append(scoring)

    setting = Setting(settings(2, steps=3, environment_rewards=("environment",)), turns=turns)
    take(setting, world, none)
    assert found[0]._rollouts == {}


def test_evaluations_play_episodes_again_and_again() -> None:
    """Their rollouts have the same ids each time, and nothing of the time before."""
    turns = [(2, 1), (4,)]
    world = World([], turns=turns)
    seen: list[tuple[int, list[tuple[int, list[int]]]]] = []

    async def note(step: int, answers: Sequence[Rollout], seconds: float) -> None:
        seen.append((step, [(r.id, r.turns) for r in answers]))

    def evaluate(schedule: Schedule) -> None:
        schedule.evaluation = Evaluation(1, [world.prompt(70), world.prompt(71)], note)

    take(Setting(settings(2, steps=3), turns=turns), world, evaluate)
    assert seen == [(step, [(-1, [4]), (-2, [2, 5])]) for step in (0, 1, 2, 3)]


class Judging(Forking):
    """One that brings scores of reward functions with the end."""

    verdicts: Mapping[str, Any] = {"looks": {"value": 4.0, "extra": {"why": "so"}}}

    async def step(self, response: Any) -> Observation:
        seen = await super().step(response)
        scores = {**self.verdicts, "shy": {"value": None}}
        return replace(seen, record={"scores": scores} if seen.ended_by else {})


def judged(verdicts: Mapping[str, Any], **options: Any) -> list[Step]:
    world, turns = World([], turns=[(2,)]), [(2,)]

    def judge(schedule: Schedule) -> None:
        environment = schedule._episodes.environment = Judging(world)  # type: ignore[union-attr]
        environment.verdicts = verdicts

    sources = ("looks", "shy", "environment")
    return take(
        Setting(settings(1, environment_rewards=sources, **options), turns=turns), world, judge
    )


def test_scores_that_an_episode_brings_are_those_of_their_sources() -> None:
    [step] = judged(Judging.verdicts)
    for rollout in step.batch:
        found = {name: rollout.scores[name] for name in ("looks", "shy", "environment")}
        assert [score.scalar for score in found.values()] == [4.0, None, 11.0]
        assert found["looks"].extra == {"why": "so"}


def test_a_failure_among_them_ends_the_run() -> None:
    with raises(RewardError, "responses-without-reward", "no such drawer"):
        judged({"looks": {"error": "no such drawer"}})


def test_an_episode_whose_samples_take_turns_is_told_in_order() -> None:
    """An agent (a), its sub-agent (b), and the agent again: three turns, each once."""

    def says(role: str, content: str) -> Message:
        return Message(role=role, content=content)

    a, b = (Rollout(i, Prompt(0, (9,), "q"), 0, sampling=EPISODES) for i in (0, FORKS))
    a.samples = b.samples = [a, b]
    one, two, three = (says("assistant", text) for text in ("one", "two", "three"))
    none, result = np.empty(0, np.int32), says("user", "two, it said")

    def turn(rollout: Rollout, *tokens: int) -> None:
        start, n = len(rollout), len(tokens)
        drawn, zeros = np.array(tokens, np.int32), np.zeros(n, np.float32)
        rollout.append(Chunk(rollout.id, start, drawn, zeros, 0, FinishReason.TURN))

    a.observe(Observation(0, 0, none))
    turn(a, 1, 2)
    a.left = (one,)
    b.observe(Observation(FORKS, 1, none, prompt=Prompt(0, (8,), "sub"), left=(one,)))
    turn(b, 3)
    b.left = (two,)
    context = np.array([7, 7], np.int32)
    a.append(a.observe(Observation(0, 2, context, messages=(result,), left=(two,))))
    turn(a, 4)
    a.log.append(Observation(0, 3, none, messages=(three,), ended_by="environment"))
    assert [r.ends_episode for r in (a, b)] == [True, False]
    for rollout in (a, b):
        whole = rollout.episode()
        assert [m["content"] for m in whole.messages or ()] == [
            "one",
            "two",
            "two, it said",
            "three",
        ]
        assert whole.tokens.tolist() == [1, 2, 3, 7, 7, 4]
        assert whole.sampled is not None
        assert whole.sampled.tolist() == [True, True, True, False, False, True]
        assert (whole.prompt.text, dict(whole.joints)) == ("q", {2: "\n"})


@pytest.mark.parametrize(
    ("why", "cut_by", "finish"),
    [
        ("environment", (), FinishReason.STOP),
        ("turns", (), FinishReason.STOP),
        ("seconds", (), FinishReason.STOP),
        ("tokens", (), FinishReason.LENGTH),
        ("turn_tokens", (), FinishReason.LENGTH),
        ("turns", ("turns",), FinishReason.LENGTH),
        ("seconds", ("turns",), FinishReason.STOP),
    ],
)
def test_limits_of_turns_and_seconds_cut_no_turn(
    why: str, cut_by: tuple[str, ...], finish: FinishReason
) -> None:
    class Limited(Forking):
        async def step(self, response: Any) -> Observation:
            none = np.empty(0, np.int32)
            return Observation(response.id, 1, none, reward=1.0, ended_by=why)

    turns = [(2,)]
    world = World([], turns=turns)
    options: dict[str, Any] = {"environment_rewards": ("environment",), "cut_by": cut_by}
    setting = Setting(settings(1, **options), turns=turns)
    [step] = take(setting, world, with_environment(Limited(world)))
    assert [(r.finish, r.ended_by) for r in step.batch] == [(finish, why)]
    assert train_batch(step.batch).ended.tolist() == [finish is FinishReason.STOP]
