"""Clusters out of layouts: devices, costs and memory, against cases computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raising import raises
from stretto.config import ScheduleConfig
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import shape_of
from stretto.planner import memory_model
from stretto.planner.candidates import (
    Candidate,
    PlanSpec,
    candidates,
    cluster_of,
    cost_of_generator,
    cost_of_learner,
    memory_by_phase,
    slots_of,
    swap_s,
)
from stretto.planner.hardware import Hardware
from stretto.planner.plan_search import ROUNDS, WARM, Bounds, result_of
from stretto.planner.run_layout import ModelShapes, RunLayout, Sharing, TeacherShape
from stretto.runtime.sim.cluster import Workload
from stretto.runtime.sim.costs import Efficiency, PrefillCost, SampleCost
from stretto.runtime.sim.lengths import Uniform
from stretto.runtime.sim.simulate import simulate

QWEN = shape_of("qwen2.5-7b")
PERFECT = Efficiency(
    memory=1, prefill=1, training=1, link=1, usable=1, optimizer=1, step_s=0, call_s=0
)
WORK = Workload(
    batch=32,
    steps=4,
    max_new_tokens=256,
    prompt_tokens=Uniform(low=100, high=100),
    response_tokens=Uniform(low=1, high=256),
)
SPEC = PlanSpec(ModelShapes.of_one_size(QWEN), WORK, Hardware.of("h200", PERFECT))


FOUR = Layout(dp=4)
SYNC = ScheduleConfig()


def plan(layout: RunLayout, schedule: ScheduleConfig = SYNC, engines: int = 1) -> Candidate:
    return Candidate(layout, "a variant", schedule, engines)


def layout(sharing: Sharing, scorer: Layout = FOUR) -> RunLayout:
    return RunLayout(Layout(fsdp=4), Layout(dp=2, tp=2), scorer, sharing)


@pytest.mark.parametrize(
    ("sharing", "generators", "scorers", "gpus"),
    [
        ("all", (0, 1, 2, 3), (0, 1, 2, 3), 4),
        ("none", (4, 5, 6, 7), (8, 9, 10, 11), 12),
        ("generators", (4, 5, 6, 7), (4, 5, 6, 7), 8),
        ("learner", (4, 5, 6, 7), (0, 1, 2, 3), 8),
    ],
)
def test_roles_share_devices_as_the_layout_says(
    sharing: Sharing, generators: tuple[int, ...], scorers: tuple[int, ...], gpus: int
) -> None:
    place = layout(sharing)
    expected = {"learner": (0, 1, 2, 3), "generators": generators, "scorers": scorers}
    assert place.devices == expected
    assert place.gpus == gpus
    cluster = cluster_of(SPEC, plan(place))
    assert cluster.device_count == gpus
    assert cluster.generators[0].replicas == 2
    hosts = {scorer.host for scorer in cluster.scorers}
    assert hosts == ({0} if sharing in ("all", "generators") else {None})


def test_each_generator_has_its_share_of_the_copies_and_of_the_scorers() -> None:
    place = replace(layout("generators"), generator=Layout(dp=4), scorer=Layout(dp=4))
    cluster = cluster_of(SPEC, plan(place, ScheduleConfig(preset="rlhfuse"), 2))
    assert [g.devices for g in cluster.generators] == [(4, 5), (6, 7)]
    rewards = [(s.devices, s.host) for s in cluster.scorers if s.name == "reward"]
    assert rewards == [((4, 5), 0), ((6, 7), 1)]
    assert {s.follows for s in cluster.scorers if s.name == "critic"} == {"critic"}


def test_weights_travel_by_reshard_or_broadcast() -> None:
    def loads(place: RunLayout) -> tuple[float, float]:
        cluster = cluster_of(SPEC, plan(place))
        cost = cluster.generators[0].cost
        assert cost is not None
        (critic,) = (s.load_s for s in cluster.scorers if s.follows)
        return cost.load_s, critic

    size, critic = 2 * QWEN.parameters, 2 * QWEN.valued().parameters
    # Colocated, a device has a quarter of all already, and two exchange what they lack by NVLink.
    held = 2 * QWEN.held(2)
    assert loads(layout("all")) == (pytest.approx((held - size / 4) / 450e9), 0.0)
    # Learner and generators fit into one node, and so do learner and scorers.
    assert loads(layout("none")) == (pytest.approx(size / 450e9), pytest.approx(critic / 450e9))
    nodes = RunLayout(Layout(fsdp=8), Layout(dp=2, tp=4), Layout(dp=8), "none")
    assert loads(nodes) == (pytest.approx(size / 50e9), pytest.approx(critic / 50e9))
    # A critic that scores where it is trained is gathered there.
    lent = loads(layout("learner"))
    assert lent[1] == pytest.approx((critic - critic / 4) / 450e9)


def test_offloaded_moments_travel_there_and_back_and_frozen_models_once() -> None:
    place = replace(layout("all"), offload=True)
    trained = QWEN.parameters + QWEN.valued().parameters
    moved = 2 * 8 * trained / 4 + 2 * trained
    assert swap_s(SPEC, place) == pytest.approx(moved / 64e9)
    assert swap_s(SPEC, layout("all")) == 0
    apart = cost_of_learner(SPEC, layout("all")).step_s
    assert cost_of_learner(SPEC, place).step_s == pytest.approx(apart + moved / 64e9)


def test_memory_of_scorers_that_stream() -> None:
    place = layout("none", Layout(dp=2, tp=2))
    plain = memory_by_phase(SPEC, plan(place))
    streams = memory_by_phase(SPEC, plan(place, ScheduleConfig(score_on="chunk")))
    assert streams.keys() == {"generation", "scoring", "training", "weight sync"}
    # 16 responses of 100 + 128.5 tokens a copy; keys and values of three models in two slices
    expected = 16 * WORK.mean_tokens * 3 * 57344 / 2
    assert WORK.mean_tokens == pytest.approx(228.5, abs=1)
    assert streams["scoring"]["responses that stream"] == pytest.approx(expected)
    assert {**streams["scoring"], "responses that stream": 0} == {
        **plain["scoring"],
        "responses that stream": 0,
    }


def test_where_not_all_fit_a_copy_has_slots() -> None:
    """Of 62 GB beside weights and a prefill's activations, at 57,344 bytes a token and row."""
    place = RunLayout(Layout(fsdp=2), Layout(dp=2), Layout(dp=2), "none")
    long = WORK.model_copy(update={"batch": 256, "max_new_tokens": 16_284})
    on = Hardware.of("h100", PERFECT)
    spec = replace(SPEC, workload=long, hardware=on)
    cost = cost_of_generator(spec, place)
    assert spec.longest == 16_384
    slots = slots_of(spec, plan(place))
    assert slots == cost.cache_tokens // 16_384
    assert slots == cluster_of(spec, plan(place)).generators[0].slots
    assert 0 < slots < 128
    assert slots_of(SPEC, plan(place)) == 0  # all of a short batch
    assert spec.in_flight(ScheduleConfig(overcommit=32)) == 256 + 32


def test_scorers_beside_generators_find_their_caches_there() -> None:
    place = layout("generators", Layout(dp=4))
    found = memory_by_phase(SPEC, plan(place))
    generator, scorer = found["generation"], found["scoring"]
    assert generator["frozen"] == scorer["frozen"] == memory_model.frozen_bytes(SPEC.models, place)
    assert scorer["keys and values"] == generator["keys and values"]
    assert "frozen" not in memory_by_phase(SPEC, plan(layout("none")))["generation"]
    beside = memory_by_phase(SPEC, plan(layout("learner")))
    assert beside["training"]["frozen"] == beside["scoring"]["frozen"]


def test_runs_without_critic_or_reward_model() -> None:
    models = ModelShapes(QWEN, reference=QWEN)
    spec = replace(SPEC, models=models, functions={"right": SampleCost(call_s=0.01)})
    cluster = cluster_of(spec, plan(layout("none")))
    assert [s.name for s in cluster.scorers] == ["reference", "right"]
    assert cluster.learner.trains == ("actor",)
    both = cost_of_learner(SPEC, layout("none")).token_s
    alone = cost_of_learner(spec, layout("none")).token_s
    assert both / 2 < alone < both * 0.55  # the critic has no output layer to speak of
    assert len(simulate(cluster).steps) == 4


def test_several_teachers_divide_the_prompts_and_all_take_memory() -> None:
    small = shape_of("qwen2.5-0.5b")
    teachers = TeacherShape("teacher-a", QWEN, 0.25), TeacherShape("teacher-b", small, 0.75)
    spec = replace(SPEC, models=ModelShapes(QWEN, teachers=teachers))
    place = layout("none")
    a, b = cluster_of(spec, plan(place)).scorers
    assert (a.name, a.kind, a.prompts) == ("teacher-a", "logprobs", (0.0, 0.25))
    assert (b.name, b.kind, b.prompts) == ("teacher-b", "logprobs", (0.25, 1.0))
    assert isinstance(a.cost, PrefillCost)
    assert isinstance(b.cost, PrefillCost)
    assert a.cost.token_s > b.cost.token_s
    memory = memory_by_phase(spec, plan(place, ScheduleConfig(preset="oppo")))["scoring"]
    assert memory["frozen"] == sum(memory_model.weight_bytes(s, 1) for s in (QWEN, small))
    cached = [memory_model.cache_bytes(s, 1) for s in (QWEN, small)]
    tokens = spec.in_flight(ScheduleConfig(preset="oppo")) * spec.mean_tokens / 4
    streamed = tokens * (0.25 * cached[0] + 0.75 * cached[1])
    assert memory["responses that stream"] == pytest.approx(streamed)
    found = list(candidates(replace(spec, gpus=4, variants={"sync": SYNC})))
    bounds = Bounds(spec, WARM, ROUNDS)
    for candidate in found[::5]:
        assert bounds.of(candidate) <= result_of(spec, candidate).step_s


def test_no_room_for_keys_and_values() -> None:
    big = replace(
        SPEC, models=ModelShapes(shape_of("llama-65b")), hardware=Hardware.of("h100", PERFECT)
    )
    with raises(ConfigError, "no-cache-room", "131 GB of weights and of what others keep"):
        cluster_of(big, plan(replace(layout("none"), generator=FOUR)))
