"""The simulated roles: costs, lengths, devices, decoding, faults; against hand-computed cases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _estimate import StepSizes, estimate
from _rlhfuse import kept_cost
from helpers import ManualClock, ticket, told
from raising import raises
from stretto.config import Section
from stretto.errors import ConfigError, EngineError, StateError
from stretto.layout import Layout
from stretto.models.shapes import shape_of
from stretto.observe.spans import Span, Spans
from stretto.planner.calibration import calibrate, fit_costs
from stretto.planner.formulas import (
    TrainingPasses,
    fsdp_training_bytes,
    generator_cost,
    prefill_cost,
    train_cost,
)
from stretto.planner.hardware import GPUS, Hardware
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.runtime.sim.cluster import GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import (
    DecodeCost,
    Efficiency,
    GeneratorCost,
    PrefillCost,
    SampleCost,
    SimSpeculation,
    TrainCost,
    TransferCost,
)
from stretto.runtime.sim.faults import Faults, InjectedError, faulty
from stretto.runtime.sim.generator import Replica, SimGenerator, SimRow, decode
from stretto.runtime.sim.lengths import (
    Bimodal,
    Distribution,
    Drifting,
    Geometric,
    HeavyTail,
    LearningCurve,
    Lengths,
    Lognormal,
    Replayed,
    Uniform,
)
from stretto.runtime.sim.loop import VirtualClock, run
from stretto.runtime.sim.resources import Device, SimWorker
from stretto.runtime.sim.sim_roles import SimLearner, SimScorer
from stretto.schedules.rollout import Rollout, train_batch
from stretto.testing import make_chunk
from stretto.types import Chunk, FinishReason, Prompt, Score

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
FREE = GeneratorCost()


def rollout(id_: int, *, prompt: int = 10, group: int | None = None, tokens: int = 0) -> Rollout:
    r = Rollout(id_, Prompt(id_, (0,) * prompt, ""), id_ if group is None else group)
    if tokens:
        r.append(make_chunk(id_, 0, (0,) * tokens, (-1.0,) * tokens, 0))
    return r


def make(
    spans: Spans,
    cost: GeneratorCost = FREE,
    lengths: Callable[[int], int] = lambda i: i,
    limit: int = 1000,
    device: Device | None = None,
    carry: Any = "recompute",
    replicas: int = 1,
    slots: int = 0,
) -> SimGenerator:
    worker = SimWorker("generator", [device or Device(0)], spans)
    role = GeneratorRole(cost=cost, slots=slots, devices=tuple(range(replicas)))
    return SimGenerator(worker, role, lengths, max_new_tokens=limit, carry=carry)


def make_scorer(
    spans: Spans, cost: PrefillCost | SampleCost, name: str = "reward", **options: Any
) -> SimScorer:
    reward = options.pop("reward", lambda i, v: 0.0)
    devices = [] if isinstance(cost, SampleCost) else [Device(0)]
    role = ScorerRole(name=name, cost=cost, **options)
    return SimScorer(SimWorker(name, devices, spans), role, reward)


def make_learner(spans: Spans, cost: TrainCost, **options: Any) -> SimLearner:
    return SimLearner(SimWorker("learner", [Device(0)], spans), LearnerRole(cost=cost, **options))


def virtually(body: Callable[[Spans], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        return await body(Spans(VirtualClock()))

    return run(main())


# -- costs ------------------------------------------------------------------------------------


def test_decoding_costs_by_hand() -> None:
    cost = DecodeCost(step_s=10.0, row_s=1.0, context_s=0.1)
    # two rows with 30 tokens of context, which grows by two a step: 10 + 2 + 3.0, 3.2, 3.4
    assert cost.seconds(2, 30, 3) == pytest.approx(15.0 + 15.2 + 15.4)
    assert [cost.steps_within(2, 30, s) for s in (0.0, 1.0, 15.0, 15.1, 30.2, 30.3, 45.6)] == [
        0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip


def test_a_decode_step_takes_the_longer_of_reading_and_computing() -> None:
    """Two rows: 5 + 0.5 a token of context to read, 4 + 0.6 a token to compute, and 1 beside."""
    cost = DecodeCost(step_s=1.0, weights_s=5.0, cache_s=0.5, product_s=2.0, attention_s=0.6)
    # with 6, 8, 10, 12 and 14 tokens: 8, 9, 10, 11, 12 to read, and 7.6, 8.8, 10, 11.2, 12.4
    assert cost.seconds(2, 6, 5) == pytest.approx(5 + 8 + 9 + 10 + 11.2 + 12.4)
    assert [cost.steps_within(2, 6, s) for s in (9.0, 9.1, 30.0, 30.1, 42.2, 42.3)] == [
        1, 2, 3, 4, 4, 5,
    ]  # fmt: skip
    assert cost.at_least(5, 10, 50) == 5 + 50  # 25 + 25 to read, 20 + 30 to compute
    # Of 10 tokens each: 1 + 5 + 5 R to read, 1 + 8 R to compute.
    assert cost.rows_within(21.0, 10) == pytest.approx(2.5)
    assert cost.rows_within(6.5, 10) == pytest.approx(0.1)


@given(
    st.floats(1e-6, 1), st.floats(0, 1e-2), st.floats(0, 1e-4), st.floats(0, 1), st.floats(0, 1e-4),
    st.floats(0, 1e-2), st.floats(0, 1e-4), st.integers(1, 500), st.integers(0, 10**6),
    st.integers(1, 3000),
)  # fmt: skip
def test_steps_and_seconds_are_inverse(
    step_s: float, row_s: float, context_s: float, weights_s: float, cache_s: float,
    product_s: float, attention_s: float, rows: int, context: int, steps: int,
) -> None:  # fmt: skip
    cost = DecodeCost(
        step_s=step_s, row_s=row_s, context_s=context_s, weights_s=weights_s, cache_s=cache_s,
        product_s=product_s, attention_s=attention_s,
    )  # fmt: skip
    contexts = [context + i * rows for i in range(steps)]
    naive = sum(
        step_s + row_s * rows + context_s * c
        + max(weights_s + cache_s * c, product_s * rows + attention_s * c)
        for c in contexts
    )  # fmt: skip
    assert cost.seconds(rows, context, steps) == pytest.approx(naive, rel=1e-9)
    assert cost.at_least(steps, rows * steps, sum(contexts)) <= naive * (1 + 1e-9)
    assert cost.steps_within(rows, context, cost.seconds(rows, context, steps)) == steps
    halfway = cost.seconds(rows, context, steps) - step_s / 2
    assert cost.steps_within(rows, context, halfway) == steps


def test_padded_rows_read_as_much_as_the_longest() -> None:
    """Rows of 2 + 3 and 10 + 1 tokens; the second ends after two steps, the first after four."""
    for padded, expected in ((False, (16 + 18) + (7 + 8)), (True, (22 + 24) + (7 + 8))):
        replica = Replica(
            GeneratorCost(decode=DecodeCost(context_s=1.0), padded=padded), 0, SimSpeculation()
        )
        for id_, prompt, tokens, length in ((0, 2, 3, 7), (1, 10, 1, 3)):
            row = SimRow(id_, id_, prompt, tokens, length, FinishReason.STOP, cached=99)
            replica.waiting.append(row)
        ended, seconds, work = decode([replica], 9, 0)
        assert [row.id for row in ended] == [1, 0]
        assert (work["steps"], work["context"], seconds) == (4, expected, expected)
        assert replica.load == 0


def test_a_token_costs_a_share_of_a_step_while_proposed_ones_are_verified() -> None:
    """Three rows of 2, 4 and 6 tokens, whose last two read 3 tokens a step and keep half of one;
    it takes 1.5 s to make two.
    """
    cost = DecodeCost(step_s=6.0, row_s=1.0, weights_s=3.0, product_s=1.0)
    few = SimSpeculation(rows=2, proposed=2.0, accepted=0.5, draft_s=1.5)
    replica = Replica(GeneratorCost(decode=cost), 0, few)
    for id_, length in enumerate((2, 4, 6)):
        replica.waiting.append(SimRow(id_, id_, 1, 0, length, FinishReason.STOP, cached=1))
    _, seconds, work = decode([replica], 9, 0)
    three, two, one = 6 + 3 + max(3, 3), (7.5 + 6 + max(3, 6)) / 1.5, (7.5 + 3 + max(3, 3)) / 1.5
    assert seconds == pytest.approx(2 * three + 2 * two + 2 * one)
    assert (work["steps"], work["tokens"]) == (6, 12)


PERFECT = Efficiency(
    memory=1,
    prefill=1,
    training=1,
    link=1,
    usable=1,
    optimizer=1,
    step_s=0,
    call_s=0,
    reduce_s=1e-5,
)
QWEN = shape_of("qwen2.5-7b")


def test_roofline_costs_are_what_the_data_sheets_say() -> None:
    on = Hardware.of("h200", PERFECT)
    cost = generator_cost(QWEN, 1, on)
    # All but the embedding is read, and multiplied with.
    used = 7.615e9 - 152_064 * 3584
    assert cost.decode.weights_s == pytest.approx(2 * used / 4.8e12, rel=1e-3)  # 2.9 ms
    assert cost.decode.product_s == pytest.approx(2 * used / 989e12, rel=1e-3)
    assert cost.decode.attention_s == pytest.approx(4 * 28 * 3584 / 989e12)
    assert (cost.decode.step_s, cost.decode.row_s, cost.decode.context_s) == (0, 0, 0)
    assert cost.cache_bytes == 2 * 28 * 4 * 128 * 2  # keys and values, 28 layers, 4 heads of 128
    assert cost.decode.cache_s == pytest.approx(57344 / 4.8e12)
    assert cost.prefill.seconds(1000) == pytest.approx(1000 * 2 * used / 989e12, rel=1e-3)
    assert cost.cache_tokens == int((141e9 - 2 * QWEN.parameters) / 57344)
    assert generator_cost(QWEN, 1, on, free_bytes=57344 * 7).cache_tokens == 7
    # A token attends to half of the others: 4 operations a layer and unit of width.
    longer = generator_cost(QWEN, 1, on, length=1000).prefill.token_s - cost.prefill.token_s
    assert longer == pytest.approx(2 * 28 * 3584 * 1000 / 989e12)
    with raises(ConfigError, "no-cache-room", "1 x 80 GB", "131 GB of weights; raise"):
        generator_cost(shape_of("llama-65b"), 1, Hardware.of("h100", PERFECT))


def test_tensor_parallel_copies_share_weights_and_reduce() -> None:
    on = Hardware.of("h200", PERFECT)
    layers = 28 * QWEN.layer_parameters
    head = 152_064 * 3584 + 3584
    sent = 28 * 2 * 2 * 3584 * 2 * 3 / 4 / 450e9  # of a token, two all-reduces a layer
    cost = generator_cost(QWEN, 4, on)
    assert cost.decode.step_s == pytest.approx(56e-5)
    assert cost.decode.row_s == pytest.approx(sent)
    assert cost.decode.weights_s == pytest.approx(2 * (layers / 4 + head) / 4.8e12)
    assert cost.decode.product_s == pytest.approx(2 * (layers / 4 + head) / 989e12)
    assert cost.decode.cache_s == pytest.approx(57344 / 4 / 4.8e12)
    assert cost.decode.attention_s == pytest.approx(4 * 28 * 3584 / 4 / 989e12)
    scored = prefill_cost(QWEN.valued(), Layout(dp=3, tp=4), on)
    assert scored.call_s == pytest.approx(56e-5)
    assert scored.token_s == pytest.approx((2 * (layers / 4 + 3584 * 2) / 989e12 + sent) / 3)


@pytest.mark.parametrize(("rows", "longer_s"), [(16, 5.8184e-3), (256, 10.0343e-3)])
def test_a_decode_step_of_a_large_model_by_hand(rows: int, longer_s: float) -> None:
    """Llama 3.1 70B on 8 H200, 512 tokens of context a row: few rows read, many compute.

    An eighth of 80 layers of 855,654,400 parameters each, and head and norm of 1,050,681,344, are
    9,607,225,344. At 3.36 TB/s they take 5.7186 ms to read, and 40,960 bytes a token of context
    6.2415 us a row; at 494.5 TFLOP/s a row takes 39.196 us to compute. Beside that: 2 ms, 160
    all-reduces of 20 us, and 4,587,520 bytes a row over 315 GB/s.
    """
    on = Hardware.of("h200")
    cost = generator_cost(shape_of("llama-3.1-70b"), 8, on).decode
    beside_s = 0.002 + 160 * 20e-6 + rows * 4_587_520 / 315e9
    assert cost.seconds(rows, 512 * rows, 1) == pytest.approx(beside_s + longer_s, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "tensor", "rows"),
    [
        ("llama-3.1-70b", 8, 16),
        ("llama-3.1-70b", 8, 256),
        ("qwen2.5-7b", 1, 4),
        ("qwen2.5-7b", 2, 512),
    ],
)
def test_a_decode_step_costs_as_much_as_on_paper(name: str, tensor: int, rows: int) -> None:
    """The simulator's generator, and the estimate of a step that the planner prints."""
    shape, on, one = shape_of(name), Hardware.of("h200"), Layout(tp=tensor)
    layout = RunLayout(one, one, one, "none")
    load = StepSizes(rows, prompt_tokens=256, response_tokens=512)
    _, decoding = estimate(ModelShapes.of_one_size(shape), layout, load, on).generation.work
    cost = generator_cost(shape, tensor, on, free_bytes=1e12).decode
    once = cost.seconds(rows, rows * (256 + 512 / 2), 1)
    assert sum(decoding.by_limit.values()) == pytest.approx(512 * once)


def test_training_takes_its_operations_or_its_links() -> None:
    on, tokens = Hardware.of("h200", PERFECT), 7 * 8192
    used = QWEN.multiplied(1)
    cost = train_cost([QWEN], Layout(fsdp=7), on, TrainingPasses(tokens, epochs=4, updates=4))
    assert cost.token_s == pytest.approx(4 * 6 * used / 989e12 / 7)
    assert cost.step_s == pytest.approx(4 * QWEN.parameters * 32 / 4.8e12 / 7)
    checkpointed = train_cost(
        [QWEN], Layout(fsdp=7), on, TrainingPasses(tokens, checkpointing=True)
    )
    assert checkpointed.token_s == pytest.approx(8 * used / 989e12 / 7)
    # With little to compute, FSDP's traffic counts: 700 tokens are 100 of each shard, in one pass.
    little = train_cost([QWEN], Layout(fsdp=7), on, TrainingPasses(700))
    traffic = fsdp_training_bytes(QWEN, Layout(fsdp=7), 1) / 450e9
    assert little.token_s * 700 == pytest.approx(traffic)


def test_shards_that_keep_their_weights_exchange_once_an_update() -> None:
    on, layout = Hardware.of("h200", PERFECT), Layout(fsdp=4, tp=2, pp=2)
    passes = TrainingPasses(1000, updates=3, micro_tokens=10)
    kept = kept_cost([QWEN], layout, on, passes)
    stage = replace(QWEN, layers=14)
    alone = train_cost([stage], Layout(tp=2), on, passes)  # gathers nothing
    each_s = alone.token_s + 2 * 2 * 3584 / 2 / 50e9
    assert kept.token_s == pytest.approx(each_s / 4)
    held = stage.held(2)
    exchanged = 6 * held * 3 / 4 / 450e9  # the four are neighbours
    updated = 32 * held / 4 / 4.8e12
    waited = 10 * each_s
    assert kept.step_s == pytest.approx(3 * (updated + exchanged + waited))
    assert train_cost([QWEN], layout, on, passes).token_s > 10 * kept.token_s


def test_pipeline_stages_share_layers_and_wait_for_each_other() -> None:
    on, passes = Hardware.of("h200", PERFECT), TrainingPasses(64 * 1000, micro_tokens=1000)
    alone = train_cost([QWEN], Layout(), on, passes)
    stages = train_cost([QWEN], Layout(pp=4), on, passes)
    stage = QWEN.stage(4)
    assert stage.layers == 7
    sent = 2 * 2 * 3584 / 50e9
    assert stages.token_s == pytest.approx(6 * stage.multiplied(1) / 989e12 + sent)
    moved = 32 * stage.held(1) / 4.8e12
    assert stages.step_s == pytest.approx(moved + 3 * 1000 * stages.token_s)
    assert stages.token_s < alone.token_s / 3
    # Two like models, fused: one stage waits for a micro-batch of either, for both together.
    fused = train_cost([QWEN, QWEN], Layout(pp=4), on, replace(passes, fused=True))
    assert fused.token_s == pytest.approx(2 * stages.token_s)
    assert fused.step_s == pytest.approx(2 * moved + 1000 * stages.token_s)


def test_sliced_stages_in_copies_reduce_twice_a_layer_and_exchange_once_an_update() -> None:
    at_once = PERFECT.model_copy(update={"reduce_s": 0.0})
    on, layout = Hardware.of("h200", at_once), Layout(dp=2, pp=4, tp=4)
    passes = TrainingPasses(64 * 1000, micro_tokens=1000, updates=2)
    cost = train_cost([QWEN], layout, on, passes)
    stage, reduced = QWEN.stage(4), 7 * 4 * 2 * (2 * 3584) * 3 / 4 / 450e9
    token_s = 6 * stage.multiplied(4) / 989e12 + reduced + 2 * 2 * 3584 / 50e9
    assert cost.token_s == pytest.approx(token_s / 2)
    moved = (8 + 24 / 2) * stage.held(4) / 4.8e12
    exchanged = (4 + 2) * stage.held(4) / 2 / 50e9  # float32 gradients, bfloat16 weights
    assert cost.step_s == pytest.approx(2 * (moved + exchanged + 3 * 1000 * token_s))
    # Little work makes one small micro-batch, and the stages wait for each other as long.
    little = train_cost([QWEN], layout, on, replace(passes, tokens=800))
    assert little.step_s == pytest.approx(2 * (moved + exchanged + 3 * 200 * token_s))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'qwen2\.5-7'.*'qwen2\.5-7b'"):
        shape_of("qwen2.5-7")
    for name in ("h20", "b100", "t4"):
        with raises(ConfigError, "unknown-gpu", f"'{name}'", "--hardware", "rtx4090") as caught:
            Hardware.of(name)
        assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("H100", "h100"),
        ("B200", "b200"),
        ("A100_80GB", "a100-80gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_are_known_in_every_spelling(name: str, known: str) -> None:
    assert Hardware.of(name).gpu is GPUS[known]


# -- lengths ----------------------------------------------------------------------------------


def test_a_length_depends_on_seed_and_rollout_alone() -> None:
    spec = Lognormal(median=100, p95=400)
    forward = [Lengths(spec, 3)(i) for i in range(50)]
    again = Lengths(spec, 3)
    assert [again(i) for i in reversed(range(50))] == forward[::-1]
    assert [Lengths(spec, 4)(i) for i in range(50)] != forward


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Lognormal(median=100, p95=400), {50: 100, 95: 400}),
        (Lognormal(median=100, p99=1000), {50: 100, 99: 1000}),
        (Uniform(low=11, high=110), {0: 11, 50: 60, 100: 110}),
        (Bimodal(short=100, long=1000, long_share=0.2, spread=0.1), {40: 100, 81: 910, 99: 1090}),
        (Geometric(mean=200), {50: 200 * log(2), 95: 200 * log(20)}),
        (Drifting(first=50, last=200, over=1, p95_ratio=3), {50: 200, 95: 600}),
        (HeavyTail(shortest=50, exponent=2.0), {50: 50 * 2**0.5, 75: 100, 99: 500}),
        (Replayed(tokens=(3, 5, 9)), {0: 3, 50: 5, 100: 9}),
    ],
    ids=lambda x: getattr(x, "kind", ""),
)
def test_distributions_have_the_percentiles_they_are_made_from(
    spec: Distribution, expected: dict[int, float]
) -> None:
    lengths = [Lengths(spec, 0)(i) for i in range(30_000)]
    for percent, tokens in expected.items():
        assert np.percentile(lengths, percent) == pytest.approx(tokens, rel=0.05, abs=1)


def test_geometric_and_uniform_means() -> None:
    lengths = Lengths(Geometric(mean=7.0), 1)
    assert np.mean([lengths(i) for i in range(30_000)]) == pytest.approx(7.0, rel=0.03)
    drift = Lengths(Drifting(first=100, last=1600, over=1000, p95_ratio=1.0), 0)
    assert [drift(i) for i in (0, 250, 500, 1000, 5000)] == [100, 200, 400, 1600, 1600]


def test_lengths_replayed_from_a_ledger() -> None:
    lengths = Lengths(Replayed.from_ledger({0: 4, 3: 8, 1: 6}), 0)
    assert [lengths(i) for i in range(5)] == [4, 6, 6, 8, 4]  # 2 never ended: the median


# -- devices ----------------------------------------------------------------------------------


def test_roles_on_one_device_take_turns_and_others_do_not() -> None:
    async def body(spans: Spans) -> Any:
        shared, own = Device(0), Device(1)
        a, b, c = (
            SimWorker(n, [d], spans) for n, d in zip("abc", (shared, shared, own), strict=True)
        )
        both = SimWorker("d", [own, shared], spans)
        await asyncio.gather(
            a.work("x", 2.0), b.work("y", 3.0), c.work("z", 4.0), both.work("w", 1.0)
        )
        return [(s.role, s.start_s, s.end_s) for s in spans.records], shared.busy_s, own.busy_s

    spans, shared_s, own_s = virtually(body)
    assert spans == [("a", 0.0, 2.0), ("c", 0.0, 4.0), ("b", 2.0, 5.0), ("d", 5.0, 6.0)]
    assert (shared_s, own_s) == (6.0, 5.0)


def test_a_cancelled_call_gives_its_devices_back() -> None:
    async def body(spans: Spans) -> Any:
        devices = [Device(0), Device(1)]
        worker, other = SimWorker("a", devices, spans), SimWorker("b", devices[1:], spans)
        first = asyncio.create_task(worker.work("x", 10.0))
        queued = asyncio.create_task(SimWorker("c", devices, spans).work("x", 10.0))
        await asyncio.sleep(1.0)
        queued.cancel()
        first.cancel()
        await other.work("y", 1.0)
        return asyncio.get_running_loop().time()

    assert virtually(body) == 2.0


# -- the generator ----------------------------------------------------------------------------


def summary(chunks: Sequence[Chunk]) -> list[tuple[int, int, int, FinishReason | None]]:
    return [(c.rollout_id, c.start, len(c.tokens), c.finish) for c in chunks]


def test_decoding_by_hand() -> None:
    """Rows of 2, 5 and 9 tokens; 1 s a step, 0.1 s a row, 0.01 s a token of context."""
    cost = GeneratorCost(
        decode=DecodeCost(step_s=1.0, row_s=0.1, context_s=0.01),
        prefill=PrefillCost(call_s=0.5, token_s=0.01),
    )

    async def body(spans: Spans) -> Any:
        g = make(spans, cost, {0: 2, 1: 5, 2: 9}.__getitem__, limit=8)
        await g.admit(told([rollout(i) for i in range(3)]))
        calls = [summary((await g.decode(4)).chunks), summary((await g.decode(100)).chunks)]
        assert (await g.decode(5)).chunks == []
        return calls, spans.records

    calls, spans = virtually(body)
    assert calls == [
        [(0, 0, 2, STOP), (1, 0, 4, None), (2, 0, 4, None)],
        [(1, 4, 1, STOP), (2, 4, 4, LENGTH)],
    ]
    prefill = 0.5 + 0.3
    three = (1.3 + 0.30) + (1.3 + 0.33)
    two = (1.2 + 0.24) + (1.2 + 0.26)
    assert spans[0].end_s == pytest.approx(prefill + three + two)
    assert spans[0].attributes == {
        "rollouts": [0, 1, 2], "tokens": 10, "version": 0, "steps": 4, "prefilled": 30,
        "context": 30 + 33 + 24 + 26, "uneven_s": 0.0,
    }  # fmt: skip
    last = (1.2 + 0.28) + (1.1 + 0.15) + (1.1 + 0.16) + (1.1 + 0.17)
    assert spans[1].end_s - spans[1].start_s == pytest.approx(last)


def test_stop_after_returns_once_enough_have_ended() -> None:
    async def body(spans: Spans) -> Any:
        g = make(spans, lengths={5: 3, 1: 6, 2: 6, 3: 7}.__getitem__)
        await g.admit(told([rollout(i) for i in (5, 3, 2, 1)]))
        return [summary((await g.decode(100, stop_after=n)).chunks) for n in (1, 1, 0)]

    assert virtually(body) == [
        [(5, 0, 3, STOP), (1, 0, 3, None), (2, 0, 3, None), (3, 0, 3, None)],
        [(1, 3, 3, STOP), (2, 3, 3, STOP), (3, 3, 3, None)],  # both end in that step
        [(3, 6, 1, STOP)],
    ]


def test_slots_are_handed_on_within_a_call() -> None:
    async def body(spans: Spans) -> Any:
        g = make(spans, lengths=lambda i: [2, 7, 3][i], slots=2)
        await g.admit(told([rollout(i) for i in range(3)]))
        return [summary((await g.decode(n)).chunks) for n in (4, 4)]

    assert virtually(body) == [
        [(0, 0, 2, STOP), (1, 0, 4, None), (2, 0, 2, None)],
        [(2, 2, 1, STOP), (1, 4, 3, STOP)],
    ]


def test_rollouts_wait_until_the_memory_has_room_for_them() -> None:
    async def body(spans: Spans) -> Any:
        cost = GeneratorCost(cache_tokens=40)
        g = make(spans, cost, lambda i: [10, 5, 20, 5][i])  # prompts have 10 tokens each
        await g.admit(told([rollout(i) for i in range(4)]))
        return summary((await g.decode(100)).chunks)

    # 20 + 15 tokens; 2 needs 30 and waits for both, and 3 behind it for 2
    assert virtually(body) == [(1, 0, 5, STOP), (0, 0, 10, STOP), (2, 0, 20, STOP), (3, 0, 5, STOP)]


def test_replicas_decode_at_their_own_pace() -> None:
    """One copy has a row of 2, the other two rows: a step of its own takes longer."""
    cost = GeneratorCost(decode=DecodeCost(row_s=1.0))

    async def body(spans: Spans) -> Any:
        g = make(spans, cost, lambda i: [2, 9, 5][i], replicas=2)
        await g.admit(told([rollout(i) for i in range(3)]))  # 0 and 2 to one, 1 to the other
        calls = [
            summary((await g.decode(100, stop_after=1)).chunks),
            summary((await g.decode(100)).chunks),
        ]
        uneven = [s.attributes["uneven_s"] for s in spans.records]
        return calls, [s.end_s for s in spans.records], uneven

    calls, ends, uneven = virtually(body)
    # 0 ends at 4 s, after two steps of its copy; the other has made four by then
    assert calls[0] == [(0, 0, 2, STOP), (1, 0, 4, None), (2, 0, 2, None)]
    assert calls[1] == [(2, 2, 3, STOP), (1, 4, 5, STOP)]
    assert ends == [4.0, 9.0]
    assert uneven == [0.0, 1.0]  # the first copy is done at 7 s, the other at 9


def naive(lengths: dict[int, int], order: Sequence[int], slots: int) -> list[int]:
    """The order in which rollouts end, one step at a time."""
    waiting, rows, ended = list(order), {}, []
    while waiting or rows:
        while waiting and len(rows) < slots:
            rows[waiting.pop(0)] = 0
        for id_ in list(rows):
            rows[id_] += 1
        done = sorted(id_ for id_, n in rows.items() if n == lengths[id_])
        ended += done
        for id_ in done:
            del rows[id_]
    return ended


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.integers(0, 99), st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=10),
)
def test_any_calls_add_up_to_one(
    lengths: dict[int, int], slots: int, calls: list[tuple[int, int]]
) -> None:
    """However decoding is cut into calls, rollouts end in the same order with the same tokens."""

    async def body(spans: Spans) -> Any:
        g = make(spans, lengths=lengths.__getitem__, slots=slots)
        rollouts = {i: rollout(i) for i in lengths}
        await g.admit(told(list(rollouts.values())))
        ended: list[int] = []
        while len(ended) < len(lengths):
            max_tokens, stop_after = calls[len(ended) % len(calls)]
            for chunk in (await g.decode(max_tokens, stop_after)).chunks:
                rollouts[chunk.rollout_id].append(chunk)
                if chunk.finish:
                    ended.append(chunk.rollout_id)
        assert {i: len(r) for i, r in rollouts.items()} == lengths
        return ended

    assert virtually(body) == naive(lengths, list(lengths), slots)


def test_groups_share_the_prefill_of_their_prompt_and_new_weights_void_it() -> None:
    cost = GeneratorCost(prefill=PrefillCost(token_s=1.0), load_s=0.25)

    async def body(spans: Spans, carry: str) -> Any:
        g = make(spans, cost, lambda i: 50, carry=carry)
        await g.admit(told([rollout(i, group=i // 2) for i in range(4)]))
        await g.decode(5)
        await g.load(ticket(7, "x"))
        chunks = (await g.decode(5)).chunks
        assert {c.version for c in chunks} == {7}
        return [s.end_s - s.start_s for s in spans.records]

    # two prompts of 10 tokens; again, with the 5 tokens that each of the four has
    assert virtually(lambda s: body(s, "recompute")) == [20.0, 0.25, 2 * 10 + 4 * 5]
    assert virtually(lambda s: body(s, "reuse")) == [20.0, 0.25, 0.0]


def test_moving_rollouts_with_and_without_their_cache() -> None:
    cost = GeneratorCost(
        prefill=PrefillCost(token_s=1.0),
        cache_bytes=100.0,
        transfer=TransferCost(latency_s=0.5, bytes_per_s=1000.0),
    )

    async def body(spans: Spans) -> Any:
        a, b = make(spans, cost, lambda i: 50), make(spans, cost, lambda i: 50)
        rollouts = [rollout(i) for i in range(2)]
        await a.admit(told(rollouts))
        for chunk in (await a.decode(5)).chunks:
            rollouts[chunk.rollout_id].append(chunk)
        for r, with_cache in zip(rollouts, (True, False), strict=True):
            transfers = await a.export([r.id], with_cache)
            assert [p.cached_tokens for p in transfers] == [15 if with_cache else 0]
            await b.accept(told([r]), transfers)
        assert (await a.decode(5)).chunks == []
        assert summary((await b.decode(3)).chunks) == [(0, 5, 3, None), (1, 5, 3, None)]
        return [(s.name, s.end_s - s.start_s) for s in spans.records]

    # 15 tokens of 100 bytes at 1000 bytes a second and the latency; the other one is prefilled anew
    assert virtually(body) == [("gen", 20.0), ("migrate", 2.0), ("migrate", 0.0), ("gen", 15.0)]


# -- scorers and the learner ------------------------------------------------------------------


def chunk(
    id_: int, start: int, count: int, finish: FinishReason | None = None, v: int = 0
) -> Chunk:
    return make_chunk(id_, start, (0,) * count, (-1.0,) * count, v, finish)


@pytest.mark.parametrize("streams", [True, False])
def test_a_streaming_scorer_has_only_the_rest_left(streams: bool) -> None:
    async def body(spans: Spans) -> Any:
        cost = PrefillCost(call_s=1.0, token_s=0.1)
        s = make_scorer(spans, cost, reward=lambda i, v: i + v / 10, streams=streams)
        await s.admit(told([rollout(1), rollout(2, tokens=4)]))
        await s.extend([chunk(1, 0, 20), chunk(2, 4, 6, STOP)])
        await s.extend([chunk(1, 20, 5, STOP, v=3)])
        scores = await s.finish([2, 1])
        return [(x.rollout_id, x.scalar) for x in scores], [
            (x.name, round(x.end_s - x.start_s, 9), x.attributes["tokens"]) for x in spans.records
        ]

    scores, spans = virtually(body)
    assert scores == [(2, 2.0), (1, pytest.approx(1.3))]
    if streams:
        assert spans == [("prefill", 6.0, 50), ("prefill", 1.5, 5), ("score", 0.0, 0)]
    else:
        assert spans == [("score", 1.0 + 5.5, 55)]


def test_new_weights_void_what_a_critic_has_prefilled() -> None:
    async def body(spans: Spans) -> Any:
        cost = PrefillCost(token_s=1.0)
        s = make_scorer(spans, cost, "critic", kind="values", follows="critic")
        await s.admit(told([rollout(1)]))
        await s.extend([chunk(1, 0, 5)])
        await s.load(ticket(1, "x"))
        await s.extend([chunk(1, 5, 2, STOP)])
        (score,) = await s.finish([1])
        return score.values.shape, [x.end_s - x.start_s for x in spans.records]

    assert virtually(body) == ((7,), [15.0, 17.0, 0.0])


@pytest.mark.parametrize(
    ("padded", "streams", "expected"),
    [
        (0, False, [("score", 1 + 0.1 * 90, 90)]),
        (2, False, [("score", 2 + 0.1 * (60 + 40), 100)]),
        (3, False, [("score", 1 + 0.1 * 120, 120)]),
        (3, True, [("prefill", 1 + 0.1 * 120, 120), ("score", 0, 0)]),
    ],
)
def test_padded_scoring_takes_the_longest_of_each_few(
    padded: int, streams: bool, expected: Sequence[tuple[str, float, int]]
) -> None:
    async def body(spans: Spans) -> Any:
        cost = PrefillCost(call_s=1.0, token_s=0.1)
        s = make_scorer(spans, cost, "model", streams=streams, padded=padded)
        await s.admit(told([rollout(1), rollout(2), rollout(3)]))
        await s.extend([chunk(1, 0, 10, STOP), chunk(2, 0, 20, STOP), chunk(3, 0, 30, STOP)])
        await s.finish([1, 2, 3])
        return [(x.name, x.end_s - x.start_s, x.attributes["tokens"]) for x in spans.records]

    found = virtually(body)
    assert found == [(name, pytest.approx(seconds), n) for name, seconds, n in expected]


@pytest.mark.parametrize(
    ("prompts", "share", "expected"), [((0.0, 0.5), 0.5, [2, 4, 5]), ((0.5, 1.0), 0.5, [1, 3])]
)
def test_of_several_teachers_each_reads_the_responses_to_its_own_prompts(
    prompts: tuple[float, float], share: float, expected: Sequence[int]
) -> None:
    """Multiples of the golden ratio: 0.62, 0.24, 0.85, 0.47, 0.09."""

    async def body(spans: Spans) -> Any:
        cost = PrefillCost(call_s=1.0, token_s=0.1)
        s = make_scorer(spans, cost, "teacher-a", kind="logprobs", prompts=prompts)
        assert s._role.share == share
        await s.admit(told([rollout(i) for i in range(1, 6)]))
        await s.extend([chunk(i, 0, 10, STOP) for i in range(1, 6)])
        scores = await s.finish([1, 2, 3, 4, 5])
        return [len(x.values) for x in scores], [
            (x.name, x.end_s - x.start_s, x.attributes["rollouts"]) for x in spans.records
        ]

    lengths, spans = virtually(body)
    assert lengths == [10 * (i in expected) for i in range(1, 6)]
    assert spans[0] == ("prefill", pytest.approx(1 + 2 * len(expected)), expected)


def test_a_teacher_of_no_prompt_in_a_call_takes_no_time() -> None:
    async def body(spans: Spans) -> Any:
        s = make_scorer(spans, PrefillCost(call_s=1.0), "teacher-a", prompts=(0.5, 1.0))
        await s.admit(told([rollout(2)]))
        await s.extend([chunk(2, 0, 10, STOP)])
        await s.finish([2])
        return spans.records

    assert not virtually(body)


def test_a_function_costs_by_responses() -> None:
    async def body(spans: Spans) -> Any:
        s = make_scorer(spans, SampleCost(call_s=2.0, sample_s=0.5), "task")
        await s.admit(told([rollout(1), rollout(2)]))
        await s.extend([chunk(1, 0, 100, STOP), chunk(2, 0, 3, STOP)])
        await s.finish([1, 2])
        return [(x.name, x.end_s - x.start_s) for x in spans.records]

    assert virtually(body) == [("score", 3.0)]


def test_a_scorer_refuses_what_is_out_of_order() -> None:
    async def body(spans: Spans) -> None:
        s = make_scorer(spans, PrefillCost())
        await s.admit(told([rollout(1)]))
        for bad in (chunk(2, 0, 1), chunk(1, 1, 1)):
            with raises(EngineError, "chunk-out-of-place", bad.rollout_id, bad.start):
                await s.extend([bad])
        await s.extend([chunk(1, 0, 1)])
        with raises(EngineError, "rollout-unfinished", 1):
            await s.finish([1])
        await s.release([1])
        await s.admit(told([rollout(1)]))

    virtually(body)


def test_the_learner_costs_by_tokens_and_reports_rewards() -> None:
    async def body(spans: Spans) -> Any:
        cost = TrainCost(step_s=3.0, token_s=0.1, publish_s=0.5)
        learner = make_learner(spans, cost, trains=("actor", "critic"))
        batch = [rollout(1, tokens=10), rollout(2, tokens=30)]
        for r, rewards in zip(batch, ((1.0, 0.5), (2.0, 0.0)), strict=True):
            for name, x in zip(("model", "task"), rewards, strict=True):
                r.scores[name] = Score(r.id, name, "reward", np.array([x], np.float32))
            r.scores["critic"] = Score(r.id, "critic", "values", np.ones(len(r), np.float32))
        await learner.publish()
        weights = await learner.publish()
        output = await learner.train(train_batch(batch))
        assert output.rewards.tolist() == [1.5, 2.0]
        return output.stats, weights, [(s.name, s.end_s - s.start_s) for s in spans.records]

    stats, weights, spans = virtually(body)
    assert stats == {"objective/scores": 1.75, "staleness/mean": 2.0, "staleness/max": 2.0}
    assert {name: w.version for name, w in weights.items()} == {"actor": 2, "critic": 2}
    assert spans == [("publish", 0.5), ("publish", 0.5), ("update", 3.0 + 0.1 * 60)]


def test_a_learner_that_pads_trains_on_the_longest_everywhere() -> None:
    async def body(spans: Spans) -> Any:
        cost = TrainCost(token_s=0.1)
        batch = train_batch([rollout(1, tokens=10), rollout(2, tokens=30, prompt=5)])
        for padded in (False, True):
            await make_learner(spans, cost, padded=padded).train(batch)
        return [(x.attributes["tokens"], x.end_s - x.start_s) for x in spans.records]

    tokens, seconds = zip(*virtually(body), strict=True)
    assert tokens == (20 + 35, 2 * 35)
    assert seconds == (pytest.approx(5.5), pytest.approx(7.0))


def test_recorded_rewards_repeat_by_groups() -> None:
    """The last group is not complete, and a rollout without a reward follows the curve."""
    workload = Workload(
        batch=4,
        samples_per_prompt=2,
        rewards=(1.0, 1.0, 3.0, None, 5.0),
        learning=LearningCurve(first=7.0, last=7.0, spread=0.0),
    )
    rewards = [workload.reward(i, 0) for i in range(8)]
    assert rewards == [1.0, 1.0, 3.0, 7.0, 1.0, 1.0, 3.0, 7.0]


def test_rewards_follow_the_curve() -> None:
    curve = LearningCurve(first=-1.0, last=3.0, versions=10.0, spread=0.5)
    for version in (0, 10, 100):
        rewards = [curve.reward(0, i, version) for i in range(4000)]
        middle = 3.0 - 4.0 * np.exp(-version / 10)
        assert np.mean(rewards) == pytest.approx(middle, abs=0.02)
        assert max(abs(r - middle) for r in rewards) <= 0.5


# -- faults -----------------------------------------------------------------------------------


def test_faults_come_as_often_as_asked_and_the_same_again() -> None:
    async def body(spans: Spans) -> list[str]:
        loop, seen = asyncio.get_running_loop(), []
        faults = Faults(seed=1, raises=0.2, hangs=0.1, dawdles=0.3, slow_factor=4.0)
        for i in range(600):
            learner = make_learner(spans, TrainCost(publish_s=1.0))
            start_s = loop.time()
            try:
                async with asyncio.timeout(100.0):
                    await faulty(learner, faults, f"learner {i}").publish()
            except (InjectedError, TimeoutError) as error:
                seen.append(type(error).__name__)
            else:
                seen.append(f"{loop.time() - start_s:g}")
        return seen

    seen = virtually(body)
    assert virtually(body) == seen
    shares = {what: seen.count(what) / 600 for what in set(seen)}
    assert shares == {
        "InjectedError": pytest.approx(0.2, abs=0.05),
        "TimeoutError": pytest.approx(0.1, abs=0.05),
        "4": pytest.approx(0.3, abs=0.05),
        "1": pytest.approx(0.4, abs=0.05),
    }


def test_a_call_waits_for_the_faulty_one_before_it() -> None:
    async def body(spans: Spans) -> Any:
        scorer = faulty(
            make_scorer(spans, PrefillCost(call_s=1.0)),
            Faults(dawdles=1.0, slow_factor=3.0, unscored=1.0),
            "reward",
        )
        assert (scorer.info.name, scorer.info.kind) == ("reward", "reward")
        await scorer.admit(told([rollout(1)]))
        first = asyncio.create_task(scorer.extend([chunk(1, 0, 5, STOP)]))
        await asyncio.sleep(0)
        (score,) = await scorer.finish([1])
        return first.done(), asyncio.get_running_loop().time(), score.failure

    assert virtually(body) == (True, 3.0, "made to fail")


# -- calibration ------------------------------------------------------------------------------


def test_costs_are_found_again_in_the_spans_they_made() -> None:
    cost = GeneratorCost(
        decode=DecodeCost(step_s=0.02, row_s=0.001, context_s=2e-6),
        prefill=PrefillCost(call_s=0.01, token_s=5e-5),
        load_s=0.3,
    )
    reward = PrefillCost(call_s=0.03, token_s=1e-4)
    judged = SampleCost(call_s=0.1, sample_s=0.02)
    training = TrainCost(step_s=1.0, token_s=0.002, publish_s=0.1)

    async def body(spans: Spans) -> Any:
        g = make(spans, cost, Lengths(Lognormal(median=40, p95=160), 0))
        model, judge = make_scorer(spans, reward), make_scorer(spans, judged, "task")
        learner = make_learner(spans, training)
        for step in range(12):
            batch = [rollout(100 * step + i, prompt=20 + i) for i in range(4 + step)]
            await g.admit(told(batch))
            done: list[Rollout] = []
            while len(done) < len(batch):
                for c in (await g.decode(16)).chunks:
                    r = batch[c.rollout_id % 100]
                    r.append(c)
                    done += [r] if c.finish else []
            for scorer in (model, judge):
                await scorer.admit(told(done))
                await scorer.finish([r.id for r in done])
            await learner.train(train_batch(done))
            await g.load((await learner.publish())["actor"])
        return spans.records

    found = calibrate(virtually(body))
    assert numbers(found.generator.decode) == pytest.approx(numbers(cost.decode), rel=1e-3)
    assert numbers(found.generator.prefill) == pytest.approx(numbers(cost.prefill), rel=1e-3)
    assert found.generator.load_s == pytest.approx(0.3)
    assert numbers(found.scorers["reward"]) == pytest.approx(numbers(reward), rel=1e-3)
    assert numbers(found.scorers["task"]) == pytest.approx(numbers(judged), rel=1e-3)
    assert numbers(found.learner) == pytest.approx(numbers(training), rel=1e-3)


def numbers(cost: Section) -> dict[str, float]:
    return cost.model_dump()


def test_a_fit_stands_a_slow_first_call_and_stays_positive() -> None:
    random = np.random.default_rng(0)
    steps, tokens = random.integers(5, 50, 200), random.integers(100, 2000, 200)
    features = np.stack([steps, tokens, -np.ones(200)], axis=1).astype(float)
    seconds = 0.02 * steps + 1e-4 * tokens
    seconds *= random.normal(1, 0.02, 200)
    seconds[:3] += 60.0  # compilation, warm-up
    per_step, per_token, extra = fit_costs(features, seconds)
    assert per_step == pytest.approx(0.02, rel=0.03)
    assert per_token == pytest.approx(1e-4, rel=0.03)
    assert 0 <= extra < 0.01


def test_a_fit_takes_as_long_in_all_as_the_calls_did() -> None:
    """Calls of a busy machine: a few take several times as long, and are part of the mean."""
    random = np.random.default_rng(0)
    features = np.stack([np.ones(300), random.integers(100, 2000, 300)], axis=1).astype(float)
    usual = 0.1 + 1e-4 * features[:, 1]
    took = usual * random.lognormal(0, 0.2, 300) * np.where(random.random(300) < 0.1, 4, 1)
    assert took.sum() > 1.2 * usual.sum()
    assert (features @ fit_costs(features, took)).sum() == pytest.approx(took.sum(), rel=1e-6)
    one = np.ones((4, 1))
    assert fit_costs(one, np.array([200.0, 1.0, 2.0, 3.0])) == pytest.approx([2.0])  # compiles
    assert fit_costs(one, np.array([1.0, 200.0, 2.0, 3.0])) == pytest.approx([51.5])


def test_the_driver_s_work_is_fitted_and_not_on_the_way() -> None:
    """Between an update and publishing pass 0.5 s, of which the driver works 0.2."""
    spans = [Span("generator", "gen", 0.0, 1.0, {"steps": 1, "tokens": 1})]
    for step, items in enumerate((4, 8, 12)):
        at_s = 10.0 * step
        fill_s = 0.1 + 0.05 * items
        spans += [
            Span("driver", "driver/fill", at_s, at_s + fill_s, {"items": items}),
            Span("learner", "update", at_s + 1, at_s + 2, {"tokens": 1}),
            Span("driver", "driver/books", at_s + 1.9, at_s + 2.2, {"items": 3}),
            Span("learner", "publish", at_s + 2.5, at_s + 3, {}),
        ]
    found = calibrate(spans)
    assert found.call_s == pytest.approx(0.3)
    fill, books = found.driver["driver/fill"], found.driver["driver/books"]
    assert numbers(fill) == pytest.approx({"call_s": 0.1, "item_s": 0.05})
    assert books.seconds(3) == pytest.approx(0.3)


def test_replicas_of_a_scorer_have_one_cost_and_a_weight_sync_has_none() -> None:
    spans = Spans(ManualClock())
    spans.add("generator", "gen", 0.0, 1.0, steps=10, tokens=10)
    spans.add("learner", "update", 0.0, 1.0, tokens=10)
    for i in range(2):
        spans.add(f"critic {i}", "score/critic", 0.0, 3.0, rollouts=[1, 2, 3])
        spans.add(f"critic {i}", "score/critic", 0.0, 1.0, rollouts=[1])
        spans.add(f"critic {i}", "load", 0.0, 1.0, version=1)
    spans.add("weights", "send", 0.0, 1.0, version=1)
    found = calibrate(spans.records)
    assert list(found.scorers) == ["critic"]
    assert numbers(found.scorers["critic"]) == pytest.approx({"call_s": 0.0, "sample_s": 1.0})


def test_calibration_needs_a_run() -> None:
    with raises(StateError, "no-spans", "'gen'", "generator"):
        calibrate([])
