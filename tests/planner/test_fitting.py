"""The memory of each device, against sums by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raising import raises
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.models.load import load_causal_lm
from stretto.models.lora import add_lora
from stretto.models.shapes import Shape
from stretto.planner.fitting import Load, RunMemory, check, known_shapes, table
from stretto.planner.memory import CACHE, FROZEN, SYNC
from stretto.runtime.placement import PROCESS_BYTES, places

SHAPE = Shape(
    layers=2, hidden=8, inner=16, heads=2, kv_heads=2, vocabulary=32, outputs=32, tied=True
)
SHAPES = {"actor": SHAPE, "reference": SHAPE, "critic": SHAPE.valued()}
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
    assert learner.held == {
        "processes": PROCESS_BYTES,
        "learner's states": 16 * (actor + critic),
        "published weights": 2 * 4 * (actor + critic),
    }
    assert generator.held == {
        "processes": PROCESS_BYTES,
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
    assert generator.certain.total() == PROCESS_BYTES + 4 * actor


def test_shards_and_slices_hold_their_parts() -> None:
    """Four ranks of all roles: layers in two slices of the learner, each in two shards."""
    roles = ["learner", "generator", "reference", "critic"]
    by_device = found(4, cluster={"processes": [{"roles": roles, "fsdp": 2, "tp": 2}]})
    assert len(by_device) == 4
    held = by_device["cuda:0"].held
    slices = 2 * LAYER / 2 + ROOT
    assert held["learner's states"] == round(16 * slices / 2) + round(16 * (slices + 8) / 2)
    assert held["published weights"] == 0  # who follows reads the shards
    assert held["reference's weights"] == 4 * (2 * LAYER / 4 + ROOT)


@pytest.mark.parametrize(("width", "lag", "copies"), [(2, 0, 2), (4, 1, 3)])
def test_adapters_are_trained_and_travel_alone(width: int, lag: int, copies: int) -> None:
    """The weights beside them stay as they are; adapters have four bytes whatever the type."""
    config = Config.model_validate({"runtime": "local", "schedule": {"lag": lag}})
    counted = RunMemory(config).loads(places(config, 8, 4), SHAPES, width, 100)
    by_device = {load.device: load for load in counted}
    learner, generator, reference, scorer = (by_device[f"cuda:{i}"] for i in range(4))
    actor = 2 * LAYER + ROOT
    assert learner.held == {
        "processes": PROCESS_BYTES,
        FROZEN: width * (2 * actor + 8),
        "learner's states": 16 * 2 * 100,
        "published weights": copies * 4 * 2 * 100,
    }
    assert generator.held["generator's weights"] == width * actor + 4 * 100
    assert reference.held["reference's weights"] == width * actor
    assert scorer.held["critic's weights"] == width * (actor + 8) + 4 * 100
    assert learner.work[SYNC]["buckets"] == 2 * 4 * 2 * 100
    assert generator.work[SYNC]["buckets"] == 2 * 4 * 100


def test_a_learner_of_adapters_shares_frozen_weights_out_and_gathers_no_gradients() -> None:
    config = Config.model_validate(
        {"runtime": "local", "cluster": {"processes": [{"roles": ["learner"], "fsdp": 2}]}}
    )
    found = places(config, 8, 5)
    (adapted, *_), (whole, *_) = (
        RunMemory(config).loads(found, {"actor": SHAPE, "reference": SHAPE}, 2, adapters)
        for adapters in (100, None)
    )
    actor = 2 * LAYER + ROOT
    assert adapted.held[FROZEN] == actor  # two bytes each, in two shards
    assert adapted.held["learner's states"] == 16 * 100 / 2
    assert whole.held["learner's states"] == 16 * actor / 2
    assert adapted.work["training"]["gathered"] == 2 * (2 * LAYER + ROOT)
    assert whole.work["training"]["gathered"] == 2 * (2 * LAYER + ROOT) + 6 * (LAYER + ROOT)


def test_a_run_with_adapters_is_planned(tiny_folder: Path) -> None:
    """Rank 2 on all linear layers: 2 (inputs + outputs) of each, as peft counts them."""
    model = {"name": str(tiny_folder), "lora_rank": 2}
    config = Config.model_validate({"runtime": "local", "model": model})
    _, adapters = known_shapes(config.model, config.critic, config.reward)
    assert adapters is not None
    actor = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    wrapped = add_lora(actor, config.model, "CAUSAL_LM")
    assert adapters == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    (load,) = RunMemory(config).planned(places(config, 8, 0), 4)
    assert load.held["learner's states"] == 16 * 2 * adapters


def test_what_rests_on_the_host_counts_in_its_phases() -> None:
    """In shards: moments, not masters and gradients; on a CPU nothing is gained."""
    roles = ["learner", "generator", "reference", "critic"]
    process = {"roles": roles, "fsdp": 2, "offload": True}
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
    with raises(ConfigError, "memory-exceeded", "this machine, which has 1 kB", "fsdp"):
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
