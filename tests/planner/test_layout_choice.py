"""Layouts that the user left open: the least slicing that divides the heads and fits."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config import Config
from stretto.layout import Layout
from stretto.planner.choices import with_layouts

GB = 10**9


def chosen(
    ranks: int, gigabytes: int, roles: tuple[str, ...] = (), **settings: Any
) -> tuple[Config, list[str]]:
    """Qwen2.5-7B, with 28 heads and 4 of keys and values, on as many GPUs as ranks."""
    process = {"roles": ["learner", "generator", "reference", *roles], "ranks": ranks}
    given = {
        "runtime": "local",
        "model": {"name": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16"},
        "algorithm": {"name": "grpo"},
        "cluster": {"processes": [process]},
        **settings,
    }
    given["rollout"] = {"batch": 64, "samples_per_prompt": 4, **settings.get("rollout", {})}
    lines = list[str]()
    config = Config.model_validate(given)
    return with_layouts(config, lines.append, gigabytes * GB, ranks), lines


@pytest.mark.parametrize(
    ("ranks", "gigabytes", "generator", "reference"),
    [
        # A rank has 15.2 GB of the learner's states. A copy of the weights takes as much.
        (8, 96, Layout(dp=8), Layout(dp=8)),  # 45.7 GB, and the passes
        (8, 60, Layout(dp=8), Layout(fsdp=8)),  # one copy, and a shard of 1.9 GB
        (8, 24, Layout(dp=2, tp=4), Layout(fsdp=8)),
        (4, 96, Layout(dp=4), Layout(dp=4)),  # 30.5 GB of states
        (4, 80, Layout(dp=4), Layout(fsdp=4)),
        # No more slices than heads of keys and values, even where nothing fits.
        (16, 10, Layout(dp=4, tp=4), Layout(fsdp=16)),
    ],
)
def test_copies_come_before_slices_and_shards(
    ranks: int, gigabytes: int, generator: Layout, reference: Layout
) -> None:
    config, lines = chosen(ranks, gigabytes)
    (process,) = config.cluster.processes
    assert process.layout == {"generator": generator, "reference": reference}
    assert config.rollout.engines == generator.dp
    assert f"layout.generator = auto takes {generator}" in lines[0]


def test_a_reference_that_streams_is_sliced_before_it_is_sharded() -> None:
    config, _ = chosen(8, 50, schedule={"preset": "oppo"})
    assert config.cluster.processes[0].layout["reference"] == Layout(dp=2, tp=4)


def test_a_critic_apart_is_sliced_and_never_sharded() -> None:
    apart = [{"roles": ["critic"], "ranks": 4}]
    config, _ = chosen(4, 12, cluster={"processes": apart}, algorithm={"name": "ppo"})
    assert config.cluster.processes[0].layout == {"critic": Layout(tp=4)}


def test_what_the_user_set_stays() -> None:
    config, lines = chosen(8, 80, rollout={"engines": 2})
    assert config.cluster.processes[0].layout == {"reference": Layout(dp=8)}
    assert config.rollout.engines == 2
    assert len(lines) == 1


def test_the_learners_ranks_use_its_critic_and_its_base() -> None:
    model = {"name": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "lora_rank": 16}
    config, _ = chosen(8, 80, ("critic",), model=model, algorithm={"name": "ppo"})
    assert config.cluster.processes[0].layout == {"generator": Layout(dp=8)}


def test_a_critic_in_the_ranks_of_stages_has_a_layout_of_its_own() -> None:
    """Stages run no passes of a full model, so it is not the learner's."""
    stages = {"pipeline": {"ranks": 8}, "algorithm": {"name": "ppo"}}
    config, _ = chosen(8, 400, ("critic",), **stages)
    assert config.cluster.processes[0].layout["critic"] == Layout(dp=8)
