"""Training through pipelines: the same steps as in one process, and what may go wrong."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from episode_helpers import as_episodes
from helpers import make_learner, make_rollouts
from learner_helpers import in_memory, make_batch
from rounding import GRADIENT_TERMS, rounding
from run_helpers import OF_PROCESSES, UNTIMED, Kill, Killer, processes
from sharded_workers import ShardedRank
from staged_workers import UPDATES, StagedRank, models
from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.config import Config, PipelineConfig, recipes
from stretto.errors import ConfigError, RankError
from stretto.models.load import load_causal_lm, save_model
from stretto.models.tiny import byte_tokenizer
from stretto.models.weights import fingerprint
from stretto.observe import RunDirectory
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.pipeline_schedule import evaluate
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.schedules.rollout import train_batch
from stretto.training import pipelined, shard_files
from stretto.training.backprop import divided, into_micro_batches
from stretto.training.learner import PolicyLearner
from stretto.training.pipelined import Planner
from stretto.types import TrainBatch
from stretto.workers.forkserver import NAME
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

SHAPES = [(3, 7), (20, 5), (5, 1), (2, 9), (8, 6), (3, 4), (4, 12), (2, 3)]
"""Prompt and response lengths of a batch."""
QUICK = {"ranks": 2, "seconds": 0.2}
ROUNDING = {"val/clipfrac_avg"}
"""Not compared: counts values whose clipped error is larger, be it by a rounding error."""
Stats = Mapping[str, float]


def settings(**sections: Any) -> dict[str, Any]:
    """Settings of a batch whose old policy is not the present one."""
    training = {"lr": 1e-3, "critic_lr": 2e-3, "ratio_tolerance": 100.0, "weight_decay": 0.01}
    sections["training"] = {**training, **sections.get("training", {})}
    sections["rollout"] = {"batch": len(SHAPES), **sections.get("rollout", {})}
    sections["pipeline"] = QUICK | sections.get("pipeline", {})
    return sections


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int], RankGroup]]:
    """Ranks that several tests use in turn, as they take seconds to start."""
    groups = dict[int, RankGroup]()

    def of(count: int) -> RankGroup:
        if count not in groups:
            groups[count] = RankGroup(GroupSpec(count), StagedRank).start()
        return groups[count]

    yield of
    for ranks in groups.values():
        ranks.close()


@pytest.fixture(scope="module")
def two(started: Callable[[int], RankGroup]) -> RankGroup:
    return started(2)


def local_learner(kind: str, given: Mapping[str, Any]) -> PolicyLearner:
    return make_learner(*models(kind), {**given, "pipeline": {}}, updates=UPDATES)


def batch_of(shapes: Sequence[tuple[int, int]] = SHAPES) -> TrainBatch:
    return train_batch(make_rollouts(*models("plain"), shapes))


def assert_same_steps(
    ranks: RankGroup,
    local: PolicyLearner,
    batches: Sequence[TrainBatch],
    rel: float = rounding(GRADIENT_TERMS),
) -> None:
    """Figures of each step on all ranks, and the weights after the last."""
    expected = [local.train(batch).stats for batch in batches]
    for stats in ranks.call(StagedRank.train, batches):
        for got, want in zip(stats, expected, strict=True):
            assert_same_figures(got, want, rel)
    assert_same_weights(ranks, local)


def assert_same_figures(got: Stats, expected: Stats, rel: float = rounding(GRADIENT_TERMS)) -> None:
    plain = {k: v for k, v in got.items() if not k.startswith("pipeline/")}
    assert plain.keys() == expected.keys()
    for name in expected.keys() - ROUNDING:
        value = expected[name]
        assert plain[name] == pytest.approx(value, rel=rel, abs=rounding(GRADIENT_TERMS)), name


def assert_same_weights(
    ranks: RankGroup, local: PolicyLearner, atol: float = rounding(GRADIENT_TERMS)
) -> None:
    """After updates that move by 1e-3, and enlarge differences in the smallest gradients."""
    (weights, marks), *others = ranks.call(StagedRank.weights)
    assert all(not any(own.values()) and other == marks for own, other in others)
    for name, tensors in local.weights().items():
        assert list(weights[name]) == list(tensors)
        for key, tensor in tensors.items():
            torch.testing.assert_close(
                weights[name][key], tensor, rtol=1e-4, atol=atol, msg=f"{name}.{key}"
            )


# -- the same steps ------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "fused, ragged, epochs of mini-batches": {
        "training": {
            "epochs": 2,
            "minibatches": 2,
            "microbatch_tokens": 40,
            "grad_clip": 0.5,
            "lr_schedule": "linear",
        },
    },
    "serial, KL in the loss": {
        "pipeline": {"schedule": "serial", "micro_batches": 4},
        "algorithm": {"kl_in": "loss", "kl_target": 0.1, "entropy_coef": 0.03},
    },
    "two pipelines of the critic, which trains alone at first": {
        "pipeline": {"stage_counts": (0, 1)},
        "critic": {"freeze_steps": 1},
        "training": {"microbatch_tokens": 40},
    },
    "two pipelines of the actor, proximal policy": {
        "pipeline": {"stage_counts": (1, 0), "micro_batches": 6},
        "algorithm": {"old_policy": "proximal", "correction": "truncate"},
        "training": {"minibatches": 1, "epochs": 2},
    },
    "the policy before the step is the one under training": {
        "algorithm": {
            "old_policy": "proximal",
            "correction": "truncate",
            "ess_scaling": "sqrt",
        },
        "training": {"microbatch_tokens": 40},
    },
    "lora": {"training": {"microbatch_tokens": 60}},
    "partly frozen": {"training": {"lr_schedule": "linear", "minibatches": 2}},
    "untied": {"pipeline": {"schedule": "serial"}},
    "checkpointing": {"pipeline": {"schedule": "serial"}},
    "slices": {
        "pipeline": {"ranks": 4, "stage_slices": (2, 2)},
        "training": {"microbatch_tokens": 40, "grad_clip": 0.5},
    },
    "lora, slices of the actor beside two stages of the critic": {
        "pipeline": {"ranks": 4, "stage_slices": (2, 1), "stage_counts": (2, 2)},
    },
    "replicas": {"pipeline": {"ranks": 4, "stage_counts": (2, 2)}, "training": {"minibatches": 2}},
    "replicas with slices": {
        "pipeline": {"ranks": 8, "stage_slices": (2, 2), "stage_counts": (2, 2)},
        "training": {"microbatch_tokens": 40},
    },
}
KINDS = ("lora", "partly frozen", "untied", "checkpointing")
SLOW = {"replicas", "replicas with slices"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES]
)
def test_steps_are_those_of_one_process(
    case: str, started: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    """Figures and weights, and the state put into a learner of the other kind, there and back."""
    kind = next((kind for kind in KINDS if case.startswith(kind)), "plain")
    given = settings(**copy.deepcopy(CASES[case]))
    two = started(given["pipeline"]["ranks"])
    batch = batch_of()
    local = local_learner(kind, given)
    two.call(StagedRank.make, kind, given)
    _, start = two.call(StagedRank.weights)[0]
    assert start == {name: trained.fingerprint() for name, trained in local.trained.items()}
    assert_same_steps(two, local, [batch])
    _, moved = two.call(StagedRank.weights)[0]
    frozen = given.get("critic", {}).get("freeze_steps", 0) > 0
    assert (moved["actor"] == start["actor"], moved["critic"] == start["critic"]) == (frozen, False)
    assert_same_steps(two, local, [batch_of(SHAPES[:7]), batch])
    two.call(StagedRank.skip)  # as when there are fewer mini-batches than planned
    local.trained["actor"].skip()
    two.call(StagedRank.write, tmp_path, 3)
    saved, one = shard_files.read(tmp_path), tmp_path / "one"
    write_alone(local, one)
    assert_same_structure(in_memory(saved["models"]), in_memory(shard_files.read(one)["models"]))
    published = in_memory(saved["published"]["actor", 3])
    weights = local.trained["actor"].snapshot()
    assert published.keys() == weights.keys()
    resumed = local_learner(kind, given)
    resumed.load_state_dict(saved)
    write_alone(resumed, one)
    two.call(StagedRank.make, kind, given)
    two.call(StagedRank.load, one)
    assert_same_weights(two, resumed, atol=0)
    assert_same_figures(resumed.train(batch).stats, local.train(batch).stats)
    two.call(StagedRank.train, [batch])
    assert_same_weights(two, resumed)


@pytest.mark.parametrize("kind", ["plain", "bfloat16"])
@pytest.mark.parametrize("pipeline", [{"stage_counts": (2, 2)}, {"stage_counts": (1, 2)}])
def test_copies_of_a_stage_share_moments_and_masters(
    pipeline: dict[str, Any], kind: str, started: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    """Two replicas of two stages, or of two pipelines of the actor. Each moment is kept once, and
    each master of another type than the weights, also after a checkpoint is read.
    """
    ranks = started(4)
    given = settings(pipeline={"ranks": 4, **pipeline})
    ranks.call(StagedRank.make, kind, given)
    ranks.call(StagedRank.train, [batch_of()])
    held = ranks.call(StagedRank.update_states)
    for name, model in zip(("actor", "critic"), models(kind), strict=True):
        sizes = [4 * p.numel() for p in model.parameters()]
        moments, masters = (sum(states[name][i] for states in held) for i in range(2))
        assert (moments, masters) == (2 * sum(sizes), sum(sizes) * (kind == "bfloat16"))
        assert max(states[name][0] for states in held) <= 2 * (sum(sizes) / 4 + max(sizes))
    ranks.call(StagedRank.write, tmp_path)
    ranks.call(StagedRank.make, kind, given)
    ranks.call(StagedRank.load, tmp_path)
    assert ranks.call(StagedRank.update_states) == held


def write_alone(learner: PolicyLearner, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shard_files.write(folder / shard_files.file_name(), shard_files.packed(learner.state_dict()))


OF_EPISODES: list[dict[str, Any]] = [
    {},
    {"importance_sampling_level": "sequence", "clip": 0.05},
    {"old_policy": "proximal", "correction": "truncate", "correction_level": "sequence"},
]


@pytest.mark.parametrize("algorithm", OF_EPISODES, ids=["tokens", "responses", "corrected"])
def test_steps_on_episodes_are_those_of_one_process(
    algorithm: dict[str, Any], two: RankGroup
) -> None:
    """Turns with context between them and forks; a sample each, or an episode, in a micro-batch."""
    given = settings(algorithm=algorithm, training={"microbatch_tokens": 40})
    rollouts = as_episodes(make_batch(models("plain")[0], {"name": "ppo", **algorithm}))
    two.call(StagedRank.make, "plain", given)
    assert_same_steps(two, local_learner("plain", given), [train_batch(rollouts)] * 2)


def test_a_run_goes_on_with_shards_and_with_other_stages(two: RankGroup, tmp_path: Path) -> None:
    """From two stages to two shards, and to two pipelines of a stage, as in one process."""
    given = settings(training={"microbatch_tokens": 60})
    batch = batch_of()
    local = local_learner("plain", given)
    two.call(StagedRank.make, "plain", given)
    assert_same_steps(two, local, [batch])
    two.call(StagedRank.write, tmp_path, 1)
    shards = RankGroup(GroupSpec(2), ShardedRank).start()
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    try:
        shards.call(ShardedRank.make, "float32", {**given, "pipeline": {}})
        shards.call(ShardedRank.load, tmp_path)
        assert all(shards.call(ShardedRank.holds, tmp_path, 1))
        shards.call(ShardedRank.train, [batch])
        shards.call(ShardedRank.write, sharded)
    finally:
        shards.close()
    local.train(batch)
    others = settings(pipeline={"stage_counts": (1, 1)})
    two.call(StagedRank.make, "plain", others)
    two.call(StagedRank.load, sharded)
    assert_same_weights(two, local)
    assert_same_steps(two, local, [batch])


def assert_same_structure(got: Any, expected: Any, path: str = "") -> None:
    """The same keys and tensors within rounding: a checkpoint does not say who wrote it."""
    assert type(got) is type(expected), path
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), path
        for key in expected:
            assert_same_structure(got[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, path
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-6, msg=path)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-6), path
    else:
        assert got == expected, path


@pytest.mark.parametrize("counts", [(2, 2), (1, 1)], ids=["stages", "copies"])
def test_bfloat16_models_have_masters_on_the_ranks(
    counts: tuple[int, int], two: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates far below what bfloat16 can tell apart add up there, and come back rounded. Copies of
    a stage share the masters.
    """
    training = {"lr": 1e-5, "critic_lr": 1e-5}
    given = settings(training=training, pipeline={"stage_counts": counts, "micro_batches": 2})
    batch = batch_of()
    local = local_learner("bfloat16", given)
    # The same passes, because those of other rows round differently.
    monkeypatch.setattr(local.backprop, "divide", lambda tokens: divided(tokens, 2, 2 // counts[0]))
    two.call(StagedRank.make, "bfloat16", given)
    expected_stats = [local.train(batch).stats for _ in range(2)]
    for got, want in zip(two.call(StagedRank.train, [batch] * 2)[0], expected_stats, strict=True):
        assert_same_figures(got, want, rel=1e-3)
    two.call(StagedRank.write, tmp_path)
    masters = [in_memory(shard_files.read(tmp_path))["models"], local.state_dict()["models"]]
    weights, _ = two.call(StagedRank.weights)[0]
    for name, model in zip(("actor", "critic"), models("bfloat16"), strict=True):
        got, expected = (m[name]["masters"] for m in masters)
        assert got.keys() == expected.keys()
        moved = 0
        for key, before in model.named_parameters():
            assert got[key].dtype == torch.float32
            assert torch.equal(weights[name][key], got[key].bfloat16())
            torch.testing.assert_close(got[key], expected[key], rtol=0, atol=4.1e-5)
            moved += int((got[key] != before.float()).sum())
        assert moved > 1000


def test_a_snapshot_stays_while_training_goes_on(two: RankGroup) -> None:
    """Each weight is published by one rank; the tied one by that of the first stage."""
    batch = batch_of()
    two.call(StagedRank.make, "plain", settings())
    two.call(StagedRank.train, [batch])
    weights, _ = two.call(StagedRank.weights)[0]
    (mark, first), (other_mark, second) = two.call(StagedRank.publish)
    assert mark == other_mark == fingerprint(weights["actor"].items())
    assert "model.embed_tokens.weight" in first
    assert not first.keys() & second.keys()
    assert first.keys() | second.keys() == weights["actor"].keys()
    assert all(t.equal(weights["actor"][name]) for name, t in {**first, **second}.items())


def test_logprobs_are_those_of_the_whole_model(two: RankGroup) -> None:
    """Through the stages of one pipeline, and of two that share the responses."""
    responses = train_batch(
        make_rollouts(*models("plain"), [(n, 4) for n, _ in SHAPES])
    ).responses()
    expected = local_learner("plain", settings()).logprobs(responses)
    for pipeline in ({}, {"stage_counts": (1, 0)}):
        given = settings(pipeline=pipeline, training={"microbatch_tokens": 40})
        two.call(StagedRank.make, "plain", given)
        for got in two.call(StagedRank.logprobs, responses):
            assert got == pytest.approx(expected, abs=rounding(GRADIENT_TERMS))
        (one, _) = two.call(StagedRank.logprobs, responses[:1])
        assert one == pytest.approx(expected[:1], abs=rounding(GRADIENT_TERMS))


# -- what a rank holds ---------------------------------------------------------------------------


def test_each_rank_holds_its_stages_alone(two: RankGroup, tmp_path: Path) -> None:
    """Bytes of all tensors of a rank, from a model's files: no more than its stages and buffers."""
    actor, critic = models("untied")
    save_model(actor, byte_tokenizer(), tmp_path)
    held = two.call(StagedRank.make_from, tmp_path, settings())
    layers = [
        [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
        for model in (actor, critic)
    ]
    embedding = actor.model.embed_tokens.weight.nbytes
    norm = actor.model.norm.weight.nbytes
    ends = [embedding, norm + actor.lm_head.weight.nbytes], [embedding, norm + norm]
    expected = [layers[0][r] + ends[0][r] + layers[1][1 - r] + ends[1][1 - r] for r in range(2)]
    assert [stages for stages, _ in held] == expected
    for stages, everything in held:
        assert stages <= everything < stages + 4096  # rotary tables, masks


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_the_model_is_saved_whole(kind: str, two: RankGroup, tmp_path: Path) -> None:
    batch = batch_of()
    two.call(StagedRank.make, kind, settings())
    two.call(StagedRank.train, [batch])
    two.call(StagedRank.save, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert (tmp_path / "adapter").exists() == (kind == "lora")
    responses = [r for r in batch.responses() if len(r) == 7]
    plain = make_learner(saved, None, {"algorithm": {"name": "rloo"}, "rollout": ROWS})
    assert two.call(StagedRank.logprobs, responses)[0] == pytest.approx(
        plain.logprobs(responses), abs=1e-4
    )


ROWS = {"samples_per_prompt": 2, "batch": 8}


# -- numbers that stop a run ---------------------------------------------------------------------


def test_a_disagreeing_engine_stops_the_run_before_a_weight_moves(two: RankGroup) -> None:
    two.call(StagedRank.make, "plain", settings(training={"ratio_tolerance": 1e-3}))
    _, before = two.call(StagedRank.weights)[0]
    assert two.call(StagedRank.refused, batch_of()) == ["policies-disagree"] * 2
    _, after = two.call(StagedRank.weights)[0]
    assert after["actor"] == before["actor"]


def test_an_infinite_gradient_stops_the_run_and_leaves_the_weights(two: RankGroup) -> None:
    """On all ranks, though one alone has the weight."""
    two.call(StagedRank.make, "plain", settings())
    two.call(StagedRank.fill, "model.layers.1.mlp.down_proj.weight", 1e38)
    before, _ = two.call(StagedRank.weights)[0]
    assert two.call(StagedRank.refused, batch_of()) == ["gradient-not-finite"] * 2
    after, _ = two.call(StagedRank.weights)[0]
    for name, tensors in before.items():
        assert all(after[name][key].equal(tensor) for key, tensor in tensors.items())


def test_pipelines_without_a_response_change_nothing(two: RankGroup) -> None:
    """With one response left for two pipelines the other gets a blank micro-batch."""
    given = settings(
        pipeline={"stage_counts": (0, 1)},
        rollout={"batch": 2},
        algorithm={"kl_in": "loss", "entropy_coef": 0.03},
    )
    one = train_batch(make_rollouts(*models("plain"), SHAPES)[4:5])
    local = local_learner("plain", given)
    two.call(StagedRank.make, "plain", given)
    assert_same_steps(two, local, [one] * 3)  # also where latencies would be measured
    (figures,), _ = two.call(StagedRank.train, [one])
    assert "pipeline/predicted_s" not in figures


def test_models_that_train_nothing_or_have_too_few_layers_are_refused(two: RankGroup) -> None:
    assert two.call(StagedRank.not_made, "frozen", settings()) == ["nothing-to-train"] * 2
    four = settings(pipeline={"ranks": 4})
    assert two.call(StagedRank.not_made, "plain", four) == ["too-few-layers"] * 2


def ranks_of_this_process() -> list[psutil.Process]:
    started = psutil.Process().children(recursive=True)
    return [p for p in started if p.name() == NAME and p.status() != psutil.STATUS_ZOMBIE]


# -- a whole run ---------------------------------------------------------------------------------


def tiny_run(folder: Path, out: Path, ranks: int, **sections: Any) -> Config:
    """The tiny recipe, made smaller, with so many ranks."""
    data = recipes.load("tiny").model_dump()
    small: dict[str, Any] = {
        "steps": 3,
        "threads": 1,
        "warmup_examples": 0,
        "out": str(out),
        "model": {"name": str(folder)},
        "rollout": {"batch": 16},
        "training": {"lr": 1e-3, "warmup_steps": 0, "microbatch_tokens": 64},
        "observe": {"progress": "off", "checkpoint_every": 2},
        "pipeline": {"ranks": ranks, "seconds": 0.2},
    }
    for changes in (small, sections):
        for name, value in changes.items():
            data[name] = data[name] | value if isinstance(value, dict) else value
    return Config.model_validate(data)


ASYNC = {"preset": "async"}
REWARDS = """
def some(completions, **rest):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


def run(
    config: Config,
    *,
    resume: Any = None,
    progress: Any = None,
    overrides: Overrides = NO_OVERRIDES,
) -> Any:
    from stretto import runs
    from stretto.observe.display import Progress

    run_dir = resume or RunDirectory.create(config.out, "r", config)
    runs.train(
        config,
        run_dir=run_dir,
        progress=progress or Progress(),
        resume=resume is not None,
        overrides=overrides,
    )
    return run_dir


def metrics(run_dir: Any) -> list[dict[str, float]]:
    left_out = (*UNTIMED, *OF_PROCESSES)
    lines = [json.loads(line) for line in run_dir.metrics_file.read_text().splitlines()]
    return [{k: v for k, v in m.items() if not k.startswith(left_out)} for m in lines]


def test_a_run_with_lag_is_that_of_one_process(tiny_folder: Path, tmp_path: Path) -> None:
    """The same responses and losses, with weights that are handed over as copies."""
    plain, cut = (
        metrics(run(tiny_run(tiny_folder, tmp_path / str(ranks), ranks, schedule=ASYNC)))
        for ranks in (0, 2)
    )
    assert len(cut) == len(plain) == 3
    for got, expected in zip(cut, plain, strict=True):
        assert_same_figures(got, expected, rel=1e-4)
        assert 0 < got["pipeline/bubble_fraction"] < 1
    assert cut[2]["staleness/max"] == 1
    assert "pipeline/predicted_s" not in cut[0]
    assert cut[2]["pipeline/predicted_s"] > 0


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0)])
def test_a_run_can_be_resumed_with_and_without_ranks(
    tiny_folder: Path, tmp_path: Path, ranks: tuple[int, int]
) -> None:
    first, second = ranks
    whole = metrics(run(tiny_run(tiny_folder, tmp_path, 0, steps=4)))
    half = run(tiny_run(tiny_folder, tmp_path, first, steps=2))
    resumed = metrics(run(tiny_run(tiny_folder, tmp_path, second, steps=4), resume=half))
    assert len(resumed) == 4
    for got, expected in zip(resumed, whole, strict=True):
        assert_same_figures(got, expected, rel=1e-4)
    staged = [metrics_of.get("pipeline/step_s", 0.0) > 0 for metrics_of in resumed]
    assert staged == [first > 0] * 2 + [second > 0] * 2


@pytest.mark.parametrize("rank", [0, 2])
def test_all_roles_share_the_ranks_of_stages(tiny_folder: Path, tmp_path: Path, rank: int) -> None:
    """Weights go from stages to slices in the same ranks, and rewards are those of one process."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    sections = {
        "reward": {"sources": (f"{rewards}:some",), "missing_eos": "off"},
        "model": {"name": str(tiny_folder), "lora_rank": rank},
    }
    roles = ["learner", "generator", "reference", "critic"]
    cluster = {"processes": [{"roles": roles, "ranks": 2}]}
    alone, staged = (
        metrics(run(tiny_run(tiny_folder, tmp_path / str(ranks), ranks, **sections, **placed)))
        for ranks, placed in ((0, {}), (2, {"runtime": "local", "cluster": cluster}))
    )
    for got, expected in zip(staged, alone, strict=True):
        assert_same_figures(got, expected, rel=1e-3)


@pytest.mark.parametrize("schedule", [{}, ASYNC])
def test_a_rank_that_dies_ends_the_run_with_the_cause(
    tiny_folder: Path, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    before = ranks_of_this_process()
    with pytest.raises(RankError, match=r"rank 1 of the learner was killed by SIGKILL.* from the"):
        run(
            tiny_run(tiny_folder, tmp_path, 2, schedule=schedule, steps=6),
            progress=Killer("learner, rank 1"),
        )
    assert ranks_of_this_process() == before


@pytest.mark.slow
def test_a_run_goes_on_otherwise_after_a_rank_died_in_an_update(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two replicas of two stages in two slices, with all roles. The checkpoint of the second
    step goes on in four ranks: two slices of the actor, beside two stages of the critic.
    """
    rewards, out = tmp_path / "rewards.py", tmp_path / "parts"
    rewards.write_text(REWARDS)
    common: dict[str, Any] = {
        "steps": 4,
        "reward": {"sources": (f"{rewards}:some",), "missing_eos": "off"},
    }

    def placed(ranks: int, **pipeline: Any) -> Config:
        roles = ["learner", "generator", "reference", "critic"]
        layout = {role: {"dp": ranks // 2, "tp": 2} for role in roles[1:]}
        sections = {
            "runtime": "local",
            "cluster": {"processes": [{"roles": roles, "ranks": ranks, "layout": layout}]},
            "rollout": {"batch": 16, "engines": ranks // 2},
            "pipeline": {"ranks": ranks, "seconds": 0.2, **pipeline},
        }
        return tiny_run(tiny_folder, out, ranks, **common, **sections)

    whole = metrics(run(tiny_run(tiny_folder, tmp_path / "whole", 0, **common)))
    before = ranks_of_this_process()
    with monkeypatch.context() as patch:
        kill_in_update(patch, 3, "rank 5")
        died = r"rank 5 of the learner\S* was killed by SIGKILL.* of its update \(learner\)"
        with pytest.raises(RankError, match=died):
            run(placed(8, stage_counts=(2, 2), stage_slices=(2, 2)))
    assert ranks_of_this_process() == before
    (folder,) = out.iterdir()
    other = placed(4, stage_counts=(1, 2), stage_slices=(2, 1))
    steps = metrics(run(other, resume=RunDirectory.open(folder)))
    assert len(steps) == 4
    for got, expected in zip(steps, whole, strict=True):
        assert_same_figures(got, expected, rel=1e-3)


def kill_in_update(patch: pytest.MonkeyPatch, update: int, rank: str) -> None:
    """Kill a rank once all ranks of the learner have got a batch."""
    wait, updates = RankGroup._wait, count(1)

    def waiting(group: RankGroup, doing: str, *rest: Any) -> None:
        if doing.startswith("its update") and next(updates) == update:
            (pid,) = (pid for name, pid in processes().items() if name.endswith(rank))
            os.kill(pid, signal.SIGKILL)
        wait(group, doing, *rest)

    patch.setattr(RankGroup, "_wait", waiting)


def test_an_interrupted_run_ends_its_ranks_and_saves_the_last_step(
    tiny_folder: Path, tmp_path: Path
) -> None:
    one = run(tiny_run(tiny_folder, tmp_path / "one", 2, steps=1))
    before = ranks_of_this_process()
    with pytest.raises(KeyboardInterrupt):
        run(tiny_run(tiny_folder, tmp_path / "two", 2), progress=Kill(1))
    assert ranks_of_this_process() == before
    (folder,) = (tmp_path / "two").iterdir()
    expected, saved = (load_file(d / "model/model.safetensors") for d in (one.path, folder))
    assert all(saved[name].equal(tensor) for name, tensor in expected.items())


def test_a_model_of_the_caller_is_trained_by_stages(tiny_folder: Path, tmp_path: Path) -> None:
    """It is sent to the ranks, and has the trained weights in the end."""
    model = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    named = run(tiny_run(tiny_folder, tmp_path / "named", 2, steps=1))
    config = tiny_run(tiny_folder, tmp_path / "sent", 2, steps=1)
    run(config, overrides=Overrides(actor=model))
    expected = load_file(named.path / "model/model.safetensors")
    weights = dict(model.named_parameters())
    assert all(weights[name].equal(tensor) for name, tensor in expected.items())


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pipeline": {"ranks": 1}}, "one stage of a model, which is no pipeline"),
        ({"pipeline": {"ranks": 4, "stage_counts": [3, 0]}}, r"actor \(3\): pipelines of so many"),
        (
            {"pipeline": {"ranks": 6, "stage_slices": (2, 3)}},
            "one number must divide the other, and the larger one",
        ),
        (
            {"pipeline": {"ranks": 2, "stage_counts": (2, 4)}},
            r"critic \(4\): pipelines of so many stages",
        ),
        (
            {"pipeline": {"ranks": 6, "stage_counts": (3, 2), "micro_batches": 4}},
            "shared evenly by 2 pipelines of the actor and 3 of the critic; choose a multiple of 6",
        ),
        (
            {
                "pipeline": {"ranks": 2},
                "algorithm": {"name": "rloo"},
                "rollout": {"samples_per_prompt": 2},
            },
            "'rloo' has no critic; set pipeline.ranks = 0",
        ),
        ({"pipeline": {"ranks": 2}, "model": {"trust_remote_code": True}}, "trust_remote_code"),
        (
            {"pipeline": {"ranks": 2, "micro_batches": 9}, "training": {"minibatches": 4}},
            "a mini-batch has 8 responses .* ask for 9 micro-batches",
        ),
        ({"pipeline": {"schedule": "gpipe"}}, "must be 'fused' or 'serial'"),
        ({"pipeline": {"seconds": 0}}, "must be greater than 0"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipes.build(sections, "here")


def test_settings_without_effect_are_remarked_upon() -> None:
    config = Config(pipeline=PipelineConfig(schedule="serial", micro_batches=3))
    (remark,) = config.remarks
    assert remark.endswith("while pipeline.ranks is 0: pipeline.schedule, pipeline.micro_batches")
    assert not Config(pipeline=PipelineConfig(ranks=2, schedule="serial")).remarks


# -- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([10] * 8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ([10] * 8, 5, [[0], [1], [2, 3], [4, 5], [6, 7]]),
        ([10] * 4, 4, [[0], [1], [2], [3]]),
        ([3, 9, 4, 8], 2, [[1, 3], [2, 0]]),
        ([100, 5, 5, 5, 5], 2, [[0], [1, 2, 3, 4]]),
        ([7], 1, [[0]]),
    ],
)
def test_just_so_many_micro_batches_of_like_sizes(
    tokens: list[int], count: int, expected: list[list[int]]
) -> None:
    got = into_micro_batches(tokens, count)
    assert len(got) == count
    assert sorted(i for group in got for i in group) == list(range(len(tokens)))
    cost = max(len(g) * max(tokens[i] for i in g) for g in got)
    assert cost == max(len(g) * max(tokens[i] for i in g) for g in expected)
    if count != 5:
        assert got == expected


def test_serial_is_1f1b_of_the_actor_and_then_of_the_critic() -> None:
    problem = Problem(
        ModelPipelines.of(2, 1, 3, forward=1, backward=2, activation=1.0),
        ModelPipelines.of(1, 2, 2, forward=1, backward=2, activation=1.0),
    )
    words = one_f_one_b(problem).words
    assert [" ".join(word) for word in words] == [
        "0F 0F 0B 0F 0B 0B 1F 1B 1F 1B",
        "0F 0B 0F 0B 0F 0B 2F 2B 2F 2B",
    ]
    critic = ModelPipelines.of(4, 1, 2, forward=1, backward=2, activation=1.0)
    words = one_f_one_b(Problem(critic, critic)).words
    assert [" ".join(word) for word in words] == [
        "0F 0F 0B 0B 1F 1B 1F 1B",
        "0F 0F 0B 0B 1F 1F 1B 1B",
        "0F 0F 0B 0B 1F 1F 1B 1B",
        "0F 0B 0F 0B 1F 1F 1B 1B",
    ]


def test_a_plan_is_made_once_and_again_when_latencies_are_measured() -> None:
    config = PipelineConfig(ranks=2, seconds=0.2)
    planner = Planner(config, {"actor": 3000, "critic": 1500}, seed=0)
    first = planner.plan(4)
    assert planner.plan(4) is first
    assert math.isnan(first.predicted_us)
    actor, critic = first.problem.models
    assert (actor.forward, actor.backward) == ((1000, 1000), (2000, 2000))
    assert (critic.forward, critic.backward) == ((500, 500), (1000, 1000))
    assert (actor.micro_batches, critic.micro_batches) == (4, 4)
    measured = Problem(
        ModelPipelines.of(2, 1, 2, forward=[70, 90], backward=[150, 170], activation=1.0),
        ModelPipelines.of(2, 1, 2, forward=[60, 50], backward=[110, 90], activation=1.0),
    )
    planner.measure(measured)
    again = planner.plan(4)
    assert again.problem.actor.forward == (70, 90)
    assert again.problem.actor.micro_batches == 4
    assert again.predicted_us == evaluate(again.problem, again.schedule).latency
    assert again.predicted_us >= 4 * (90 + 170 + 60 + 110)  # the second device's own work, at least


def test_pipelines_get_the_long_micro_batches_in_turn() -> None:
    """Of two pipelines of the critic each takes a half of the list, of like sums."""
    given = settings(pipeline={"stage_counts": (0, 1), "micro_batches": 4})
    config = Config.model_validate(given)
    nothing: Any = None
    passes = pipelined.PipelinedBackprop({}, nothing, nothing, nothing, config.pipeline, budget=1)
    assert passes.divide([10, 40, 20, 30]) == [[1], [0], [3], [2]]
    assert len(passes.divide([5, 5, 5])) == 2  # not four, and not three
    assert passes.divide([7]) == [[0]]
