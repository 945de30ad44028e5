"""Runs that are taken up again from each of their checkpoints, in virtual time. No torch."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from schedule_helpers import Setting, schedule_of
from stretto.config.knobs import Settings
from stretto.errors import RewardError
from stretto.plain import dumps, parse
from stretto.runtime.sim.loop import run
from stretto.schedules.rollout import Rollout, Step
from stretto.testing import World
from stretto.types import CONTEXT, FinishReason, Message, Observation, Prompt, Sampling


@dataclass(frozen=True)
class Checkpoint:
    """All that a run is taken up again from."""

    schedule: dict[str, Any]
    places: int
    version: int
    loaded: int


@dataclass(frozen=True)
class Outcome:
    """What came of a run: a list of (id, reward, failed) for each step, and the books."""

    steps: list[list[tuple[int, float | None, bool]]]
    ledger: dict[str, Any]


def seen(step: Step) -> list[tuple[int, float | None, bool]]:
    rollouts = sorted((*step.batch, *step.rejected), key=lambda r: r.id)
    return [(r.id, r.scores["judge"].scalar, bool(r.rejected_because)) for r in rollouts]


async def taken(
    setting: Setting, since: Checkpoint | None = None
) -> tuple[Outcome, list[Checkpoint]]:
    """A run to its end, from the start or a checkpoint, and a checkpoint after each step of it."""
    world = World(setting.lengths, setting.fails)
    schedule = schedule_of(setting, world)
    first = 0
    if since is not None:
        world.places = since.places
        world.loaded = dict.fromkeys(world.loaded, since.loaded)
        schedule._learner.version = since.version  # type: ignore[attr-defined]
        schedule.load_state_dict(deepcopy(since.schedule), world.prompt)
        assert schedule.state_dict() == since.schedule
        first = since.schedule["counts"][1]
    steps, checkpoints = [], []
    async with schedule:
        for _ in range(first, setting.settings.steps):
            steps.append(seen(await schedule.step()))
            async with schedule.weights_lock:
                state, version = deepcopy(schedule.state_dict()), schedule._learner.version  # type: ignore[attr-defined]
                checkpoints.append(Checkpoint(state, world.places, version, schedule.loaded))
    return Outcome(steps, schedule.ledger.state_dict()), checkpoints


def resumed(setting: Setting) -> int:
    """Resume a run from every checkpoint; return how many, once all came out as they should."""
    seed, shuffle = setting.order or 0, setting.order is not None
    whole, checkpoints = run(taken(setting), seed=seed, shuffle=shuffle)
    for i, checkpoint in enumerate(checkpoints[:-1], 1):
        again, _ = run(taken(setting, checkpoint), seed=seed, shuffle=shuffle)
        rows = [row for step in (*whole.steps[:i], *again.steps) for row in step]
        assert len(rows) == setting.settings.steps * setting.settings.batch
        assert len({id_ for id_, *_ in rows}) == len(rows)  # none is trained on twice
        for id_, reward, _ in rows:
            assert reward == (None if id_ in setting.fails else id_ + 0.5)
        if setting.timeless:
            assert again == replace(whole, steps=whole.steps[i:])
        elif setting.turns:  # what waits is drawn for beside delta, as long as it can be carried
            s = setting.settings
            batches = -(-s.steps // s.weight_sync_interval) * s.weight_sync_interval - s.steps
            left = len(again.ledger["in_flight"]) - batches * s.batch
            size = s.batch * s.weight_sync_interval
            beside = min(size + setting.delta, s.max_carries * size - setting.delta)
            most = setting.delta + max(0, beside)
            assert setting.delta <= left <= -(-most // s.samples_per_prompt) * s.samples_per_prompt
        else:  # another may end first
            assert again.ledger["dispatched"] == whole.ledger["dispatched"]
            assert len(again.ledger["in_flight"]) == len(whole.ledger["in_flight"])
    return len(checkpoints) - 1


# -- a round that waits for its scores, where scorers sit with the generators --------------------


@pytest.mark.parametrize("score_on", ["batch", "rollout"])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("train_s", [0.1, 9.0])
def test_a_round_that_waits_for_scores_gets_them_after_a_restart(
    score_on: Any, critic: bool, interval: int, train_s: float
) -> None:
    """Nothing is decoded at first: devices are free for the scorers all the same."""
    settings = Settings(4, 1, 100, 6, score_on=score_on, lag=1, weight_sync_interval=interval)
    setting = Setting(
        settings, engines=2, migrate=0.5, hosted=True, critic=critic, score_s=30.0, train_s=train_s
    )
    assert resumed(setting) == 5


# -- any setting, any checkpoint -----------------------------------------------------------------


def random_setting(seed: int) -> Setting:
    """A short run whose knobs, roles and times are drawn from the seed."""
    r = random.Random(seed)
    engines, group = r.choice([1, 2, 2, 3]), r.choice([1, 1, 2])
    batch, interval = group * r.choice([1, 2, 3]), r.choice([1, 1, 2, 3])
    delta, carries = r.choice([0, 0, 1, 3, 6]), r.choice([1, 2, 8])
    flaky = group * batch > 1 and r.random() < 0.4
    return Setting(
        Settings(
            batch,
            group,
            100,
            r.randint(2, 6),
            failures_allowed=float(flaky),
            group_at_least=group,
            score_on=r.choice(["batch", "rollout", "chunk"]),
            lag=r.choice([0, 1, 1, 2]),
            weight_sync_interval=interval,
            max_carries=max(carries, -(-delta // (batch * interval))),
            restarts=r.choice([0, 0, 1]),
        ),
        lengths=[r.choice([1, 3, 8, 20, 60]) for _ in range(r.randint(1, 9))],
        engines=engines,
        migrate=r.choice([0.0, 0.3, 0.6, 1.0]) if engines > 1 else 0.0,
        delta=delta,
        chunk=r.choice([1, 4, 30]),
        hosted=r.random() < 0.6,
        critic=r.random() < 0.6,
        score_s=r.choice([0.0, 0.5, 9.0, 60.0]),
        train_s=r.choice([0.0, 2.0, 9.0, 60.0]),
        fails=range(0, 99, r.choice([3, 5, 7])) if flaky else (),
        order=seed if r.random() < 0.5 else None,
    )


def resumed_from_everywhere(seeds: range) -> Counter[str]:
    """Resume a run of each seed from every checkpoint; return how many of which kinds."""
    counts = Counter[str]()
    for seed in seeds:
        setting = random_setting(seed)
        try:
            n = resumed(setting)
        except RewardError:  # nothing of a batch had a reward
            counts["without rewards"] += 1
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}: {setting}")
            raise
        s = setting.settings
        kinds = {
            "all": True,
            "hosted": setting.hosted,
            "migrating": setting.migrate > 0,
            "lagging": s.lag > 0,
            "several batches a version": s.weight_sync_interval > 1,
            "over-committed": setting.delta > 0,
            "streamed": s.score_on == "chunk",
            "groups": s.samples_per_prompt > 1,
            "flaky rewards": bool(setting.fails),
            "the same batches": setting.timeless,
        }
        counts.update({kind: n for kind, there in kinds.items() if there})
    return counts


def test_a_run_of_any_settings_goes_on_from_each_of_its_checkpoints() -> None:
    """The same books and rewards, no response twice, and none waits for ever."""
    counts = resumed_from_everywhere(range(150))
    print(dict(counts))
    assert counts["all"] >= 300
    assert min(counts.values()) >= 10, counts  # the seeds cover all kinds


@pytest.mark.slow
def test_runs_of_four_thousand_seeds_go_on_from_each_of_their_checkpoints() -> None:
    counts = resumed_from_everywhere(range(1000, 5000))
    print(dict(counts))
    assert counts["all"] >= 10_000


def test_a_learner_that_starts_on_groups_trains_on_the_same() -> None:
    """Whatever the other settings; and it goes on from each checkpoint, without its sums."""
    counts = Counter[str]()
    for seed in range(80):
        drawn = random_setting(seed)
        s = drawn.settings
        carries = max(s.max_carries, -(-drawn.delta // s.batch))
        on_batch = replace(
            s,
            score_on="rollout" if s.score_on == "batch" else s.score_on,
            lag=0,
            weight_sync_interval=1,
            max_carries=carries,
        )
        setting = replace(drawn, settings=replace(on_batch, train_on="group"))
        try:
            counts["checkpoints"] += resumed(setting)
        except RewardError:
            continue
        if setting.timeless:
            (want, _), (got, _) = (
                run(taken(each), seed=seed, shuffle=False)
                for each in (setting, replace(drawn, settings=on_batch))
            )
            assert got == want, seed
            counts["the same batches"] += 1
    assert counts["checkpoints"] >= 150
    assert counts["the same batches"] >= 30


# -- episodes -------------------------------------------------------------------------------------


def with_turns(seed: int) -> Setting:
    """A random setting of the schedule, with episodes."""
    r, setting = random.Random(-seed), random_setting(seed)
    turns = [
        tuple(r.choice([1, 2, 5, 9]) for _ in range(r.randint(1, 4)))
        for _ in range(r.randint(1, 5))
    ]
    return replace(
        setting,
        settings=replace(setting.settings, episodes=Sampling(100, max_turn_tokens=100), restarts=0),
        turns=turns,
        waits_s=[r.choice([0.0, 0.5, 3.0, 40.0]) for _ in range(r.randint(1, 4))],
    )


def test_episodes_are_taken_up_again_from_every_checkpoint() -> None:
    """Whatever the knobs: each rollout is trained on once, and without a race the same ones."""
    counts: Counter[str] = Counter()
    for seed in range(150):
        setting = with_turns(seed)
        if setting.fails:
            continue
        try:
            counts["checkpoints"] += resumed(setting)
        except BaseException as error:
            error.add_note(f"seed {seed}: {setting}")
            raise
        counts["runs"] += 1
    assert counts["runs"] > 50
    assert counts["checkpoints"] > 100


def test_what_an_environment_opened_with_is_in_the_log_that_it_is_resumed_with() -> None:
    asked, begun = Prompt(3, (1, 2), "go"), Prompt(3, (1, 2, 5), "go on")
    rollout = Rollout(0, asked, 0, asked=asked)
    rollout.prompt = replace(begun, messages=(Message(role="user", content="go on"),))
    rollout.observe(Observation(0, 0, np.empty(0, np.int32), prompt=rollout.prompt))
    (opening,) = Rollout.from_state(rollout.state_dict(), asked).log
    assert opening.prompt == rollout.prompt


def test_a_rollout_of_an_episode_goes_on_from_its_state() -> None:
    turn, answer = {"role": "assistant", "content": "2"}, {"role": "user", "content": "?"}
    observation = {
        "rollout_id": 4, "number": 0, "tokens": [], "reward": None, "ended_by": "", "messages": [],
        "left": [], "max_turn_tokens": 0, "stop": ("\n",), "record": {"seconds": 0.5},
    }  # fmt: skip
    answered = {"number": 1, "tokens": [8], "reward": 0.5, "messages": [turn, answer]}
    score = {"rollout_id": 4, "source": "judge", "kind": "reward", "failure": None, "extra": {}}
    state = {
        "id": 4, "prompt": 2, "prompt_mark": "67abdd721024f0ff", "group": 3, "tokens": [5, 6, 8],
        "logprobs": [-0.5, -1.0, 0.0], "versions": [1, 1, CONTEXT], "finish": "stop",
        "state": "finished", "carries": 1, "scores": [{**score, "values": [0.25]}],
    }  # fmt: skip
    episode = {
        "context": [(2, 3)], "opened": ((1, 7), "go on", None), "turns": [2],
        "turn_rewards": [0.5], "ended_by": "environment", "left": [turn],
        "log": [observation, {**observation, **answered}],
    }  # fmt: skip
    rollout = Rollout.from_state({**state, **episode}, Prompt(2, (1,), "go"))
    expected = {**state, **episode, "rejected_because": ""}
    assert parse(dumps(rollout.state_dict())) == parse(dumps(expected))
    assert (rollout.finish, rollout.left) == (FinishReason.STOP, (turn,))
    assert rollout.log[0].prompt == rollout.prompt == Prompt(2, (1, 7), "go on")
