"""Groups with equal scores leave the batch, and others take their places. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stretto.config.knobs import Settings
from stretto.observe.spans import Spans
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import DecodeCost, GeneratorCost, SampleCost, TrainCost
from stretto.runtime.sim.lengths import Lengths, Lognormal
from stretto.runtime.sim.loop import VirtualClock, run
from stretto.runtime.sim.sim_roles import PendingRollout
from stretto.runtime.sim.simulate import make_roles, make_schedule
from stretto.schedules.buffer import Buffer
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.rollout import Ledger, Rollout, Step, scores_are_equal
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.testing import FakeEnvironment, FakeGenerator, FakeLearner, FakeScorer, World
from stretto.types import FinishReason, Prompt, Sampling, Score

EQUAL = "equal scores"


class MarkingScorer(FakeScorer):
    """A judge whose scores are given by rollout id."""

    def __init__(self, world: World, marks: Callable[[int], float]) -> None:
        super().__init__(world, "judge")
        self.marks = marks

    def _score(self, rollout_id: int, entry: PendingRollout) -> Score:
        score = super()._score(rollout_id, entry)
        if score.failure:
            return score
        return replace(score, values=np.array([self.marks(rollout_id)], np.float32))


def marks_of(equal: Sequence[int]) -> Callable[[int], float]:
    """Scores of groups of two: the responses of an ``equal`` group all have the same."""
    return lambda id_: 1.0 if id_ // 2 in equal else float(id_ % 2)


def make(
    world: World,
    marks: Callable[[int], float],
    *,
    delta: int = 0,
    engines: int = 1,
    batch: int = 4,
    steps: int = 1,
    most_skipped: int = 100,
    environment: FakeEnvironment | None = None,
    **settings: Any,
) -> Schedule:
    names = [f"gen {i}" for i in range(engines)]
    return Schedule(
        world.next_prompt,
        [FakeGenerator(world, name) for name in names],
        [ScorerReplica(MarkingScorer(world, marks))],
        FakeLearner(world),
        Controls(
            Settings(batch, 2, 100, steps, most_skipped=most_skipped, **settings),
            FixedChunk(4),
            FixedOvercommit(delta),
        ),
        world.clock,
        world,
        environment=environment,
    )


def take(
    world: World, marks: Callable[[int], float], seed: int | None = None, **options: Any
) -> tuple[list[Step], Ledger]:
    async def main() -> tuple[list[Step], Ledger]:
        schedule = make(world, marks, **options)
        async with schedule:
            taken = [await schedule.step() for _ in range(options.get("steps", 1))]
        return taken, schedule.ledger

    return run(main(), seed=seed or 0, shuffle=seed is not None)


def ids(rollouts: Sequence[Rollout]) -> list[int]:
    return [r.id for r in rollouts]


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
def test_another_group_takes_the_place_of_one_with_equal_scores(score_on: Any) -> None:
    """Group 1 of the first two is equal, and so is group 2 after it."""
    (step,), ledger = take(World([4, 2, 3]), marks_of([1, 2]), score_on=score_on)
    assert ids(step.batch) == [0, 1, 6, 7]
    assert ids(step.skipped) == [2, 3, 4, 5]
    assert ledger.rejected == {EQUAL: 4}
    assert step.stats["schedule/skipped"] == 4
    assert step.stats["rejected"] == 0
    assert (ledger.dispatched, ledger.trained, ledger.in_flight) == (8, 4, 0)


def test_the_plain_loop_scores_first_and_then_decodes_the_missing_group() -> None:
    """4 s of decoding, 0.5 + 1 s of the judge (4 + 2 + 2 + 2 tokens), and the same for group 2 of
    3 tokens each: 3 s and 0.5 + 0.6 s."""
    world = World([4, 2, 2, 2, 3, 3])
    take(world, marks_of([1]))
    assert [line for line in world.log if "finish" in line or "train" in line] == [
        "5.5 judge finish [0, 1, 2, 3]",
        "9.6 judge finish [4, 5]",
        "9.6 train [0, 1, 4, 5]",
    ]


def test_a_group_decoded_beyond_the_batch_takes_the_place_without_delay() -> None:
    """Groups 0 and 2 end at 2 s. Group 0 is equal, and group 1 needs 20 s, so group 2 is trained on
    together with group 3, which is drawn for group 0 and ends before group 1."""
    world = World([2, 2, 20, 20, 2, 2, 2, 2])
    (step,), ledger = take(world, marks_of([0]), delta=2, score_on="rollout")
    assert ids(step.batch) == [4, 5, 6, 7]
    assert ids(step.skipped) == [0, 1]
    assert ledger.in_flight == 2


def test_no_more_is_skipped_than_allowed() -> None:
    (step,), _ = take(World([2]), marks_of(range(99)), most_skipped=5)
    assert ids(step.skipped) == [0, 1, 2, 3]  # a further group would be 6
    assert ids(step.batch) == [4, 5, 6, 7]


@pytest.mark.parametrize("delta", [0, 2])
def test_episodes_that_replace_others_open_while_others_go_on(delta: int) -> None:
    """Group 1 of two ends first and is equal. The episodes of group 2 open at once: they end long
    before group 0, whose turn takes 90 s."""
    turns = [[30, 30], [30, 30], [1, 1], [1, 1], [2, 2], [2, 2], [90], [90]]
    world = World([], turns=turns)
    environment = FakeEnvironment(world, [3.0])
    episodes: dict[str, Any] = {"episodes": Sampling(500, max_turn_tokens=400)}
    (step,), _ = take(
        world, marks_of([1]), environment=environment, delta=delta, score_on="rollout", **episodes
    )
    assert ids(step.batch) == [0, 1, 4, 5]
    opened_s = [float(line.split()[0]) for line in world.log if "env open 4" in line]
    ended_s = max(float(line.split()[0]) for line in world.log if "env step 0" in line)
    assert len(opened_s) == 1
    assert opened_s[0] < ended_s


def test_the_limit_is_of_each_round() -> None:
    steps, _ = take(World([2]), marks_of(range(99)), steps=3, most_skipped=2)
    assert [len(step.skipped) for step in steps] == [2, 2, 2]
    assert [step.stats["schedule/skipped"] for step in steps] == [2, 2, 2]


def test_a_group_with_a_failure_is_not_equal() -> None:
    world = World([2], fails=[3])
    (step,), ledger = take(
        world, marks_of([1]), batch=6, failures_allowed=1.0, group_at_least=2, score_on="rollout"
    )
    assert ids(step.batch) == [0, 1, 4, 5]
    assert ids(step.rejected) == [2, 3]
    assert EQUAL not in ledger.rejected


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order_of_events_each_response_is_trained_on_or_equal(seed: int) -> None:
    """Whichever response ends first: what is drawn is trained on, skipped or in flight, and no
    trained group is equal."""
    draw = random.Random(seed)
    lengths = [draw.choice([1, 3, 9, 30]) for _ in range(draw.randint(1, 9))]
    equal = {g for g in range(400) if draw.random() < 0.5}
    options: dict[str, Any] = {
        "delta": draw.choice([0, 2, 6]),
        "engines": draw.choice([1, 2, 3]),
        "batch": draw.choice([2, 4, 6]),
        "steps": 6,
        "score_on": draw.choice(["batch", "rollout", "chunk"]),
        "lag": draw.choice([0, 1]),
        "weight_sync_interval": draw.choice([1, 2]),
        "max_carries": 8,
    }
    world = World(lengths)
    steps, ledger = take(world, marks_of(sorted(equal)), seed, **options)
    trained = [id_ for step in steps for id_ in ids(step.batch)]
    skipped = [id_ for step in steps for id_ in ids(step.skipped)]
    assert all(len(step.batch) == options["batch"] for step in steps)
    assert not {id_ // 2 for id_ in trained} & equal
    assert {id_ // 2 for id_ in skipped} <= equal
    assert len({*trained, *skipped}) == len(trained) + len(skipped)
    assert ledger.dispatched == ledger.in_flight + ledger.trained + ledger.rejected.total()
    assert ledger.dispatched == 2 * world.places


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
@pytest.mark.parametrize("delta", [0, 4])
def test_a_run_goes_on_from_each_of_its_checkpoints(score_on: Any, delta: int) -> None:
    equal = [1, 2, 5, 6, 9, 12]
    options: dict[str, Any] = {"delta": delta, "steps": 5, "lag": 1, "score_on": score_on}
    lengths = [3, 9, 2, 30, 5]

    async def taken(state: Any = None, places: int = 0, version: int = 0) -> tuple[Any, Any]:
        world = World(lengths)
        schedule = make(world, marks_of(equal), **options)
        if state:
            world.places = places
            world.loaded = dict.fromkeys(world.loaded, schedule.loaded)
            schedule._learner.version = version  # type: ignore[attr-defined]
            schedule.load_state_dict(deepcopy(state), world.prompt)
            assert schedule.state_dict() == state
        steps, states = [], []
        async with schedule:
            for _ in range(state["counts"][1] if state else 0, 5):
                step = await schedule.step()
                steps.append((ids(step.batch), ids(step.skipped)))
                async with schedule.weights_lock:
                    now = deepcopy(schedule.state_dict())
                    states.append((now, world.places, schedule._learner.version))  # type: ignore[attr-defined]
        return steps, states

    whole, states = run(taken())
    for i, (state, places, version) in enumerate(states[:-1], 1):
        rest, _ = run(taken(state, places, version))
        trained = [id_ for step, _ in (*whole[:i], *rest) for id_ in step]
        skipped = [id_ for _, skipped in (*whole[:i], *rest) for id_ in skipped]
        assert len({*trained, *skipped}) == len(trained) + len(skipped)
        assert len(trained) == 20
        assert not {id_ // 2 for id_ in trained} & {*equal}
        assert {id_ // 2 for id_ in skipped} <= {*equal}


def test_lengths_trained_on_are_those_drawn() -> None:
    """Over-commitment trains on the first to end, and skipping makes it draw more. Nothing is
    biased towards short responses: of the groups drawn early, those with different scores are all
    trained on, the long ones too."""
    draw = random.Random(0)
    solved = [draw.choice([0.0, 0.3, 1.0]) for _ in range(2000)]  # share of right answers, by group
    rewards = tuple(float(draw.random() < solved[i // 4]) for i in range(8000))
    lengths = Lengths(Lognormal(median=100, p95=900), seed=0)
    w = Workload(
        batch=16,
        samples_per_prompt=4,
        steps=60,
        max_new_tokens=2000,
        response_tokens=Lognormal(median=100, p95=900),
        most_skipped=160,
        rewards=rewards,
    )
    cluster = Cluster(
        generators=(GeneratorRole(cost=GeneratorCost(decode=DecodeCost(step_s=0.01))),),
        scorers=(ScorerRole(name="rule", cost=SampleCost(sample_s=0.001)),),
        learner=LearnerRole(devices=(1,), cost=TrainCost(step_s=1.0)),
        workload=w,
        schedule={"preset": "oppo", "overcommit": 16, "chunk_tokens": 32},  # type: ignore[arg-type]
    )

    async def trained_on() -> set[int]:
        spans = Spans(VirtualClock())
        schedule = make_schedule(cluster, make_roles(cluster, spans), spans)
        async with schedule:
            return {id_ for _ in range(w.steps) for id_ in ids((await schedule.step()).batch)}

    trained = run(trained_on())
    early = [g for g in range(0, 400, 4) if g < 4 * (len(trained) // 4) - 16 * 9]
    differ = [g for g in early if len({rewards[g + k] for k in range(4)}) > 1]
    assert 0.2 * len(early) < len(differ) < 0.8 * len(early)
    assert trained >= {g + k for g in differ for k in range(4)}
    assert not trained & {g + k for g in {*early} - {*differ} for k in range(4)}
    assert max(lengths(g + k) for g in differ for k in range(4)) > 900


# -- which groups are equal ------------------------------------------------------------------------


def scored(id_: int, *, judge: float, rule: float = 0.0, turns: Sequence[float] = ()) -> Rollout:
    rollout = Rollout(id_, Prompt(0, (1,), "p"), 0, finish=FinishReason.STOP)
    rollout.turn_rewards = list(turns)
    for source, value in (("judge", judge), ("rule", rule)):
        values = np.array([value], np.float32)
        rollout.scores[source] = Score(id_, source, "reward", values)
    return rollout


def test_equal_in_sum_is_equal_unless_sources_are_normalized_apart() -> None:
    group = [scored(0, judge=1, rule=0), scored(1, judge=0, rule=1)]
    assert scores_are_equal(group, None, apart=False)
    assert not scores_are_equal(group, None, apart=True)
    assert not scores_are_equal(group, {"judge": 2.0, "rule": 1.0}, apart=False)


def test_a_group_to_which_no_source_applies_is_refused_and_not_skipped() -> None:
    group = [scored(0, judge=1), scored(1, judge=1)]
    for rollout in group:
        for score in rollout.scores.values():
            score.values.resize(0, refcheck=False)
    assert not scores_are_equal(group, None, apart=False)


def test_rewards_of_turns_are_compared_too() -> None:
    """Their sum is the score, but an algorithm may credit each turn with its own."""
    group = [scored(0, judge=1, turns=[1, 0]), scored(1, judge=1, turns=[0.5, 0.5])]
    assert not scores_are_equal(group, None, apart=False)
    group = [scored(0, judge=1, turns=[0, 1]), scored(1, judge=1, turns=[0, 0, 1])]
    assert scores_are_equal(group, None, apart=False)


def test_a_buffer_lets_a_group_go_and_chooses_the_next() -> None:
    buffer = Buffer(max_carries=1)
    groups = [[Rollout(g, Prompt(g, (1,), "p"), g)] for g in range(4)]
    for group in groups:
        buffer.add(group)
    assert buffer.begin_round(2) == []
    assert [ids(buffer.ended(groups[g][0])) for g in (0, 1, 2)] == [[0], [1], []]
    assert ids(buffer.remove(1)) == [2]
    assert buffer.complete
    assert ids(buffer.chosen) == [0, 2]
    assert (len(buffer), ids(buffer.of_group(3))) == (3, [])
