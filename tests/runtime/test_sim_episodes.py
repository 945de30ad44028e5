"""Episodes in virtual time: their turns and waits, what a wait costs, and whole simulated runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from helpers import ticket
from raising import raises
from stretto.config import PresetName, ScheduleConfig, recipes
from stretto.errors import ConfigError
from stretto.observe.spans import Spans
from stretto.runtime.sim.cluster import (
    Cluster,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
)
from stretto.runtime.sim.costs import (
    DecodeCost,
    GeneratorCost,
    PrefillCost,
    TrainCost,
    TransferCost,
)
from stretto.runtime.sim.generator import SimGenerator
from stretto.runtime.sim.lengths import Lengths, Lognormal, Uniform
from stretto.runtime.sim.loop import VirtualClock, run
from stretto.runtime.sim.resources import Device, SimWorker
from stretto.runtime.sim.sim_roles import SimScorer
from stretto.runtime.sim.simulate import simulate
from stretto.runtime.sim.turns import (
    AnswerLatency,
    SimEnvironment,
    SimEpisodes,
    SimTurn,
    Turns,
    turn_of,
)
from stretto.schedules.rollout import Rollout
from stretto.types import Chunk, FinishReason, Prompt, Sampling

TURN, STOP, LENGTH = FinishReason.TURN, FinishReason.STOP, FinishReason.LENGTH
PROMPT = 10
COST = GeneratorCost(
    decode=DecodeCost(step_s=1.0),
    prefill=PrefillCost(token_s=0.1),
    offload=TransferCost(bytes_per_s=10.0),
    cache_bytes=1.0,
)
TURNS = {
    0: [SimTurn(3, 5.0, 2), SimTurn(4, 0.0, 0)],
    1: [SimTurn(2, 1.0, 1), SimTurn(1, 2.0, 3), SimTurn(6, 0.0, 0)],
}


def virtually(body: Callable[[Spans], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        return await body(Spans(VirtualClock()))

    return run(main())


def episode(id_: int, most: int = 1000, most_in_turn: int = 1000) -> Rollout:
    sampling = Sampling(most, max_turn_tokens=most_in_turn)
    return Rollout(id_, Prompt(id_, (0,) * PROMPT, ""), id_, sampling=sampling)


def make(spans: Spans, cost: GeneratorCost = COST, slots: int = 0) -> SimGenerator:
    worker, role = SimWorker("generator", [Device(0)], spans), GeneratorRole(cost=cost, slots=slots)
    return SimGenerator(
        worker, role, lambda i: 7, max_new_tokens=1000, turns=lambda i: TURNS[i % 2]
    )


async def play(
    g: SimGenerator,
    rollouts: Sequence[Rollout],
    wait: Callable[[dict[int, Rollout]], Any] | None = None,
) -> None:
    """Play episodes in lockstep: all turns, then all waits."""
    env = SimEnvironment(lambda i: TURNS[i % 2], 1000)
    going = {r.id: r for r in rollouts}
    while going:
        await g.admit([r.response() for r in going.values()])
        for chunk in (await g.decode(1000)).chunks:
            going[chunk.rollout_id].append(chunk)
        if wait:
            await wait(going)
        answers = await asyncio.gather(*(env.step(r.response()) for r in going.values()))
        for answer in answers:
            rollout = going[answer.rollout_id]
            if answer.ended_by:
                rollout.ended_by = answer.ended_by
                del going[rollout.id]
            else:
                rollout.append(rollout.observe(answer))


# -- turns and waits ----------------------------------------------------------------------------


def test_turns_depend_on_seed_and_rollout_alone() -> None:
    episodes = SimEpisodes(turns=Uniform(low=1, high=5), wait_s=AnswerLatency(median=0.5, p95=5.0))
    lengths = Lognormal(median=100, p95=300)
    turns = Turns(episodes, lengths, 3)
    forward = [turns(i) for i in range(30)]
    again = Turns(episodes, lengths, 3)
    assert [again(i) for i in reversed(range(30))] == forward[::-1]
    assert [Turns(episodes, lengths, 4)(i) for i in range(30)] != forward
    assert {len(t) for t in forward} == {1, 2, 3, 4, 5}
    # A first turn is as long as the whole response without episodes.
    assert [t[0].tokens for t in forward] == [Lengths(lengths, 3)(i) for i in range(30)]
    assert all(t[-1][1:] == (0.0, 0) for t in forward)
    assert all(turn.answer > 0 for t in forward for turn in t[:-1])


def test_waits_have_the_percentiles_they_are_made_from() -> None:
    turns = Turns(SimEpisodes(turns=Uniform(low=2, high=2)), Uniform(low=1, high=1), 0)
    waits = [turns(i)[0].wait_s for i in range(20_000)]
    assert np.percentile(waits, 50) == pytest.approx(0.5, rel=0.05)
    assert np.percentile(waits, 95) == pytest.approx(5.0, rel=0.1)
    assert AnswerLatency(median=0, p95=0).quantile(0.9) == 0.0
    with raises(ConfigError, "p95-below-median"):
        recipes.build({"median": 2.0, "p95": 1.0}, "waits", AnswerLatency)


def test_recorded_turns_start_over() -> None:
    recorded = (((3, 0.5, 2), (4, 0.0, 0)), ((5, 0.0, 0),))
    turns = Turns(SimEpisodes(recorded=recorded), Uniform(), 0)
    assert [len(turns(i)) for i in range(4)] == [2, 1, 2, 1]
    assert turns(2)[0] == SimTurn(3, 0.5, 2)


def test_mean_tokens_count_turns_and_answers() -> None:
    episodes = SimEpisodes(turns=Uniform(low=3, high=3), answer_tokens=Uniform(low=7, high=7))
    fixed = {"prompt_tokens": Uniform(low=10, high=10), "response_tokens": Uniform(low=5, high=5)}
    assert Workload(episodes=episodes, **fixed).mean_tokens == 10 + 3 * 5 + 2 * 7
    assert Workload(episodes=episodes, max_new_tokens=20, **fixed).mean_tokens == 10 + 20
    assert Workload(**fixed).mean_tokens == 15


def test_which_turn_a_response_is_in() -> None:
    r = episode(0)
    assert turn_of(r.response()) == 0
    for version, n, turn in ((0, 3, 0), (-1, 2, 1), (0, 1, 1), (-1, 1, 2)):
        columns = np.zeros(n, np.int32), np.zeros(n, np.float32)
        r.append(Chunk(0, len(r), *columns, version))
        assert turn_of(r.response()) == turn


# -- the generator ------------------------------------------------------------------------------


def test_a_turn_parks_its_rollout_and_only_the_answer_is_prefilled() -> None:
    """Turns of 3 and 2 tokens, then of 4 and 1, then of 6; waits of 5 and 1 s, then of 2 s."""

    async def body(spans: Spans) -> Any:
        rollouts = [episode(0), episode(1)]
        await play(make(spans), rollouts)
        return rollouts, spans.records

    (first, second), records = virtually(body)
    assert (len(first), first.turns, first.context) == (9, [3, 9], [(3, 5)])
    assert (len(second), second.turns) == (13, [2, 4, 13])
    assert second.context == [(2, 3), (4, 7)]
    assert first.ended_by == second.ended_by == "environment"
    assert first.sampled_tokens == 7
    assert [s.attributes["prefilled"] for s in records] == [20, 2 + 1, 3]
    starts = [round(s.start_s, 6) for s in records]
    # 2 s of prefill and 3 steps, 5 s of waiting; 0.3 s and 4 steps, 2 s; 0.3 s and 6 steps.
    assert starts == [0.0, 10.0, 16.3]
    assert records[-1].end_s == pytest.approx(16.3 + 6.3)


@pytest.mark.parametrize(
    ("how", "prefilled", "copied_s"),
    [("keep", 3, []), ("remake", 13 + 2 + 12 + 1, []), ("offload", 3, [2.5, 2.5])],
)
def test_what_becomes_of_keys_and_values(
    how: Literal["keep", "remake", "offload"], prefilled: int, copied_s: list[float]
) -> None:
    """13 and 12 tokens wait, of which a byte each goes to the host, 10 a second."""

    async def body(spans: Spans) -> Any:
        g = make(spans)

        async def wait(going: dict[int, Rollout]) -> None:
            await g.hold([*going, 99], how)

        await play(g, [episode(0), episode(1)], wait)
        return spans.records

    records = virtually(body)
    calls = [s for s in records if s.name == "gen"]
    assert calls[1].attributes["prefilled"] == prefilled
    copies = [s.end_s - s.start_s for s in records if s.name in ("offload", "onload")]
    assert copies[:2] == pytest.approx(copied_s)


def test_new_weights_void_what_waits() -> None:
    async def body(spans: Spans) -> Any:
        g = make(spans)

        async def wait(going: dict[int, Rollout]) -> None:
            await g.hold([0], "offload")
            await g.load(ticket(1, ""))

        await play(g, [episode(0), episode(1)], wait)
        return [s.attributes["prefilled"] for s in spans.records if s.name == "gen"]

    assert virtually(body)[1] == 15 + 13


def test_what_waits_longest_gives_way_to_rows_that_decode() -> None:
    """Room for 40 tokens: 13 and 12 wait, and a third needs 13 + 10 more than is left."""

    async def body(spans: Spans) -> Any:
        g = make(spans, COST.model_copy(update={"cache_tokens": 40}))
        first, second, third = episode(0), episode(1), episode(2)
        for r in (first, second):
            await g.admit([r.response()])
            for chunk in (await g.decode(1000)).chunks:
                r.append(chunk)
        await g.admit([third.response()])  # 13 tokens: fits beside 13 + 12
        third.append((await g.decode(1000)).chunks[0])
        fourth = episode(3)
        await g.admit([fourth.response()])  # 12 tokens more than fit: the first gives way
        fourth.append((await g.decode(1000)).chunks[0])
        env = SimEnvironment(lambda i: TURNS[i % 2], 1000)
        for r in (second, first):
            r.append(r.observe(await env.step(r.response())))
            await g.admit([r.response()])
            await g.decode(1000)
        return [s.attributes["prefilled"] for s in spans.records if s.name == "gen"]

    assert virtually(body) == [10, 10, 10, 10, 1, 15]


def test_limits_of_turns_and_episodes_end_both() -> None:
    async def body(spans: Spans) -> Any:
        g, env = make(spans), SimEnvironment(lambda i: TURNS[i % 2], 4)
        short, whole = episode(0, most_in_turn=2), episode(2, most=4)
        await g.admit([short.response(), whole.response()])
        for chunk in (await g.decode(1000)).chunks:
            (short if chunk.rollout_id == 0 else whole).append(chunk)
        assert short.ended_by == "turn_tokens"
        # Three tokens and an answer of two are more than four.
        return len(short), (await env.step(whole.response())).ended_by

    assert virtually(body) == (2, "tokens")


def test_a_released_rollout_that_waits_is_forgotten() -> None:
    async def body(spans: Spans) -> Any:
        g, r = make(spans), episode(0)
        await g.admit([r.response()])
        await g.decode(1000)
        await g.hold([0], "offload")
        await g.release([0])
        await g.admit([episode(0).response()])
        await g.decode(1000)
        return [s.attributes["prefilled"] for s in spans.records if s.name == "gen"]

    assert virtually(body) == [10, 10]


def test_a_scorer_prefills_in_waits_and_answers_for_sampled_tokens() -> None:
    async def body(spans: Spans) -> Any:
        role = ScorerRole(
            name="reference", kind="logprobs", devices=(0,), cost=PrefillCost(token_s=1.0)
        )
        scorer = SimScorer(SimWorker("reference", [Device(0)], spans), role)
        await scorer.admit([episode(0).response()])
        sampled, context = np.zeros(3, np.int32), np.zeros(2, np.int32)
        numbers = np.zeros(3, np.float32)
        await scorer.extend([Chunk(0, 0, sampled, numbers, 4, TURN)])
        await scorer.extend([Chunk(0, 3, context, numbers[:2], -1)])
        await scorer.extend([Chunk(0, 5, sampled, numbers, 5, STOP)])
        (score,) = await scorer.finish([0])
        return len(score.values), [s.attributes["tokens"] for s in spans.records]

    assert virtually(body) == (6, [13, 2, 3, 0])


# -- whole runs ---------------------------------------------------------------------------------


def described(preset: PresetName = "sync", **workload: Any) -> Cluster:
    """A second a step of decoding, and one for training; episodes 0 and 1 of TURNS in turn."""
    recorded = tuple(tuple(tuple(turn) for turn in TURNS[i]) for i in (0, 1))
    given: dict[str, Any] = {"batch": 2, "steps": 2, "max_new_tokens": 1000}
    given |= {"prompt_tokens": Uniform(low=10, high=10), "episodes": SimEpisodes(recorded=recorded)}
    return Cluster(
        generators=(GeneratorRole(cost=COST),),
        scorers=(ScorerRole(name="reward", devices=(1,), cost=PrefillCost(token_s=0.001)),),
        learner=LearnerRole(devices=(2,), cost=TrainCost(step_s=1.0)),
        workload=Workload(**{**given, **workload}),
        schedule=ScheduleConfig(preset=preset),
    )


def test_turns_in_lockstep_by_hand() -> None:
    """Prefill of 20 tokens and 3 steps, 5 s; 3 answers' tokens and 4 steps, 2 s; 3 and 6 steps.

    Then 9 + 13 response tokens and 20 of prompts are scored, and a second of training.
    """
    result = simulate(described())
    step_s = (2.0 + 3 + 5) + (0.3 + 4 + 2) + (0.3 + 6) + 0.042 + 1.0
    assert [step["timing_s/step"] for step in result.steps] == pytest.approx([step_s, step_s])
    calls = [s for s in result.spans if s.role == "environment" and s.name == "step"]
    assert Counter(s.attributes["rollout"] for s in calls) == {0: 2, 1: 3, 2: 2, 3: 3}
    assert result.ledger["trained"] == 4


def test_waits_are_filled_by_what_overlaps_them() -> None:
    waits = SimEpisodes(wait_s=AnswerLatency(median=10, p95=100))
    workload = {"batch": 16, "steps": 8, "episodes": waits, "max_new_tokens": 512}
    lengths = {"response_tokens": Lognormal(median=20, p95=60)}
    took = {
        preset: simulate(described(preset, **workload, **lengths)).makespan_s
        for preset in ("sync", "oppo", "stretto")
    }
    assert took["sync"] > 1.1 * took["oppo"] > 1.1 * took["stretto"]


@pytest.mark.parametrize("preset", ["sync", "oppo", "stretto"])
def test_each_schedule_trains_on_the_very_same_episodes(preset: PresetName) -> None:
    workload = {"batch": 4, "steps": 6, "samples_per_prompt": 2, "episodes": SimEpisodes()}
    cluster = described(preset, **workload, response_tokens=Lognormal(median=20, p95=60))
    turns = cluster.workload.turns
    assert turns
    result = simulate(cluster)
    assert result.ledger["trained"] == 24
    ended = Counter(
        s.attributes["rollout"]
        for s in result.spans
        if s.role == "environment" and s.name == "step"
    )
    whole = [i for i in ended if ended[i] == len(turns(i))]
    assert len(whole) >= 24
    assert all(ended[i] <= len(turns(i)) for i in ended)


def test_rewards_of_the_environment_are_the_score() -> None:
    rewarded = SimEpisodes(rewarded=True)
    cluster = described(episodes=rewarded, rewards=(1.0, 3.0, 5.0, 7.0))
    cluster = cluster.model_copy(update={"scorers": ()})
    scores = [step["objective/scores"] for step in simulate(cluster).steps]
    assert scores == [2.0, 6.0]


def test_room_that_is_short_costs_less_where_what_waits_is_let_go() -> None:
    """Prefilling dear, copying cheap, room for some of what waits: auto reads least again."""
    cost = COST.model_copy(update={"cache_tokens": 1500, "offload": TransferCost(bytes_per_s=1e4)})
    workload: dict[str, Any] = {"batch": 16, "steps": 6, "max_new_tokens": 512}
    workload |= {"episodes": SimEpisodes(wait_s=AnswerLatency(median=20, p95=200))}
    workload |= {"response_tokens": Lognormal(median=20, p95=60)}
    prefilled = {}
    for hold in ("keep", "offload", "remake", "auto"):
        schedule = ScheduleConfig(preset="async", hold=hold)
        cluster = described(**workload).model_copy(
            update={"schedule": schedule, "generators": (GeneratorRole(cost=cost),)}
        )
        spans = simulate(cluster).spans
        prefilled[hold] = sum(s.attributes["prefilled"] for s in spans if s.name == "gen")
    assert prefilled["offload"] <= prefilled["auto"] < prefilled["keep"] <= prefilled["remake"]
