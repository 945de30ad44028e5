"""Steps on layouts, against cases computed by hand: phases, goes, bottlenecks, what bursts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from _estimate import StepSizes, estimate
from _phases import Phase, Work
from raising import raises
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.planner import memory_model
from stretto.planner.formulas import fsdp_training_bytes
from stretto.planner.hardware import Gpu, Hardware, Links
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.runtime.sim.costs import Efficiency

SMALL = Shape(layers=2, hidden=4, inner=8, heads=2, kv_heads=2, vocabulary=10, outputs=10)
"""Attention 4 x 16, the MLP 96, norms 8: 168 a layer; around them 84."""
P = 2 * 168 + 84
CRITIC = P - 40 + 4
USED, CRITIC_USED = P - 40, CRITIC - 40
"""Parameters that tokens are multiplied with."""
MODELS = ModelShapes.of_one_size(SMALL)
ALL = Efficiency(
    memory=1, prefill=1, training=1, link=1, usable=1, optimizer=1, step_s=0.5, reduce_s=0
)
"""Everything reaches its peak; a decode step takes half a second beside."""
FAST = 1e30
SHARDS = Layout(fsdp=4)
COPIES = Layout(dp=4)
LOAD = StepSizes(responses=8, prompt_tokens=3, response_tokens=2)
SIZES = LOAD.responses, LOAD.length
BUCKETS = 2 * 2 * P  # a small model has buckets as large as itself


def hardware(
    flops: float = FAST, read: float = FAST, memory_bytes: float = 1e9, link: float = FAST
) -> Hardware:
    gpu = Gpu("test", flops, read, memory_bytes, link, FAST)
    return Hardware(gpu, Links(link, link, FAST), ALL)


def layout(
    colocated: bool,
    learner: Layout = SHARDS,
    generator: Layout = COPIES,
    scorer: Layout = COPIES,
) -> RunLayout:
    return RunLayout(
        learner,
        generator,
        scorer,
        "all" if colocated else "none",
        checkpointing=False,
        micro_tokens=5,
        prefill_tokens=5,
    )


# -- pieces ----------------------------------------------------------------------------------------


def test_of_what_goes_on_side_by_side_the_longest_counts() -> None:
    work = Work(arithmetic_s=3, memory_s=2, hidden_s=4, exposed_s=1, host_s=5, overhead_s=6)
    assert work.by_limit == {"links": 5, "host": 5, "overhead": 6}
    assert work.times(2).by_limit == {"links": 10, "host": 10, "overhead": 12}


def test_a_phase_adds_up_its_pieces() -> None:
    phase = Phase("x", {"a": 1, "b": 2}, 0, (Work(arithmetic_s=3), Work(memory_s=1, hidden_s=2)))
    assert phase.memory_bytes == 3
    assert phase.seconds == 5
    assert {k: v for k, v in phase.by_limit.items() if v} == {"arithmetic": 3, "links": 2}


# -- generation ------------------------------------------------------------------------------------


def test_decoding_reads_weights_and_cache_once_a_step() -> None:
    found = estimate(MODELS, layout(True), LOAD, hardware(read=10)).generation
    # Two rows a copy, four tokens each halfway, 2 x 2 x 4 x 2 bytes a token.
    step_s = (2 * USED + 2 * 4 * 32) / 10 + 0.5
    assert found.seconds == pytest.approx(2 * step_s)
    assert found.wire_bytes == 0


def test_decoding_and_prefill_take_their_operations() -> None:
    found = estimate(MODELS, layout(True), LOAD, hardware(flops=100)).generation
    prefill = 6 * (2 * USED + 2 * 2 * 3 * 4)
    step = 2 * (2 * USED + 4 * 2 * 4 * 4)
    assert found.by_limit["arithmetic"] == pytest.approx((prefill + 2 * step) / 100)
    assert found.by_limit["overhead"] == 1


def test_tensor_parallel_generators_reduce_twice_a_layer() -> None:
    place = layout(True, generator=Layout(dp=2, tp=2))
    peak = hardware(link=10)
    found = estimate(MODELS, place, LOAD, peak).generation
    # Four rows a copy: 12 tokens of prompts, and two steps of four; 8 bytes a token.
    assert found.wire_bytes == 2 * 2 * 8 * (12 + 8)
    assert found.by_limit["links"] == pytest.approx(found.wire_bytes / 10)
    slow = replace(peak, assumed=ALL.model_copy(update={"reduce_s": 1}))
    found = estimate(MODELS, place, LOAD, slow).generation
    passes = 3 + 2  # prompts five tokens at a time, and two steps
    assert found.by_limit["overhead"] == pytest.approx(passes * 2 * 2 + 2 * 0.5)


def test_what_does_not_fit_at_once_is_decoded_in_goes() -> None:
    place = layout(True, *[Layout()] * 3)
    phases = memory_model.phases_of(MODELS, place, *SIZES, hardware())
    cache = 8 * (5 * 32 + 4 * 10)  # kept while other roles work, so the fullest phase counts
    assert {parts["keys and values"] for parts in phases.values()} == {cache}
    others = max(sum(parts.values()) for parts in phases.values()) - cache
    tight = hardware(memory_bytes=others + 3.5 * 200)
    assert memory_model.rows_in_flight(MODELS, place, *SIZES, hardware()) == (8, 1)
    assert memory_model.rows_in_flight(MODELS, place, *SIZES, tight) == (3, 3)
    found = estimate(MODELS, place, LOAD, tight)
    assert found.generation.by_limit["overhead"] == 3 * 2 * 0.5
    assert found.generation not in found.bursts
    none = hardware(memory_bytes=others)
    assert memory_model.rows_in_flight(MODELS, place, *SIZES, none) == (1, 8)
    assert estimate(MODELS, place, LOAD, none).bursts[0].name == "weight sync"


# -- scoring and training --------------------------------------------------------------------------


def test_scoring_reads_all_tokens_three_times() -> None:
    found = estimate(MODELS, layout(True), LOAD, hardware(flops=100)).scoring
    tokens, attention = 40 / 4, 2 * 2 * 5 * 4
    expected = tokens * (2 * USED + 4 * CRITIC_USED + 3 * attention) / 100
    assert found.seconds == pytest.approx(expected)
    # The critic is in the learner's shards, gathered for each of two micro-batches.
    assert found.wire_bytes == 2 * 2 * CRITIC * 3 / 4
    aside = estimate(MODELS, layout(False), LOAD, hardware(flops=100)).scoring
    assert aside.seconds == pytest.approx(expected)
    assert aside.wire_bytes == 0


@pytest.mark.parametrize(("checkpointing", "factor"), [(False, 3), (True, 4)])
def test_training_takes_three_forwards_or_four(checkpointing: bool, factor: int) -> None:
    place = replace(layout(True), checkpointing=checkpointing)
    load = replace(LOAD, epochs=2)
    found = estimate(MODELS, place, load, hardware(flops=100)).training
    expected = 2 * factor * 10 * (2 * USED + 2 * CRITIC_USED + 2 * 80) / 100
    assert found.seconds == pytest.approx(expected)


def test_shards_are_fetched_beside_the_passes() -> None:
    slow = estimate(MODELS, layout(True), LOAD, hardware(link=10)).training
    traffic = [fsdp_training_bytes(s, Layout(fsdp=4), 2) for s in (MODELS.actor, MODELS.critic)]
    assert slow.wire_bytes == sum(traffic)
    assert slow.seconds == pytest.approx(sum(traffic) / 10)
    both = estimate(MODELS, layout(True), LOAD, hardware(flops=1, link=10)).training
    alone = estimate(MODELS, layout(True), LOAD, hardware(flops=1)).training
    assert both.seconds == alone.seconds


def test_updates_move_their_states() -> None:
    found = estimate(MODELS, layout(True), LOAD, hardware(read=10)).training
    assert found.by_limit["GPU memory"] == pytest.approx(32 * (P + CRITIC) / 4 / 10)


# -- weight sync, and the step ---------------------------------------------------------------------


def test_colocated_phases_add_up() -> None:
    place = layout(True, generator=Layout(dp=2, tp=2))
    found = estimate(MODELS, place, LOAD, hardware(flops=100, link=10))
    assert found.sync.wire_bytes == 2 * (168 + 84 - P / 4)
    assert found.sync.seconds == pytest.approx(found.sync.wire_bytes / 10)
    assert found.step_s == pytest.approx(sum(phase.seconds for phase in found.phases))
    longest = max(found.phases, key=lambda phase: phase.seconds)
    assert found.bottleneck[0] == longest.name


def test_apart_the_slowest_group_counts() -> None:
    found = estimate(MODELS, layout(False), LOAD, hardware(flops=100))
    assert found.layout.gpus == 12
    assert found.step_s == found.training.seconds
    assert found.bottleneck == ("training", "arithmetic")
    # Where links are slow, generators wait for the weights, and training does not.
    found = estimate(MODELS, layout(False), LOAD, hardware(link=1))
    assert found.sync.wire_bytes == 2 * P
    fetched = found.training.seconds
    assert found.groups["generation"]["links"] == pytest.approx(2 * P)
    assert found.groups["scoring"]["links"] == pytest.approx(2 * CRITIC)
    assert found.step_s == max(fetched, 2 * P + found.generation.seconds)


def test_broadcasts_between_nodes_share_the_adapters() -> None:
    place = layout(False, Layout(fsdp=8), COPIES, COPIES)
    peak = replace(hardware(), links=Links(FAST, between_bytes_per_s=10))
    found = estimate(MODELS, place, LOAD, peak)
    assert found.syncs[0].exposed_s == pytest.approx(2 * P / (4 * 10))


# -- memory of the phases --------------------------------------------------------------------------


def test_colocated_roles_keep_what_they_have() -> None:
    place, peak = layout(True), hardware()
    held = {
        "learner's states": 16 * (P + CRITIC) / 4,
        "frozen": 2 * (P + CRITIC),
        "weights": 2 * P,  # of an engine that is not put to sleep, with two rows of five tokens
        "keys and values": 2 * (5 * 32 + 4 * 10),
    }
    for phase in estimate(MODELS, place, LOAD, peak).phases:
        assert {name: phase.parts[name] for name in held} == held
    assert estimate(MODELS, place, LOAD, peak).host_bytes == 0
    sync = estimate(MODELS, place, LOAD, peak).sync
    assert sync.memory_bytes == sum(held.values()) + 2 * BUCKETS


def test_an_engine_that_sleeps_leaves_the_gpu_to_other_roles() -> None:
    """It has weights of its own, which are published, and the critic as a scorer is a copy."""
    found = estimate(MODELS, replace(layout(True), sleeping=True), LOAD, hardware())
    for phase in found.phases:
        awake = phase.name in ("generation", "weight sync")
        assert phase.parts["weights"] == (2 * P if awake else 0)
        assert phase.parts["frozen"] == 2 * (P + 2 * CRITIC)
        assert phase.parts["published weights"] == 3 * 2 * (P + CRITIC) / 4


def test_offloaded_moments_and_frozen_weights_are_on_the_host() -> None:
    """As ``cluster.processes`` has it: masters, gradients and the engine stay on the GPU."""
    place = replace(layout(True), offload=True)
    found = estimate(MODELS, place, LOAD, hardware())
    moments, frozen = 8 * (P + CRITIC) / 4, 2 * (P + CRITIC)
    for phase in found.phases:  # moments come back while scorers work
        updates = phase.name in ("scoring", "training")
        assert phase.parts["learner's states"] == moments
        assert phase.parts["learner's moments"] == (moments if updates else 0)
        assert phase.parts["frozen"] == (frozen if phase.name == "scoring" else 0)
    assert found.host_bytes == moments + frozen
    # Moments come and go, copies of frozen models stay on the host.
    slow = replace(hardware(), links=Links(FAST, FAST, host_bytes_per_s=1))
    found = estimate(MODELS, place, LOAD, slow)
    host = [phase.by_limit.get("host", 0.0) for phase in found.phases]
    assert host == [0, frozen, 2 * moments, 0]


def test_roles_apart_hold_what_they_need() -> None:
    found = estimate(MODELS, layout(False), LOAD, hardware())
    assert found.scoring.parts["frozen"] == 2 * (P + 2 * CRITIC)
    assert found.training.parts["published weights"] == 3 * 2 * (P + CRITIC) / 4
    assert "frozen" not in found.training.parts
    assert found.generation.parts["buckets"] == BUCKETS
    sides = (found.training.memory_bytes + BUCKETS, found.generation.memory_bytes)
    assert found.sync.memory_bytes == max(sides)


def test_of_two_models_the_larger_pass_counts() -> None:
    """They are trained one after the other."""
    parts = memory_model.phases_of(MODELS, layout(True), *SIZES, hardware())["training"]
    assert parts["logits"] == memory_model.logits_bytes(SMALL, 5, gradients=True)
    assert parts["activations"] == 2 * memory_model.layer_activation_bytes(SMALL, 5, 1)


def test_phases_that_burst_are_named() -> None:
    place = layout(True)
    phases = estimate(MODELS, place, LOAD, hardware()).phases
    most = max(phase.memory_bytes for phase in phases) - 200  # with one row in place of two
    found = estimate(MODELS, place, LOAD, hardware(memory_bytes=most))
    assert found.bursts == ()
    found = estimate(MODELS, place, LOAD, hardware(memory_bytes=most - 1))
    assert [phase.name for phase in found.bursts] == ["training"]


def test_models_that_cannot_be_divided_are_refused() -> None:
    with raises(ConfigError, "heads-not-divided", 4, "2 heads"):
        estimate(MODELS, layout(True, learner=Layout(tp=4)), LOAD, hardware())
