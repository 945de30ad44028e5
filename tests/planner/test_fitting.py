"""The memory of each device, against sums by hand."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from raising import raises
from stretto.api.settings import settled
from stretto.config import Config, SftConfig
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models import backend
from stretto.models.load import load_causal_lm
from stretto.models.lora import add_lora
from stretto.models.shapes import Shape
from stretto.planner import choices
from stretto.planner.choices import fitted_run
from stretto.planner.fitting import Load, RunMemory, check, known_shapes, table
from stretto.planner.memory_model import (
    CACHE,
    COMMUNICATOR,
    CONTEXT,
    FROZEN,
    NF4,
    PHASES,
    SHARE,
    SYNC,
    Adapters,
    DeviceMemory,
)
from stretto.rollout import engine_registry
from stretto.rollout.engine_registry import choose
from stretto.runtime.placement import PROCESS_BYTES, places

SHAPE = Shape(
    layers=2, hidden=8, inner=16, heads=2, kv_heads=2, vocabulary=32, outputs=32, tied=True
)
SHAPES = {"actor": SHAPE, "reference": SHAPE, "critic": SHAPE.valued()}
LORA = {"lora_rank": 2}
LAYER = 4 * 64 + 3 * 8 * 16 + 16
ROOT = 32 * 8 + 8
"""Parameters of a layer, and of embedding and last norm; a critic has 8 more in its head."""


def found(gpus: int = 0, width: int = 4, **settings: Any) -> dict[str, Load]:
    config = Config.model_validate({"runtime": "local", **settings})
    return {
        load.device: load
        for load in RunMemory(config).loads(places(config, 8, gpus), SHAPES, width)
    }


def test_each_role_takes_what_it_holds() -> None:
    """On GPUs of their own; weights published twice, as the newest and the one before it."""
    actor = 2 * LAYER + ROOT
    critic = actor + 8
    by_device = found(4, rollout={"slots": 3, "max_new_tokens": 6}, task={"max_prompt_tokens": 10})
    learner, generator, reference, scorer = (by_device[f"cuda:{i}"] for i in range(4))
    own = {"contexts": CONTEXT, "communicators": COMMUNICATOR}  # of weight syncs
    assert learner.held == {
        **own,
        "learner's states": 16 * (actor + critic),
        "published weights": 2 * 4 * (actor + critic),
    }
    assert generator.held == {
        **own,
        "generator's weights": 4 * actor,
        # slots; positions, keys and values of two layers; a row of logits
        CACHE: 3 * (16 * (2 * 2 * 8) * 4 + 4 * 32),
    }
    assert reference.held["reference's weights"] == 4 * actor
    assert scorer.held["critic's weights"] == 4 * critic
    assert learner.work[SYNC]["buckets"] == 2 * 4 * (actor + critic)
    assert generator.work[SYNC]["buckets"] == 2 * 4 * actor
    assert not reference.work[SYNC]
    assert learner.phase("training").total() > learner.phase("scoring").total()
    assert generator.certain.total() == CONTEXT + COMMUNICATOR + 4 * actor
    assert reference.held["communicators"] == 0  # it gets no weights


def test_shards_and_slices_hold_their_parts() -> None:
    """Four ranks of all roles: layers in two slices of the learner, each in two shards."""
    roles = ["learner", "generator", "reference", "critic"]
    process = {"roles": roles, "ranks": 4, "layout": {"learner": {"fsdp": 2, "tp": 2}}}
    by_device = found(4, cluster={"processes": [process]})
    assert len(by_device) == 4
    held = by_device["cuda:0"].held
    slices = 2 * LAYER / 2 + ROOT
    assert held["learner's states"] == round(16 * slices / 2) + round(16 * (slices + 8) / 2)
    assert held["communicators"] == 2 * COMMUNICATOR  # of its shards, and of its slices
    assert held["published weights"] == 0  # who follows reads the shards
    assert not held["critic's weights"]  # they are the learner's
    assert held["reference's weights"] == 4 * (2 * LAYER + ROOT) / 4  # four do not divide two heads


@pytest.mark.parametrize(("width", "lag", "copies"), [(2, 0, 2), (4, 1, 3)])
def test_adapters_are_trained_and_travel_alone(width: int, lag: int, copies: int) -> None:
    """The weights beside them stay as they are; adapters have four bytes whatever the type."""
    config = Config.model_validate({"runtime": "local", "schedule": {"lag": lag}})
    counted = RunMemory(config).loads(places(config, 8, 4), SHAPES, width, Adapters(100, 0))
    by_device = {load.device: load for load in counted}
    learner, generator, reference, scorer = (by_device[f"cuda:{i}"] for i in range(4))
    actor = 2 * LAYER + ROOT
    assert learner.held == {
        "contexts": CONTEXT,
        "communicators": COMMUNICATOR,
        FROZEN: width * actor,  # the critic reads them too
        "learner's states": 16 * 2 * 100,
        "published weights": copies * 4 * 2 * 100,
    }
    assert generator.held["generator's weights"] == width * actor + 4 * 100
    assert generator.held["fused adapters"] == width * 100
    assert reference.held["reference's weights"] == width * actor
    assert scorer.held["critic's weights"] == width * (actor + 8) + 4 * 100
    assert learner.work[SYNC]["buckets"] == 2 * 4 * 2 * 100
    assert generator.work[SYNC]["buckets"] == 2 * 4 * 100


def test_a_learner_of_adapters_shares_frozen_weights_out_and_gathers_no_gradients() -> None:
    config = Config.model_validate(
        {"runtime": "local", "cluster": {"processes": [{"roles": ["learner"], "ranks": 2}]}}
    )
    found = places(config, 8, 5)
    (adapted, *_), (whole, *_) = (
        RunMemory(config).loads(found, {"actor": SHAPE, "reference": SHAPE}, 2, adapters)
        for adapters in (Adapters(100, 0), None)
    )
    actor = 2 * LAYER + ROOT
    assert adapted.held[FROZEN] == actor  # two bytes each, in two shards
    assert adapted.held["learner's states"] == 16 * 100 / 2
    assert whole.held["learner's states"] == 16 * actor / 2
    assert adapted.work["training"]["gathered"] == 2 * (2 * LAYER + ROOT)
    assert whole.work["training"]["gathered"] == 2 * (2 * LAYER + ROOT) + 6 * (LAYER + ROOT)


def test_matrices_in_4_bits_take_a_quarter_and_their_scales() -> None:
    """4.127 bits each, as Dettmers et al. (2023) count, in every role; norms, embedding and head as
    ever. A pass makes one of them whole.
    """
    model = {"name": "qwen2.5-7b", "lora_rank": 1, "load_in_4bit": True}
    config = Config.model_validate({"runtime": "local", "model": model})
    in_4bit = {role: replace(shape, in_4bit=True) for role, shape in SHAPES.items()}
    (load,) = RunMemory(config).loads(places(config, 8, 1), in_4bit, 2, Adapters(100, 0))
    matrices = 2 * (LAYER - 16)
    packed = round(matrices * 4.127 / 8 + 2 * (2 * 16 + ROOT))
    assert pytest.approx(4.127 / 8, rel=1e-4) == NF4
    # Processes have weights of their own; a reference beside a learner has not.
    assert load.held[FROZEN] == pytest.approx(packed, abs=1)
    assert load.held["generator's weights"] == pytest.approx(packed + 4 * 100, abs=1)
    assert load.work["training"]["dequantized"] == 2 * 8 * 16


def test_a_run_with_adapters_is_planned(tiny_folder: Path) -> None:
    """Rank 2 on all linear layers: 2 (inputs + outputs) of each, as peft counts them."""
    model = {"name": str(tiny_folder), "lora_rank": 2}
    config = Config.model_validate({"runtime": "local", "model": model})
    _, adapters = known_shapes(config)
    assert adapters is not None
    actor = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    wrapped = add_lora(actor, config.model, "CAUSAL_LM")
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    assert adapters.parameters == sum(p.numel() for p in trained)
    read = [p.shape[1] for n, p in wrapped.named_parameters() if "lora_A" in n]
    assert adapters.inputs == sum(read)
    (load,) = RunMemory(config).planned(places(config, 8, 0), 4)
    assert load.held["learner's states"] == 16 * 2 * adapters.parameters


def test_what_rests_on_the_host_counts_in_its_phases() -> None:
    """In shards: moments, not masters and gradients; on a CPU nothing is gained."""
    roles = ["learner", "generator", "reference", "critic"]
    process = {"roles": roles, "ranks": 2, "offload": True}
    load = found(2, cluster={"processes": [process]})["cuda:0"]
    actor, slices = 2 * LAYER + ROOT, 2 * LAYER / 2 + ROOT
    states = 16 * (2 * actor + 8) / 2
    assert load.held["learner's states"] == states / 2
    assert load.phase("training")["learner's moments"] == states / 2
    assert load.phase("scoring")["learner's moments"] == states / 2  # on their way
    assert "learner's moments" not in load.phase("generation")
    weights = {p: load.phase(p)["reference's weights"] for p in ("generation", "scoring")}
    assert weights == {"generation": 0, "scoring": 4 * slices}
    (cpu,) = found(cluster={"processes": [process]}).values()
    assert cpu.held["learner's states"] == 2 * states


@pytest.mark.parametrize("width", [2, 4])
def test_copies_of_a_stage_share_what_updates_need(width: int) -> None:
    """Two replicas of two stages share moments and, if they are not the weights, masters."""
    load = found(4, width, pipeline={"ranks": 4, "stage_counts": (2, 2)})["cuda:0"]
    held = 2 * LAYER + 2 * ROOT  # a layer of each model and an end with an embedding
    parts = {part: load.held[part] for part in ("learner's weights", "learner's states")}
    if width == 2:
        assert parts == {"learner's weights": 2 * held, "learner's states": (4 + 12 / 2) * held}
    else:
        assert parts == {"learner's weights": 0, "learner's states": (8 + 8 / 2) * held}


def test_processes_of_one_machine_share_its_memory_and_phases_add_up_where_they_overlap() -> None:
    (apart,) = found().values()
    (beside,) = found(schedule={"preset": "async"}).values()
    assert apart.held["processes"] == 4 * PROCESS_BYTES
    assert apart.phase("generation") == apart.held + apart.work["generation"]
    assert set(apart.work["generation"]) == {"activations"}
    assert beside.phase("generation").total() > beside.phase("generation")["processes"]
    assert beside.phase("generation") == beside.phase("training")


def test_what_cannot_fit_is_refused_and_what_might_not_is_remarked_on() -> None:
    (load,) = found(rollout={"slots": 1000}).values()
    assert not list(check([load], lambda _: 10**12))
    with raises(ConfigError, "memory-exceeded", "this machine, which has 1 kB", "ranks"):
        list(check([load], lambda _: 1000))
    (remark,) = check([load], lambda _: load.certain.total() + 1)
    assert "lower rollout.slots" in remark
    assert table([load]).splitlines()[1].split()[0] == "cpu"


def test_models_that_are_not_known_are_not_counted() -> None:
    """A critic from elsewhere may be small: nothing is refused on a guess."""
    config = Config.model_validate({"runtime": "local"})
    (load,) = RunMemory(config).loads(places(config, 8, 0), {"actor": SHAPE, "reference": SHAPE}, 4)
    assert load.held["learner's states"] == 16 * (2 * LAYER + ROOT)
    assert "critic's weights" not in load.held
    assert set(load.certain) == {"learner's states", "published weights"}  # of a CPU


GB = 10**9
QWEN = "Qwen/Qwen2.5-7B-Instruct"


def fitted_to(gpus: int, gigabytes: int, **settings: Any) -> tuple[Config, list[Load]]:
    """Settings that were fitted to GPUs of a size, and the memory that they then ask for."""
    given = {"runtime": "local", "algorithm": {"name": "grpo"}, **settings}
    given["rollout"] = {"batch": 64, "samples_per_prompt": 4, **given.get("rollout", {})}
    config = Config.model_validate(given)
    found = places(config, 8, gpus)
    shapes, adapters = known_shapes(config)

    def room(_: str) -> int:
        return gigabytes * GB

    config = fitted_run(config, found, shapes, 2, adapters, room)
    return config, RunMemory(config).loads(found, shapes, 2, adapters, room)


FSDP: dict[str, Any] = {"cluster": {"processes": [{"roles": ["learner"], "ranks": 4}]}}


@pytest.mark.parametrize(
    ("set_", "expected"),
    [
        ({}, (16_384, "on")),
        ({"training": {"microbatch_tokens": 2000}}, (2000, "off")),
        ({"training": {"microbatch_tokens": 20_000}}, (20_000, "on")),
        ({"model": {"gradient_checkpointing": True}}, (16_384, "on")),
        ({"model": {"gradient_checkpointing": False}}, (2048, "off")),
        ({"schedule": {"preset": "async"}}, (16_384, "on")),
    ],
)
def test_passes_are_chosen_that_fit_and_what_is_set_stays(
    set_: dict[str, Any], expected: tuple[int, str]
) -> None:
    """7B over 4 of 6 GPUs of 80 GB: 51 GB are there beside activations of 6.3 MB a token."""
    model = {"name": QWEN, **set_.get("model", {})}
    config, loads = fitted_to(6, 80, **{**FSDP, **set_, "model": model})
    tokens, again = config.training.microbatch_tokens, config.model.gradient_checkpointing
    assert (tokens, again) == expected
    learner = loads[0].phase("training")
    per_token = 28 * (2 * (6 + 2) * 3584 + 2 * 2 * (3584 + 512) + 4 * 2 * 18_944)
    if again == "off":
        assert learner["activations"] == max(tokens, 576) * per_token
    if not set_:  # as docs/models.md says
        assert (round(16_384 * per_token / GB), round(learner["activations"] / GB)) == (103, 7)
    assert learner.total() <= 0.9 * 80 * GB


def test_more_memory_is_used_for_larger_passes_before_it_saves_recomputation() -> None:
    """On one GPU, with LoRA; 62 GB of 16,384 tokens' activations fit none of these but 141 GB."""
    found = {}
    for size in (24, 40, 80, 141):
        config, loads = fitted_to(
            1, size, runtime="inline", model={"name": QWEN, "lora_rank": 16}, rollout={"slots": 16}
        )
        (load,) = loads
        assert load.phase("training").total() <= 0.9 * size * GB
        found[size] = config.training.microbatch_tokens, config.model.gradient_checkpointing
    tokens = [tokens for tokens, again in found.values() if again == "on"]
    assert tokens == sorted(tokens) != []
    assert found[24][1] == "on"
    assert found[141] == (8192, "off")


def test_slots_are_as_many_as_fit_beside_passes() -> None:
    """512 responses of 4,608 tokens would take 135 GB; halves of what takes too much are tried."""
    long = {"batch": 512, "max_new_tokens": 4096}
    given = {"runtime": "inline", "model": {"name": QWEN, "lora_rank": 16}}
    config, (load,) = fitted_to(1, 80, rollout=long, **given)
    slots = config.rollout.slots
    assert 512 // slots in (4, 8, 16)
    assert load.held[CACHE] == pytest.approx(slots * 4608 * 2 * 28 * 512 * 2, rel=0.01)
    assert all(load.phase(name).total() <= 0.9 * 80 * GB for name in PHASES)
    twice = config.changed_in("rollout", slots=2 * slots)
    twice = twice.changed_in("training", microbatch_tokens=4096)
    twice = twice.changed_in("model", gradient_checkpointing="on")
    shapes, adapters = known_shapes(config)
    (load,) = RunMemory(twice).loads(places(twice, 8, 1), shapes, 2, adapters)
    assert max(load.phase(name).total() for name in PHASES) > 0.9 * 80 * GB
    given_slots, _ = fitted_to(1, 80, rollout={**long, "slots": 512}, **given)
    assert given_slots.rollout.slots == 512
    few, _ = fitted_to(1, 80, **given)
    assert few.rollout.slots == 0  # all that are in flight
    ppo = {"algorithm": {"name": "ppo"}, "model": {"name": QWEN}}
    apart, _ = fitted_to(7, 80, rollout={"samples_per_prompt": 1}, **ppo, **FSDP)
    assert apart.rollout.slots == 0  # the learner does not fit, whatever an engine takes


@pytest.mark.parametrize(("hold", "times"), [("keep", 2), ("auto", 2), ("remake", 1)])
def test_copies_of_episodes_that_wait_are_counted_as_the_engine_bounds_them(
    hold: str, times: int
) -> None:
    given = {"runtime": "inline", "model": {"name": QWEN, "lora_rank": 16}, "rollout": {"slots": 8}}
    _, (plain,) = fitted_to(1, 80, **given)
    tools = {"environment": {"sources": ["tools.py:add"]}, "schedule": {"hold": hold}}
    _, (load,) = fitted_to(1, 80, **given, **tools)
    assert load.held[CACHE] == times * plain.held[CACHE]


def test_peft_keeps_a_float32_input_of_each_adapted_layer() -> None:
    """Of bfloat16 weights: three of Q, K and V, each a copy; without copies in float32 itself."""
    inputs = 2 * (6 * 8 + 16)
    for width, checkpointing, expected in (
        (2, False, 4 * inputs),
        (2, True, 2 * inputs),
        (4, False, 0),
    ):
        counted = DeviceMemory(width=width, adapters=Adapters(100, inputs))
        counted.put_learner([SHAPE], Layout(), 10, (), checkpointing=checkpointing, versions=0)
        assert counted.work["training"]["adapters' inputs"] == 10 * expected


def test_models_trained_side_by_side_have_passes_at_the_same_time() -> None:
    """The sum of their activations; one after the other, the larger ones alone."""
    passes = {}
    for models, side_by_side in (([SHAPE], False), ([SHAPE] * 2, False), ([SHAPE] * 2, True)):
        counted = DeviceMemory(width=2)
        learner = models, Layout(), 10, ()
        counted.put_learner(*learner, checkpointing=False, versions=0, side_by_side=side_by_side)
        passes[len(models), side_by_side] = counted.work["training"].total()
    assert passes[2, False] == passes[1, False] > 0
    assert passes[2, True] == 2 * passes[1, False]


def test_models_trained_side_by_side_share_a_cpus_default_tokens() -> None:
    """1,024 of the actor alone, 512 of each with a critic. A setting holds for each of them."""

    def activations(algorithm: str, budget: int) -> int:
        load = found(
            algorithm={"name": algorithm},
            task={"max_prompt_tokens": 64},
            rollout={"batch": 64, "max_new_tokens": 64, "samples_per_prompt": 2},
            training={"microbatch_tokens": budget},
        )["cpu"]
        return load.work["training"]["activations"]

    alone = activations("rloo", 1024)
    assert activations("rloo", 0) == alone
    assert activations("ppo", 0) == activations("ppo", 512) == alone
    assert activations("ppo", 1024) == 2 * alone


def test_scorers_that_heads_do_not_divide_are_counted_as_shards() -> None:
    """All their weights are divided, and two layers and the root gathered for a pass."""
    ranks = 3 * SHAPE.heads
    counted = DeviceMemory(width=2)
    counted.put_inference("the reference's weights", SHAPE, Layout(tp=ranks), 10)
    assert counted.held["the reference's weights"] == round(2 * SHAPE.parameters / ranks)
    gathered = 2 * (2 * SHAPE.layer_parameters + SHAPE.root_parameters)
    assert counted.work["scoring"]["gathered"] == gathered
    sliced = DeviceMemory(width=2)
    sliced.put_inference("the reference's weights", SHAPE, Layout(), 10)
    assert counted.work["scoring"]["activations"] == sliced.work["scoring"]["activations"]


def test_scorers_in_shards_of_slices_hold_a_share_or_nothing() -> None:
    """Two layers of a slice and the root are gathered, from the device, the host or the learner."""
    layout, gathered = Layout(fsdp=3, tp=2), 2 * (2 * SHAPE.layer_parameters / 2 + ROOT)
    counted = {name: DeviceMemory(width=2) for name in ("shards", "on the host", "learner's")}
    counted["shards"].put_inference("weights", SHAPE, layout, 10)
    counted["on the host"].put_inference("weights", SHAPE, layout, 10, rests=True)
    counted["learner's"].put_inference("weights", SHAPE, layout, 10, reads="all")
    held = [memory.held["weights"] for memory in counted.values()]
    assert held == [round(2 * SHAPE.held(2) / 3), 0, 0]
    assert {memory.work["scoring"]["gathered"] for memory in counted.values()} == {gathered}
    of_one = counted["shards"]
    of_one.put_inference("others", SHAPE, layout, 10)
    assert of_one.work["scoring"]["gathered"] == gathered  # one after the other


def test_references_of_adapters_in_the_learners_shards_take_nothing() -> None:
    """Two ranks, 100 adapters: without a reference, only the gathered layers are fewer."""
    loads = []
    for roles in (["learner", "reference"], ["learner"]):
        process = {"roles": roles, "ranks": 2}
        cluster = {"processes": [process]}
        config = Config.model_validate({"runtime": "local", "cluster": cluster, "model": LORA})
        counted = RunMemory(config).loads(places(config, 8, 5), SHAPES, 2, Adapters(100, 0))
        loads.append({load.device: load for load in counted}["cuda:0"])
    assert loads[0].held == loads[1].held
    assert loads[0].work["scoring"]["gathered"] == 2 * (2 * LAYER + ROOT)


def test_vllm_gets_what_learners_leave_on_their_gpus() -> None:
    """7B on 8 GPUs, as docs/vllm.md has it: engines sleep while the learner works."""
    text = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    (block,) = re.findall(r"```toml\n(runtime[^`]*ranks = 8\n)```", text)
    data = tomllib.loads(block)
    config, loads = fitted_to(8, 80, **data)
    assert [load.device for load in loads] == [f"cuda:{i}" for i in range(8)]
    arguments = config.rollout.engine_args
    share = arguments["gpu_memory_utilization"]
    assert isinstance(share, float)
    assert arguments["enable_sleep_mode"] is True
    billions = 7.615616512
    states, published = 16 * billions / 8, 2 * 2 * billions / 8
    buckets = 2 * 2 * 64 * 2**20 / 1e9  # two of each side
    beside = states + published + buckets + 2 * 0.5 + 3 * 0.3  # contexts and communicators
    assert share == math.floor(100 * (0.9 - beside / 80)) / 100
    assert share * 80 > 2 * billions
    for load in loads:
        assert load.phase("generation")[SHARE] == round(share * 80 * GB)
        assert load.phase("training")[SHARE] == 0
        assert all(load.phase(name).total() <= 0.9 * 80 * GB for name in PHASES)
    ahead, _ = fitted_to(8, 80, **data, schedule={"lag": 1})
    assert ahead.rollout.engine_args["enable_sleep_mode"] is False
    with raises(ConfigError, "memory-exceeded", "vLLM's weights"):
        fitted_to(8, 40, **data)


def test_vllms_share_is_its_own_where_it_is_given_or_alone() -> None:
    engine = {"engine": "vllm", "engine_args": {"gpu_memory_utilization": 0.4}}
    config, loads = fitted_to(4, 80, model={"name": QWEN}, rollout=engine, **FSDP)
    assert config.rollout.engine_args["gpu_memory_utilization"] == 0.4
    assert loads[0].phase("generation")[SHARE] == 32 * GB
    apart, loads = fitted_to(6, 80, model={"name": QWEN}, rollout={"engine": "vllm"}, **FSDP)
    assert apart.rollout.engine_args == {}
    assert loads[4].held[SHARE] == round(0.92 * 80 * GB)
    assert apart.training.microbatch_tokens == 16_384  # of the learner, whatever vLLM takes
    assert not list(check(loads, lambda _: 80 * GB))


def test_in_one_process_roles_read_the_learners_weights() -> None:
    """One copy for engine, critic and learner; under LoRA it is the reference's, too."""
    actor = 2 * LAYER + ROOT
    inline = Config.model_validate({"rollout": {"slots": 3}, "algorithm": {"name": "ppo"}})
    for lag, adapters, expected in (
        (0, None, {"learner's weights": 2 * (2 * actor + 8), "reference's weights": 2 * actor}),
        (0, Adapters(100, 0), {FROZEN: 2 * actor}),
        (
            1,
            Adapters(100, 0),
            {FROZEN: 2 * actor, "generator's weights": 400, "critic's weights": 400},
        ),
    ):
        config = inline.changed_in("schedule", lag=lag)
        config = config.changed_in("model", **LORA) if adapters else config
        (load,) = RunMemory(config).loads(places(config, 8, 1), SHAPES, 2, adapters)
        assert load.device == "cuda:0"
        held = {what: size for what, size in load.held.items() if "weights" in what and size}
        held.pop("published weights", None)
        assert held == expected
        assert load.held[CACHE] == 3 * (576 * (2 * 2 * 8) * 2 + 4 * 32)


def test_beside_a_learner_of_adapters_a_reference_takes_nothing() -> None:
    together = {"cluster": {"processes": [{"roles": ["learner", "reference"]}]}}
    config = Config.model_validate({"runtime": "local", "model": LORA, **together})
    for adapters, expected in ((Adapters(100, 0), 0), (None, 2 * (2 * LAYER + ROOT))):
        if not adapters:
            config = config.changed_in("model", lora_rank=0)
        first = RunMemory(config).loads(places(config, 8, 4), SHAPES, 2, adapters)[0]
        assert first.held["reference's weights"] == expected


def test_open_settings_are_settled_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate(
        {
            "runtime": "local",
            "model": {"name": QWEN, "dtype": "bfloat16"},
            "algorithm": {"name": "rloo"},
            "rollout": {"samples_per_prompt": 2},
            **FSDP,
        }
    )
    said = list[str]()
    assert settled(config, said.append) == config
    assert not said
    for module in (backend, choices):
        monkeypatch.setattr(module, "pick_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(choices, "capacity", lambda _: 80 * GB)
    monkeypatch.setattr(engine_registry, "installed", lambda: None)
    on_gpus = settled(config, said.append)
    assert on_gpus.rollout.engine == "torch"
    assert on_gpus.training.microbatch_tokens == 16_384
    assert on_gpus.model.gradient_checkpointing == "on"
    engine, plan = said
    assert engine.startswith("rollout.engine = auto takes torch: vLLM")
    assert plan.startswith("by the memory plan of a GPU of 80 GB: training.microbatch_tokens")
    assert settled(on_gpus, said.append) == on_gpus  # as when the run is resumed
    assert len(said) == 2
    sft = SftConfig.model_validate({"model": {"name": QWEN, "dtype": "bfloat16", "lora_rank": 8}})
    tuned = settled(sft, said.append)
    assert tuned.training.microbatch_tokens == 4096
    unknown = config.with_model("nobody/knows-it")
    monkeypatch.setattr(choices, "load_config", lambda *_: None)
    kept = settled(unknown, said.append)
    assert (kept.training, kept.model) == (unknown.training, unknown.model)
    assert "not fitted" in said[-1]


BESIDE = {"roles": ["learner", "generator"], "ranks": 2}


@pytest.mark.parametrize(
    ("settings", "version", "engine"),
    [
        ({"runtime": "local"}, "0.32", "vllm"),
        ({"runtime": "ray"}, "0.33", "vllm"),
        ({"runtime": "local"}, "0.31", "torch"),
        ({"runtime": "local"}, "", "torch"),
        ({"runtime": "inline"}, "0.32", "torch"),
        ({"runtime": "local", "rollout": {"engine_args": {"cuda_graphs": False}}}, "0.32", "torch"),
        (
            {"runtime": "local", "cluster": {"processes": [BESIDE]}},
            "0.32",
            "torch",
        ),
    ],
)  # fmt: skip
def test_vllm_generates_where_it_can(
    settings: dict[str, Any], version: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Version(version) if version else None
    monkeypatch.setattr(engine_registry, "installed", lambda: found)
    assert choose(Config.model_validate(settings))[0] == engine


def test_passes_are_fitted_to_gpus_that_only_a_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of 80 GB, as is assumed; with ten ranks, some share one."""
    cluster = SimpleNamespace(gpus=8.0)
    monkeypatch.setattr("stretto.workers.ray_cluster.find", lambda: cluster)
    monkeypatch.setattr(engine_registry, "installed", lambda: Version("0.32"))
    config = Config.model_validate(
        {
            "runtime": "ray",
            "model": {"name": QWEN, "device": "cuda"},
            "algorithm": {"name": "grpo", "kl_coef": 0},
            "rollout": {"engines": 2, "samples_per_prompt": 4},
            "cluster": {"address": "auto", "processes": [{"roles": ["learner"], "ranks": 8}]},
        }
    )
    said = list[str]()
    found = settled(config, said.append)
    assert found.model.dtype == "bfloat16"
    assert found.rollout.engine == "vllm"
    assert found.rollout.engine_args["enable_sleep_mode"] is True
    assert found.training.microbatch_tokens > 0
    assert "GPU taken to have 80 GB" in said[-1]


def test_an_optimal_baseline_takes_two_more_copies_of_the_gradients() -> None:
    """While the learner trains, in float32, of the actor alone."""
    sections: dict[str, Any] = {"rollout": {"samples_per_prompt": 2}}
    loads = []
    for baseline in ("mean", "optimal"):
        algorithm = {"name": "rloo", "baseline": baseline}
        config = Config.model_validate({"algorithm": algorithm, **sections})
        loads += RunMemory(config).loads(places(config, 8, 0), {"actor": SHAPE}, 4)
    without, with_optimal = (load.phase("training").total() for load in loads)
    assert with_optimal - without == 2 * 4 * SHAPE.parameters
