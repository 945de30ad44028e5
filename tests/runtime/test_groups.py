"""The runtime of processes: what it computes is what the runtime of threads computes."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GraniteConfig

from helpers import check_trace_events
from raising import raises
from run_helpers import Killer, killed_by_ctrl_c, processes
from scorer_helpers import reward_model
from stretto import runs
from stretto.api.settings import check_resumable
from stretto.assembly.run_models import Overrides
from stretto.config import ClusterConfig, Config, ModelConfig, recipes
from stretto.config.cluster_config import ProcessConfig
from stretto.errors import (
    ConfigError,
    EngineError,
    MissingExtraError,
    ModelError,
    RankError,
    RewardError,
)
from stretto.layout import Layout
from stretto.models.load import load_causal_lm, save_model
from stretto.models.lora import add_lora
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.rollout.vllm import llm
from stretto.runtime.clients import KVRouter
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.placement import ProcessPlacement
from stretto.runtime.processes import LAUNCHERS, Launcher
from stretto.runtime.role_services import FollowerService
from stretto.runtime.run import Run, start
from stretto.runtime.weight_sync import WeightSync
from stretto.types import FinishReason, Prompt, Reply, Response, Score, TrainBatch, WeightsRef, Work
from stretto.weights.channel import SharedChannel, fetched
from stretto.workers.connection import NotConnectedError
from stretto.workers.forkserver import NAME, ForkedProcesses
from stretto.workers.group import Launched
from stretto.workers.rank import GroupSpec

TIMES = ("timing_s/", "time_s", "perf/", "utilisation/", "idle_s/", "pipeline/")
OF_PROCESSES = ("cluster/", "weight_sync/", "memory/")
COPIES = {"processes": [{"roles": [f"reference {i}", f"critic {i}"]} for i in range(2)]}
"""Two copies of the scorers, which share their work."""
BESIDE_LEARNER = {"processes": [{"roles": ["learner", "reference"]}]}
RLOO = {
    "algorithm": {"name": "rloo"},
    "rollout": {"batch": 4, "max_new_tokens": 6, "samples_per_prompt": 2},
}


def settings(tiny_folder: Path, **changes: Any) -> Config:
    data: dict[str, Any] = {
        "steps": 2,
        "threads": 1,
        "model": {"name": str(tiny_folder), "dtype": "float32"},
        "task": {"settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},
        "rollout": {"batch": 4, "max_new_tokens": 6},
        "reward": {"missing_eos": "off"},
        "training": {"lr": 1e-3, "critic_lr": 1e-3},
    }
    return recipes.build({**data, **changes}, "here")


def trained(config: Config, folder: Path, display: Any = None, **rest: Any) -> RunDirectory:
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDirectory.create(folder, "run", config)
    runs.train(config, run_dir=run, progress=display or Progress(), **rest)
    return run


def assert_same(one: RunDirectory, two: RunDirectory) -> None:
    """Weights, rollouts and all metrics but times, bit for bit."""
    weights = [load_file(run.model / "model.safetensors") for run in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert one.read_rollouts() == two.read_rollouts()
    metrics: list[list[Mapping[str, Any]]] = [
        [
            {k: v for k, v in m.items() if not k.startswith(TIMES + OF_PROCESSES)}
            for m in run.read_metrics()
        ]
        for run in (one, two)
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize(
    ("runtime", "changes"),
    [
        ("local", {}),
        ("ray", {}),
        ("local", {"schedule": {"preset": "async"}, "cluster": COPIES}),
        ("local", {"pipeline": {"ranks": 2}}),
        ("local", {"model": {"lora_rank": 2}, "warmup_examples": 8}),
        pytest.param("local", {"model": {"lora_rank": 2}}, marks=pytest.mark.slow),
        ("local", {"model": {"lora_rank": 2}, "cluster": BESIDE_LEARNER}),
        pytest.param("local", RLOO, marks=pytest.mark.slow),
        pytest.param("local", {"cluster": {"scorers": "together"}}, marks=pytest.mark.slow),
        pytest.param("local", {"cluster": {"scorers": "generators"}}, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_same_on_threads_and_on_processes(
    tiny_folder: Path, tmp_path: Path, runtime: str, changes: dict[str, Any]
) -> None:
    if runtime == "ray":
        pytest.importorskip("ray")
    model = {"name": str(tiny_folder), "dtype": "float32", **changes.get("model", {})}
    config = settings(tiny_folder, **{**changes, "model": model})
    here = trained(config, tmp_path / "inline")
    there = trained(config.model_copy(update={"runtime": runtime}), tmp_path / "there")
    assert_same(here, there)


@pytest.mark.parametrize(
    ("preset", "process_"),
    [
        ("stretto", {"roles": ["learner"]}),
        pytest.param("oppo", {"roles": ["learner"]}, marks=pytest.mark.slow),
        pytest.param("rlhfuse", {"roles": ["learner"]}, marks=pytest.mark.slow),
        ("oppo", {"roles": ["learner", "generator"], "ranks": 2}),
    ],
)
def test_where_order_is_a_matter_of_luck_the_books_are_the_same(
    tiny_folder: Path, tmp_path: Path, preset: str, process_: dict[str, Any]
) -> None:
    """Which responses end first depends on the machine; none is lost, and none trained twice."""
    config = settings(
        tiny_folder,
        runtime="local",
        cluster={"processes": [process_]},
        steps=4,
        schedule={"preset": preset},
        rollout={"batch": 4, "max_new_tokens": 12, "engines": 2},
    )
    run = trained(config, tmp_path)
    records = run.read_rollouts()
    kept = [r.id for r in records if r.state == "trained"]
    assert len(kept) == len(set(kept)) == 16
    assert len(run.read_metrics()) == 4
    assert all(m["cluster/deaths"] == 0 for m in run.read_metrics())


def process(roles: str, ranks: int, **layout: dict[str, int]) -> ProcessConfig:
    data = {"roles": roles.split("+"), "ranks": ranks, "layout": layout}
    return ProcessConfig.model_validate(data)


ALL = "learner+generator+reference+critic"


@pytest.mark.parametrize(
    ("places", "stored", "changes"),
    [
        ([process("learner", 2)], torch.float32, {"schedule": {"preset": "async"}}),
        (
            [
                process("learner", 4, learner={"fsdp": 2, "tp": 2}),
                process("generator", 2),
                process("reference", 2),
                process("critic", 2),
            ],
            torch.bfloat16,
            {"schedule": {"preset": "oppo", "overcommit": 0}},
        ),
        pytest.param(
            [
                process("learner", 2, learner={"tp": 2}),
                process("generator 0", 2),
                process("generator 1", 2),
            ],
            torch.float32,
            {"schedule": {"preset": "rlhfuse"}, "rollout": {"engines": 2}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [process("learner", 3), process("generator", 2)],
            torch.bfloat16,
            {"model": {"lora_rank": 2}},
            marks=pytest.mark.slow,
        ),
        (
            [process(ALL, 2)],
            torch.bfloat16,
            {"model": {"lora_rank": 2}, "schedule": {"preset": "oppo", "overcommit": 0}},
        ),
        pytest.param(
            [process("learner+reference", 4, learner={"fsdp": 2, "tp": 2})],
            torch.bfloat16,
            {"model": {"lora_rank": 2}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [process("learner", 2, learner={"tp": 2})],
            torch.bfloat16,
            RLOO,
            marks=pytest.mark.slow,
        ),
        ([process(ALL, 2)], torch.bfloat16, {}),
        # Three slices do not divide four heads. The critic is the learner's.
        (
            [process("learner+reference+critic", 3)],
            torch.bfloat16,
            {"schedule": {"preset": "oppo"}},
        ),
        pytest.param(
            [process("learner+generator", 2, learner={"tp": 2}), process("reference+critic", 2)],
            torch.float32,
            {"schedule": {"preset": "async"}},
            marks=pytest.mark.slow,
        ),
        (
            [
                process(
                    ALL,
                    4,
                    generator={"dp": 2, "tp": 2},
                    reference={"dp": 4},
                    critic={"dp": 2, "tp": 2},
                )
            ],
            torch.bfloat16,
            {"rollout": {"engines": 2}},
        ),
        pytest.param(
            [process("generator", 2)],
            torch.bfloat16,
            {"pipeline": {"ranks": 4, "stage_slices": (2, 2), "seconds": 0.1}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [process(ALL, 4, learner={"fsdp": 2, "tp": 2}, generator={"dp": 4}, critic={"dp": 4})],
            torch.float32,
            {"schedule": {"preset": "rlhfuse"}, "rollout": {"engines": 4}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                process("learner", 2),
                process("generator", 4, generator={"dp": 2, "tp": 2}),
                process("critic", 2, critic={"dp": 2}),
            ],
            torch.bfloat16,
            {"model": {"lora_rank": 2}, "rollout": {"engines": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_roles_over_ranks_work_as_one_process(
    tiny_folder: Path,
    tmp_path: Path,
    places: Sequence[ProcessConfig],
    stored: torch.dtype,
    changes: dict[str, Any],
) -> None:
    """The same responses, and rewards and weights but for rounding."""
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=stored).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    own = {
        "model": {"name": str(model), "dtype": "float32", **changes.get("model", {})},
        "reward": varied_reward(tmp_path),
    }
    rollout = {"batch": 4, "max_new_tokens": 6, **changes.get("rollout", {})}
    config = settings(model, **{**changes, **own, "rollout": rollout})
    here = trained(config, tmp_path / "inline")
    placed = {"runtime": "local", "cluster": ClusterConfig(processes=tuple(places))}
    there = trained(config.model_copy(update=placed), tmp_path / "there")
    assert_same_but_for_rounding(model, here, there)
    assert not processes()


def test_a_reference_in_shards_keeps_the_adapters_that_a_run_starts_from(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """The learner's base serves both, with other adapters once these have been trained."""
    base = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    adapted: Any = add_lora(base, ModelConfig(lora_rank=2), "CAUSAL_LM")
    adapted.peft_config["default"].base_model_name_or_path = str(tiny_folder)
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1 * len(name) / 100)
    adapted.save_pretrained(tmp_path / "adapter")
    model = {"name": str(tmp_path / "adapter"), "dtype": "float32"}
    config = settings(tiny_folder, steps=3, model=model, reward=varied_reward(tmp_path))
    here = trained(config, tmp_path / "inline")
    cluster = ClusterConfig(processes=(process("learner+reference+critic", 2),))
    placed = {"runtime": "local", "cluster": cluster}
    there = trained(config.model_copy(update=placed), tmp_path / "there")
    assert_same_but_for_rounding(tiny_folder, here, there)
    pairs = zip(here.read_metrics(), there.read_metrics(), strict=True)
    kls = [(one["objective/kl"], two["objective/kl"]) for one, two in pairs]
    assert all(two == pytest.approx(one, rel=1e-3, abs=1e-5) for one, two in kls)
    assert kls[0][0] == pytest.approx(0, abs=1e-5)  # at the start they are one policy
    assert kls[2][0] > 1e-4


@pytest.mark.slow
def test_scorers_have_layouts_of_their_own_in_the_learners_ranks(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Shards of slices, here of the model without adapters, and shards alone, which score at the
    end of responses.
    """
    reward_model().save_pretrained(tmp_path / "reward")
    byte_tokenizer().save_pretrained(tmp_path / "reward")
    source, reward = f"model:{tmp_path / 'reward'}", varied_reward(tmp_path)
    config = settings(
        tiny_folder,
        model={"name": str(tiny_folder), "dtype": "float32", "lora_rank": 2},
        schedule={"preset": "oppo", "overcommit": 0},
        rollout={"batch": 4, "max_new_tokens": 6},
        task={"max_prompt_tokens": 200, "settings": {"min_terms": 2, "max_terms": 2}},
        reward={**reward, "sources": (*reward["sources"], source)},
    )
    here = trained(config, tmp_path / "inline")
    layouts = {"reference": {"fsdp": 2, "tp": 2}, source: {"fsdp": 4}}
    place = process(f"learner+reference+{source}", 4, **layouts)
    placed = {"runtime": "local", "cluster": ClusterConfig(processes=(place,))}
    there = trained(config.model_copy(update=placed), tmp_path / "there")
    assert_same_but_for_rounding(tiny_folder, here, there)


def test_a_critic_without_a_copy_has_the_learners_version_alone(tiny_folder: Path) -> None:
    """It is the learner's. As its shards are gathered, it does not stream, and says so once."""
    roles = ("learner", "generator", "reference", "critic")
    processes = [{"roles": roles, "ranks": 2}]
    config = settings(
        tiny_folder, runtime="local", schedule={"preset": "oppo"}, cluster={"processes": processes}
    )
    said = list[str]()
    with ExitStack() as stack:
        run = start(config, stack, said.append)
        assert sum("'critic' scores rollouts whole, at their end" in line for line in said) == 1
        assert not any("'reference' scores" in line for line in said)  # it has slices
        scorer, refs = run.workers.executors["critic"], run.workers.ready.refs
        newer = run.learner.ask(LearnerService.publish).value["critic"]
        assert scorer.ask(FollowerService.load, newer).value.moved == 0
        with raises(EngineError, "version-not-kept", "version 0 of the critic", "holds [1]"):
            scorer.ask(FollowerService.load, refs["critic"])
        with raises(EngineError, "other-weights", "the learner's critic"):
            scorer.ask(FollowerService.load, replace(newer, fingerprint="other"))


def test_a_critic_that_cannot_be_sliced_needs_the_learners_shards(tiny_folder: Path) -> None:
    """Three slices do not divide four heads. With lag, the learner's critic is ahead."""
    processes = [{"roles": ("learner", "critic"), "ranks": 3}]
    cluster = {"processes": processes}
    config = settings(tiny_folder, runtime="local", cluster=cluster, schedule={"preset": "async"})
    with ExitStack() as stack, raises(ModelError, "tp-divides", "schedule.lag = 0", "4 attention"):
        start(config, stack, lambda _: None)


def varied_reward(folder: Path) -> dict[str, Any]:
    """Return settings of a reward that differs between responses, so that there are gradients."""
    file = folder / "rewards.py"
    file.write_text(
        "def some(completions, **rest):\n"
        "    return [sum(map(ord, text)) % 7 / 7 for text in completions]\n"
    )
    return {"sources": (f"{file}:some",), "missing_eos": "off"}


def assert_same_but_for_rounding(start: Path, here: RunDirectory, there: RunDirectory) -> None:
    """The same responses, and metrics and weights that differ little for what was learned."""
    assert {(r.id, r.tokens) for r in here.read_rollouts()} == {
        (r.id, r.tokens) for r in there.read_rollouts()
    }
    for one, two in zip(here.read_metrics(), there.read_metrics(), strict=True):
        for name in ("objective/scores", "policy/grad_norm", "loss/policy_avg"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5)
    before = load_file(start / "model.safetensors")
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (here, there))
    assert before.keys() == ours.keys() == theirs.keys()
    for name, then in before.items():  # AdamW makes steps of roundings where gradients are zero
        assert (ours[name] - theirs[name]).norm() <= 0.02 * (ours[name] - then).norm(), name


@pytest.mark.parametrize(
    ("ranks", "changes", "owners"),
    [
        # The critic is the learner's own.
        ({("learner", "generator", "reference", "critic"): 2}, {}, {"learner", "reference"}),
        pytest.param(
            {("learner", "reference", "critic"): 1, ("generator",): 1},
            {"model": {"dtype": "bfloat16"}},  # with masters
            {"learner", "reference", "critic"},
            marks=pytest.mark.slow,
        ),
        # Shards of the reference stay on the host, as three ranks do not divide four heads.
        pytest.param({("learner", "reference"): 3}, {}, {"learner"}, marks=pytest.mark.slow),
    ],
)
def test_roles_that_leave_their_tensors_on_the_host_change_nothing(
    tiny_folder: Path,
    tmp_path: Path,
    ranks: Mapping[tuple[str, ...], int],
    changes: dict[str, Any],
    owners: set[str],
) -> None:
    """Bit for bit, also where the run goes on from its checkpoint."""
    model = {"name": str(tiny_folder), "dtype": "float32", **changes.get("model", {})}
    config = settings(
        tiny_folder,
        runtime="local",
        steps=4,
        observe={"checkpoint_every": 2},
        **{**changes, "model": model},
    )
    plain, offloading = (
        config.model_copy(
            update={
                "cluster": ClusterConfig(
                    processes=tuple(
                        ProcessConfig(roles=r, ranks=n, offload=offload and len(r) > 1)
                        for r, n in ranks.items()
                    )
                )
            }
        )
        for offload in (False, True)
    )
    whole = trained(plain, tmp_path / "plain")
    with pytest.raises(KeyboardInterrupt):
        trained(offloading, tmp_path / "offloaded", Stopper())
    (folder,) = (tmp_path / "offloaded").iterdir()
    offloaded = RunDirectory.open(folder)
    runs.train(offloading, run_dir=offloaded, resume=True, progress=Progress())
    assert_same(whole, offloaded)
    spans = json.loads((offloaded.path / "trace.json").read_text())
    swaps = [span["args"] for span in spans if span["name"] == "swap"]
    assert {swap["owner"] for swap in swaps} == owners
    ways = {(swap["owner"], swap["direction"]) for swap in swaps}
    assert ("learner", "out") in ways  # which changes
    assert ("reference", "out") not in ways
    assert not processes()


def test_roles_work_at_the_same_time_and_a_run_is_resumed(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(
        tiny_folder,
        runtime="local",
        steps=4,
        schedule={"preset": "async"},
        observe={"checkpoint_every": 2},
        algorithm={"name": "rloo"},
        rollout={"batch": 4, "max_new_tokens": 6, "samples_per_prompt": 2},
    )
    whole = trained(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path / "half", Stopper())
    (folder,) = (tmp_path / "half").iterdir()
    run = RunDirectory.open(folder)
    runs.train(config, run_dir=run, resume=True, progress=Progress())
    assert [m["step"] for m in run.read_metrics()] == [1, 2, 3, 4]
    assert [m["staleness/max"] for m in run.read_metrics()] == [0, 1, 1, 1]
    assert_same(run, whole)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_classifier_made_here_goes_to_processes_and_is_resumed(tmp_path: Path, rank: int) -> None:
    """Granite has no sequence classifier in transformers, and PPO's critic is one."""
    torch.manual_seed(0)
    granite = GraniteConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=258, tie_word_embeddings=True,
    )  # fmt: skip
    save_model(AutoModelForCausalLM.from_config(granite), byte_tokenizer(), tmp_path / "granite")
    model = {"name": str(tmp_path / "granite"), "dtype": "float32", "lora_rank": rank}
    config = settings(tmp_path, model=model, steps=4, observe={"checkpoint_every": 2})
    whole = trained(config, tmp_path / "whole")
    config = config.model_copy(update={"runtime": "local"})
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path / "half", Stopper())
    (folder,) = (tmp_path / "half").iterdir()
    run = RunDirectory.open(folder)
    runs.train(config, run_dir=run, resume=True, progress=Progress())
    assert_same(run, whole)


RANKS_BEFORE_AND_AFTER = [
    (Layout(fsdp=2), Layout(tp=2)),
    pytest.param(Layout(fsdp=2), Layout(), marks=pytest.mark.slow),
    pytest.param(Layout(), Layout(fsdp=2, tp=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("before", "after"), RANKS_BEFORE_AND_AFTER)
def test_a_run_is_resumed_with_other_ranks(
    tiny_folder: Path, tmp_path: Path, before: Layout, after: Layout
) -> None:
    """As one that was never stopped, in one process, but for rounding."""
    config = settings(
        tiny_folder, steps=4, schedule={"preset": "async"}, observe={"checkpoint_every": 2}
    )
    whole = trained(config, tmp_path / "whole")

    def over(layout: Layout) -> Config:
        learner = ProcessConfig(roles=("learner",), ranks=layout.ranks, layout={"learner": layout})
        cluster = ClusterConfig(processes=(learner,))
        return config.model_copy(update={"runtime": "local", "cluster": cluster})

    run = RunDirectory.create(tmp_path, "run", config)
    with killed_by_ctrl_c():
        runs.train(over(before), run_dir=run, progress=Stopper())
    files = sorted((run.checkpoints / "step-000002" / "learner").iterdir())
    assert len(files) == before.ranks
    runs.train(over(after), run_dir=run, resume=True, progress=Progress())
    assert [m["step"] for m in run.read_metrics()] == [1, 2, 3, 4]
    assert_same_but_for_rounding(tiny_folder, whole, run)


def test_a_run_is_resumed_with_other_engines(tiny_folder: Path, tmp_path: Path) -> None:
    """Two engines in the learner's ranks, and then one in a process with everything else."""
    reward = varied_reward(tmp_path)
    config = settings(tiny_folder, steps=4, reward=reward, observe={"checkpoint_every": 2})
    whole = trained(config, tmp_path / "whole")
    group = ClusterConfig(processes=(process("learner+generator", 2, generator={"dp": 2}),))
    there = config.changed_in("rollout", engines=2)
    there = there.model_copy(update={"runtime": "local", "cluster": group})
    run = RunDirectory.create(tmp_path, "run", there)
    with killed_by_ctrl_c():
        runs.train(there, run_dir=run, progress=Stopper())
    check_resumable(there, config)
    runs.train(config, run_dir=run, resume=True, progress=Progress())
    assert_same_but_for_rounding(tiny_folder, whole, run)


def test_a_rank_whose_disk_is_full_leaves_the_former_checkpoint(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # it would be cut off, too
    learner = ClusterConfig(processes=(process("learner", 2),))
    config = settings(
        tiny_folder, steps=3, runtime="local", cluster=learner, observe={"checkpoint_every": 1}
    )
    display = Full()
    run = trained(config, tmp_path, display)
    assert any("is no checkpoint of step 3" in note for note in display.notes), display.notes
    assert any("File too large; make room there" in note for note in display.notes)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert left[0] == "step-000001"
    assert set(left[1:]) <= {"step-000002"}
    runs.train(config, run_dir=run, resume=True, progress=Progress())
    assert (run.checkpoints / "step-000003").is_dir()


class Full(Progress):
    """Has the learner's second rank write short files alone, from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def step(self, step: int, *_: Any, **__: Any) -> None:
        if step == 3:
            limit = 20_000, resource.RLIM_INFINITY
            resource.prlimit(processes()["learner, rank 1"], resource.RLIMIT_FSIZE, limit)

    def note(self, line: str) -> None:
        self.notes.append(line)


class Stopper(Progress):
    """Presses Ctrl-C after the third step, of which there is no checkpoint."""

    def step(self, step: int, *_: Any, **__: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt


def test_a_learner_that_dies_ends_the_run_with_the_cause(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(tiny_folder, runtime="local", steps=500)
    killer = Killer("learner")
    with raises(RankError, "rank-died", "learner", "SIGKILL"):
        trained(config, tmp_path, killer)
    assert not processes()


def test_roles_that_die_with_the_learner_end_the_run_with_the_cause(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """They are not replaced, as what is trained would begin anew with them."""
    together = process("learner+generator", 2)
    cluster = ClusterConfig(processes=(together,))
    config = settings(tiny_folder, runtime="local", steps=500)
    killer = Killer("learner+generator, rank 1")
    with raises(RankError, "rank-died", "rank 1", "SIGKILL"):
        trained(config.model_copy(update={"cluster": cluster}), tmp_path, killer)
    assert not processes()


@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("generator 0", signal.SIGKILL),
        ("reference", signal.SIGKILL),
        ("critic", signal.SIGKILL),
        pytest.param("generator 1", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("critic", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_role_that_dies_is_replaced_and_nothing_changes(
    tiny_folder: Path, tmp_path: Path, role: str, number: int
) -> None:
    """The rollouts of an undisturbed run, token for token: none lost, none trained twice."""
    config = settings(
        tiny_folder,
        runtime="local",
        steps=3,
        rollout={"batch": 6, "max_new_tokens": 12, "engines": 2},
        schedule={"score_on": "rollout", "deadline_s": 10.0 if number == signal.SIGSTOP else 60.0},
    )
    killer = Killer(role, number)
    disturbed = trained(config, tmp_path / "disturbed", killer)
    assert killer.done
    last = disturbed.read_metrics()[-1]
    assert (last["cluster/deaths"], last["cluster/restarts"]) == (1.0, 1.0)
    assert last["weight_sync/logprob_gap"] < 1e-3
    assert any(f"{role} was lost: " in note and "(restart 1 of 2)" in note for note in killer.notes)
    assert sum(m.get(f"idle_s/{role}/down", 0.0) for m in disturbed.read_metrics()) > 0
    assert {"utilisation/all devices", "perf/throughput_per_device"} <= last.keys()
    assert "utilisation/weights" not in last
    check_trace_events(events := json.loads(disturbed.trace.path.read_bytes()))
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    flows = {(e["name"], named[e["pid"]]) for e in events if e["ph"] in ("s", "f")}
    living = {"generator 0", "generator 1", "critic"} - {role}
    assert flows >= {("weights", name) for name in living | {"learner"}}
    assert flows >= {("batch", name) for name in living - {"critic"} | {"learner"}}
    whole = trained(config.model_copy(update={"runtime": "inline"}), tmp_path / "whole")
    one, two = (sorted(run.read_rollouts(), key=lambda r: r.id) for run in (disturbed, whole))
    assert [r.id for r in one] == [r.id for r in two] == list(range(18))
    assert [r.tokens for r in one] == [r.tokens for r in two]
    assert not processes()


@pytest.mark.parametrize("name", ["generator", "learner"])
def test_a_process_that_dies_while_the_run_starts_is_started_again(
    name: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, killed, said = Launcher.launch, list[int](), list[str]()

    def once(self: Launcher, process: ProcessPlacement, spec: GroupSpec) -> Launched:
        launched = launch(self, process, spec)
        if process.name == name and not killed and isinstance(launched, ForkedProcesses):
            killed.append(launched.processes[0].pid)
            os.kill(killed[0], signal.SIGKILL)
        return launched

    monkeypatch.setattr(Launcher, "launch", once)
    with ExitStack() as stack:
        run = start(settings(tiny_folder, runtime="local"), stack, said.append)
        assert [line for line in said if f"the {name} was killed by SIGKILL" in line]
        assert run.workers.executors["learner"].generation == 0
        run.workers.close()
    assert killed


def test_generators_and_critics_get_the_first_weights(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM starts without weights."""
    load_all, followers = WeightSync.load_all, list[str]()

    def recorded(self: WeightSync, refs: Mapping[str, WeightsRef]) -> None:
        followers.extend(self._models)
        load_all(self, refs)

    monkeypatch.setattr(WeightSync, "load_all", recorded)
    with ExitStack() as stack:
        run = start(settings(tiny_folder, runtime="local"), stack, lambda _: None)
        run.workers.close()
    assert followers == ["generator", "critic"]


@pytest.mark.parametrize(
    ("sends", "places"),
    [
        (True, []),
        (False, []),
        (True, [process("learner+generator", 2, generator={"dp": 2})]),
        pytest.param(
            True,
            [process("generator", 4, generator={"dp": 2, "tp": 2})],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stragglers_move_between_processes_and_nothing_changes(
    tiny_folder: Path,
    tmp_path: Path,
    sends: bool,
    places: Sequence[ProcessConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not sends:  # then their tokens are prefilled again
        monkeypatch.setattr(KVRouter, "bytes_per_s", lambda *_: 1.0)
    config = settings(
        tiny_folder,
        runtime="local",
        # Long enough that no generator is at its end while the other has hardly begun.
        rollout={"batch": 8, "max_new_tokens": 96, "engines": 2},
        schedule={"preset": "rlhfuse", "migrate": 0.75, "chunk_tokens": 2},
        reward={"missing_eos": "off"},
        warmup_examples=64,  # so that some responses end before others
    )
    cluster = ClusterConfig(processes=tuple(places))
    there = trained(config.model_copy(update={"cluster": cluster}), tmp_path / "there")
    spans = json.loads((there.path / "trace.json").read_text())
    assert sum(span["name"] == "migrate" for span in spans) >= 2  # given, and taken
    here = trained(config.model_copy(update={"runtime": "inline"}), tmp_path / "here")
    one, two = (sorted(run.read_rollouts(), key=lambda r: r.id) for run in (there, here))
    assert [(r.id, r.tokens) for r in one] == [(r.id, r.tokens) for r in two]


def test_without_restarts_the_first_death_ends_the_run_and_the_model_is_saved(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(tiny_folder, runtime="local", steps=500, cluster={"restarts": 0})
    with raises(RankError, "rank-died", "generator", "SIGKILL"):
        trained(config, tmp_path, Killer("generator"))
    (run,) = tmp_path.glob("run-*")
    assert load_file(run / "model" / "model.safetensors")


class Starting:
    """A process that has not started when the run ends."""

    one_clock = True

    def __init__(self) -> None:
        self.connecting, self.killed = threading.Event(), threading.Event()

    def connect(self, timeout_s: float) -> Any:
        self.connecting.set()
        assert self.killed.wait(60)
        raise NotConnectedError(0)

    def kill(self) -> None:
        self.killed.set()


class Refusing:
    """A launcher whose generator starts for ever, and whose reference is refused."""

    gpus, host, interface = 0, "127.0.0.1", ""

    def __init__(self) -> None:
        self.generator = Starting()

    def devices(self, process: Any) -> Any:
        return process.devices

    def prepare(self, processes: Any, stack: Any) -> None:
        pass

    def launch(self, process: Any, spec: Any) -> Any:
        if process.name == "generator":
            return self.generator
        if process.name == "reference":
            self.generator.connecting.wait(60)
            raise ConfigError("no such reference", "no-reference")
        assert self.generator.killed.wait(60)
        raise RankError("ended")


def test_what_cannot_start_ends_what_is_starting(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Refusing()
    monkeypatch.setitem(LAUNCHERS, "local", lambda *_: launcher)
    config = settings(tiny_folder, runtime="local")
    with raises(ConfigError, "no-reference"):
        trained(config, tmp_path)
    assert launcher.generator.killed.is_set()


def test_no_process_outlives_a_driver_that_is_killed(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "train", "tiny", "--runtime", "local"]
    command += ["--out", str(tmp_path), "--warmup-examples", "0", "--model.name", str(tiny_folder)]
    command += ["--observe.progress", "plain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None
        assert any(b"step 1/" in line for line in driver.stdout)  # at once, or the process ended
        started = psutil.Process(driver.pid).children(recursive=True)
        assert sum(child.name() == NAME for child in started) == 4
        driver.kill()
    _, alive = psutil.wait_procs(started, timeout=15)
    assert not alive


def test_a_role_may_have_an_interpreter_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """Here it is this one by another name, which takes down that it was asked."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    processes = ({"roles": ("generator",), "python": str(python)},)
    config = settings(tiny_folder, runtime="local", cluster={"processes": processes})
    there = trained(config, tmp_path / "there")
    assert "forkserver" in asked.read_text()
    assert_same(trained(settings(tiny_folder), tmp_path / "inline"), there)
    missing = settings(
        tiny_folder,
        runtime="local",
        cluster={"processes": [{"roles": ["generator"], "python": str(tmp_path / "none")}]},
    )
    with raises(ConfigError, "no-such-interpreter", str(tmp_path / "none")):
        trained(missing, tmp_path / "missing")


def test_a_missing_engine_is_named_before_anything_starts(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "installed", lambda: None)
    rollout = {"engine": "vllm", "batch": 4, "max_new_tokens": 6}
    config = settings(tiny_folder, runtime="local", rollout=rollout)
    with raises(MissingExtraError, "missing-library", "vllm") as caught:
        trained(config, tmp_path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not processes()


def test_an_error_of_a_role_is_raised_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completions):\n    raise ValueError('no')\n")
    config = settings(tiny_folder, runtime="local", reward={"sources": (f"{tmp_path}/mine.py:f",)})
    with raises(RewardError, "responses-without-reward", "ValueError: no"):
        trained(config, tmp_path / "runs")


def test_what_cannot_be_sent_to_processes_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    model = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    model.unsendable = lambda: None
    config = settings(tiny_folder, runtime="local")
    with raises(ConfigError, "cannot-be-pickled"):
        trained(config, tmp_path, overrides=Overrides(actor=model))


# -- what crosses a boundary ---------------------------------------------------------------------


def test_every_message_can_be_pickled() -> None:
    tokens, logprobs = np.array([3, 4], np.int32), np.array([-1.0, -2.0], np.float32)
    prompt = Prompt(1, (5, 6), "text", ({"role": "user", "content": "x"},), {"row": 1})
    response = Response(7, 1, prompt, tokens, 2, FinishReason.STOP)
    ids = np.array([7], np.int64)
    batch = TrainBatch(
        ids, ((5, 6),), ids, np.array([2]), np.array([True]), tokens, logprobs, tokens,
        {"task": logprobs[:1]}, {"task": np.array([True])}, {"values": logprobs},
    )  # fmt: skip
    messages: list[Any] = [
        response,
        batch,
        Score(7, "task", "reward", logprobs[:1]),
        WeightsRef("actor", 3, "abc", "broadcast"),
        Reply((response,), (Work("gen", 0.0, 1.0, {"tokens": 2}),)),
        RewardError("failed", [7]),
    ]
    for message in messages:
        again = pickle.loads(pickle.dumps(message))
        assert repr(again) == repr(message)
    assert batch.total_tokens == 4
    assert [r.tokens.tolist() for r in batch.responses()] == [[3, 4]]


def test_a_channel_hands_on_the_tensors_of_a_ticket() -> None:
    import torch

    refs = [WeightsRef("actor", v, "x", "broadcast") for v in range(2)]
    shared = SharedChannel()
    shared.put(refs[0], {"w": torch.zeros(1)})
    shared.put(refs[1], {"w": torch.ones(1)})
    assert shared.get(refs[1])["w"].item() == 1.0
    with raises(EngineError, "version-not-kept", "version 0 of the actor", "'shared'"):
        shared.get(refs[0])
    with raises(EngineError, "other-channel", "'broadcast'"):
        fetched(shared, refs[1])
    assert fetched(None, WeightsRef("actor", 1, "x")) == {}


def test_the_schedules_state_is_plain_data(tiny_folder: Path, tmp_path: Path) -> None:
    """No tensors: weights travel by tickets."""
    from stretto.workers.drive import drive

    config = settings(tiny_folder, schedule={"preset": "async"}, steps=3)
    states: list[Any] = []

    async def body() -> None:
        async with run.schedule as schedule:
            await schedule.step()
            async with schedule.weights_lock:
                states.append(schedule.state_dict())

    with ExitStack() as stack:
        run = start(config, stack, lambda _: None)
        drive(body())
        run.workers.close()
    assert json.loads(json.dumps(states[0], default=list))["weights"].keys() == {"actor", "critic"}


def test_a_sharded_learner_trains_while_a_follower_sleeps(tiny_folder: Path) -> None:
    """Two of its ranks send to a generator that is stopped; a step is taken, and then it wakes."""
    processes = [{"roles": ["learner"], "ranks": 2}]
    changes = {**RLOO, "schedule": {"preset": "async"}, "cluster": {"processes": processes}}
    config = settings(tiny_folder, runtime="local", **changes)
    tokens, logprobs = np.full(8, 65, np.int32), np.full(8, -3.0, np.float32)
    ids, whole = np.arange(4), np.full(4, True)
    rewards = {s.name: np.arange(4, dtype=np.float32) for s in config.reward.parsed}
    batch = TrainBatch(
        ids, ((66, 67),) * 4, ids // 2, np.full(4, 2), whole, tokens, logprobs,
        np.full(8, -1, np.int32),  # of no version that engine and learner must agree on
        rewards, dict.fromkeys(rewards, whole), {"logprobs": logprobs},
    )  # fmt: skip
    events: list[str] = []

    async def slept(run: Run) -> None:
        trainer, generator = (run.workers.executors[n] for n in ("learner", "generator"))
        ref = trainer.ask(LearnerService.publish).value["actor"]
        os.kill(generator.facts[0].pid, signal.SIGSTOP)
        try:
            syncing = asyncio.ensure_future(
                asyncio.to_thread(run.sync.transfer, ref, ["generator"])
            )
            syncing.add_done_callback(lambda _: events.append("synced"))
            await trainer.call(LearnerService.train, batch)
            events.append("trained")
        finally:
            os.kill(generator.facts[0].pid, signal.SIGCONT)
        outcome = (await syncing)["generator"]
        assert isinstance(outcome, Reply), outcome

    with ExitStack() as stack:
        asyncio.run(slept(start(config, stack, lambda _: None)))
    assert events == ["trained", "synced"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sync", "async"])
@pytest.mark.parametrize(("fsdp", "engines"), [(8, 8), (4, 4)])
def test_the_layouts_of_eight_gpus(
    fsdp: int, engines: int, preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """A rank and an engine for each GPU, or four GPUs for each: on CPUs, one engine is killed."""
    config = settings(
        tiny_folder,
        runtime="local",
        steps=4,
        algorithm={"name": "rloo"},
        rollout={"batch": 16, "max_new_tokens": 6, "samples_per_prompt": 2, "engines": engines},
        schedule={"preset": preset},
        cluster={"processes": [{"roles": ["learner"], "ranks": fsdp}], "scorers": "together"},
    )
    run = trained(config, tmp_path, Killer("generator 1"))
    metrics = run.read_metrics()
    assert len(metrics) == 4
    assert metrics[-1]["cluster/restarts"] == 1
    trained_on = [r.id for r in run.read_rollouts() if r.state == "trained"]
    assert len(trained_on) == len(set(trained_on)) == 4 * 16
