"""What becomes of keys and values over a wait: expected waits and decisions, by hand."""

from __future__ import annotations

import pytest

from raising import raises
from stretto.config.knobs import Settings
from stretto.errors import ConfigError
from stretto.runtime.sim.loop import run
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.hold import (
    WINDOW,
    AutoHold,
    FixedHold,
    HoldLimits,
    Parked,
    Waiting,
)
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.rollout import Rollout
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.testing import (
    FakeEnvironment,
    FakeGenerator,
    FakeLearner,
    FakeScorer,
    World,
    make_chunk,
)
from stretto.types import Prompt, Sampling

# 100 tokens a second are read; of 1,000 keys and values are copied, so there and back 500.
LIMITS = HoldLimits(cache_tokens=1000, prefill_tokens_per_s=100.0, copy_tokens_per_s=1000.0)


def test_what_is_left_of_a_wait() -> None:
    model = AutoHold(LIMITS)
    assert model.remaining_s("search", 3.0) == 3.0  # nothing is known: as long again
    for seconds in (1.0, 2.0, 3.0, 10.0):
        model.waited("search", seconds)
    assert model.remaining_s("search", 0.0) == 4.0
    assert model.remaining_s("search", 2.0) == pytest.approx((3 + 10) / 2 - 2)
    assert model.remaining_s("search", 9.0) == pytest.approx(1.0)
    assert model.remaining_s("search", 12.0) == 12.0
    model.waited("python", 30.0)
    assert model.remaining_s("search", 0.0) == 4.0
    assert model.remaining_s("unknown", 0.0) == pytest.approx((1 + 2 + 3 + 10 + 30) / 5)


def test_waits_of_long_ago_are_forgotten() -> None:
    model = AutoHold(LIMITS)
    model.waited("", 1000.0)
    for _ in range(WINDOW):
        model.waited("", 2.0)
    assert model.remaining_s("", 0.0) == 2.0


def test_the_cheaper_way_to_let_go() -> None:
    assert LIMITS.let_go(100) == ("offload", 0.2)  # 100 / 1000 there and back; remade in 1 s
    assert HoldLimits(0, 100.0, 150.0).let_go(100) == ("remake", 1.0)  # 1.33 s to copy
    assert HoldLimits(0, 100.0).let_go(50) == ("remake", 0.5)
    with raises(ConfigError, "not-positive"):
        HoldLimits(0, 0.0)


def test_nothing_goes_while_all_has_room() -> None:
    hold = AutoHold(LIMITS)
    waiting = [Waiting(i, 200, 0.0) for i in range(3)]
    assert hold.decide(waiting, 400, 60.0) == {}
    endless = AutoHold(HoldLimits(0, 100.0))
    assert endless.decide(waiting, 10**9, 60.0) == {}
    apart = AutoHold(HoldLimits(600, 100.0, apart=True))  # rows that decode have room of their own
    assert apart.decide(waiting, 10**9, 60.0) == {}
    assert len(apart.decide([*waiting, Waiting(3, 1, 0.0)], 0, 60.0)) == 1


def test_the_longest_expected_waits_go_first_until_the_rest_has_room() -> None:
    hold = AutoHold(LIMITS)
    for kind, seconds in (("quick", 1.0), ("slow", 20.0), ("slow", 40.0)):
        hold.waited(kind, seconds)
    waiting = [
        Waiting(1, 300, since_s=5.0, kind="quick"),  # 0.5 s left: less than 0.6 s to copy
        Waiting(2, 300, since_s=0.0, kind="slow"),  # 30 - 5.5 s left
        Waiting(3, 300, since_s=5.0, kind="slow"),  # 30 - 0.5 s left
    ]
    assert hold.decide(waiting, 200, 5.5) == {3: "offload"}  # 1,100 of 1,000
    assert hold.decide(waiting, 401, 5.5) == {3: "offload", 2: "offload"}  # 1,301
    assert hold.decide(waiting, 1000, 5.5) == {3: "offload", 2: "offload"}  # never the quick one


def test_a_policy_goes_on_from_its_state() -> None:
    hold, other = AutoHold(LIMITS), AutoHold(LIMITS)
    hold.waited("slow", 20.0)
    hold.waited("quick", 0.1)
    other.load_state_dict(hold.state_dict())
    hold.waited("quick", 99.0)  # a state is a copy
    waiting = [Waiting(1, 600, 0.0, "quick"), Waiting(2, 600, 0.0, "slow")]
    assert other.decide(waiting, 0, 0.0) == {2: "offload"}


def test_what_is_known_of_rollouts_that_wait() -> None:
    def waits(id_: int, tokens: int, environment: str) -> Rollout:
        rollout = Rollout(id_, Prompt(id_, (0,) * 10, "", data={"environment": environment}), id_)
        rollout.append(make_chunk(id_, 0, (0,) * tokens, (-1.0,) * tokens))
        return rollout

    policy = AutoHold(LIMITS)
    parked = Parked(policy)
    parked.begin(waits(1, 490, "quick"), 0.0)
    parked.begin(waits(2, 490, "slow"), 0.0)
    for id_, environment, seconds in ((3, "slow", 60.0), (4, "quick", 2.0)):
        parked.begin(waits(id_, 5, environment), 0.0)
        parked.end(id_, seconds)
    parked.end(5, 9.0)  # an opening: nothing has waited in an engine
    assert parked.decide([1, 2], 0, 1.0) == {}  # 1,000 tokens have room
    assert parked.decide([2, 1], 1, 1.0) == {"offload": [2]}
    assert parked.decide([2, 1], 501, 1.0) == {}  # 2 is let go; 1 is back before a copy
    parked.void()
    assert parked.decide([1, 2], 10**6, 30.0) == {}
    parked.end(1, None)  # it goes on no more: nothing is learnt of it
    assert policy.state_dict() == {"seconds": {"slow": [60.0], "quick": [2.0]}}


def test_a_fixed_way() -> None:
    waiting = [Waiting(1, 100, 0.0), Waiting(2, 100, 0.0)]
    assert FixedHold().decide(waiting, 10**9, 1.0) == {}
    assert FixedHold("remake").decide(waiting, 0, 1.0) == {1: "remake", 2: "remake"}
    assert FixedHold("remake").state_dict() == {}


def test_a_pool_lets_go_as_the_policy_says() -> None:
    """Turns of 3 and 2 tokens, and of 4 and 2, behind prompts of 1 and 2; room for 5 tokens."""
    world = World([], turns=[[3, 2], [4, 2]])
    generator, hold = FakeGenerator(world), AutoHold(HoldLimits(5, 100.0, 1000.0, apart=True))

    async def step() -> None:
        settings = Settings(
            batch=2,
            samples_per_prompt=1,
            max_new_tokens=100,
            steps=1,
            score_on="rollout",
            episodes=Sampling(100, max_turn_tokens=100),
        )
        controls = Controls(settings, FixedChunk(8), FixedOvercommit(0), hold=hold)
        replicas = [ScorerReplica(FakeScorer(world, "judge"))]
        learner, clock = FakeLearner(world), world.clock
        environment = FakeEnvironment(world, [3.0, 5.0])
        async with Schedule(
            world.next_prompt, [generator], replicas, learner, controls, clock, world,
            environment=environment,
        ) as schedule:  # fmt: skip
            await schedule.step()

    run(step())
    # Of first waits nothing is known. The second ones are of 1 + 7 and 2 + 8 tokens.
    assert [line for line in world.log if " hold " in line] == [
        "10 gen hold [0] offload",
        "12 gen hold [1] offload",
    ]
    assert hold.state_dict() == {"seconds": {"": [3.0, 5.0]}}
