"""Schedules whose roles are lost, with scripted roles in virtual time: what goes on. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from helpers import ManualClock
from raising import raises
from stretto.config.knobs import Settings
from stretto.errors import LifecycleError, RoleLostError, StalledError, StrettoError
from stretto.observe.spans import Spans
from stretto.runtime.sim.faults import Faults, faulty
from stretto.runtime.sim.loop import run
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.migration import FixedMigration, MigrationLimits
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.rollout import Step
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.schedules.waits import Phases
from stretto.testing import FakeGenerator, FakeLearner, FakeScorer, World
from stretto.types import Chunk, Decoded, WeightsRef

LENGTHS = [3, 17, 2, 9, 5, 1, 30]
RESTART_S = 3.0

Calls = Mapping[str, Sequence[int]]
"""Numbers, from 0, of a method's calls."""


class Mortal:
    """A role whose process dies in given calls, with the answer on its way or before any work.

    Args:
        role: answers all other calls.
        name: in the error.
        dies: calls that it dies in; those of ``restart`` fail.
        hangs: calls that are never answered.
        late: die after the work instead of before.
        restart_s: seconds that a new process takes.
    """

    def __init__(
        self,
        role: Any,
        name: str,
        dies: Calls,
        *,
        hangs: Calls | None = None,
        late: bool = False,
        restart_s: float = RESTART_S,
    ) -> None:
        self._role, self._name, self._late, self._restart_s = role, name, late, restart_s
        self._dies, self._hangs = dict(dies), dict(hangs or {})
        self._counts: dict[str, int] = {}
        self._turn, self._dead = asyncio.Lock(), False

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._role, name)
        if not asyncio.iscoroutinefunction(member):
            return member

        async def call(*args: Any, **keywords: Any) -> Any:
            async with self._turn:
                number = self._counts.get(name, 0)
                self._counts[name] = number + 1
                if self._dead:
                    raise RoleLostError(self._name, "it is dead", "dead")
                dies = number in self._dies.get(name, ())
                if number in self._hangs.get(name, ()):
                    await asyncio.get_running_loop().create_future()
                if not dies or self._late:
                    answer = await member(*args, **keywords)
                if dies:
                    self._dead = True
                    raise RoleLostError(self._name, f"it was killed in {name} {number}", "killed")
                return answer

        return call

    async def restart(self) -> None:
        number = self._counts.get("restart", 0)
        self._counts["restart"] = number + 1
        await asyncio.sleep(self._restart_s)
        if number in self._dies.get("restart", ()):
            raise RoleLostError(self._name, f"start {number} failed", "not-started")
        await self._role.restart()
        self._dead = False


def make(
    world: World,
    generators: Sequence[Any],
    replicas: Sequence[Any],
    *,
    steps: int = 3,
    delta: int = 0,
    migrate: float = 0.0,
    initial: Mapping[str, WeightsRef] | None = None,
    learner: Any = None,
    **settings: Any,
) -> Schedule:
    limits = MigrationLimits(len(generators), 8, 10_000, 100, 1e4, 1e5)
    return Schedule(
        world.next_prompt,
        generators,
        [r if isinstance(r, ScorerReplica) else ScorerReplica(r) for r in replicas],
        learner or FakeLearner(world),
        Controls(
            Settings(4, 1, 100, steps, **{"restarts": 9, **settings}),
            FixedChunk(4),
            FixedOvercommit(delta),
            FixedMigration(limits, 4, migrate) if migrate else None,
        ),
        world.clock,
        world,
        initial,
    )


def judge(world: World) -> FakeScorer:
    return FakeScorer(world, "judge")


def critic(world: World) -> FakeScorer:
    return FakeScorer(world, "critic", "values", follows="critic")


def take(schedule: Schedule, steps: int = 3, seed: int | None = None) -> list[Step]:
    """So many steps; the books balance after them, whatever ended them."""

    async def main() -> list[Step]:
        async with schedule:
            return [await schedule.step() for _ in range(steps)]

    try:
        return run(main(), seed=seed or 0, shuffle=seed is not None)
    finally:
        ledger = schedule.ledger
        assert ledger.dispatched == ledger.in_flight + ledger.trained + ledger.rejected.total()


def within(made: Any) -> Any:
    """Make something in a running loop, which locks and clocks need."""

    async def main() -> Any:
        return made()

    return run(main())


def losing(
    generators: Sequence[tuple[Calls, Calls]] = (({}, {}),),
    scorers: tuple[Calls, Calls] = ({}, {}),
    *,
    late: bool = False,
    seed: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    steps: int = 3,
    **options: Any,
) -> tuple[World, list[Step]]:
    """Steps with generators that die and hang in calls, and a judge and a critic that die in some.

    Calls that hang cost the deadline of 1,000 s.
    """
    world = World(lengths)

    async def main() -> list[Step]:
        mortal = [
            Mortal(FakeGenerator(world, f"gen{i}"), f"gen{i}", dies, hangs=hangs, late=late)
            for i, (dies, hangs) in enumerate(generators)
        ]
        replicas = [
            Mortal(role, role.name, dies, late=late)
            for role, dies in zip((judge(world), critic(world)), scorers, strict=True)
        ]
        schedule = make(world, mortal, replicas, steps=steps, deadline_s=1000.0, **options)
        async with schedule:
            return [await schedule.step() for _ in range(steps)]

    return world, run(main(), seed=seed or 0, shuffle=seed is not None)


def seen(steps: Sequence[Step]) -> list[list[dict[str, Any]]]:
    """All that was trained on: tokens, log-probabilities, versions and scores."""
    batches = [[r.state_dict() for r in step.batch] for step in steps]
    for batch in batches:
        for rollout in batch:  # in the order of arrival
            rollout["scores"].sort(key=lambda score: score["source"])
    return batches


def deaths(steps: Sequence[Step]) -> tuple[float, float]:
    return steps[-1].stats["cluster/deaths"], steps[-1].stats["cluster/restarts"]


# -- generators ----------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize(
    "dies", [{"admit": [0]}, {"decode": [1]}, {"load": [0]}, {"decode": [0, 1], "load": [1]}]
)
def test_nothing_changes_by_the_loss_of_a_generator(
    dies: Calls, engines: int, score_on: str, late: bool
) -> None:
    """Tokens, versions and scores of all batches are those of a run without losses."""
    whole = losing([({}, {})] * engines, score_on=score_on)[1]
    others = [({}, {})] * (engines - 1)
    steps = losing([(dies, {}), *others], score_on=score_on, late=late)[1]
    assert seen(steps) == seen(whole)
    lost = float(sum(map(len, dies.values())))
    assert deaths(steps) == (lost, lost)


def test_the_others_go_on_with_its_rollouts_and_the_new_one_loads_first() -> None:
    """Lost at 4 s, back at 7 s: gen1 has all that is left until the end.

    Each rollout has four tokens by then, and 0 and 2 are returned at 12 s. Then 0.5 + 2.2 s for
    their scores, and 2 s for training.
    """
    engines: list[tuple[Calls, Calls]] = [({"decode": [1]}, {}), ({}, {})]
    lengths = [10, 5, 12, 6]
    world, steps = losing(engines, lengths=lengths, steps=2, score_on="rollout")
    assert [line for line in world.log if " gen" in line] == [
        "0 gen0 admit [0, 2]",
        "0 gen1 admit [1, 3]",
        "4 gen1 admit [0, 2]",
        "7 gen0 restart",
        "16.7 gen0 load 1",
        "16.7 gen1 load 1",
        "16.7 gen0 admit [4, 6]",
        "16.7 gen1 admit [5, 7]",
    ]
    assert [r.id for r in steps[0].batch] == [0, 1, 2, 3]
    assert ("generator 0", "down", 4.0, 7.0) in world.spans


def test_the_last_of_them_waits_for_the_one_in_its_place() -> None:
    dies = {"decode": [1]}
    world, steps = losing([(dies, {})], lengths=[10, 5], steps=1, score_on="rollout")
    everything = "gen0 admit [0, 1, 2, 3]"
    assert world.log[:3] == [f"0 {everything}", "7 gen0 restart", f"7 {everything}"]
    assert deaths(steps) == (1.0, 1.0)


@pytest.mark.parametrize("call", ["export", "accept"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("score_on", ["batch", "chunk"])
def test_rollouts_that_move_survive_both_ends(call: str, late: bool, score_on: str) -> None:
    engines = [({}, {})] * 3
    world, whole = losing(engines, migrate=0.8, score_on=score_on)
    assert any(" export " in line for line in world.log)
    dying = [({call: [0, 1]}, {})] * 3
    _, steps = losing(dying, migrate=0.8, late=late, score_on=score_on)
    assert seen(steps) == seen(whole)
    assert deaths(steps)[0] >= 1


@pytest.mark.parametrize("call", ["admit", "decode", "load", "export", "accept"])
def test_a_generator_that_hangs_is_taken_for_lost(call: str) -> None:
    engines = [({}, {})] * 2
    whole = losing(engines, migrate=0.8)[1]
    steps = losing([({}, {call: [0]}), ({}, {call: [0]})], migrate=0.8)[1]
    assert seen(steps) == seen(whole)
    assert deaths(steps)[0] >= 1


def test_without_restarts_a_loss_ends_the_run() -> None:
    with raises(RoleLostError, "killed", "gen0", "decode 1"):
        losing([({"decode": [1]}, {})], restarts=0)
    with raises(StalledError, "no-answer-in-time", "generator", "1000 s"):
        losing([({}, {"decode": [1]})], restarts=0)
    assert "cluster/deaths" not in losing(restarts=0)[1][0].stats


def test_a_generator_without_budget_leaves_the_rest_to_the_others() -> None:
    always = {"decode": range(100)}
    whole = losing([({}, {})] * 2)[1]
    world, steps = losing([(always, {}), ({}, {})], restarts=2)
    assert seen(steps) == seen(whole)
    assert deaths(steps) == (3.0, 2.0)
    assert world.log.count("gen0 restart") <= 2


def test_the_loss_of_the_last_generator_ends_the_run() -> None:
    always = {"decode": range(100)}
    with raises(RoleLostError, "killed", "decode") as caught:
        losing([(always, {}), (always, {})], restarts=2)
    assert caught.value.role in ("gen0", "gen1")
    fails = {"decode": [0], "restart": range(100)}
    with raises(RoleLostError, "not-started", 1):
        losing([(fails, {})], restarts=2)


def test_a_new_process_loads_what_the_others_started_with() -> None:
    initial = {"actor": WeightsRef("actor", 0, "x")}
    world, _ = losing([({"decode": [0]}, {})], initial=initial, steps=1)
    assert world.log[1:3] == ["3 gen0 restart", "3 gen0 load 0"]


def test_weights_published_meanwhile_are_loaded_too() -> None:
    """Gen0 is away until 25 s, over the first weight sync, and comes back with version 1."""
    world = World([10, 5])

    async def main() -> list[Step]:
        dying = Mortal(FakeGenerator(world, "gen0"), "gen0", {"decode": [0]}, restart_s=25.0)
        schedule = make(world, [dying, FakeGenerator(world, "gen1")], [judge(world)], steps=2)
        async with schedule:
            return [await schedule.step() for _ in range(2)]

    steps = run(main())
    lines = [line.partition(" ")[2] for line in world.log]
    assert lines.index("gen1 load 1") < lines.index("gen0 restart") < lines.index("gen0 load 1")
    assert [set(r.versions) for r in steps[1].batch] == [{1}] * 4


# -- scorers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
@pytest.mark.parametrize(
    "dies",
    [
        {"admit": [0]},
        {"finish": [1]},
        {"load": [0]},
        {"extend": [0, 2], "finish": [0, 1], "load": [1], "restart": [1]},
    ],
)
def test_scores_are_those_of_a_run_without_losses(dies: Calls, score_on: str, late: bool) -> None:
    """Of a frozen scorer and of one that follows a model; a second score would be an error."""
    whole = losing(score_on=score_on)[1]
    steps = losing(scorers=(dies, dies), score_on=score_on, late=late)[1]
    assert seen(steps) == seen(whole)
    assert deaths(steps)[0] >= 1


def test_a_scorer_without_budget_ends_the_run() -> None:
    with raises(RoleLostError, "killed", "judge", "finish"):
        losing(scorers=({"finish": range(100)}, {}), restarts=3)
    with raises(RoleLostError, "killed", "critic", "load"):
        losing(scorers=({}, {"load": range(100)}), restarts=3)


@pytest.mark.parametrize("score_on", ["batch", "rollout", "chunk"])
@pytest.mark.parametrize("dies", [{"finish": range(100)}, {"load": [0], "restart": range(100)}])
@pytest.mark.parametrize("hosted", [False, True])
def test_other_replicas_go_on_for_one_without_budget(
    dies: Calls, score_on: str, hosted: bool
) -> None:
    def steps(dies: Calls) -> list[Step]:
        world = World(LENGTHS)

        async def main() -> list[Step]:
            engines = [FakeGenerator(world, f"gen{i}") for i in range(2)]
            replicas = [  # in worlds of their own, as one has a single version for each name
                ScorerReplica(Mortal(critic(World(LENGTHS)), "critic", d), i if hosted else None)
                for i, d in enumerate((dies, {}))
            ]
            schedule = make(
                world, engines, [judge(world), *replicas], score_on=score_on, restarts=1
            )
            async with schedule:
                return [await schedule.step() for _ in range(3)]

        return run(main())

    assert seen(steps(dies)) == seen(steps({}))


class Thread(FakeScorer):
    async def finish(self, rollout_ids: Sequence[int]) -> Any:
        raise RoleLostError(self.name, "its file is gone", "no-file")

    async def restart(self) -> None:
        raise LifecycleError("a thread cannot be replaced")


def test_what_cannot_be_replaced_ends_the_run_with_its_loss() -> None:
    world = World([3])
    with raises(RoleLostError, "no-file", "judge"):
        take(within(lambda: make(world, [FakeGenerator(world)], [Thread(world, "judge")])))


# -- the learner, and all together ---------------------------------------------------------------


def test_the_loss_of_the_learner_ends_the_run() -> None:
    class Lost(FakeLearner):
        async def train(self, batch: Any) -> Any:
            raise RoleLostError("learner", "out of memory", "no-memory")

    world = World([3])
    with raises(RoleLostError, "no-memory", "learner"):
        take(
            within(lambda: make(world, [FakeGenerator(world)], [judge(world)], learner=Lost(world)))
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delta": 3, "score_on": "chunk"},
        {"lag": 1, "delta": 2, "score_on": "rollout"},
        {"lag": 1, "delta": 4, "score_on": "chunk", "migrate": 0.8},
        {"weight_sync_interval": 2, "score_on": "chunk"},
    ],
)
@pytest.mark.parametrize("seed", range(15))
def test_scripted_roles_check_each_token_whatever_dies(options: dict[str, Any], seed: int) -> None:
    """Every scorer compares the tokens that it was given with those of the script."""
    world = World(LENGTHS)
    faults = Faults(seed=seed, dies=0.08, hangs=0.01, restart_s=4.0, restart_fails=0.1)

    async def main() -> list[Step]:
        engines = [faulty(FakeGenerator(world, f"gen{i}"), faults, f"gen{i}") for i in range(3)]
        scorers = [faulty(role(world), faults, role.__name__) for role in (judge, critic)]
        schedule = make(
            world, engines, scorers, steps=4, deadline_s=100.0, **{"restarts": 100, **options}
        )
        async with schedule:
            return [await schedule.step() for _ in range(4)]

    steps = run(main(), seed=seed, shuffle=True)
    trained = [r for step in steps for r in step.batch]
    assert len({r.id for r in trained}) == len(trained) == 16
    for r in trained:
        assert r.tokens.tolist() == [100 * r.id + t for t in range(world.length(r.id))]
        assert r.scores["judge"].scalar == r.id + 0.5
        assert len(set(r.scores["critic"].values.tolist())) == 1
    assert deaths(steps)[0] >= 1


def test_a_run_taken_up_again_knows_what_newcomers_load() -> None:
    first = World(LENGTHS)

    async def main() -> dict[str, Any]:
        schedule = make(first, [FakeGenerator(first)], [judge(first)], steps=4)
        async with schedule:
            for _ in range(3):
                await schedule.step()
            return schedule.state_dict()

    state = run(main())
    assert state["fleet"]["held"]["actor"]["version"] == 2
    world = World(LENGTHS)
    world.places = first.places

    async def again() -> None:
        engine = Mortal(FakeGenerator(world, "gen0"), "gen0", {"decode": [0], "load": [0]})
        learner = FakeLearner(world)
        learner.version = 3
        schedule = make(world, [engine], [judge(world)], steps=4, learner=learner)
        schedule.load_state_dict(state, world.prompt)
        async with schedule:
            await schedule.step()

    run(again())
    assert [line for line in world.log if "load" in line] == ["3 gen0 load 3", "6 gen0 load 3"]


# -- the order of calls --------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [0, 5])
@pytest.mark.parametrize("engines", [1, 2])
def test_a_generator_decodes_on_before_scorers_get_its_chunks(engines: int, restarts: int) -> None:
    """The call that makes chunk n + 1 is issued before the one that hands chunk n to a scorer."""
    world = World([20])
    calls: list[tuple[int | str, int]] = []

    class Generator(FakeGenerator):
        async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
            calls.extend(self.done.items())
            return await super().decode(max_tokens, stop_after)

    class Scorer(FakeScorer):
        async def extend(self, chunks: Sequence[Chunk]) -> None:
            for c in chunks:
                if c.finish is None:
                    assert (c.rollout_id, c.start + len(c.tokens)) in calls
                    calls.append(("extend", c.start))
            await super().extend(chunks)

    generators = [Generator(world, f"gen{i}") for i in range(engines)]
    scorers = [Scorer(world, "judge"), Scorer(world, "critic", "values", follows="critic")]
    schedule = within(
        lambda: make(world, generators, scorers, score_on="chunk", restarts=restarts, steps=1)
    )
    take(schedule, 1)
    assert calls.count(("extend", 0)) == 8


def test_errors_of_losses_travel() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(RoleLostError("critic", "killed by signal 9")))
    assert (error.role, isinstance(error, StrettoError)) == ("critic", True)
    assert "critic was lost: killed by signal 9" in str(error)


def test_a_role_is_shown_as_lost_while_it_is_and_as_a_whole_afterwards() -> None:
    clock = ManualClock()
    spans = Spans(clock)
    phases = Phases(clock, spans)
    clock.advance(1.0)
    phases.lost("critic")
    clock.advance(2.0)
    phases.lost("critic")  # its new process is lost too
    window = spans.take()
    assert [(s.role, s.cause, s.start_s, s.end_s) for s in window.open] == [
        ("critic", "down", 1.0, 3.0)
    ]
    clock.advance(2.0)
    phases.down("critic", 1.0)
    window = spans.take()
    assert not window.open
    assert [(s.role, s.cause, s.start_s, s.end_s) for s in window.ended] == [
        ("critic", "down", 1.0, 5.0)
    ]
