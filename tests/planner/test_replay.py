"""Recorded runs in virtual time: shared cores, calls on their way, placements."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import ended_records
from raising import raises
from stretto.config import (
    AlgorithmConfig,
    ClusterConfig,
    Config,
    EnvironmentConfig,
    RolloutConfig,
    ScheduleConfig,
)
from stretto.errors import ConfigError, StateError
from stretto.machine import Machine, usable_cores
from stretto.observe.run_directory import RolloutRecord, RunDirectory
from stretto.observe.spans import WEIGHT_SYNC, Span, Spans
from stretto.planner import live_recording
from stretto.planner.calibration import calibrate, undisturbed
from stretto.planner.live_recording import LiveRecording
from stretto.planner.replay import CPU_TOKEN_BUDGET, FUNCTION, Recording, call_work_s
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import (
    DecodeCost,
    DriverCost,
    GeneratorCost,
    PrefillCost,
    SimSpeculation,
    TrainCost,
)
from stretto.runtime.sim.lengths import Bimodal, Replayed, Uniform
from stretto.runtime.sim.loop import VirtualClock, run
from stretto.runtime.sim.resources import Cores, Device, SimWorker
from stretto.runtime.sim.simulate import simulate
from stretto.runtime.sim.tuning import workload_of
from stretto.runtime.sim.turns import AnswerLatency, SimEpisodes
from stretto.schedules.rollout import Rollout
from stretto.scoring.response_buffer import worthwhile_tokens
from stretto.types import Prompt

TWO_CORES = Machine("a CPU", 2, 2, (), "2.0")
READ = [Span(r, f"score/{r}", 0, 1, {"tokens": 1}) for r in ("reference", "critic")]


# -- cores and calls --------------------------------------------------------------------------


def ends(
    cores: int, pieces: list[tuple[float, float, int]], thread_scaling: float = 0.0
) -> list[float]:
    """When pieces of work end: each with its start, its seconds alone, and its threads."""

    async def main() -> list[float]:
        shared, loop = Cores(cores, thread_scaling), asyncio.get_running_loop()

        async def piece(start_s: float, seconds: float, threads: int) -> float:
            await asyncio.sleep(start_s)
            await shared.work(seconds, threads)
            return loop.time()

        return await asyncio.gather(*(piece(*p) for p in pieces))

    return run(main())


@pytest.mark.parametrize(
    ("cores", "pieces", "expected"),
    [
        (1, [(0.0, 3.0, 1)], [3.0]),
        (2, [(0.0, 3.0, 1), (1.0, 3.0, 1)], [3.0, 4.0]),  # one each
        (1, [(0.0, 1.0, 1), (0.5, 1.0, 1)], [1.5, 2.0]),  # half as fast from 0.5 to 1.5
        (2, [(0.0, 1.0, 2), (0.0, 1.0, 2)], [2.0, 2.0]),
        # Three threads on two cores: 2/3 until the first ends at 1.5 with 1.0 done of each.
        (2, [(0.0, 1.0, 1), (0.0, 1.0, 1), (0.0, 2.0, 1)], [1.5, 1.5, 2.5]),
        (2, [(0.0, 0.0, 1), (0.0, 1.0, 4)], [0.0, 2.0]),
    ],
)
def test_threads_share_cores_evenly(
    cores: int, pieces: list[tuple[float, float, int]], expected: list[float]
) -> None:
    assert ends(cores, pieces) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cores", "thread_scaling", "expected"),
    [
        (2, 1.25, [1.6, 2.6]),  # 5/8 each until the first ends with 1 done, then 1 s alone
        (1, 1.25, [2.0, 3.0]),  # the cores allow less
        (2, 2.0, [1.0, 2.0]),
    ],
)
def test_threads_of_one_process_hinder_each_other(
    cores: int, thread_scaling: float, expected: list[float]
) -> None:
    assert ends(cores, [(0.0, 1.0, 1), (0.0, 2.0, 1)], thread_scaling) == pytest.approx(expected)


def test_passes_wait_for_python_code_of_the_process() -> None:
    async def main(thread_scaling: float) -> list[float]:
        cores, loop = Cores(2, thread_scaling), asyncio.get_running_loop()

        async def piece(seconds: float, in_python: bool) -> float:
            await cores.work(seconds, 1, in_python=in_python)
            return loop.time()

        return await asyncio.gather(piece(1.0, True), piece(2.0, False))

    assert run(main(1.8)) == pytest.approx([2.0, 3.0])  # half as fast each, then 1 s alone
    assert run(main(0.0)) == pytest.approx([1.0, 2.0])  # roles in processes of their own


@pytest.mark.parametrize(
    ("thread_scaling", "seconds", "expected"),
    [
        (0.0, [1.0], [1.0]),  # the driver has the other core
        (0.0, [1.0, 1.0], [1.25, 1.25]),  # both have one core for 0.5 s
        (2.0, [1.0], [1.25]),  # half as fast for 0.5 s, as both need Python's lock
        (2.0, [1.0, 1.0], [4 / 3, 4 / 3]),  # a third as fast
        (0.0, [0.25], [0.5]),  # ends meanwhile, and the driver hears of it later
    ],
)
def test_the_driver_takes_a_core_or_the_lock(
    thread_scaling: float, seconds: list[float], expected: list[float]
) -> None:
    async def main() -> list[float]:
        cores, loop = Cores(2, thread_scaling), asyncio.get_running_loop()

        async def piece(seconds: float) -> float:
            await cores.work(seconds, 1)
            return loop.time()

        pieces = [asyncio.create_task(piece(s)) for s in seconds]
        await asyncio.sleep(0)
        cores.compute(0.5)
        return await asyncio.gather(*pieces)

    assert run(main()) == pytest.approx(expected)


def test_work_that_ends_while_the_driver_computes_keeps_its_end() -> None:
    """It ends after 0.25 s. Later work in the same callback slows down only what goes on."""

    async def main() -> list[tuple[float, float]]:
        spans, cores = Spans(VirtualClock()), Cores(2)
        one, other = (SimWorker(f"role {i}", [Device(i)], spans, cores=cores) for i in range(2))
        first = asyncio.create_task(one.work("work", 0.25))
        await asyncio.sleep(0)
        cores.compute(0.5)
        cores.compute(0.5)
        other.threads = 4
        await asyncio.gather(first, other.work("work", 1.0))
        return [(span.start_s, span.end_s) for span in spans.records]

    assert run(main()) == [(0.0, 0.25), (1.0, 3.0)]


@pytest.mark.parametrize(
    ("thread_scaling", "expected"),
    [
        # Three threads on two cores: 2/3 until 1.5, then the other load on two cores.
        (0.0, [("work", 0.0, 1.5), ("load", 0.0, 1.5), ("load", 1.5, 2.5)]),
        (3.0, [("work", 0.0, 1.5), ("load", 0.0, 1.5), ("load", 0.0, 1.5)]),
    ],
)
def test_processes_get_weights_in_turn_from_a_thread_of_the_learners(
    thread_scaling: float, expected: list[tuple[str, float, float]]
) -> None:
    async def main() -> list[tuple[str, float, float]]:
        spans, cores = Spans(VirtualClock()), Cores(2, thread_scaling)
        workers = [SimWorker(f"role {i}", [Device(i)], spans, cores=cores) for i in range(3)]
        loads = [worker.load(1, 1.0) for worker in workers[1:]]
        await asyncio.gather(workers[0].work("work", 1.0), *loads)
        return [(span.name, span.start_s, span.end_s) for span in spans.records]

    names = [pytest.approx(times) for _, *times in expected]
    measured = run(main())
    assert [name for name, *_ in measured] == [name for name, *_ in expected]
    assert [times for _, *times in measured] == names


def test_work_that_is_broken_off_leaves_its_cores_to_the_others() -> None:
    async def main() -> float:
        shared = Cores(1)
        gone = asyncio.create_task(shared.work(10.0, 1))
        stays = asyncio.create_task(shared.work(2.0, 1))
        await asyncio.sleep(1.0)  # each has done half a second
        gone.cancel()
        await stays
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(2.5)


def test_a_device_is_busy_for_as_long_as_its_work_takes_beside_others() -> None:
    async def main() -> list[float]:
        spans, cores = Spans(VirtualClock()), Cores(1)
        devices = [Device(0), Device(1)]
        workers = [SimWorker(f"role {d.index}", [d], spans, cores=cores) for d in devices]
        await asyncio.gather(*(w.work("work", 1.0) for w in workers))
        return [d.busy_s for d in devices]

    assert run(main()) == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("cores", [None, 1])
def test_a_call_and_its_answer_are_on_their_way(cores: int | None) -> None:
    """Both are work, if roles are processes that share cores."""

    async def main() -> tuple[list[tuple[float, float]], float]:
        spans = Spans(VirtualClock())
        worker = SimWorker(
            "role", [Device(0)], spans, cores=Cores(cores) if cores else None, call_s=0.5
        )

        async def call() -> None:
            async with worker.turn("call"):
                await worker.work("work", 1.0)

        await asyncio.gather(call(), call())
        times = [(span.start_s, span.end_s) for span in spans.records]
        return times, asyncio.get_running_loop().time()

    assert run(main()) == ([(0.25, 1.25), (1.75, 2.75)], 3.0)


# -- calibration ------------------------------------------------------------------------------


def test_what_others_took_is_left_out() -> None:
    """On one core: A works from 0 to 1.5 s, B from 0.5 to 2 s; each takes a second alone."""
    spans = [
        Span("a", "score", 0.0, 1.5, {}),
        Span("b 0", "score", 0.5, 2.0, {}),
        Span("b 0", "wait", 0.0, 9.0, {"cause": "data"}),
        Span(WEIGHT_SYNC, "send", 0.5, 1.5, {"model": "actor"}),
    ]
    one = {"a": 1, "b": 1}
    found = {s.role: s.end_s - s.start_s for s in undisturbed(spans, one, 1) if not s.waits}
    assert found == pytest.approx({"a": 1.0, "b 0": 1.0, WEIGHT_SYNC: 0.5})
    for threads, cores in ((one, 0), (one, 2), ({"a": 2, "b": 2}, 4)):
        assert [s for s in undisturbed(spans, threads, cores) if not s.waits] == [
            s for s in spans if not s.waits
        ]


def test_what_the_lock_took_is_left_out() -> None:
    """Two threads get 1.25 done at once: A works from 0 to 1.5 s, B from 0.5 to 2 s; each is alone
    for half a second, and does 0.625 of the second that they share. The driver and A have half of
    the first 0.25 s each."""
    spans = [
        Span("a", "score", 0.0, 1.5, {}),
        Span("b", "score", 0.5, 2.0, {}),
        Span("driver", "driver/books", 0.0, 0.25, {"items": 1}),
    ]
    found = undisturbed(spans, {"a": 1, "b": 1, "driver": 0}, 2, 1.25)
    expected = {"a": 1.0, "b": 1.125, "driver": 0.125}
    assert {s.role: s.end_s - s.start_s for s in found} == pytest.approx(expected)


def test_decoding_without_prefills_is_fitted() -> None:
    spans = [
        *(Span("generator", "gen", i, i + 0.5, {"steps": 1, "tokens": 1}) for i in range(3)),
        Span("reference", "score/reference", 0.0, 1.0, {"tokens": 10, "rollouts": [1]}),
        Span("learner", "update", 0.0, 1.0, {"tokens": 10}),
    ]
    assert calibrate(spans).generator.prefill.token_s == 0.0


def test_prefills_of_like_sizes_cost_what_the_reference_reads() -> None:
    """Calls that prefill 100 tokens take 1 ms a token and 20 ms each, which their sizes do not tell
    apart, but the reference reads tokens of the same model."""
    spans = [Span("learner", "update", 90.0, 91.0, {"tokens": 10})]
    for i, steps in enumerate((10, 25, 40, 10, 30, 70)):
        took_s = 0.02 + 0.001 * 100 + 0.01 * steps
        amounts = {"steps": steps, "tokens": 3 * steps, "context": 0, "prefilled": 100}
        spans.append(Span("generator", "gen", 2.0 * i, 2.0 * i + took_s, amounts))
        length = 50 * 2**i
        read = {"tokens": length, "rollouts": [i]}
        spans.append(Span("reference", "score", 20.0 * i, 20.0 * i + 0.001 * length, read))
    found = calibrate(spans).generator.prefill
    assert (found.call_s, found.token_s) == pytest.approx((0.02, 0.001), rel=1e-6)


def test_hand_overs_and_calls_are_measured() -> None:
    spans = [
        Span("generator", "gen", 0.0, 1.0, {"steps": 10, "tokens": 10}),
        Span("critic", "score/critic", 1.0, 1.5, {"rollouts": [1], "tokens": 10}),
    ]
    for i in range(3):
        at_s = 2.0 + 10 * i
        spans += [
            Span("learner", "update", at_s, at_s + 3, {"tokens": 10}),
            Span("learner", "publish", at_s + 3.25, at_s + 3.75, {}),
            Span("generator", "load", at_s + 4.5, at_s + 5, {}),
            Span(WEIGHT_SYNC, "send", at_s + 4, at_s + 5, {"model": "actor"}),
            Span(WEIGHT_SYNC, "send", at_s + 5, at_s + 7, {"model": "critic"}),
        ]
    found = calibrate(spans)
    assert found.call_s == pytest.approx(0.25)
    assert found.generator.load_s == pytest.approx(1.0)  # with what comes before and after
    assert found.loads_s["critic"] == pytest.approx(2.0)
    inside = calibrate([s for s in spans if s.role != WEIGHT_SYNC])  # within one process
    assert inside.generator.load_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("amounts", "call_s", "token_s"),
    [((100, 200, 400), 0.3, 0.01), ((100, 110, 150), 0.0, 0.0125)],
)
def test_calls_of_like_amounts_do_not_tell_what_a_call_costs_by_itself(
    amounts: tuple[int, ...], call_s: float, token_s: float
) -> None:
    """All is counted by amount then: of 0.3 s and 0.01 s a token, 4.5 s for 360 tokens."""
    spans = [
        Span("critic", "score/critic", 10.0 * i, 10.0 * i + 0.3 + 0.01 * n, {"tokens": n})
        for i, n in enumerate(amounts)
    ]
    spans += [Span("generator", "gen", 40.0, 41.0, {"steps": 10, "tokens": 10})]
    spans += [Span("learner", "update", 50.0, 51.0, {"tokens": 10})]
    cost = calibrate(spans).scorers["critic"]
    assert isinstance(cost, PrefillCost)
    assert (cost.call_s, cost.token_s) == pytest.approx((call_s, token_s), abs=1e-6)


def test_what_was_in_flight_gets_the_median_of_what_became_longer() -> None:
    ended = {0: 10, 1: 20, 2: 30, 4: 40}
    assert Replayed.from_ledger(ended).tokens == (10, 20, 30, 25, 40)
    found = Replayed.from_ledger(ended, {3: 15, 5: 30, 6: 90})
    assert found.tokens == (10, 20, 30, 30, 40, 40, 90)


# -- replays ----------------------------------------------------------------------------------


def settings(**changes: Any) -> Config:
    return Config(
        steps=12,
        rollout=RolloutConfig(batch=8, max_new_tokens=30, **changes.pop("rollout", {})),
        algorithm=AlgorithmConfig(kl_coef=0.1),
        runtime="local",
        **changes,
    )


def crowded(config: Config) -> Cluster:
    """The run's processes, which share two cores."""
    seats = Recording(config, [], READ, TWO_CORES).role_devices()

    def at(role: str) -> dict[str, Any]:
        return {"devices": seats[role][0].devices, "threads": seats[role][0].threads}

    cost = GeneratorCost(
        decode=DecodeCost(step_s=0.1, row_s=0.01), prefill=PrefillCost(call_s=0.1), load_s=0.05
    )
    prefill = PrefillCost(call_s=0.1, token_s=0.01)
    streaming = config.schedule.knobs.streams
    worthwhile = worthwhile_tokens(CPU_TOKEN_BUDGET, streaming=streaming)
    budget = {"cost": prefill, "worthwhile_tokens": worthwhile}
    critic = {"name": "critic", "kind": "values", "follows": "critic", "load_s": 0.05}
    return Cluster(
        cores=2,
        call_s=0.02,
        driver={"driver/fill": DriverCost(call_s=0.05), "driver/records": DriverCost(item_s=0.02)},
        generators=(GeneratorRole(**at("generator"), cost=cost),),
        scorers=(
            ScorerRole(**at("reference"), **budget, name="reference", kind="logprobs"),
            ScorerRole.model_validate({**at("critic"), **budget, **critic}),
        ),
        learner=LearnerRole(
            **at("learner"),
            trains=("actor", "critic"),
            cost=TrainCost(step_s=0.5, token_s=0.005, publish_s=0.1),
        ),
        workload=Workload(
            batch=8,
            steps=12,
            max_new_tokens=30,
            response_tokens=Bimodal(short=6, long=24, spread=0.5),
            prompt_tokens=Uniform(low=2, high=9),
        ),
        schedule=config.schedule,
    )


def recording(config: Config, cluster: Cluster) -> Recording:
    rollouts = ended_records(cluster.workload, cluster.workload.steps + 2)
    return Recording(config, rollouts, simulate(cluster).spans, TWO_CORES)


@pytest.mark.parametrize("preset", ["sync", "async", "oppo", "stretto"])
def test_a_run_over_crowded_processes_predicts_itself_and_another_placement(preset: Any) -> None:
    """Four processes on two cores; costs come out as if each had been alone."""
    schedule = ScheduleConfig(preset=preset, chunk_tokens=8)
    apart = settings(schedule=schedule)
    together = settings(schedule=schedule, cluster=ClusterConfig(scorers="together"))
    run = recording(apart, crowded(apart))
    for config in (apart, together):
        truth = simulate(crowded(config)).makespan_s
        assert simulate(run.cluster(config)).makespan_s == pytest.approx(truth, rel=0.01)


def test_generator_and_critic_in_processes_load_weights_in_turn() -> None:
    spans = simulate(crowded(settings())).spans
    loads = sorted((s for s in spans if s.name == "load"), key=lambda s: s.start_s)
    assert {s.role for s in loads} == {"generator", "critic"}
    assert all(a.end_s <= b.start_s for a, b in pairwise(loads))


@pytest.mark.parametrize("preset", ["sync", "async"])
def test_a_run_of_episodes_predicts_itself(preset: Any) -> None:
    """Turns come from the records of rollouts, waits from the spans of the environment."""
    config = settings(
        schedule=ScheduleConfig(preset=preset, chunk_tokens=8),
        environment=EnvironmentConfig(sources=("tools.py:add",)),
    )
    waits = SimEpisodes(
        wait_s=AnswerLatency(median=2, p95=9),
        answer_tokens=Uniform(low=1, high=4),
        openings_s=(0.5, 1.5, 3.0),
    )
    described = crowded(config)
    workload = {"max_new_tokens": 100, "episodes": waits}
    cluster = described.model_copy(
        update={"workload": described.workload.model_copy(update=workload)}
    )
    turns, rollouts = cluster.workload.turns, ended_records(cluster.workload, 14)
    assert turns
    records = [
        replace(
            r,
            tokens=sum(t.tokens + t.answer for t in turns(r.id)),
            turns=[{"tokens": t.tokens, "wait_s": 99.0, "context": t.answer} for t in turns(r.id)],
        )
        for r in rollouts
    ]
    result = simulate(cluster)
    asked = [s for s in result.spans if s.role == "environment"]
    assert {s.name for s in asked} == {"open", "step"}
    known = {(s.attributes["rollout"], s.attributes["turn"]): s.end_s - s.start_s for s in asked}
    run = Recording(config, records, result.spans, TWO_CORES, waits=known)
    replayed = run.cluster(config)
    episodes = replayed.workload.episodes
    assert episodes
    assert episodes.recorded[1][0] == pytest.approx(turns(1)[0])
    assert episodes.openings_s[:4] == pytest.approx((0.5, 1.5, 3.0, 0.5))
    limited = replayed.workload.model_copy(update={"max_new_tokens": 100})
    again = simulate(replayed.model_copy(update={"workload": limited}))
    assert again.makespan_s == pytest.approx(result.makespan_s, rel=0.01)


@pytest.mark.parametrize(("cpu_s", "work_s"), [(1.2, 0.5), (0.7, 0.0)])
def test_an_environment_works_if_the_driver_is_busy_with_its_calls(
    cpu_s: float, work_s: float
) -> None:
    """Calls are open for two seconds. The driver's other work takes 0.3 s, so that 0.9 s or 0.4 s
    are for the calls: an opening and three turns."""
    spans = [
        Span("environment", "open", 0.0, 1.5, {}),
        Span("environment", "step", 1.0, 2.0, {}),
        Span("driver", "driver/fill", 0.0, 0.3, {"items": 4}),
    ]
    assert call_work_s(spans, cpu_s, [episode_of(0, 3)]) == pytest.approx(work_s)


def episode_of(rollout_id: int, turns: int) -> RolloutRecord:
    """A finished episode with turns of 2 tokens, each with an answer of one token."""
    (record,) = ended_records(Workload(batch=1), 1)
    turn = {"tokens": 2, "wait_s": 9.0, "context": 1}
    return replace(record, id=rollout_id, tokens=3 * turns, turns=(turn,) * turns)


@pytest.mark.parametrize(("cpu_s", "work_s"), [(1.2, 0.5), (0.7, 0.0)])
def test_a_run_in_progress_knows_whether_its_environment_works(
    cpu_s: float, work_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spans of the test above, with those of a generator and a learner. Calls that work do not
    wait, too, when the tuner simulates its latest episodes."""
    records = [
        Span("environment", "open", 0.0, 1.5, {"rollout": 0, "turn": 0}),
        Span("environment", "step", 1.0, 2.0, {"rollout": 0, "turn": 1}),
        Span("driver", "driver/fill", 0.0, 0.3, {"items": 4}),
        Span("generator", "gen", 2.0, 3.0, {"steps": 6, "tokens": 6, "context": 30}),
        Span("learner", "update", 3.0, 4.0, {"tokens": 9}),
    ]
    spans: Any = SimpleNamespace(records=records)
    rollouts: Any = [episode_of(0, 3)]
    seconds = iter([5.0, 5.0 + cpu_s, 99.0])  # at the start, after the round, after the fit
    monkeypatch.setattr(live_recording.time, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(RolloutRecord, "of", lambda step, rollout, reward: rollout)
    config = settings(environment=EnvironmentConfig(sources=("tools.py:add",)))
    gate: Any = SimpleNamespace(fact=lambda name, measure: measure())
    live = LiveRecording(config, spans, gate, (0.0, 0.0))
    live.observe(rollouts)
    workload = live.cluster(1).workload
    assert workload.episodes
    assert workload.episodes.work_s == pytest.approx(work_s)
    responses = [[0, 4, 9, [[2, 9.0, 1]] * 3]]
    latest = workload_of(workload, responses, 2).episodes
    assert latest
    assert latest.recorded == (((2, 0.0 if work_s else 9.0, 1),) * 3,)


def test_calls_that_work_take_turns_on_the_cores() -> None:
    """Four episodes of a token a turn open and are answered in 0.5 s each, one after the other: 2 s
    and 2 s, between which a decode step takes 0.1 s."""
    config = settings(environment=EnvironmentConfig(sources=("tools.py:add",)))
    described = crowded(config)
    episodes = SimEpisodes(recorded=(((1, 0.0, 0),),), work_s=0.5)
    generator = described.generators[0]
    decode = GeneratorCost(decode=DecodeCost(step_s=0.1))
    cluster = described.model_copy(
        update={
            "driver": {},
            "call_s": 0.0,
            "generators": (generator.model_copy(update={"cost": decode}),),
            "workload": described.workload.model_copy(
                update={"batch": 4, "steps": 1, "episodes": episodes}
            ),
        }
    )
    calls = [s for s in simulate(cluster).spans if s.role == "environment"]
    opened = [s.end_s for s in calls if s.name == "open"]
    answered = [s.end_s for s in calls if s.name == "step"]
    assert opened == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert answered == pytest.approx([2.6, 3.1, 3.6, 4.1])


def test_roles_sit_where_the_placement_says() -> None:
    by_hand = ClusterConfig.model_validate(
        {
            "scorers": "together",
            "processes": [
                {"roles": ["learner"], "device": "cuda:1"},
                {"roles": ["generator 0", "critic"], "threads": 3},
            ],
        }
    )
    asynchronous = ScheduleConfig(preset="async")
    config = settings(schedule=asynchronous, cluster=by_hand, rollout={"engines": 2})
    machine = Machine("a CPU", 8, 8, ("a GPU", "a GPU"), "2.0")
    seats = Recording(config, [], READ, machine).role_devices()
    # GPU 1 has the learner by hand; the processes after it are dealt to 1, 0 and 1.
    assert {role: [s.devices for s in found] for role, found in seats.items()} == {
        "learner": [(0,)],
        "generator": [(0,), (1,)],
        "critic": [(0,)],
        "reference": [(0,)],
        FUNCTION: [()],
    }
    assert seats["generator"][0].threads == 3
    assert seats["critic"][0].host == 0


@pytest.mark.parametrize(
    ("tokens", "scaling"), [(5, 1.0), (10, 1.0), (20, 1.25), (40, 1.5), (80, 1.5)]
)
def test_the_lock_counts_as_measured_for_rows_of_the_runs_length(
    tokens: int, scaling: float
) -> None:
    """Measured with 10 and 40 tokens, of which 20 is the geometric mean. Not of processes."""
    machine = replace(TWO_CORES, thread_scaling=(1.0, 1.5))
    rollout: Any = SimpleNamespace(prompt_tokens=2, tokens=tokens - 2, finish="stop")
    inline = settings().model_copy(update={"runtime": "inline"})
    assert Recording(inline, [rollout], READ, machine)._thread_scaling == pytest.approx(scaling)
    local = settings().model_copy(update={"runtime": "local"})
    assert Recording(local, [rollout], READ, machine)._thread_scaling == 0.0


def test_functions_work_beside_all_others_and_a_run_without_overlap_has_one_worker() -> None:
    inline = settings().model_copy(update={"runtime": "inline"})
    (one,) = Recording(inline, [], READ, TWO_CORES).role_devices()["generator"]
    assert (one.devices, one.threads) == ((0,), 2)
    seats = Recording(inline, [], READ, TWO_CORES).role_devices()
    assert all(found == [one] for found in seats.values())
    local = settings(schedule=ScheduleConfig(preset="oppo"))
    (function,) = Recording(local, [], READ, TWO_CORES).role_devices()[FUNCTION]
    assert (function.devices, function.threads) == ((), 1)


def test_records_of_one_number_of_ranks_say_nothing_of_another() -> None:
    config = settings(schedule=ScheduleConfig())
    sharded = ClusterConfig.model_validate({"processes": [{"roles": ["learner"], "ranks": 2}]})
    run = recording(config, crowded(config))
    with raises(ConfigError, "cuts-not-recorded", "{'learner': '{ fsdp = 2 }'}"):
        run.cluster(settings(schedule=ScheduleConfig(), cluster=sharded))


def test_accepted_tokens_are_replayed_as_they_were_recorded() -> None:
    args: dict[str, Any] = {"speculative_tokens": 4, "speculative_rows": 2}
    config = settings(schedule=ScheduleConfig(), rollout={"engine_args": args})
    run, counts = recording(config, crowded(config)), {"eligible": 8, "proposed": 20}
    spans = [
        replace(s, attributes={**s.attributes, **counts, "accepted": 4}) if s.name == "gen" else s
        for s in run.spans
    ]
    run = replace(run, spans=spans)

    (generator,) = run.cluster().generators
    assert generator.speculation == SimSpeculation(rows=2, proposed=2.5, accepted=0.5)
    for name, value in (("speculative_tokens", 0), ("speculative_rows", 3)):
        with raises(ConfigError, "speculation-not-recorded", name):
            run.cluster(config.changed_in("rollout", engine_args={**args, name: value}))


def test_a_run_that_ended_nothing_cannot_be_replayed() -> None:
    config = settings()
    record = RolloutRecord.of(1, Rollout(0, Prompt(0, (1, 2), ""), 0, tokens=array("i", [3])), None)
    with raises(StateError, "no-rollouts"):
        Recording(config, [record], [], TWO_CORES).cluster()


# -- machines and files -----------------------------------------------------------------------


def test_machine_and_starts_are_kept_in_the_folder_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Machine.here()
    assert found.cores == usable_cores() >= 1
    folder = RunDirectory.create(tmp_path, "run", Config())
    monkeypatch.setattr("sys.argv", ["/bin/stretto", "train", "tiny", "--out", "my runs"])
    folder.save_machine(found)
    monkeypatch.setattr("sys.argv", ["/lib/stretto/__main__.py", "train", "--resume", "run-001"])
    folder.save_machine(found)
    assert folder.read_machine() == found
    begun, resumed = folder.read_starts()
    assert begun["command"] == "stretto train tiny --out 'my runs'"
    assert resumed["command"] == "stretto train --resume run-001"
    given = ["run.py", "--hf-token", "a", "--judge.API_KEY=b c", "--max-new-tokens", "8", "--token"]
    monkeypatch.setattr("sys.argv", given)
    folder.save_machine(found)
    hidden = "run.py --hf-token '***' '--judge.API_KEY=***' --max-new-tokens 8 --token"
    assert folder.read_starts()[2]["command"] == hidden
    assert datetime.fromisoformat(begun["date"]) <= datetime.fromisoformat(resumed["date"])
    assert begun["versions"]["torch"] == found.torch
    assert list(begun["versions"]) == ["python", "stretto", "torch", "transformers"]
    folder.add_to_machine(thread_scaling=(1.25, 1.5))
    assert (folder.read_machine(), len(folder.read_starts())) == (
        replace(found, thread_scaling=(1.25, 1.5)),
        3,
    )
    folder.machine_file.write_text("{}")
    with pytest.raises(StateError, match=r"machine\.json' cannot be read"):
        folder.read_machine()
    folder.save_machine(found)  # as of a run that is resumed
    assert (folder.read_machine(), len(folder.read_starts())) == (found, 1)
    two = Machine("a CPU", 1, 1, ("H200", "H200"), "2.11")
    assert str(two) == "a CPU, 1 core, 2 x H200, torch 2.11"


def test_rollouts_in_flight_are_kept_and_told_from_those_that_ended(tmp_path: Path) -> None:
    folder = RunDirectory.create(tmp_path, "run", Config())
    left = Rollout(7, Prompt(7, (1, 2), ""), 7, tokens=array("i", [3, 4]))
    folder.append_rollouts(3, [left], {})
    assert folder.read_rollouts() == []
    (record,) = folder.read_rollouts(in_flight=True)
    assert (record.id, record.tokens, record.finish, record.in_flight) == (7, 2, None, True)
    folder.append_metrics(2, {})
    folder.rewind(2)  # a run that is resumed with more steps takes it up again
    assert folder.read_rollouts(in_flight=True) == []
