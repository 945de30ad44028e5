"""Plans: rounds by hand, bounds below what is simulated, the search against full enumeration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raising import raises
from stretto.config import PRESETS, ScheduleConfig
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import Shape, shape_of
from stretto.pipelines.baselines import serial_1f1b
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.pipelines.solve import solve
from stretto.planner.candidates import (
    BASELINE,
    Candidate,
    Kind,
    PlanSpec,
    candidates,
    fits,
    memory_by_phase,
)
from stretto.planner.formulas import pipeline_waits_s
from stretto.planner.hardware import Hardware
from stretto.planner.plan_search import (
    ROUNDS,
    WARM,
    WITHIN,
    Bounds,
    StepWork,
    result_of,
    search,
    work_of,
)
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.runtime.sim.cluster import Workload
from stretto.runtime.sim.lengths import Lognormal, Replayed, Uniform

SMALL = Shape(24, 2048, 8192, 16, 4, 32_000, 32_000)
"""About 1.5 billion parameters."""
IN_THREES = ModelShapes.of_one_size(replace(SMALL, heads=12, kv_heads=6))
WORK = Workload(
    batch=16,
    max_new_tokens=256,
    prompt_tokens=Uniform(low=20, high=60),
    response_tokens=Lognormal(median=40, p95=200),
)
SPEC = PlanSpec(ModelShapes.of_one_size(SMALL), WORK, Hardware.of("h100"), pipelines=True)
VARIANTS: dict[str, ScheduleConfig] = {
    **{name: ScheduleConfig(preset=name) for name in PRESETS},
    "inter": ScheduleConfig(preset="oppo", score_on="batch"),
    "async-inter": ScheduleConfig(preset="async", overcommit="auto"),
    "dial": ScheduleConfig(preset="async", weight_sync_interval=2),
}


def spec(gpus: int, *names: str) -> PlanSpec:
    found = {name: VARIANTS[name] for name in names or VARIANTS}
    return replace(SPEC, gpus=gpus, variants=found)


# -- the work of a step ----------------------------------------------------------------------------


def made(lengths: tuple[int, ...], batch: int, extra: int = 0, **more: Any) -> list[StepWork]:
    """The work of two rounds after the first one, with prompts of 10 tokens."""
    workload = Workload(
        batch=batch,
        prompt_tokens=Uniform(low=10, high=10),
        response_tokens=Replayed(tokens=lengths),
        **more,
    )
    schedule = ScheduleConfig(score_on="rollout", overcommit=extra)
    return [work_of(workload, schedule, first, first + 1) for first in (1, 2)]


def test_a_round_ends_with_its_longest_response() -> None:
    first, second = made((1, 1, 3, 5, 2, 2), 2)
    # Context: two prompts for 3 and 5 steps, and 0 + 1 + 2, 0 + .. + 4 tokens of the responses.
    assert first == StepWork(5, 8, 80 + 3 + 10, 20, 28)
    assert second == StepWork(2, 4, 40 + 2, 20, 24)


def test_a_step_has_its_share_of_a_round_of_several() -> None:
    lengths = {
        "prompt_tokens": Uniform(low=10, high=10),
        "response_tokens": Replayed(tokens=(3, 5)),
    }
    workload = Workload(batch=1, **lengths)
    schedule = ScheduleConfig(score_on="rollout", weight_sync_interval=2)
    assert work_of(workload, schedule, 1, 2) == StepWork(2.5, 4, (80 + 3 + 10) / 2, 10, 14)


def test_what_is_over_committed_is_carried() -> None:
    first, second = made((1, 1, 4, 2, 5, 3), 2, extra=1)
    # The 4 has one token already, read again with its prompt; it ends after three steps, and the 2
    # after two. Of the 5 there are three tokens then.
    assert (first.steps, first.decoded, first.trained) == (3, 3 + 2 + 3, 10 + 4 + 10 + 2)
    assert first.read == 3 * 10 + (1 + 2 + 3) + 2 * 10 + (0 + 1) + 3 * 10 + (0 + 1 + 2)
    assert first.prefilled == 11 + 20
    assert second.prefilled == 13 + 20


def test_responses_to_one_prompt_end_together() -> None:
    lengths = (1, 1, 1, 9, 2, 3, 5, 5, 4, 4)
    first, _ = made(lengths, 2, extra=2, samples_per_prompt=2)
    # The third group's, as the second has eight more to go.
    assert (first.steps, first.trained) == (3, 10 + 2 + 10 + 3)


# -- candidates ------------------------------------------------------------------------------------


def test_candidates_use_all_gpus_and_leave_no_knob_idle() -> None:
    found = list(candidates(spec(8)))
    assert {c.layout.gpus for c in found} == {8}
    assert {c.layout.sharing for c in found} == {"all", "none", "generators", "learner"}
    assert len({(c.layout, c.variant) for c in found}) == len(found)
    for c in found:
        knobs, sharing = c.schedule.knobs, c.layout.sharing
        assert not (knobs.lag and sharing == "all")
        assert not (knobs.streams and sharing in ("all", "generators"))
        if c.variant == "rlhfuse":
            assert sharing == "generators"
            assert c.engines == c.layout.generator.dp > 1


def test_models_are_cut_by_divisors_of_their_heads() -> None:
    found = list(
        candidates(
            replace(spec(6, "sync"), models=ModelShapes.of_one_size(shape_of("smollm2-135m")))
        )
    )
    assert {c.layout.learner.tp for c in found} == {1, 3}
    assert {c.layout.generator.tp for c in found} == {1, 3}


def layouts(gpus: int, sharing: str, models: ModelShapes = SPEC.models) -> list[RunLayout]:
    asked = replace(spec(gpus, "sync"), models=models)
    return [c.layout for c in candidates(asked) if c.layout.sharing == sharing]


def test_roles_in_the_learners_ranks_have_layouts_of_their_own() -> None:
    """28 heads, 4 of keys and values: eight slices do not divide them, shards do."""
    models = ModelShapes.of_one_size(replace(SMALL, heads=28, kv_heads=4))
    together = [layout for layout in layouts(8, "all", models) if layout.learner.pp == 1]
    copies = [Layout(dp=8), Layout(dp=4, tp=2), Layout(dp=2, tp=4)]
    assert {layout.learner for layout in together} == {
        *(Layout(fsdp=8), Layout(fsdp=4, tp=2), Layout(fsdp=2, tp=4)),
    }
    assert {layout.generator for layout in together} == set(copies)
    assert {layout.scorer for layout in together} == {*copies, Layout(fsdp=8)}
    assert all(layout.critic == layout.learner for layout in together)
    # Elsewhere than all generators, a critic is a copy in slices, so that 4 ranks can have shards.
    beside = layouts(8, "learner", models)
    sharded = {layout.learner.ranks for layout in beside if layout.scorer.fsdp > 1}
    assert sharded == {2, 4}
    assert {layout.critic for layout in beside if layout.scorer == Layout(fsdp=4)} == {Layout(tp=4)}
    without_critic = replace(models, critic=None)
    beside = layouts(8, "learner", without_critic)
    assert {layout.learner.ranks for layout in beside if layout.scorer.fsdp > 1} == {*range(2, 8)}


def test_pipelines_have_a_critic_and_gpus_of_their_own_or_all() -> None:
    assert {layout.learner.pp for layout in layouts(8, "learner")} == {1}
    expected = {
        *(Layout(pp=2), Layout(dp=2, pp=2), Layout(dp=3, pp=2), Layout(pp=4)),
        *(Layout(pp=2, tp=2), Layout(pp=2, tp=3)),
    }
    for sharing in ("none", "generators"):
        learners = {layout.learner for layout in layouts(8, sharing, IN_THREES)}
        assert {learner for learner in learners if learner.pp > 1} == expected
    together = [layout for layout in layouts(8, "all") if layout.learner.pp > 1]
    assert {layout.learner for layout in together} == {
        *(Layout(dp=4, pp=2), Layout(dp=2, pp=4), Layout(pp=8)),
        *(Layout(dp=2, pp=2, tp=2), Layout(pp=4, tp=2), Layout(pp=2, tp=4)),
    }
    assert {layout.fused for layout in together} == {True}  # there is memory for it
    # The critic is no learner's shards: it scores as a copy, by the engines' layout next to shards.
    assert {layout.scorer.fsdp for layout in together} == {1, 8}
    for layout in together:
        assert layout.critic == (layout.generator if layout.scorer.fsdp > 1 else layout.scorer)
    without_critic = replace(SPEC.models, critic=None)
    assert {layout.learner.pp for layout in layouts(8, "none", without_critic)} == {1}
    asked = replace(spec(8, "sync"), pipelines=False)
    assert {c.layout.learner.pp for c in candidates(asked)} == {1}
    few = replace(spec(8, "sync"), updates=8)  # of two responses each
    assert {c.layout.learner.dp for c in candidates(few)} == {1, 2}


def test_engines_with_weights_of_their_own_share_the_gpus_of_one_node() -> None:
    asked = replace(spec(8, "sync"), sleeping=True)
    together = [c.layout for c in candidates(asked) if c.layout.sharing == "all"]
    assert {layout.sleeping for layout in together} == {True}
    assert {layout.critic for layout in together if layout.scorer.fsdp == 1} == {
        layout.scorer for layout in together if layout.scorer.fsdp == 1
    }
    assert "all" not in {c.layout.sharing for c in candidates(replace(asked, gpus=16))}


@pytest.mark.parametrize("sizes", [(2, 2), (5, 2), (2, 5)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 6), (5, 10), (8, 16), (8, 6)])
def test_pipelines_wait_as_in_the_schedules(
    stages: int, micro_batches: int, sizes: tuple[int, int]
) -> None:
    """Of models of like and of different sizes, with many and with few micro-batches."""
    actor, critic = (
        ModelPipelines.of(stages, 1, micro_batches, forward=n, backward=2 * n, activation=1)
        for n in sizes
    )
    problem, micro = Problem(actor, critic), [3 * n for n in sizes]

    def idle(latency: int) -> float:
        return latency - micro_batches * sum(micro)

    serial, fused = (
        pipeline_waits_s(micro, stages, micro_batches, fused=fused) for fused in (False, True)
    )
    assert serial == idle(serial_1f1b(problem).latency)
    any_memory = 1e9  # the search ends with the bound of the latency
    assert fused == idle(solve(problem, seconds=1.0, memory=any_memory).makespan)


def test_fused_pipelines_hold_both_models_micro_batches() -> None:
    place = RunLayout(Layout(pp=4), Layout(dp=2), Layout(), "none", checkpointing=True)
    plain = Candidate(place, "sync", VARIANTS["sync"])
    fused = replace(plain, layout=replace(place, fused=True))
    more = [sum(memory_by_phase(SPEC, c)["training"].values()) for c in (plain, fused)]
    assert more[1] - more[0] == memory_by_phase(SPEC, plain)["training"]["activations"]
    assert result_of(SPEC, fused).step_s < result_of(SPEC, plain).step_s


def test_one_gpu_holds_all_roles() -> None:
    (only,) = {c.layout for c in candidates(spec(1, "sync"))}
    assert (only.sharing, only.offload) == ("all", False)


def test_without_scorers_there_is_nothing_to_place() -> None:
    alone = replace(spec(4, "sync"), models=ModelShapes(SMALL))
    assert {c.layout.sharing for c in candidates(alone)} == {"all", "generators"}


def test_many_gpus_are_dealt_out_by_nodes() -> None:
    found = list(candidates(spec(1000, "async")))
    assert all(c.layout.learner.ranks % 16 == 8 for c in found)
    assert len(found) < 30_000


# -- bounds ----------------------------------------------------------------------------------------


def test_rounds_of_several_batches_share_decode_steps() -> None:
    """A small batch and a long tail: three of them decode as long as one."""
    tail = WORK.model_copy(
        update={"batch": 4, "response_tokens": Lognormal(median=20, p95=240), "seed": 7}
    )
    schedule = ScheduleConfig(preset="async", weight_sync_interval=3)
    tailed = replace(spec(4, "dial"), workload=tail, variants={"dial": schedule})
    bounds = Bounds(tailed, WARM, ROUNDS)
    found = list(candidates(tailed))
    assert all(bounds.of(c) <= result_of(tailed, c).step_s for c in found[::4])


@pytest.mark.parametrize("name", VARIANTS)
def test_no_candidate_is_quicker_than_its_bound(name: str) -> None:
    bounds = Bounds(SPEC, WARM, ROUNDS)
    for c in list(candidates(spec(6, name)))[::9]:
        assert bounds.of(c) <= result_of(SPEC, c).step_s


def test_the_baseline_is_known_beforehand() -> None:
    """Without overlap, a bound is what is simulated but for messages."""
    bounds = Bounds(SPEC, WARM, ROUNDS)
    (first, *_) = (c for c in candidates(spec(4, "sync")) if c.kind == BASELINE)
    assert bounds.of(first) == pytest.approx(result_of(SPEC, first).step_s, rel=0.1)


# -- outcomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["all", "none", "generators", "learner"])
def test_the_time_of_all_gpus_is_accounted_for(sharing: Any) -> None:
    shards, copies = Layout(fsdp=2), Layout(dp=2)
    schedule = VARIANTS["sync"]
    found = result_of(SPEC, Candidate(RunLayout(shards, copies, copies, sharing), "sync", schedule))
    assert found.busy + sum(found.idle.values()) == pytest.approx(1)
    assert found.idle["stragglers"] > 0.05  # two copies of a generator
    assert found.samples_per_s == pytest.approx(16 / found.step_s)
    assert (found.staleness_mean, found.staleness_max) == (0, 0)


def test_staleness_follows_the_knobs() -> None:
    place = RunLayout(Layout(fsdp=2), Layout(dp=2), Layout(), "none")
    behind = result_of(SPEC, Candidate(place, "async", VARIANTS["async"]))
    assert (behind.staleness_mean, behind.staleness_max) == (1, 1)


# -- the search ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [2, 4])
def test_the_search_finds_what_full_enumeration_finds(gpus: int) -> None:
    asked = spec(gpus, "sync", "inter", "async", "rlhfuse", "stretto")
    everything: dict[Kind, float] = {}
    count = 0
    for c in candidates(asked):
        if fits(SPEC, c):
            count += 1
            step_s = result_of(SPEC, c).step_s
            kind = c.kind
            everything[kind] = min(everything.get(kind, step_s), step_s)
    found = search(asked, keep=3, workers=1)
    assert found.simulated < count
    expected = sorted(everything.values())[:3]
    for outcome, step_s in zip(found.best, expected, strict=True):
        assert step_s <= outcome.step_s <= step_s * (1 + WITHIN)
    assert found.baseline is not None
    known = min(step_s for kind, step_s in everything.items() if kind == BASELINE)
    assert found.baseline.step_s <= known * (1 + WITHIN)


def test_in_several_processes_it_finds_the_same() -> None:
    asked = spec(2, "sync", "async")
    here, there = search(asked, workers=1), search(asked, workers=2)
    assert [o.step_s for o in here.best] == [o.step_s for o in there.best]


def test_a_search_that_is_cut_short_says_what_it_may_have_missed() -> None:
    found = search(spec(6), limit_s=0, workers=1)
    assert found.best
    assert 0 < found.bound_s <= found.best[0].step_s * 1.5
    assert search(spec(2, "sync"), workers=1).bound_s == float("inf")


def test_nothing_fits() -> None:
    big = replace(spec(2), models=ModelShapes.of_one_size(shape_of("llama-65b")))
    with raises(ConfigError, "nothing-fits", "2 GPUs"):
        search(big, workers=1)
