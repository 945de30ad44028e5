"""Controllers: chunk size, over-commitment, and what they know of lengths and latency. No torch."""

from __future__ import annotations

import heapq
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stretto
from docs_helpers import blocks
from raising import raises
from run_helpers import settings
from stretto.api.planning import PLANNED, variants_of
from stretto.assembly.controllers import ScheduledRun, controls, controls_of
from stretto.config import Config, ScheduleConfig, recipes
from stretto.config.knobs import Settings
from stretto.errors import ConfigError, StateError
from stretto.schedules.buffer import Buffer
from stretto.schedules.chunking import ChunkSize, FixedChunk, TunedChunk
from stretto.schedules.controller import DecodeSample, Feedback
from stretto.schedules.migration import (
    AutoMigration,
    FixedMigration,
    MigrationLimits,
    MigrationPolicy,
)
from stretto.schedules.overcommit import (
    Algorithm1,
    Equation4,
    FixedOvercommit,
    Overcommit,
    ThroughputOvercommit,
)
from stretto.schedules.predictors import LatencyModel, LengthModel, drain_seconds, drain_times
from stretto.schedules.rollout import Rollout
from stretto.types import FinishReason, Prompt


def feedback(
    reward: float = 0.0,
    lengths: Sequence[int] = (),
    decode: Sequence[DecodeSample] = (),
    seconds: float = 1.0,
    overhead_s: float = 0.0,
) -> Feedback:
    return Feedback(reward, lengths, decode, seconds, overhead_s)


def is_plain(data: Any) -> bool:
    if isinstance(data, dict):
        return all(type(k) is str and is_plain(v) for k, v in data.items())
    if type(data) is list:
        return all(map(is_plain, data))
    return type(data) in (int, float)


# -- the distribution of lengths --------------------------------------------------------------


def test_lengths_of_one_step_count_the_same() -> None:
    model = LengthModel(100)
    model.observe([10, 40, 20, 30])
    assert len(model) == 4
    assert model.mean() == pytest.approx(25)
    assert [model.quantile(q) for q in (0.0, 0.25, 0.5, 0.51, 1.0)] == [10, 10, 20, 30, 40]
    assert model.sample(np.array([[0.0, 0.3], [0.74, 0.99]])).tolist() == [[10, 20], [30, 40]]


def test_newer_lengths_count_more_and_old_ones_are_forgotten() -> None:
    model = LengthModel(8)  # a half-life is 2 lengths
    model.observe([10, 10])
    model.observe([50, 50])
    assert model.mean() == pytest.approx((10 * 0.5 + 50) / 1.5)
    for _ in range(4):
        model.observe([50, 50])
    assert len(model) == 8
    assert model.mean() == pytest.approx(50)
    assert model.quantile(0.0) == 50


def test_lengths_that_were_never_seen_are_an_error() -> None:
    with raises(StateError, "no-data"):
        LengthModel(4).mean()
    with raises(ConfigError, "number-too-small", "window", 0):
        LengthModel(0)


# -- the latency of decode steps --------------------------------------------------------------


def calls_of(
    curve: Callable[[float], float], rows: Sequence[float], noise: float = 0.0, seed: int = 0
) -> list[DecodeSample]:
    rng = np.random.default_rng(seed)
    return [DecodeSample(r, 32, 32 * curve(r) * (1 + noise * rng.standard_normal())) for r in rows]


@pytest.mark.parametrize(
    ("curve", "tolerance"),
    [
        (lambda r: 0.02 + 0.0005 * r, 0.02),
        (lambda r: 0.001 * r, 0.02),
        (lambda r: 0.05, 0.02),
        (lambda r: 0.02 + 0.0003 * r + 0.004 * max(0.0, r - 40), 0.1),
    ],
    ids=["affine", "proportional", "flat", "knee"],
)
def test_a_latency_curve_is_found_again(curve: Callable[[float], float], tolerance: float) -> None:
    model = LatencyModel()
    calls = calls_of(curve, [*range(4, 84)] * 3, noise=0.02)
    calls[7] = DecodeSample(calls[7].rows, 32, 50 * calls[7].seconds)  # two pauses
    calls[90] = DecodeSample(calls[90].rows, 32, 10 * calls[90].seconds)
    model.observe(calls)
    asked = np.array([8.0, 20, 40, 60, 80])
    np.testing.assert_allclose(model.step_seconds(asked), [curve(r) for r in asked], rtol=tolerance)


def test_with_one_number_of_rows_the_curve_is_flat() -> None:
    model = LatencyModel()
    model.observe(calls_of(lambda r: 0.01 * r, [8] * 30, noise=0.05))
    assert float(model.step_seconds(64)) == pytest.approx(0.08, rel=0.05)
    assert float(model.step_seconds(1)) == float(model.step_seconds(64))


def test_prefill_is_told_apart_from_decoding() -> None:
    model = LatencyModel()
    for carried in (0, 10, 20, 30, 5, 15):
        rows = [32 + carried - 3 * k for k in range(10)]
        calls = calls_of(lambda r: 0.02 + 0.001 * r, rows)
        first = DecodeSample(rows[0], 32, calls[0].seconds + 0.4 + 0.05 * carried, True, carried)
        model.observe([*calls[5:], first, *calls[1:5]])  # a round that began before the hand-over
    np.testing.assert_allclose(model.step_seconds([1, 50]), [0.021, 0.07], rtol=0.01)
    assert model.start_seconds(0) == pytest.approx(0.4, rel=0.05)
    assert model.start_seconds(20) == pytest.approx(1.4, rel=0.05)


def test_latency_says_when_it_knows_nothing() -> None:
    model = LatencyModel()
    model.observe([DecodeSample(4, 0, 1.0, first=True), DecodeSample(0, 3, 1.0)])
    assert len(model) == 0
    with raises(StateError, "no-data"):
        model.step_seconds(1)


def test_rows_drain_as_they_would_one_step_at_a_time() -> None:
    step_seconds = np.array([1.0, 1.5, 3.0, 3.25])
    remaining = np.array([2, 2, 5, 9])
    now, ends = 0.0, {}
    for token in range(1, 10):
        now += step_seconds[(remaining >= token).sum() - 1]
        ends.update(dict.fromkeys(np.flatnonzero(remaining == token), now))
    expected = np.array([ends[i] for i in range(4)])
    np.testing.assert_allclose(drain_times(step_seconds, remaining), expected)
    assert float(drain_seconds(step_seconds, remaining)) == pytest.approx(now)
    assert now == pytest.approx(2 * 3.25 + 3 * 1.5 + 4 * 1.0)


# -- chunk size ---------------------------------------------------------------------------------


def run_chunks(
    chunk: ChunkSize, per_token_s: Callable[[int, int], float], lengths: Sequence[int], steps: int
) -> list[int]:
    """The sizes used, when a step at a size takes so many seconds a token."""
    sizes = []
    for step in range(steps):
        sizes.append(chunk.tokens)
        decode = [DecodeSample(2.0, 50, 0.1), DecodeSample(1.0, 100, 0.1)]  # 200 tokens
        seconds = 200 * per_token_s(chunk.tokens, step)
        chunk.observe(feedback(lengths=lengths, decode=decode, seconds=seconds))
    return sizes


def test_a_fixed_chunk_stays() -> None:
    chunk = FixedChunk(100)
    assert run_chunks(chunk, lambda size, step: 1.0, [600], 5) == [100] * 5
    with raises(ConfigError, "number-too-small", "chunk_tokens", 1, 0):
        FixedChunk(0)


def test_what_another_run_chose_is_replayed_step_by_step() -> None:
    chunk, overcommit = FixedChunk(128, 64, 256), FixedOvercommit(0, 4)
    chosen = []
    for _ in range(4):
        chosen.append((chunk.tokens, overcommit.delta))
        chunk.observe(feedback())
        overcommit.observe(feedback())
    assert chosen == [(128, 0), (64, 4), (256, 4), (256, 4)]
    resumed = FixedChunk(128, 64, 256)
    resumed.load_state_dict({"place": 1})
    assert (resumed.tokens, chunk.state_dict()) == (64, {"place": 4})
    with raises(ConfigError, "number-too-small", "chunk_tokens", 0):
        FixedChunk(8, 0)
    with raises(ConfigError, "number-too-small", "delta", 0):
        FixedOvercommit()


def test_chunks_take_turns_and_the_fastest_serves() -> None:
    chunk = TunedChunk(window=12, max_new_tokens=1024)
    times = {128: 3.0, 256: 2.0, 512: 1.0}
    # Step 0 is slow and counts for nothing. In the second window 128 has become the fastest.
    sizes = run_chunks(
        chunk,
        lambda size, step: 100.0 if step == 0 else times[size] if step < 13 else size,
        [900],
        25,
    )
    assert sizes[0] == 256
    assert sizes[1:13] == [128, 256, 512] + [512] * 9
    assert sizes[13:25] == [128, 256, 512] + [128] * 9


def test_a_pause_does_not_decide_when_each_size_has_several_turns() -> None:
    chunk = TunedChunk(window=50, max_new_tokens=1024)
    pauses = {3: 50.0}  # the first turn of 512, which is the fastest
    sizes = run_chunks(
        chunk, lambda size, step: pauses.get(step, {128: 3.0, 256: 2.0, 512: 1.0}[size]), [900], 51
    )
    assert sizes[1:13] == [128, 256, 512] * 4
    assert set(sizes[13:]) == {512}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1024, [128, 256, 512]), (511, [64, 128, 256]), (100, [16, 32, 64]), (12, [8]), (4, [8])],
)
def test_candidates_shrink_to_the_token_limit(limit: int, expected: list[int]) -> None:
    chunk = TunedChunk(window=12, max_new_tokens=limit)
    sizes = run_chunks(chunk, lambda size, step: size, [limit], 13)
    assert sorted(set(sizes[1:])) == expected
    assert sizes[-1] == expected[0]


def test_candidates_follow_the_long_responses_seen() -> None:
    chunk = TunedChunk(window=12, max_new_tokens=1024)
    lengths = [*[60] * 94, *[130] * 6]  # the 95th percentile is 130
    sizes = run_chunks(chunk, lambda size, step: size, lengths, 17)
    assert sizes[1:4] == [128, 256, 512]
    assert sizes[13:16] == [32, 64, 128]  # in the second window


def test_of_chunks_about_as_fast_the_largest_serves() -> None:
    chunk = TunedChunk(window=12, max_new_tokens=1024)
    times = {128: 1.0, 256: 1.04, 512: 1.06}
    assert run_chunks(chunk, lambda size, step: times[size], [900], 6)[4:] == [256, 256]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"candidates": (4, 128)}, ("chunks-too-short", 8, "(4, 128)")),
        ({"candidates": ()}, ("chunks-too-short", 8, "()")),
        ({"window": 3}, ("window-too-short", "3 steps", "try 3")),
    ],
)
def test_chunk_sizes_that_cannot_be_tuned(
    arguments: dict[str, Any], message: tuple[Any, ...]
) -> None:
    with raises(ConfigError, *message):
        TunedChunk(**{"max_new_tokens": 64, **arguments})


# -- over-commitment by rewards ------------------------------------------------------------------


def deltas(controller: Overcommit, rewards: Sequence[float]) -> list[int]:
    seen = []
    for reward in rewards:
        controller.observe(feedback(reward))
        seen.append(controller.delta)
    return seen


def test_equation_4_by_hand() -> None:
    # Slopes over two differences: (1 - 0) / 2, (1 - 2) / 2, (1 - 1) / 2, (5 - 1) / 2.
    rewards = [0, 2, 1, 1, 1, 5]
    assert deltas(Equation4(4, 0, 8, window=2), rewards) == [4, 4, 5, 4, 3, 4]
    assert deltas(Equation4(4, 0, 8, window=2, inc=3, dec=2), rewards) == [4, 4, 7, 5, 3, 6]
    assert deltas(Equation4(4, 4, 5, window=2, inc=3, dec=2), rewards) == [4, 4, 5, 4, 4, 5]


def test_algorithm_1_by_hand() -> None:
    # Means of 2 and 2: rising (8 - 8 // 4), falling (6 + 6 // 4), level, rising, falling.
    rewards = [0, 1, 2, 3, 1, 1, 1, 1, 5, 5, 0, 0]
    assert deltas(Algorithm1(8, 0, 12, window=2), rewards) == [8, 8, 8, 6, 6, 7, 7, 7, 7, 6, 6, 7]
    assert deltas(Algorithm1(3, 0, 12, window=1), [0, 1]) == [3, 2]  # max(1, 3 // 4) = 1
    assert deltas(Algorithm1(8, 7, 12, window=1), [0, 1]) == [8, 7]
    assert deltas(Algorithm1(8, 7, 9, window=1), [1, 0]) == [8, 9]


def test_algorithm_1_adapts_every_window_once_there_are_two() -> None:
    """The paper keeps ``reward_scores[-W:]``: with W = 3 at step 6, and then every 3."""
    seen = deltas(Algorithm1(16, 0, 32, window=3), [float(i) for i in range(24)])
    assert seen == [*[16] * 5, *[12] * 3, *[9] * 3, *[7] * 3, *[6] * 3, *[5] * 3, *[4] * 3, 3]


def test_the_two_rules_move_in_opposite_directions() -> None:
    rising = [float(i) for i in range(20)]
    assert deltas(Equation4(8, 0, 16, window=2), rising)[-1] == 16
    assert deltas(Algorithm1(8, 0, 16, window=2), rising)[-1] < 8


def test_rules_refuse_contradictions() -> None:
    assert FixedOvercommit(3).delta == 3
    with raises(ConfigError, "number-too-small", "delta", -1):
        FixedOvercommit(-1)
    with raises(ConfigError, "number-too-small", "start", 4, 2):
        Equation4(2, 4, 8, window=2)
    with raises(ConfigError, "number-too-small", "high", 9, 8):
        Equation4(9, 4, 8, window=2)
    with raises(ConfigError, "number-too-small", "low", -1):
        Equation4(2, -1, 8, window=2)
    with raises(ConfigError, "number-too-small", "window", 0):
        Algorithm1(2, 0, 8, window=0)
    with raises(ConfigError, "batch-not-groups", 10, 4):
        ThroughputOvercommit(10, 8, 2, group=4)
    with raises(ConfigError, "number-too-small", "max_carries", -1):
        ThroughputOvercommit(8, 8, -1)
    with raises(ConfigError, "number-too-small", "high", 9, 8):
        ThroughputOvercommit(8, 8, 1, low=9)


def test_the_rules_get_their_settings() -> None:
    def rule(**schedule: Any) -> Overcommit:
        given = {"overcommit": "auto", "overcommit_window": 1, **schedule}
        config = Config.model_validate({"rollout": {"batch": 16}, "schedule": given})
        return controls_of(config, None).overcommit

    up_and_down = [0.0, 1.0, 2.0, 1.0, 0.0]
    assert deltas(rule(), up_and_down) == [8, 9, 10, 9, 8]
    steps = {"overcommit_increment": 3, "overcommit_decrement": 4, "overcommit_min": 5}
    assert deltas(rule(**steps, overcommit_max=12), up_and_down) == [6, 9, 12, 8, 5]
    assert deltas(rule(overcommit_min=14, overcommit_max=16), up_and_down) == [14, 15, 16, 15, 14]
    other = {"overcommit_rule": "algorithm1", "overcommit_start": 8, "overcommit_min": 7}
    assert deltas(rule(**other), up_and_down) == [8, 7, 7, 8, 10]
    assert rule(overcommit_rule="throughput", overcommit_min=5).delta == 5


def test_a_schedule_is_told_what_the_run_has_settled() -> None:
    config = Config.model_validate(
        {
            "seed": 5,
            "steps": 7,
            "rollout": {"batch": 8, "samples_per_prompt": 4, "max_new_tokens": 30, "engines": 2},
            "algorithm": {"name": "rloo"},
            "reward": {"on_failure": "drop"},
            "schedule": {"preset": "async", "max_carries": 3, "weight_sync_interval": 2},
        }
    )
    settings = controls_of(config, None).settings
    assert settings == Settings(
        batch=8,
        samples_per_prompt=4,
        max_new_tokens=30,
        steps=7,
        failures_allowed=1.0,
        group_at_least=2,
        reward_weights=config.reward.factors,
        score_on="rollout",
        lag=1,
        weight_sync_interval=2,
        max_carries=3,
        deadline_s=1800.0,
        most_overcommit=0,
    )


def test_stragglers_move_as_the_knob_says() -> None:
    sizes = Settings(batch=8, samples_per_prompt=1, max_new_tokens=30, steps=1)
    where = MigrationLimits(2, 8, 1000, 40, 1e3, 1e5, prompt_tokens=5)

    def policy(migrating: MigrationLimits | None, **schedule: Any) -> MigrationPolicy | None:
        given = ScheduleConfig.model_validate(schedule)
        return controls(ScheduledRun(given, sizes, 2, 0, migrating)).migration

    assert policy(None, migrate=0.5) is None
    assert policy(where) is None
    fixed = policy(where, migrate=0.5, weight_sync_interval=2)
    assert isinstance(fixed, FixedMigration)
    assert fixed.threshold() == 8  # half of two batches
    assert isinstance(policy(where, preset="rlhfuse"), AutoMigration)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"overcommit_min": 9}, "overcommit_min = 9 is above the largest delta, 8"),
        ({"overcommit_min": 4, "overcommit_start": 3}, "not between the smallest delta, 4"),
        ({"overcommit_start": 9}, "and the largest, 8"),
        ({"overcommit_decrement": -1}, "greater than or equal to 0"),
        (
            {"overcommit": 24, "max_carries": 1},
            "overcommit = 24 .* carried 3 times, and schedule.max_carries = 1; lower "
            "schedule.overcommit to 8",
        ),
        ({"overcommit_max": 17, "max_carries": 2}, "lower schedule.overcommit_max to 16"),
    ],
)
def test_settings_of_over_commitment_that_contradict_each_other(
    schedule: dict[str, Any], message: str
) -> None:
    given = {"overcommit": "auto", **schedule}
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"rollout": {"batch": 8}, "schedule": given})


def test_as_many_beyond_the_batch_as_can_be_trained_on_in_time() -> None:
    for schedule in (
        {"overcommit": 64, "max_carries": 8},
        {"overcommit": 32, "max_carries": 2, "weight_sync_interval": 2},
    ):
        Config.model_validate({"rollout": {"batch": 8}, "schedule": schedule})


# -- over-commitment by prediction ---------------------------------------------------------------

BATCH, HIGH, MAX_CARRIES, STEPS, CHUNK, OVERHEAD_S = 32, 128, 4, 120, 64, 0.5
LIMIT = 1024

Lengths = Callable[[int, int], float]
Latency = Callable[[int], float]


def simulate(
    controller: Overcommit,
    length: Lengths,
    latency: Latency,
    *,
    prefill_s: float = 0.0,
    group: int = 1,
    steps: int = STEPS,
) -> tuple[float, list[int]]:
    """Seconds that a run takes, and the deltas: the true process, event by event.

    Independent of what the controller assumes: a heap of rollouts by the decode step at which they
    end, decode calls of 64 steps at most, and the schedule's own buffer.
    """
    decoding: list[tuple[int, int]] = []  # decode step at which it ends, rollout
    buffer, rollouts, sizes = Buffer(MAX_CARRIES), {}, []
    clock, total_s, chosen = 0, 0.0, []
    for step in range(steps):
        carried = len(decoding)
        while len(buffer) < BATCH + controller.delta:
            first = len(sizes)
            for i in range(first, first + group):
                rollouts[i] = Rollout(i, Prompt(first, (), ""), first)
                sizes.append(min(LIMIT, max(1, int(length(len(sizes), step)))))
                heapq.heappush(decoding, (clock + sizes[i], i))
            buffer.add([rollouts[i] for i in range(first, first + group)])
        buffer.begin_round(BATCH // group)

        lengths, calls, call_s, call_rows, call_start = [], [], prefill_s * carried, 0, clock
        while not buffer.complete:
            until = min(decoding[0][0], call_start + CHUNK)
            call_s += (until - clock) * latency(len(decoding))
            call_rows += (until - clock) * len(decoding)
            clock = until
            while decoding and decoding[0][0] == clock:
                ended = rollouts[heapq.heappop(decoding)[1]]
                lengths.append(sizes[ended.id])
                ended.finish = FinishReason.STOP
                buffer.ended(ended)
            if clock == call_start + CHUNK or buffer.complete:
                ran, opening = clock - call_start, not calls
                calls.append(DecodeSample(call_rows / ran, ran, call_s, opening, opening * carried))
                call_s, call_rows, call_start = 0.0, 0, clock
        step_s = sum(c.seconds for c in calls) + call_s + OVERHEAD_S
        buffer.take()
        total_s += step_s
        controller.observe(feedback(0.0, lengths, calls, step_s, OVERHEAD_S))
        chosen.append(controller.delta)
    return total_s, chosen


def lengths_of(name: str, seed: int = 1) -> Lengths:
    rng = np.random.default_rng(seed)
    u, z = rng.random(40_000), rng.standard_normal(40_000)
    return {
        "lognormal": lambda i, step: 60 * np.exp(z[i]),
        "bimodal": lambda i, step: 40 + 8 * z[i] if u[i] < 0.85 else 500 + 50 * z[i],
        "uniform": lambda i, step: 200 * u[i],
        "geometric": lambda i, step: np.log(1 - u[i]) / np.log(1 - 1 / 80),
        "drifting": lambda i, step: 30 * np.exp(0.015 * step + 0.8 * z[i]),
        "pareto": lambda i, step: 30 * (1 - u[i]) ** (-1 / 1.1),
    }[name]


def bandwidth_bound(rows: int) -> float:
    return 0.02 + 0.0005 * rows


def saturating(rows: int) -> float:
    return 0.02 + 0.0003 * rows + 0.004 * max(0, rows - 40)


@pytest.mark.parametrize("latency", [bandwidth_bound, saturating])
@pytest.mark.parametrize(
    "name", ["lognormal", "bimodal", "uniform", "geometric", "drifting", "pareto"]
)
def test_prediction_keeps_up_with_the_best_fixed_delta(name: str, latency: Latency) -> None:
    fixed = {
        delta: simulate(FixedOvercommit(delta), lengths_of(name), latency)[0]
        for delta in (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    }
    best = min(fixed, key=lambda delta: fixed[delta])
    assert fixed[0] > 1.3 * fixed[best]
    if latency is saturating:
        assert fixed[128] > 1.2 * fixed[best]  # too much delta hurts
    controller = ThroughputOvercommit(BATCH, HIGH, MAX_CARRIES)
    seconds, _ = simulate(controller, lengths_of(name), latency)
    assert seconds <= 1.05 * fixed[best], f"best {best}: {seconds / fixed[best]:.3f}"


def test_equal_lengths_leave_delta_at_zero() -> None:
    controller = ThroughputOvercommit(BATCH, HIGH, MAX_CARRIES)
    _, chosen = simulate(controller, lambda i, step: 64, lambda rows: 0.001 * rows, steps=12)
    assert set(chosen[1:]) == {0}  # after one look at more rows


def test_prefill_of_carried_rollouts_is_counted() -> None:
    # Each carried rollout costs five decode steps again: with uniform lengths not worth it.
    free, costly = (
        simulate(
            ThroughputOvercommit(BATCH, HIGH, MAX_CARRIES),
            lengths_of("uniform"),
            bandwidth_bound,
            prefill_s=prefill_s,
            steps=40,
        )[1]
        for prefill_s in (0.0, 0.2)
    )
    assert np.mean(free[20:]) >= 32
    assert np.mean(costly[20:]) <= 4


def test_deltas_are_whole_groups_within_the_bounds() -> None:
    for high, max_carries, bound in ((50, 4, 48), (128, 1, 32)):
        controller = ThroughputOvercommit(BATCH, high, max_carries, group=4)
        _, chosen = simulate(
            controller, lengths_of("lognormal"), bandwidth_bound, group=4, steps=30
        )
        assert all(delta % 4 == 0 and delta <= bound for delta in chosen)
        assert max(chosen) > 16
    equal = ThroughputOvercommit(BATCH, HIGH, 4, low=6, group=4)
    _, chosen = simulate(equal, lambda i, step: 64, lambda rows: 0.001 * rows, group=4, steps=12)
    assert set(chosen[1:]) == {8}
    never = ThroughputOvercommit(BATCH, HIGH, 0)
    assert set(simulate(never, lengths_of("lognormal"), bandwidth_bound, steps=10)[1]) == {0}


def test_generators_that_share_rows_are_seen_as_one_each() -> None:
    """Two generators with half the rows each decide as one whose rows count half."""

    def decide(generators: int) -> list[int]:
        controller, chosen = ThroughputOvercommit(BATCH, HIGH, 4, generators=generators), []
        rng = np.random.default_rng(0)
        for _ in range(10):
            lengths = np.ceil(rng.lognormal(4, 1, BATCH)).astype(int).tolist()
            rows = [(BATCH + controller.delta) / generators * k / 8 for k in range(8, 0, -1)]
            calls = [
                DecodeSample(
                    r,
                    64,
                    64 * saturating(round(r * generators)),
                    r == rows[0],
                    controller.delta // generators,
                )
                for r in rows
                for _ in range(generators)
            ]
            controller.observe(feedback(0.0, lengths, calls, 1.0, 0.5))
            chosen.append(controller.delta)
        return chosen

    assert decide(2) == decide(1)
    assert decide(1)[-1] > 0


# -- state ---------------------------------------------------------------------------------------


def varied(step: int) -> Feedback:
    rng = np.random.default_rng(step)
    calls = [DecodeSample(float(rng.integers(1, 40)), 32, float(rng.random())) for _ in range(6)]
    lengths = rng.integers(1, 300, 16).tolist()
    return feedback(float(rng.random()), lengths, calls, float(rng.random()), 0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TunedChunk(window=12, max_new_tokens=256),
        lambda: FixedChunk(64),
        lambda: FixedOvercommit(4),
        lambda: Equation4(4, 0, 16, window=3),
        lambda: Algorithm1(4, 0, 16, window=3),
        lambda: ThroughputOvercommit(16, 64, 4),
    ],
    ids=["tuned", "fixed_chunk", "fixed", "equation4", "algorithm1", "throughput"],
)
def test_state_goes_out_and_in_at_any_step(make: Callable[[], Any]) -> None:
    whole, parts = make(), make()
    for step in range(30):
        whole.observe(varied(step))
        parts.observe(varied(step))
        state = parts.state_dict()
        assert is_plain(state)
        parts = make()
        parts.load_state_dict(state)
        assert parts.state_dict() == whole.state_dict()
        if isinstance(whole, FixedChunk | TunedChunk):
            assert parts.tokens == whole.tokens
        else:
            assert parts.delta == whole.delta


OWN = """
class Controller:
    delta = 3
    tokens = 7

    def __init__(self, run):
        self.batch = run.settings.batch

    def observe(self, feedback):
        self.delta += 1

    def threshold(self):
        return 1

    def plan(self, remaining):
        return None

    def waited(self, kind, seconds):
        pass

    def decide(self, waiting, decoding, now_s):
        return {}

    def state_dict(self):
        return {"delta": self.delta}

    def load_state_dict(self, state):
        self.delta = state["delta"]

class Nothing:
    def __init__(self, run):
        pass

def failing(run):
    return run.missing
"""
AUTO = {"overcommit": "auto", "migrate": "auto", "hold": "auto"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("chunk_tokens", "chunk"),
        ("overcommit", "overcommit"),
        ("migrate", "migration"),
        ("hold", "hold"),
    ],
)
def test_a_controller_of_the_users_own_is_made_for_the_run(name: str, field: str) -> None:
    given = {
        "rollout": {"batch": 16, "engines": 2},
        "environment": {"sources": ["own.py:Controller"]},
        "schedule": {**AUTO, "controllers": {name: "own.py:Controller"}},
    }
    config = Config.model_validate(given)
    made = controls_of(config, MigrationLimits(2, 8, 1000, 40, 1e3, 1e5, prompt_tokens=8))
    controller: Any = made.controllers[field]
    assert (type(controller).__name__, controller.batch) == ("Controller", 16)
    others = [type(each).__name__ for key, each in made.controllers.items() if key != field]
    assert "Controller" not in others
    controller.load_state_dict({"delta": 5})
    assert controller.state_dict() == {"delta": 5}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("source", "code", "fact"),
    [
        ("own.py:Nothing", "wrong-kind-of-object", "Overcommit"),
        ("own.py:failing", "outside-raised", "in failing"),
        ("own.py:Controler", "unknown-function", "'Controller'"),
        ("mine", "unknown-source", "mine"),
    ],
)
def test_code_that_makes_no_controller_is_refused(source: str, code: str, fact: str) -> None:
    given = {"overcommit": "auto", "controllers": {"overcommit": source}}
    config = Config.model_validate({"schedule": given})
    with raises(ConfigError, code, "schedule.controllers", fact):
        controls_of(config, None)


@pytest.mark.parametrize(
    ("name", "value", "passes"),
    [
        ("delta", 16, True),
        ("delta", np.int64(3), True),
        ("delta", 17, False),
        ("delta", -1, False),
        ("delta", 1.5, False),
        ("delta", None, False),
        ("tokens", 1, True),
        ("tokens", 0, False),
        ("tokens", "8", False),
    ],
)
@pytest.mark.usefixtures("own")
def test_numbers_of_a_controller_of_the_users_own_are_checked(
    name: str, value: Any, passes: bool
) -> None:
    names = {"overcommit": "own.py:Controller", "chunk_tokens": "own.py:Controller"}
    schedule = {"overcommit": "auto", "controllers": names}
    config = Config.model_validate({"rollout": {"batch": 16}, "schedule": schedule})
    made: Any = controls_of(config, None)
    setattr(made.overcommit if name == "delta" else made.chunk, name, value)

    def asked() -> int:
        number: int = made.delta if name == "delta" else made.chunk_tokens
        return number

    if passes:
        assert asked() == value
    else:
        with raises(ConfigError, "controller-value", "schedule.controllers", f"{name} = {value!r}"):
            asked()


@pytest.mark.parametrize(
    "given", [{"overcommit": 3}, {"chunk_tokens": 8}, {"migrate": 0.5}, {"hold": "keep"}]
)
def test_a_controller_has_no_effect_on_a_setting_with_a_value(given: dict[str, Any]) -> None:
    (name,) = given
    schedule = {"schedule": {**given, "controllers": {name: "missing.py:Controller"}}}
    config = recipes.build({**schedule, "rollout": {"engines": 2}}, "here")
    (remark,) = (each for each in config.remarks if "schedule.controllers" in each)
    assert f"schedule.{name}" in remark
    controls_of(config, MigrationLimits(2, 8, 1000, 40, 1e3, 1e5, prompt_tokens=8))
    assert set(variants_of(config.schedule)) == set(PLANNED)


def test_the_controller_that_the_docs_show_follows_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = next(code for code in blocks("schedules", "python") if "class Tailed" in code)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    (toml,) = (text for text in blocks("schedules", "toml") if "Tailed" in text)
    controller = controls_of(recipes.build(tomllib.loads(toml), "here"), None).overcommit
    seen = []
    for lengths in ((3, 5, 2, 40), (3, 5, 2, 4)):
        controller.observe(feedback(lengths=lengths))
        seen.append(controller.delta)
    assert seen == [2, 0]


EVERY = """
class Base:
    def __init__(self, run):
        self.steps = 0

    def observe(self, feedback):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

class Delta(Base):
    @property
    def delta(self):
        return self.steps % 3 * 2

class Chunk(Base):
    @property
    def tokens(self):
        return 1 + self.steps % 4
"""


@pytest.mark.parametrize("runtime", ["inline", "local", "ray"])
def test_controllers_of_the_users_own_decide_on_every_runtime(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    if runtime == "ray":
        pytest.importorskip("ray")
    (tmp_path / "every.py").write_text(EVERY)
    monkeypatch.chdir(tmp_path)
    names = {"overcommit": "every.py:Delta", "chunk_tokens": "every.py:Chunk"}
    schedule = {"preset": "oppo", "overcommit": "auto", "chunk_tokens": 0, "controllers": names}
    config = settings(tiny_folder, runtime=runtime, steps=5, schedule=schedule)
    result = stretto.train(config, out=str(tmp_path / "runs"))
    decided = [(m["schedule/overcommit"], m["schedule/chunk_tokens"]) for m in result.history]
    assert decided == [(0, 1), (2, 2), (4, 3), (0, 4), (2, 1)]
    assert not [folder for folder in sys.path[:-1] if folder == str(tmp_path)]
