"""Migration: which generators take the stragglers, which move, and when it pays. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import raises
from stretto.errors import ConfigError
from stretto.schedules.controller import DecodeSample, Feedback
from stretto.schedules.migration import (
    AutoMigration,
    FixedMigration,
    MigrationLimits,
    RolloutMove,
    destinations,
    plan,
)


def limits_of(
    engines: int = 4,
    best_batch: int = 8,
    cache_tokens: int = 10_000,
    longest_tokens: int = 1000,
    prefill: float = 1e4,
    transfer: float = 1e5,
    score: float = 0.0,
    prompt: int = 0,
) -> MigrationLimits:
    return MigrationLimits(
        engines, best_batch, cache_tokens, longest_tokens, prefill, transfer, score, prompt
    )


# -- what moves, and where to --------------------------------------------------------------------


def test_destinations_by_hand() -> None:
    assert destinations([3, 1, 4, 2], limits_of()) == [0, 2]  # 10 rollouts, 8 a generator
    assert destinations([2, 1, 2, 2], limits_of()) == [0]  # 7; of equals the first
    assert destinations([3, 1, 4, 2], limits_of(best_batch=10)) == [2]
    # A cache of 3,500 tokens holds 3 of 1,000: 10 rollouts take 4 generators.
    assert destinations([3, 1, 4, 2], limits_of(cache_tokens=3500)) == [0, 1, 2, 3]
    assert destinations([3, 0, 2, 1], limits_of(cache_tokens=3500)) == [0, 2]
    assert destinations([0, 0, 0, 0], limits_of()) == []


def test_a_plan_by_hand() -> None:
    remaining = [
        [(1, 50), (2, 70)],
        [(3, 90)],
        [(4, 10), (5, 20), (6, 30)],
        [(7, 80), (8, 60)],
    ]
    # 8 rollouts, 4 a generator: generators 0 (of equals the first) and 2 take them. The longest
    # move first, each to the one with fewer.
    made = plan(remaining, limits_of(best_batch=4))
    assert made.moves == [RolloutMove(*m, True) for m in ((3, 1, 0), (7, 3, 0), (8, 3, 2))]
    assert made.freed == [1, 3]
    one = plan(remaining, limits_of())
    assert {m.rollout_id: m.destination for m in one.moves} == dict.fromkeys([1, 2, 3, 7, 8], 2)
    assert one.freed == [0, 1, 3]


def test_an_overfull_destination_gives_its_shortest_away() -> None:
    remaining = [[(1, 10), (2, 30), (3, 20)], [(4, 5)], []]
    made = plan(remaining, limits_of(engines=3, best_batch=2))
    assert made.moves == [RolloutMove(1, 0, 1, True)]
    assert made.freed == [2]


def test_nobody_moves_where_no_generator_would_be_free() -> None:
    made = plan([[(1, 10)], [(2, 10)]], limits_of(engines=2, best_batch=1))
    assert (made.moves, made.freed) == ((), ())


def test_tokens_are_prefilled_again_where_that_is_faster() -> None:
    slow_link = limits_of(prefill=1e5, transfer=1e4)
    assert [m.with_cache for m in plan([[(1, 9)], [(2, 9)]], slow_link).moves] == [False]
    assert slow_link.moving_s(500) == limits_of().moving_s(500) == pytest.approx(0.005)


@given(
    held=st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=1, max_size=8),
    best_batch=st.integers(1, 20),
    cache_tokens=st.integers(60, 700),
)
@settings(max_examples=300, deadline=None)
def test_plans_keep_to_both_limits(
    held: list[list[int]], best_batch: int, cache_tokens: int
) -> None:
    limits = limits_of(len(held), best_batch, cache_tokens, longest_tokens=60)
    ids = iter(range(1000))
    remaining = [[(next(ids), tokens) for tokens in of_one] for of_one in held]
    count = sum(map(len, remaining))
    made = plan(remaining, limits)
    place = {id_: i for i, of_one in enumerate(remaining) for id_, _ in of_one}
    for move in made.moves:
        assert place[move.rollout_id] == move.source != move.destination
        place[move.rollout_id] = move.destination
    assert len({m.rollout_id for m in made.moves}) == len(made.moves)
    if not made.freed:
        assert not made.moves
        return
    targets = sorted(set(range(len(held))) - set(made.freed))
    m = len(targets)
    assert m >= count / best_batch
    assert m >= count * 60 / cache_tokens
    fewer = m - 1  # would not do: too many rows, or a cache that may overflow
    assert fewer * best_batch < count or fewer * (cache_tokens // 60) < count
    load = [sum(i == target for i in place.values()) for target in targets]
    assert sum(load) == count
    assert all(n <= best_batch and n * 60 <= cache_tokens for n in load)
    fewest = min((len(remaining[i]) for i in targets), default=0)
    assert all(len(remaining[i]) <= fewest for i in made.freed)
    for target, n in zip(targets, load, strict=True):
        if any(move.destination == target for move in made.moves):
            assert n <= min(load) + 1


def test_limits_that_cannot_be() -> None:
    with raises(ConfigError, "not-positive", "best_batch", 0):
        limits_of(best_batch=0)
    with raises(ConfigError, "cache-too-small", 500, 1000):
        limits_of(cache_tokens=500)
    with raises(ConfigError, "not-a-share", 1.5):
        FixedMigration(limits_of(), 10, 1.5)
    with raises(ConfigError, "number-too-small", "score_tokens_per_s", -1.0):
        limits_of(score=-1.0)


def test_a_fixed_share() -> None:
    policy = FixedMigration(limits_of(), 64, 0.2)
    assert policy.threshold() == 13
    assert policy.plan([[(1, 1)], [(2, 1)]]).freed == [1]
    assert policy.state_dict() == {"place": 0}
    assert FixedMigration(limits_of(), 64, 0).threshold() == 0


def test_never_where_a_free_generator_has_nothing_to_score() -> None:
    policy = AutoMigration(limits_of(ENGINES, 16, 10_000, 275, 5e3, 5e4), BATCH)
    taught(policy, bimodal, flat, steps=4, beyond=8)
    assert policy.threshold() == 0


# -- R_t against the process itself --------------------------------------------------------------

BATCH, ENGINES, PROMPT = 64, 8, 12
Latency = Callable[[int], float]


def flat(rows: int) -> float:
    return 0.08 if rows <= 16 else 0.005 * rows


def affine(rows: int) -> float:
    return 0.048 + 0.004 * rows


def simulate(
    lengths: Sequence[int],
    latency: Latency,
    limits: MigrationLimits,
    score_tokens_per_s: float,
    threshold: int,
    prompt: int = PROMPT,
    so_far: Sequence[int] = (),
) -> float:
    """Seconds until a batch is generated and scored: the process itself, decode step by step.

    Each generator decodes what it holds, a token a step; the first of ``lengths`` have ``so_far``
    already; the first to end make the batch. At the threshold the stragglers gather on as few
    generators as may be; both ends of a move stand still meanwhile. A generator that holds nothing,
    and after the batch each, scores whole responses, one at a time, the first finished first.
    """
    done = [*so_far, *[0] * (len(lengths) - len(so_far))]
    left = [int(n) - d for n, d in zip(lengths, done, strict=True)]
    held = [{k: n for k, n in enumerate(left) if k % ENGINES == i} for i in range(ENGINES)]
    clocks = [0.0] * ENGINES  # when each generator has done its last decode step
    finished: list[tuple[float, int]] = []
    free_at = {}
    migrated = threshold == 0
    while len(finished) < BATCH:
        i = min((i for i in range(ENGINES) if held[i]), key=lambda i: clocks[i])
        clocks[i] += latency(len(held[i]))
        for k in list(held[i]):
            held[i][k] -= 1
            if not held[i][k]:
                del held[i][k]
                finished.append((clocks[i], k))
        if not held[i]:
            free_at[i] = clocks[i]
        if migrated or not 0 < BATCH - len(finished) <= threshold:
            continue
        migrated, now, remaining = True, clocks[i], sum(map(len, held))
        m = max(-(-remaining // limits.best_batch), -(-remaining // (limits.cache_tokens // 275)))
        by_load = sorted(range(ENGINES), key=lambda e: -len(held[e]))
        targets, sources = by_load[:m], by_load[m:]
        moving = sorted(
            ((prompt + lengths[k] - left, k, e) for e in sources for k, left in held[e].items()),
            reverse=True,
        )
        for tokens, k, e in moving:
            target = min(targets, key=lambda t: len(held[t]))
            held[target][k] = held[e].pop(k)
            seconds = tokens / limits.transfer_tokens_per_s
            for side in (e, target):
                clocks[side] = max(clocks[side], now) + seconds
        for e in sources:
            free_at[e] = min(free_at.get(e, np.inf), max(clocks[e], now))
        for e in targets:
            free_at.pop(e, None)
    batch = sorted(finished)[:BATCH]
    servers = [min(free_at.get(i, np.inf), batch[-1][0]) for i in range(ENGINES)]
    heapq.heapify(servers)
    last = 0.0
    for at, k in batch:
        start = max(heapq.heappop(servers), at)
        end = start + (prompt + lengths[k]) / score_tokens_per_s
        heapq.heappush(servers, end)
        last = max(last, end)
    return last


def in_flight(draw: Callable, rng: np.random.Generator, beyond: int) -> tuple[list[int], list[int]]:
    """Lengths of a batch and ``beyond`` more, and what these have so far, after several rounds."""
    lengths, so_far = draw(rng)[:beyond], np.zeros(beyond, int)
    for _ in range(12):
        lengths = np.concatenate([lengths, draw(rng)])
        so_far = np.concatenate([so_far, np.zeros(BATCH, int)])
        rest = np.argsort(lengths - so_far, kind="stable")[BATCH:]
        steps = np.sort(lengths - so_far)[BATCH - 1]
        lengths, so_far = lengths[rest], so_far[rest] + steps
        so_far = np.minimum(so_far, lengths - 1)
    return [*lengths.tolist(), *draw(rng).tolist()], so_far.tolist()


def lognormal(rng: np.random.Generator) -> np.ndarray:
    return np.clip(rng.lognormal(3.2, 0.9, BATCH), 1, 250).astype(int)


def bimodal(rng: np.random.Generator) -> np.ndarray:
    long = rng.random(BATCH) < 0.12
    return np.where(long, rng.integers(150, 250, BATCH), rng.integers(10, 40, BATCH))


def taught(
    policy: AutoMigration, draw: Callable, latency: Latency, steps: int = 20, beyond: int = 0
) -> None:
    rng = np.random.default_rng(1)
    for _ in range(steps):
        calls = [DecodeSample(float(r), 16, 16 * latency(r)) for r in range(1, 41)]
        policy.observe(Feedback(0.0, draw(rng).tolist(), calls, 1.0, 0.1, beyond))


def sweep(
    draw: Callable,
    latency: Latency,
    limits: MigrationLimits,
    score: float,
    prompt: int = PROMPT,
    beyond: int = 0,
) -> dict[int, float]:
    """Mean seconds by threshold, from 0 to 95 % of the batch, over 10 batches."""
    rng = np.random.default_rng(2)
    batches = [in_flight(draw, rng, beyond) if beyond else (draw(rng), ()) for _ in range(10)]
    return {
        r: float(np.mean([simulate(b, latency, limits, score, r, prompt, s) for b, s in batches]))
        for r in (0, *(round(BATCH * k / 20) for k in range(1, 20)))
    }


@pytest.mark.parametrize("draw", [lognormal, bimodal])
@pytest.mark.parametrize("latency", [flat, affine])
@pytest.mark.parametrize("score", [25.0, 100.0])
def test_r_t_is_about_as_good_as_the_best(draw: Callable, latency: Latency, score: float) -> None:
    limits = limits_of(ENGINES, 16, 10_000, 275, 5e3, 5e4, score, PROMPT)
    policy = AutoMigration(limits, BATCH)
    taught(policy, draw, latency)
    seconds = sweep(draw, latency, limits, score)
    best = min(seconds.values())
    assert seconds[policy.threshold()] <= 1.03 * best, (policy.threshold(), seconds)


@pytest.mark.parametrize(
    ("draw", "latency", "score", "beyond"),
    [(lognormal, flat, 100.0, 8), (bimodal, affine, 100.0, 8), (lognormal, flat, 100.0, 32)],
)
def test_r_t_knows_of_what_is_in_flight_beyond_the_batch(
    draw: Callable, latency: Latency, score: float, beyond: int
) -> None:
    """Generators never run dry before the batch has ended, so freeing some of them saves more."""
    limits = limits_of(ENGINES, 16, 10_000, 275, 5e3, 5e4, score, PROMPT)
    policy = AutoMigration(limits, BATCH)
    taught(policy, draw, latency, beyond=beyond)
    seconds = sweep(draw, latency, limits, score, beyond=beyond)
    best = min(seconds.values())
    assert seconds[policy.threshold()] <= 1.05 * best < seconds[0], seconds


def test_the_optimum_lies_near_a_fifth_of_a_long_tailed_batch() -> None:
    # One response in eight is long, and one generator takes 13 of 64 rollouts at its best.
    limits = limits_of(ENGINES, 13, 10_000, 275, 5e3, 5e4, 25.0, PROMPT)
    policy = AutoMigration(limits, BATCH)
    taught(policy, bimodal, flat)
    seconds = sweep(bimodal, flat, limits, 25.0)
    best = min(seconds, key=lambda r: seconds[r])
    assert best == policy.threshold() == 13  # 20 %
    assert seconds[0] > 1.15 * seconds[13]


@pytest.mark.parametrize(
    ("draw", "latency", "score"),
    [
        (lambda rng: np.full(BATCH, 75), flat, 25.0),  # no stragglers
        (bimodal, flat, 1e6),  # nothing to gain: scoring takes no time
        (lognormal, lambda rows: 0.02 * rows, 100.0),  # rows together decode no faster
    ],
    ids=["equal lengths", "free scoring", "no batching gain"],
)
def test_never_where_migration_does_not_pay(draw: Callable, latency: Latency, score: float) -> None:
    limits = limits_of(ENGINES, 16, 10_000, 275, 5e3, 5e4, score, PROMPT)
    policy = AutoMigration(limits, BATCH)
    taught(policy, draw, latency)
    assert policy.threshold() == 0
    seconds = sweep(draw, latency, limits, score)
    assert seconds[0] <= 1.02 * min(seconds.values())


def test_a_slow_link_weighs_against_migration() -> None:
    # Moving a rollout takes long.
    policy = AutoMigration(limits_of(ENGINES, 16, 10_000, 275, 5.0, 5.0, 25.0, PROMPT), BATCH)
    taught(policy, bimodal, flat)
    assert policy.threshold() == 0


def test_r_t_follows_the_lengths() -> None:
    policy = AutoMigration(limits_of(ENGINES, 16, 10_000, 275, 5e3, 5e4, 25.0), BATCH)
    assert policy.threshold() == 0  # nothing known yet
    taught(policy, bimodal, flat, steps=20)
    assert policy.threshold() > 0
    taught(policy, lambda rng: np.full(BATCH, 75), flat, steps=40)
    assert policy.threshold() == 0


def test_state_goes_out_and_in() -> None:
    def make() -> AutoMigration:
        return AutoMigration(limits_of(ENGINES, score=25.0), BATCH, every=3)

    whole, parts = make(), make()
    rng = np.random.default_rng(0)
    for _ in range(7):
        step = Feedback(0.0, bimodal(rng).tolist(), [DecodeSample(8.0, 16, 0.4)], 1.0, 0.1)
        whole.observe(step)
        parts.observe(step)
        state = parts.state_dict()
        parts = make()
        parts.load_state_dict(state)
        assert parts.state_dict() == whole.state_dict()
        assert parts.threshold() == whole.threshold()
