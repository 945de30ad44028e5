"""The plain schedule with scripted roles: who is called when, and the books. No torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from stretto.clock import ManualClock
from stretto.errors import JudgeError, LifecycleError
from stretto.runtime.inline.roles import drive
from stretto.schedules.ledger import Ledger
from stretto.schedules.sync import Settings, SyncSchedule
from stretto.types import (
    Batch,
    Chunk,
    FinishReason,
    Prompt,
    Rollout,
    RolloutState,
    Score,
    Weights,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class World:
    """All roles of a run, scripted: each takes a set time and writes down that it was called."""

    def __init__(self, *, lengths: Sequence[int] = (3, 5, 2, 4), fails: Sequence[int] = ()) -> None:
        self.log: list[str] = []
        self.clock = ManualClock()
        self.lengths, self.fails = lengths, set(fails)
        self.version, self.loaded = 0, 0
        self.rollouts: dict[int, Rollout] = {}
        self.done: dict[int, int] = {}
        self.batches: list[list[int]] = []
        self.places = 0
        self.idle = False

    def next_prompt(self) -> Prompt:
        place, self.places = self.places, self.places + 1
        return Prompt(place, tuple(range(place + 1)), f"p{place}")

    @contextmanager
    def span(self, role: str, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        yield attributes
        self.log.append(f"span {name}" + (f" {attributes['tokens']}" if attributes else ""))


class FakeGenerator:
    """Gives each rollout two tokens a call, until it has as many as the script says."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        w = self.world
        w.log.append(f"admit {[r.id for r in rollouts]}")
        w.rollouts |= {r.id: r for r in rollouts}
        w.done |= {r.id: 0 for r in rollouts}

    async def decode(self, max_tokens: int) -> list[Chunk]:
        w = self.world
        w.clock.advance(1.0)
        w.log.append(f"decode {max_tokens}")
        chunks = []
        for id_, start in [] if w.idle else list(w.done.items()):
            length = w.lengths[id_ % len(w.lengths)]
            n = min(2, length - start)
            finish = (STOP if id_ % 2 else LENGTH) if start + n == length else None
            tokens = tuple(range(start, start + n))
            chunks.append(Chunk(id_, start, tokens, (-0.5,) * n, w.loaded, finish))
            if finish:
                del w.done[id_]
            else:
                w.done[id_] = start + n
        return chunks

    async def release(self, rollout_ids: Sequence[int]) -> None:
        self.world.log.append(f"release {list(rollout_ids)}")

    async def load(self, weights: Weights) -> None:
        self.world.log.append(f"load {weights.version}")
        self.world.loaded = weights.version


class FakeScorer:
    kind: Any = "reward"

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        assert all(r.state is RolloutState.FINISHED for r in rollouts)
        self.world.log.append(f"{self.name} admit")

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        raise AssertionError("nothing is streamed")

    async def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
        w = self.world
        w.clock.advance(0.5)
        w.log.append(f"{self.name} finish {list(rollout_ids)}")
        scores = []
        for id_ in rollout_ids:
            bad = self.name == "judge" and id_ in w.fails
            values = np.full(0 if bad else 1, id_ + 0.5, np.float32)
            failure = f"no verdict on {id_}" if bad else None
            scores.append(Score(id_, self.name, "reward", values, failure))
        return scores

    async def release(self, rollout_ids: Sequence[int]) -> None:
        raise AssertionError("nothing is left to release")


class FakeLearner:
    def __init__(self, world: World) -> None:
        self.world = world

    async def train(self, batch: Batch) -> dict[str, float]:
        w = self.world
        assert all(r.state is RolloutState.SCORED for r in batch)
        w.clock.advance(2.0)
        w.log.append(f"train {[r.id for r in batch]}")
        w.batches.append([r.id for r in batch])
        return {"objective/scores": 1.25}

    async def publish(self) -> Weights:
        self.world.version += 1
        self.world.log.append(f"publish {self.world.version}")
        return Weights(self.world.version, "x")


def schedule(world: World, *, batch: int = 4, samples: int = 1, drop: bool = False) -> SyncSchedule:
    return SyncSchedule(
        world.next_prompt,
        FakeGenerator(world),
        [FakeScorer(world, "judge"), FakeScorer(world, "critic")],
        FakeLearner(world),
        Settings(batch, samples, 5, drop),
        world.clock,
        world,
    )


def assert_balanced(ledger: Ledger) -> None:
    ended = ledger.trained + ledger.rejected.total()
    assert ledger.dispatched == ledger.in_flight + ended


def test_a_step_calls_everyone_in_turn() -> None:
    world = World()
    step = drive(schedule(world).step())
    assert world.log == [
        "admit [0, 1, 2, 3]",
        "decode 5",
        "decode 5",
        "decode 5",
        "span gen 14",
        "judge admit",
        "judge finish [0, 1, 2, 3]",
        "span score/judge",
        "critic admit",
        "critic finish [0, 1, 2, 3]",
        "span score/critic",
        "train [0, 1, 2, 3]",
        "span update",
        "publish 1",
        "load 1",
        "span publish",
    ]
    assert [len(r) for r in step.batch] == [3, 5, 2, 4]
    assert [r.tokens for r in step.batch] == [list(range(n)) for n in (3, 5, 2, 4)]
    assert [r.finish for r in step.batch] == [LENGTH, STOP, LENGTH, STOP]
    assert [r.scores["judge"].scalar for r in step.batch] == [0.5, 1.5, 2.5, 3.5]
    assert all(r.state is RolloutState.TRAINED for r in step.batch)
    assert step.rejected == []


def test_figures_of_a_step() -> None:
    """3 decode calls of 1 s, two scorers of 0.5 s, 2 s of training; prompts of 1 to 4 tokens."""
    stats = drive(schedule(World()).step()).stats
    assert stats == {
        "objective/scores": 1.25,
        "timing_s/step": 6.0,
        "perf/throughput": (14 + 10) / 6,
        "perf/samples_per_s": 4 / 6,
        "rejected": 0.0,
    }


def test_versions_follow_the_hand_overs() -> None:
    world = World()
    run = schedule(world)
    for version in (0, 1, 2):
        assert {v for r in drive(run.step()).batch for v in r.versions} == {version}
    assert world.loaded == 3


def test_ids_groups_and_prompts_go_on_from_step_to_step() -> None:
    world = World()
    run = schedule(world, batch=6, samples=3)
    steps = [drive(run.step()) for _ in range(2)]
    rollouts = [r for step in steps for r in step.batch]
    assert [r.id for r in rollouts] == list(range(12))
    assert [r.prompt.id for r in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [r.group for r in rollouts] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert (run.ledger.dispatched, run.ledger.trained, run.ledger.in_flight) == (12, 12, 0)


def test_state_put_back_goes_on_with_the_next_ids() -> None:
    world = World(fails=[1])
    run = schedule(world, drop=True)
    drive(run.step())
    other = schedule(world, drop=True)
    other.load_state_dict(run.state_dict())
    assert other.state_dict() == run.state_dict()
    assert [r.id for r in drive(other.step()).batch] == [4, 5, 6, 7]
    ledger = other.ledger
    assert (ledger.dispatched, ledger.trained, dict(ledger.rejected)) == (8, 7, {"judge failed": 1})
    assert_balanced(ledger)


def test_a_failed_judge_stops_the_run_before_training() -> None:
    world = World(fails=[1, 2])
    run = schedule(world)
    with pytest.raises(JudgeError, match="2 of 4 responses could not be judged") as caught:
        drive(run.step())
    assert caught.value.rollout_ids == (1, 2)
    assert "no verdict on 1" in str(caught.value)
    assert "reward.on_failure = 'drop'" in str(caught.value)
    assert world.batches == []
    assert run.ledger.in_flight == 4
    assert_balanced(run.ledger)


def test_failures_can_be_dropped_and_are_reported() -> None:
    world = World(fails=[1, 2])
    run = schedule(world, drop=True)
    step = drive(run.step())
    assert world.batches == [[0, 3]]
    assert [r.id for r in step.rejected] == [1, 2]
    assert {r.rejected_because for r in step.rejected} == {"judge failed"}
    assert step.rejected[0].scores["judge"].failure == "no verdict on 1"
    assert step.stats["rejected"] == 2
    assert run.ledger.rejected == {"judge failed": 2}
    assert (run.ledger.trained, run.ledger.in_flight) == (2, 0)
    assert_balanced(run.ledger)


def test_a_batch_without_any_verdict_stops_even_so() -> None:
    world = World(fails=range(4))
    with pytest.raises(JudgeError, match="4 of 4"):
        drive(schedule(world, drop=True).step())
    assert world.batches == []


def test_a_generator_that_gives_nothing_is_an_error_that_names_who_waits() -> None:
    world = World()
    world.idle = True
    with pytest.raises(LifecycleError, match=r"idle, but rollouts \[0, 1, 2, 3\] never ended"):
        drive(schedule(world).step())


def test_an_inline_role_must_not_wait() -> None:
    class Never:
        def __await__(self) -> Iterator[None]:
            yield None

    async def waits() -> None:
        await Never()

    with pytest.raises(RuntimeError, match="waited for something outside"):
        drive(waits())


# -- the ledger ----------------------------------------------------------------------------------


def ended(id_: int, state: RolloutState, because: str = "") -> Rollout:
    rollout = Rollout(id_, Prompt(0, (1,), ""), id_, state=state)
    rollout.rejected_because = because
    return rollout


def test_ledger_counts() -> None:
    ledger = Ledger()
    rollouts = [
        ended(0, RolloutState.TRAINED),
        ended(1, RolloutState.REJECTED, "a"),
        ended(2, RolloutState.REJECTED, "b"),
        ended(3, RolloutState.REJECTED, "a"),
        ended(4, RolloutState.TRAINED),
    ]
    ledger.dispatch(rollouts)
    assert (ledger.dispatched, ledger.in_flight) == (5, 5)
    ledger.close(rollouts[:4])
    assert (ledger.trained, ledger.in_flight, ledger.rejected) == (1, 1, {"a": 2, "b": 1})
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    again.close(rollouts[4:])
    assert (again.trained, again.in_flight) == (2, 0)


def test_ledger_refuses_what_does_not_add_up() -> None:
    ledger = Ledger()
    trained = ended(0, RolloutState.TRAINED)
    with pytest.raises(LifecycleError, match="rollout 0 ends but was not in flight"):
        ledger.close([trained])
    ledger.dispatch([trained])
    with pytest.raises(LifecycleError, match="rollout 0 was dispatched twice"):
        ledger.dispatch([trained])
    ledger.close([trained])
    with pytest.raises(LifecycleError, match="not in flight"):
        ledger.close([trained])  # trained twice
    ledger.dispatch([ended(1, RolloutState.SCORED)])
    with pytest.raises(LifecycleError, match="rollout 1 ends in state scored"):
        ledger.close([ended(1, RolloutState.SCORED)])
    lost = Ledger()
    lost.load_state_dict({"dispatched": 3, "trained": 0, "rejected": {"a": 1}, "in_flight": [0]})
    with pytest.raises(LifecycleError, match="3 dispatched, but 0 in flight \\+ 1 trained \\+ 1"):
        lost.close([trained])


# -- the life of a rollout -----------------------------------------------------------------------

EDGES = {
    "queued": "decoding rejected",
    "decoding": "carried finished rejected",
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
        with pytest.raises(LifecycleError, match=f"cannot go from {start} to {end}"):
            rollout.move(end)
        assert rollout.state is start


def test_schedules_need_no_torch() -> None:
    code = "import sys, stretto.schedules.sync; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
