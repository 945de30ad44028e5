"""The schedule with scripted roles in virtual time: calls, their order, and the books. No torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from itertools import combinations, permutations
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import raises
from stretto.config.knobs import Settings
from stretto.errors import LifecycleError, RewardError, StalledError
from stretto.runtime.sim.loop import run
from stretto.schedules.buffer import Buffer
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.evaluation import Evaluation
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.rollout import Ledger, Rollout, RolloutState, Step
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.testing import FakeGenerator, FakeLearner, FakeScorer, World
from stretto.types import FinishReason, Prompt, Score, WeightsRef

T = TypeVar("T")
STOP = FinishReason.STOP


def make(
    world: World,
    *,
    batch: int = 4,
    samples: int = 1,
    steps: int = 1,
    delta: int = 0,
    chunk: int = 4,
    generators: Sequence[FakeGenerator] = (),
    replicas: Sequence[ScorerReplica] = (),
    seconds: float = 2.0,
    migration: Any = None,
    **settings: Any,
) -> Schedule:
    return Schedule(
        world.next_prompt,
        generators or [FakeGenerator(world)],
        replicas
        or [
            ScorerReplica(FakeScorer(world, "judge")),
            ScorerReplica(FakeScorer(world, "critic", "values", follows="critic")),
        ],
        FakeLearner(world, seconds),
        Controls(
            Settings(batch, samples, 100, steps, **settings),
            FixedChunk(chunk),
            FixedOvercommit(delta),
            migration,
        ),
        world.clock,
        world,
    )


def take(
    world: World, steps: int = 1, seed: int | None = None, **options: Any
) -> tuple[list[Step], Ledger]:
    """So many steps in virtual time, and the ledger after them."""

    async def main() -> tuple[list[Step], Ledger]:
        schedule = make(world, steps=steps, **options)
        async with schedule:
            taken = [await schedule.step() for _ in range(steps)]
        return taken, schedule.ledger

    return run(main(), seed=seed or 0, shuffle=seed is not None)


def assert_balanced(ledger: Ledger) -> None:
    ended = ledger.trained + ledger.rejected.total()
    assert ledger.dispatched == ledger.in_flight + ended


def ids(step: Step) -> list[int]:
    return [r.id for r in step.batch]


# -- evaluations ---------------------------------------------------------------------------------


def evaluate(
    world: World, steps: int, every: int = 2, seed: int | None = None, **options: Any
) -> tuple[list[Step], list[tuple[int, float, list[Any]]]]:
    """Steps with evaluations on two prompts; of each its step, seconds, and answers' facts."""
    found: list[tuple[int, float, list[Any]]] = []

    async def main() -> list[Step]:
        async def take(step: int, answers: Sequence[Rollout], seconds: float) -> None:
            world.write(f"evaluated {step}")
            facts = [(r.id, len(r), set(r.versions), {*r.scores}) for r in answers]
            found.append((step, seconds, facts))

        schedule = make(world, steps=steps, **options)
        if every:
            schedule.evaluation = Evaluation(every, [world.prompt(70), world.prompt(71)], take)
        async with schedule:
            await schedule.evaluated()
            return [await schedule.step() for _ in range(steps)]

    return run(main(), seed=seed or 0, shuffle=seed is not None), found


def test_an_evaluation_comes_between_two_steps() -> None:
    """Answers of 4 and 2 tokens: 4 s of decoding, then 0.5 + 0.6 s of the judge, who alone is
    asked. Before the first step, after the second, and after the last one, which is the third."""
    world = World([3, 5, 2, 4])
    steps, found = evaluate(world, 3)
    answers = [[(-1, 4, {v}, {"judge"}), (-2, 2, {v}, {"judge"})] for v in (0, 2, 3)]
    assert found == [(s, pytest.approx(5.1), a) for s, a in zip((0, 2, 3), answers, strict=True)]
    plain = World([3, 5, 2, 4])
    without, none = evaluate(plain, 3, every=0)
    assert none == []
    assert [[line.split(" ", 1)[1] for line in w.log] for w in (world, plain)] == [
        [
            *("gen admit [-1, -2]", "judge finish [-1, -2]", "evaluated 0"),
            *_logged(plain, 0, 11),
            *("gen load 2", "gen admit [-1, -2]", "judge finish [-1, -2]", "evaluated 2"),
            *_logged(plain, 12, 17),
            *("gen load 3", "gen admit [-1, -2]", "judge finish [-1, -2]", "evaluated 3"),
        ],
        _logged(plain, 0, 17),
    ]
    assert [ids(s) for s in steps] == [ids(s) for s in without]
    assert [s.rewards for s in steps] == [s.rewards for s in without]
    assert float(world.log[-1].split()[0]) == pytest.approx(3 * (5.1 + 8.9))


def _logged(world: World, first: int, last: int) -> list[str]:
    return [line.split(" ", 1)[1] for line in world.log[first:last]]


def test_the_learner_trains_while_a_policy_is_evaluated_that_lags() -> None:
    """With a lag, no step waits but the first and the last one: figures come later."""
    world = World([3, 5, 2, 4])
    _, found = evaluate(world, 6, seconds=20.0, lag=1)
    assert [step for step, *_ in found] == [0, 2, 6]
    times = {line.split(" ", 1)[1]: float(line.split()[0]) for line in world.log}
    assert times["train [8, 9, 10, 11]"] < times["evaluated 2"] < times["publish 3"]
    assert all(versions == {step} for step, _, facts in found for _, _, versions, _ in facts)


@given(
    every=st.integers(1, 4),
    delta=st.integers(0, 5),
    lag=st.integers(0, 2),
    interval=st.integers(1, 2),
    score_on=st.sampled_from(["batch", "rollout", "chunk"]),
    engines=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_evaluations_under_every_knob(
    every: int, delta: int, lag: int, interval: int, score_on: str, engines: int, seed: int
) -> None:
    """Each is of one version, is scored by the judge alone and is in no batch; all steps are taken.
    Without knobs that let time decide, the batches are what they are without evaluations."""
    options = {"lag": lag, "weight_sync_interval": interval, "score_on": score_on, "delta": delta}

    def take(n: int) -> tuple[list[Step], list[tuple[int, float, list[Any]]]]:
        world = World([3, 17, 2, 9, 5, 1, 30])
        generators = [FakeGenerator(world, f"gen{i}") for i in range(engines)]
        return evaluate(world, 6, n, seed, generators=generators, **options)

    taken, found = take(every)
    assert len(taken) == 6
    assert [step for step, *_ in found][:: len(found) - 1] == [0, 6]
    steps = [step for step, *_ in found]
    assert steps == sorted(set(steps))
    for _, _, facts in found:
        assert [(id_, size, scorers) for id_, size, _, scorers in facts] == [
            (-1, 30, {"judge"}), (-2, 1, {"judge"}),
        ]  # fmt: skip
        assert len(set.union(*(versions for _, _, versions, _ in facts))) == 1
    assert all(r.id >= 0 for step in taken for r in step.batch)
    if not (delta or lag):
        plain, _ = take(0)
        assert [s.rewards for s in taken] == [s.rewards for s in plain]
        assert [[r.tokens for r in s.batch] for s in taken] == [
            [r.tokens for r in s.batch] for s in plain
        ]


# -- all knobs at zero ---------------------------------------------------------------------------


def test_plain_steps_run_one_stage_after_the_other() -> None:
    """5 s of decoding, 0.5 + 1.4 s for each scorer (side by side), 2 s of training."""
    world = World([3, 5, 2, 4])
    steps, ledger = take(world, 2)
    assert world.log == [
        "0 gen admit [0, 1, 2, 3]",
        "6.9 judge finish [0, 1, 2, 3]",
        "6.9 critic finish [0, 1, 2, 3]",
        "6.9 train [0, 1, 2, 3]",
        "8.9 publish 1",
        "8.9 gen load 1",
        "8.9 gen admit [4, 5, 6, 7]",
        "15.8 judge finish [4, 5, 6, 7]",
        "15.8 critic finish [4, 5, 6, 7]",
        "15.8 train [4, 5, 6, 7]",
        "17.8 publish 2",
    ]
    first = steps[0].batch
    assert [r.tokens.tolist() for r in first] == [
        [0, 1, 2], [100, 101, 102, 103, 104], [200, 201], [300, 301, 302, 303]
    ]  # fmt: skip
    assert [r.scores["judge"].scalar for r in first] == [0.5, 1.5, 2.5, 3.5]
    assert [{v for r in s.batch for v in r.versions} for s in steps] == [{0}, {1}]
    assert [{float(r.scores["critic"].values[0]) for r in s.batch} for s in steps] == [{0.0}, {1.0}]
    assert steps[0].stats == {
        "objective/scores": 1.25,
        "timing_s/step": pytest.approx(8.9),
        "perf/throughput": pytest.approx((14 + 10) / 8.9),
        "perf/samples_per_s": pytest.approx(4 / 8.9),
        "rejected": 0.0,
        "schedule/overcommit": 0.0,
        "schedule/chunk_tokens": 100.0,
        "schedule/carried": 0.0,
    }
    assert (ledger.dispatched, ledger.trained, ledger.in_flight) == (8, 8, 0)


def test_idle_roles_say_what_they_wait_for() -> None:
    """Responses end at 1, 2, 3, 4 and 9 s; with five in a batch the last is the straggler."""
    world = World([1, 2, 3, 4, 9])
    take(
        world,
        batch=5,
        chunk=1,
        score_on="rollout",
        replicas=[ScorerReplica(FakeScorer(world, "judge"))],
    )
    waits = [(role, cause, a, b) for role, cause, a, b in world.spans if role == "learner"]
    assert waits == [
        ("learner", "data", 0.0, 4.0),
        ("learner", "stragglers", 4.0, 9.0),
        ("learner", "scores", 9.0, pytest.approx(10.4)),
    ]
    judge = [(cause, a, b) for role, cause, a, b in world.spans if role == "judge"]
    assert judge[0] == ("data", 0.0, 1.0)
    assert judge[-1] == ("stragglers", pytest.approx(4.9), 9.0)


# -- scoring while decoding ----------------------------------------------------------------------


def test_scores_on_each_rollout_as_it_ends() -> None:
    world = World([2, 5, 9, 9])
    replicas = [ScorerReplica(FakeScorer(world, "judge"))]
    take(world, score_on="rollout", chunk=1, replicas=replicas)
    assert world.log[1:4] == [
        "2.7 judge finish [0]",  # 0.5 + 0.1 for each of 2 tokens
        "6 judge finish [1]",
        "11.3 judge finish [2, 3]",
    ]


def test_streaming_leaves_only_the_last_chunk_to_score() -> None:
    """The scorer takes what has arrived: not in lock-step with the chunks."""
    world = World([8, 8, 8, 8])
    replicas = [ScorerReplica(FakeScorer(world, "judge"))]
    take(world, score_on="chunk", chunk=2, replicas=replicas)
    # 4 x 2 tokens every 2 s take 1.3 s each; after the last 1.3 s and then 0.5 s for the score.
    assert world.log[1:3] == ["9.8 judge finish [0, 1, 2, 3]", "9.8 train [0, 1, 2, 3]"]


def test_a_scorer_works_when_it_is_worth_it_or_someone_waits() -> None:
    """10 prompt tokens and 4 a second: 22 have come at 3 s, and 20 more at 8 s."""
    world = World([8, 8, 8, 8])
    replicas = [ScorerReplica(FakeScorer(world, "judge", worthwhile_tokens=20))]
    take(world, score_on="chunk", chunk=1, replicas=replicas)
    work = [(a, b) for role, _, a, b in world.spans if role == "judge"]
    assert work == [(0.0, 3.0), (3.0, 8.0)]
    # 20 tokens in 2.5 s; then the scores in 0.5 s and 1.2 s for the 12 tokens known at admission.
    assert world.log[1] == "12.2 judge finish [0, 1, 2, 3]"


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("delta", [0, 3])
def test_when_scorers_look_changes_nothing_of_what_is_trained(
    score_on: str, chunk: int, delta: int
) -> None:
    lengths = [3, 17, 2, 9, 5, 1, 30]
    plain, _ = take(World(lengths), 5, delta=delta)
    other, _ = take(World(lengths), 5, delta=delta, score_on=score_on, chunk=chunk)
    assert [[r.state_dict() for r in s.batch] for s in plain] == [
        [r.state_dict() for r in s.batch] for s in other
    ]


# -- over-commitment -----------------------------------------------------------------------------


def test_the_first_to_end_make_the_batch_and_the_rest_is_carried() -> None:
    world = World([3, 20, 2, 4, 6, 1])
    steps, ledger = take(world, 3, delta=2)
    # 0..5 in flight; 5, 2, 0, 3 end first, at 4 s. Then 6 (3), 7 (20), 8 (2), 9 (4) join 1 and 4.
    assert [ids(s) for s in steps] == [[0, 2, 3, 5], [4, 6, 8, 9], [1, 10, 11, 12]]
    four = next(r for r in steps[1].batch if r.id == 4)
    assert four.tokens.tolist() == [400, 401, 402, 403, 404, 405]
    assert four.versions.tolist() == [0, 0, 0, 0, 1, 1]
    assert four.carries == 1
    assert (ledger.dispatched, ledger.trained, ledger.in_flight) == (14, 12, 2)
    assert steps[0].stats["schedule/carried"] == 2


def test_a_rollout_is_not_carried_too_often() -> None:
    world = World([1, 50, 1, 1, 1, 1])
    steps, _ = take(world, 3, batch=2, delta=1, max_carries=2)
    assert [ids(s) for s in steps] == [[0, 2], [3, 4], [1, 5]]
    assert steps[2].batch[0].carries == 2


@pytest.mark.parametrize(("batch", "delta", "limit"), [(8, 64, 8), (8, 24, 3), (2, 4, 2)])
def test_the_limit_on_carries_holds_where_delta_exceeds_the_batch(
    batch: int, delta: int, limit: int
) -> None:
    """All begin together, and more long ones than a batch holds are due at one time."""
    lengths = [int(20 * np.exp(1.4 * z)) + 1 for z in np.random.default_rng(0).normal(size=997)]
    steps, _ = take(World(lengths), 40, batch=batch, delta=delta, max_carries=limit, chunk=16)
    assert max(r.carries for s in steps for r in s.batch) == limit
    assert all(len(s.batch) == batch for s in steps)


def test_groups_stay_together() -> None:
    """Two rollouts a prompt: 0 and 1, 2 and 3, ...; a group has ended when both have."""
    world = World([1, 30, 2, 3, 4, 1, 2, 2])
    steps, _ = take(world, 2, batch=4, samples=2, delta=2)
    assert [ids(s) for s in steps] == [[2, 3, 4, 5], [0, 1, 6, 7]]
    assert {r.group for s in steps for r in s.batch} == {0, 2, 4, 6}


def test_the_data_order_is_the_same_whatever_the_knobs() -> None:
    """Rollout i answers the same prompt, whichever batch it ends up in."""
    for options in ({}, {"delta": 3}, {"lag": 1}, {"delta": 2, "lag": 2, "score_on": "chunk"}):
        steps, _ = take(World([3, 9, 2, 14, 5]), 4, **options)
        assert all(r.prompt.id == r.id for s in steps for r in s.batch)


# -- lag -----------------------------------------------------------------------------------------


def test_generation_runs_one_version_behind_training() -> None:
    """Decoding takes 4 s and scoring 2.1 s (0.5 + 0.1 x 16), training 7 s, side by side."""
    world = World([4])
    steps, _ = take(
        world, 4, lag=1, seconds=7.0, score_on="rollout", chunk=100,
        replicas=[ScorerReplica(FakeScorer(world, "judge"))],
    )  # fmt: skip
    assert [{v for r in s.batch for v in r.versions} for s in steps] == [{0}, {0}, {1}, {2}]
    assert [line for line in world.log if "train" in line or "load" in line] == [
        "6.1 train [0, 1, 2, 3]",
        "13.1 train [4, 5, 6, 7]",
        "13.1 gen load 1",
        "20.1 train [8, 9, 10, 11]",
        "20.1 gen load 2",
        "27.1 train [12, 13, 14, 15]",
    ]


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
@pytest.mark.parametrize("seconds", [1.0, 10.0])
def test_no_token_is_older_than_the_lag(lag: int, seconds: float) -> None:
    steps, _ = take(World([4, 2, 3, 1]), 8, lag=lag, seconds=seconds)
    for i, step in enumerate(steps):
        assert all(i - lag <= v <= i for r in step.batch for v in r.versions)
    if seconds == 10.0:  # a slow learner: the generator is held back, as far as it may go
        assert {max(4 - lag, 0)} == {v for r in steps[4].batch for v in r.versions}


def test_several_batches_on_one_version() -> None:
    """The dial N of asynchronous RLHF: 3 batches generated together, 3 steps, one weight sync."""
    world = World([4, 2, 3, 1])
    steps, _ = take(world, 6, batch=2, weight_sync_interval=3)
    assert [ids(s) for s in steps] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert [{v for r in s.batch for v in r.versions} for s in steps] == [{0}] * 3 + [{1}] * 3
    assert [line.split()[1] for line in world.log if "publish" in line] == ["publish"] * 2
    assert world.log[0] == "0 gen admit [0, 1, 2, 3, 4, 5]"


# -- several generators --------------------------------------------------------------------------


def test_rollouts_are_spread_by_load() -> None:
    world = World([1, 9, 1, 9])
    generators = [FakeGenerator(world, "a"), FakeGenerator(world, "b")]
    take(world, 2, batch=4, delta=2, generators=generators)
    # 1 and 3 stay on b; 4 and 5 went to a and b; the next four even the loads out.
    assert world.log[:2] == ["0 a admit [0, 2, 4]", "0 b admit [1, 3, 5]"]


@pytest.mark.parametrize("score_on", ["batch", "rollout"])
def test_several_generators_stop_when_together_they_have_enough(score_on: str) -> None:
    """Two of four generators have long responses, which are carried: neither decodes them whole."""
    world = World([3, 50, 3, 50])
    generators = [FakeGenerator(world, name) for name in "abcd"]
    steps, _ = take(world, batch=2, delta=2, chunk=4, generators=generators, score_on=score_on)
    assert ids(steps[0]) == [0, 2]
    assert float(next(line for line in world.log if "train" in line).split()[0]) < 6


@pytest.mark.parametrize("host", [None, 0])
def test_all_values_of_a_batch_are_of_one_version(host: int | None) -> None:
    """Also with lag, where several replicas of the critic share its work."""
    world = World([4, 2, 3, 1])
    generators = [FakeGenerator(world, "a"), FakeGenerator(world, "b")]
    replicas = [
        ScorerReplica(
            FakeScorer(world, "critic", "values", follows="critic"), i if host == 0 else None
        )
        for i in range(2)
    ]
    steps, _ = take(world, 6, lag=1, generators=generators, replicas=replicas, score_on="rollout")
    versions = [{float(r.scores["critic"].values[0]) for r in s.batch} for s in steps]
    assert versions == [{0.0}, {0.0}, {1.0}, {2.0}, {3.0}, {4.0}]


# -- the buffer ----------------------------------------------------------------------------------


def rollout(id_: int, group: int | None = None) -> Rollout:
    return Rollout(id_, Prompt(0, (1,), ""), id_ if group is None else group)


def in_time(carries: Sequence[int], groups: int, most: int) -> bool:
    """Whether groups carried so often can all be taken, so many a round, the oldest first."""
    left = sorted(carries, reverse=True)
    while left:
        if left[0] > most:
            return False
        left = [n + 1 for n in left[groups:]]
    return True


def fewest(buffer: Buffer) -> int:
    """Rollouts that have to end before the round is complete: the best of all orders of groups."""
    groups = {r.group: [] for r in buffer.open}
    for r in buffer.open:
        groups[r.group].append(r.id)
    best = len(buffer.open)
    for order in permutations(groups):
        trial, ended = deepcopy(buffer), 0
        for r in (r for group in order for r in trial.open if r.group == group):
            if trial.complete:
                break
            r.finish, ended = STOP, ended + 1
            trial.ended(r)
        best = min(best, ended)
    return best


@given(st.data())
@settings(deadline=None)
def test_the_buffer_takes_the_first_to_end_and_carries_none_too_often(data: st.DataObject) -> None:
    """Against brute force: what is missing, and that only those are passed over that must be."""
    n = data.draw(st.integers(1, 2))
    groups, most = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size = groups + data.draw(st.integers(0, min(most * groups, 5 - groups)))
    buffer, next_id = Buffer(most), 0
    for _ in range(data.draw(st.integers(1, 6))):
        while len(buffer) < size * n:
            buffer.add([rollout(next_id + k, next_id) for k in range(n)])
            next_id += n
        buffer.begin_round(groups)
        assert buffer.complete or buffer.missing() == fewest(buffer)
        while not buffer.complete:
            missing = buffer.missing()
            for k in range(missing):
                assert not buffer.complete, f"complete after {k} of {missing}"
                r = data.draw(st.sampled_from(buffer.open))
                r.finish, chosen = STOP, {r.group for r in buffer.chosen}
                taken = buffer.ended(r)
                if taken or buffer.complete or any(x.group == r.group for x in buffer.open):
                    continue
                others = {x.group: x.carries for x in buffer if x.group not in chosen}
                carries = others.pop(r.group)
                assert not any(
                    in_time([c + 1 for g, c in others.items() if g not in rest], groups, most)
                    for rest in combinations(others, groups - len(chosen) - 1)
                ), f"rollout {r.id}, carried {carries} times, was passed over"
        batch, carried = buffer.take()
        assert len(batch) == groups * n
        assert [r.id for r in batch] == sorted(r.id for r in batch)
        assert all(r.finish is None for r in carried)
        assert max((r.carries for r in (*buffer, *batch)), default=0) <= most


def test_more_groups_than_can_be_taken_in_time_are_refused() -> None:
    buffer = Buffer(max_carries=1)
    for i in range(5):
        buffer.add([rollout(i)])
    with raises(LifecycleError, "carried-too-often", "5 groups", 2):
        buffer.begin_round(2)


# -- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delta": 3},
        {"delta": 3, "score_on": "chunk", "samples": 2},
        {"lag": 1},
        {"lag": 2, "delta": 2, "score_on": "chunk"},
        {"lag": 1, "weight_sync_interval": 2, "score_on": "rollout"},
    ],
)
@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_a_run_taken_up_again_goes_on_as_if_nothing_had_happened(
    options: dict[str, Any], seconds: float
) -> None:
    lengths = [3, 17, 2, 9, 5, 1, 30]
    whole, _ = take(World(lengths), 7, seconds=seconds, **options)

    async def interrupted() -> tuple[list[Step], Ledger]:
        world = World(lengths)
        first = make(world, steps=7, seconds=seconds, **options)
        async with first:
            taken = [await first.step() for _ in range(3)]
            state = deepcopy(first.state_dict())  # its arrays grow until the last call ends
            places, loaded = world.places, dict(world.loaded)
        again = World(lengths)
        again.places = places
        second = make(again, steps=7, seconds=seconds, **options)
        again.loaded = loaded
        second._learner.version = first._learner.version  # type: ignore[attr-defined]
        second.load_state_dict(state, again.prompt)
        assert second.state_dict() == state
        async with second:
            taken += [await second.step() for _ in range(4)]
        return taken, second.ledger

    taken, ledger = run(interrupted())
    assert [[r.state_dict() for r in s.batch] for s in whole] == [
        [r.state_dict() for r in s.batch] for s in taken
    ]
    assert ledger.trained == 28
    assert_balanced(ledger)


# -- bad days ------------------------------------------------------------------------------------


def failing(work: Callable[[Schedule], Awaitable[T]], world: World, **options: Any) -> Ledger:
    """Run something that raises; the ledger afterwards, which must be closed."""
    ledgers: list[Ledger] = []

    async def main() -> None:
        schedule = make(world, **options)
        ledgers.append(schedule.ledger)
        async with schedule:
            await work(schedule)

    try:
        run(main())
    finally:
        assert_balanced(ledgers[0])
        assert ledgers[0].in_flight == 0
    return ledgers[0]


def test_a_failed_judge_stops_the_run_before_training() -> None:
    world = World([3, 5, 2, 4], fails=[1, 2])
    facts = "2 of 4", "no verdict on 1", "reward.on_failure = 'drop'"
    with raises(RewardError, "responses-without-reward", *facts) as caught:
        failing(Schedule.step, world)
    assert caught.value.rollout_ids == (1, 2)
    assert not [line for line in world.log if "train" in line]


def test_failures_can_be_dropped_and_are_reported() -> None:
    world = World([3, 5, 2, 4], fails=[1, 2])
    (step,), ledger = take(world, failures_allowed=1.0)
    assert ids(step) == [0, 3]
    assert [r.id for r in step.rejected] == [1, 2]
    assert {r.rejected_because for r in step.rejected} == {"reward function failed"}
    assert step.rejected[0].scores["judge"].failure == "no verdict on 1"
    assert step.stats["rejected"] == 2
    assert ledger.rejected == {"reward function failed": 2}
    assert_balanced(ledger)


def test_a_batch_without_any_verdict_stops_even_so() -> None:
    world = World([3], fails=range(4))
    with raises(RewardError, "responses-without-reward", "4 of 4"):
        failing(Schedule.step, world, failures_allowed=1.0)


def test_a_group_left_with_too_few_is_left_out_as_a_whole() -> None:
    """Pairs 0 and 1, 2 and 3, ...: what 1's judge failed on leaves 0 with nothing to compare."""
    world = World([3, 5, 2, 4], fails=[1])
    steps, ledger = take(world, 2, samples=2, failures_allowed=1.0, group_at_least=2)
    assert [ids(s) for s in steps] == [[2, 3], [4, 5, 6, 7]]
    assert {r.id: r.rejected_because for r in steps[0].rejected} == {
        0: "group too small",
        1: "reward function failed",
    }
    assert steps[0].rejected[0].scores["judge"].scalar == 0.5
    assert [s.stats["rejected"] for s in steps] == [2, 2]
    assert ledger.rejected == {"reward function failed": 1, "group too small": 1}
    assert (ledger.dispatched, ledger.trained, ledger.in_flight) == (8, 6, 0)
    assert_balanced(ledger)


def test_a_group_with_enough_left_goes_on() -> None:
    """Of four responses to each prompt two failed for the first, and three for the second."""
    world = World([3, 5, 2, 4], fails=[0, 3, 4, 5, 7])
    (step,), ledger = take(
        world, batch=8, samples=4, failures_allowed=1.0, group_at_least=2
    )  # fmt: skip
    assert ids(step) == [1, 2]
    assert ledger.rejected == {"reward function failed": 5, "group too small": 1}
    assert_balanced(ledger)
    (alone,), ledger = take(World([3], fails=[1]), samples=2, failures_allowed=1.0)
    assert ids(alone) == [0, 2, 3]  # an algorithm that compares nothing
    assert ledger.rejected == {"reward function failed": 1}


def test_a_step_that_loses_every_group_stops() -> None:
    world = World([3], fails=[1, 2])
    with raises(RewardError, "responses-without-reward", "2 of 4", "the 2 left") as caught:
        failing(Schedule.step, world, samples=2, failures_allowed=1.0, group_at_least=2)
    assert caught.value.rollout_ids == (1, 2)
    assert "on_failure" not in str(caught.value)
    with raises(RewardError, "responses-without-reward", "1 of 4"):
        failing(Schedule.step, World([3], fails=[1]), samples=2, group_at_least=2)


@pytest.mark.parametrize(
    "options",
    [
        {"delta": 3, "score_on": "chunk"},
        {"lag": 1, "delta": 4, "score_on": "rollout"},
        {"weight_sync_interval": 2, "lag": 1},
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_books_balance_whatever_is_left_out(options: dict[str, Any], seed: int) -> None:
    """Dispatched = in flight + trained + rejected, and no group of fewer than two is trained on."""
    world = World([3, 17, 2, 9, 5, 1, 30], fails=[0, 3, 4, 5, 11, 12, 18, 25, 26, 29, 33, 40])
    steps, ledger = take(
        world, 8, seed, batch=6, samples=3, failures_allowed=1.0, group_at_least=2, **options
    )
    assert_balanced(ledger)
    trained = [r for s in steps for r in s.batch]
    rejected = [r for s in steps for r in s.rejected]
    assert (ledger.trained, ledger.rejected.total()) == (len(trained), len(rejected))
    assert len(trained) + len(rejected) == 48
    for s in steps:
        by_prompt: dict[int, list[int]] = {}
        for r in s.batch:
            by_prompt.setdefault(r.prompt.id, []).append(r.id)
        assert all(len(group) >= 2 for group in by_prompt.values())
    failed = {r.id for r in rejected if r.rejected_because == "reward function failed"}
    assert failed == world.fails & {r.id for r in (*trained, *rejected)}
    for r in rejected:
        if r.rejected_because == "group too small":
            assert sum(x.group == r.group for x in rejected) == 3
    assert ledger.rejected["group too small"] > 0


def test_a_generator_that_gives_nothing_is_an_error_that_names_who_waits() -> None:
    world = World([3])
    generator = FakeGenerator(world)
    generator.idle = True
    with raises(LifecycleError, "idle-generator", "generator", [0, 1, 2, 3]):
        failing(Schedule.step, world, generators=[generator])


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
def test_a_scorer_that_never_answers_is_named_with_what_it_holds_up(score_on: str) -> None:
    world = World([3, 5])
    scorer = FakeScorer(world, "judge")
    scorer.hangs = True
    with raises(StalledError, "no-answer-in-time", "judge", "60 s") as caught:
        failing(
            Schedule.step,
            world,
            replicas=[ScorerReplica(scorer)],
            score_on=score_on,
            deadline_s=60.0,
        )
    assert set(caught.value.rollout_ids) <= {0, 1, 2, 3}
    assert caught.value.rollout_ids


def test_a_role_that_raises_ends_the_run_with_its_error() -> None:
    class Broken(FakeGenerator):
        async def load(self, weights: WeightsRef) -> None:
            raise ValueError("no room")

    async def two(schedule: Schedule) -> None:
        await schedule.step()
        await schedule.step()

    world = World([3])
    with pytest.raises(ValueError, match="no room"):
        failing(two, world, steps=2, generators=[Broken(world)])


def test_a_scorer_must_answer_for_each_rollout() -> None:
    class Forgetful(FakeScorer):
        async def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
            return (await super().finish(rollout_ids))[1:]

    world = World([3])
    with raises(LifecycleError, "scores-not-as-asked", "judge", [0, 1, 2, 3], [1, 2, 3]):
        failing(Schedule.step, world, replicas=[ScorerReplica(Forgetful(world, "judge"))])


def test_a_timeout_of_a_role_s_own_is_not_taken_for_the_deadline() -> None:
    class Slow(FakeScorer):
        async def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
            raise TimeoutError("the service timed out")

    world = World([3])
    with pytest.raises(TimeoutError, match="the service timed out") as caught:
        failing(Schedule.step, world, replicas=[ScorerReplica(Slow(world, "judge"))])
    assert caught.value.__notes__ == ["raised by judge, which worked on 4 rollout(s): 0, 1, 2, 3"]


def test_a_cancelled_run_closes_its_books() -> None:
    async def cancelled(schedule: Schedule) -> None:
        async with asyncio.timeout(2.0):
            await schedule.step()

    with pytest.raises(TimeoutError):
        failing(cancelled, World([3]))


# -- the ledger ----------------------------------------------------------------------------------


def test_ledger_counts() -> None:
    ledger = Ledger()
    rollouts = [rollout(i) for i in range(5)]
    ledger.dispatch(rollouts)
    assert (ledger.dispatched, ledger.in_flight) == (5, 5)
    for r, because in zip(rollouts[1:4], "aba", strict=True):
        ledger.move(r, RolloutState.REJECTED, because)
    for state in (RolloutState.DECODING, RolloutState.FINISHED, RolloutState.SCORED):
        ledger.move(rollouts[0], state)
    ledger.move(rollouts[0], RolloutState.TRAINED)
    assert (ledger.trained, ledger.in_flight, ledger.rejected) == (1, 1, {"a": 2, "b": 1})
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    again.move(rollouts[4], RolloutState.REJECTED, "a")
    assert (again.dispatched, again.in_flight, again.rejected) == (5, 0, {"a": 3, "b": 1})


def test_ledger_refuses_what_does_not_add_up() -> None:
    ledger, r = Ledger(), rollout(0)
    with raises(LifecycleError, "not-as-booked", "not in flight"):
        ledger.move(r, RolloutState.DECODING)
    ledger.dispatch([r])
    with raises(LifecycleError, "dispatched-twice", 0):
        ledger.dispatch([r])
    r.move(RolloutState.DECODING)
    with raises(LifecycleError, "not-as-booked", "decoding", "queued"):
        ledger.move(r, RolloutState.FINISHED)
    lost = {"dispatched": 3, "trained": 0, "rejected": {"a": 1}, "in_flight": {0: "queued"}}
    with raises(LifecycleError, "books-unbalanced", "3 dispatched", "1 in flight + 0 trained + 1"):
        Ledger().load_state_dict(lost)


# -- the life of a rollout -----------------------------------------------------------------------

EDGES = {
    "queued": "decoding waiting rejected",
    "decoding": "carried waiting finished rejected",
    "waiting": "decoding finished rejected",
    "carried": "decoding rejected",
    "finished": "scored rejected",
    "scored": "trained rejected",
    "trained": "",
    "rejected": "",
}


@pytest.mark.parametrize("start", RolloutState)
@pytest.mark.parametrize("end", RolloutState)
def test_a_rollout_moves_along_its_edges_only(start: RolloutState, end: RolloutState) -> None:
    rollout = Rollout(1, Prompt(0, (1,), ""), 1, state=start)
    if end in EDGES[start].split():
        rollout.move(end, "why")
        assert (rollout.state, rollout.rejected_because) == (end, "why")
    else:
        with raises(LifecycleError, "no-such-edge", start, end):
            rollout.move(end)
        assert rollout.state is start


def test_schedules_need_no_torch() -> None:
    code = "import sys, stretto.schedules.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
