"""Whole runs that generate with vLLM, in processes of its own; skipped where it is not installed.

``STRETTO_VLLM_PYTHON`` names an interpreter that has it ('make vllm' makes one and runs these).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import left_padded_logprobs
from run_helpers import Kill, Killer, killed_by_ctrl_c, make_teacher, run, settings
from stretto import runs
from stretto.algorithms.registry import prepare
from stretto.config import ClusterConfig, Config
from stretto.errors import ConfigError, EngineError
from stretto.models.load import load_causal_lm
from stretto.models.tiny import make_tiny
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.rollout.vllm.llm import installed
from stretto.schedules import schedule
from stretto.schedules.rollout import Rollout
from stretto.training.collate import collate
from stretto.types import TrainBatch

PYTHON = os.environ.get("STRETTO_VLLM_PYTHON") or (sys.executable if installed() else "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="vLLM is not installed")

FLOAT32 = 1e-3
"""Largest difference of log-probs, in nats."""


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads that vLLM's kernels take."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, heads=2)
    return folder


def vllm_settings(tiny_folder: Path, engines: int = 1, **sections: Any) -> Config:
    """A run of the tiny model whose generators have the interpreter that has vLLM."""
    names = ["generator"] if engines == 1 else [f"generator {i}" for i in range(engines)]
    processes = [{"roles": [name], "python": PYTHON, "threads": 1} for name in names]
    rollout = {
        "engine": "vllm",
        "engines": engines,
        "batch": 4,
        "max_new_tokens": 20,
        "engine_args": {"block_size": 32},
    }
    cluster = {"processes": processes, **sections.pop("cluster", {})}
    given = {"steps": 3, "runtime": "local", "cluster": cluster, **sections}
    given["rollout"] = rollout | given.get("rollout", {})
    model = {"name": str(tiny_folder), "dtype": "float32", **given.pop("model", {})}
    return settings(tiny_folder, model=model, **given)


def check(run_dir: RunDirectory, steps: int = 3, batch: int = 4) -> list[dict[str, Any]]:
    """What holds of any such run: engine and learner agree, and nothing is trained on twice."""
    metrics = run_dir.read_metrics()
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    for m in metrics:
        assert m["weight_sync/logprob_gap"] < FLOAT32
        assert abs(m["weight_sync/logprob_gap_mean"]) <= m["weight_sync/logprob_gap"]
        assert m["weight_sync/logprob_gap"] <= m["weight_sync/logprob_gap_max"] < FLOAT32
    rollouts = run_dir.read_rollouts()
    assert len({r.id for r in rollouts}) == len(rollouts) == steps * batch
    return [dict(m) for m in metrics]


@pytest.mark.parametrize("preset", ["sync", "oppo", "async"])
def test_presets_drive_it_as_they_drive_the_own_engine(
    preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    config = vllm_settings(tiny_folder, schedule={"preset": preset, "chunk_tokens": 5})
    metrics = check(run(config, tmp_path)[0])
    if preset == "sync":
        for m in metrics:
            assert m["sampling/logp_difference_max"] < FLOAT32
            assert abs(m["sampling/logp_difference_mean"]) < FLOAT32


@pytest.mark.parametrize("preset", ["sync", "async"])
def test_it_answers_evaluations_beside_training(
    preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Greedy answers are those of Stretto's own engine, as far as both have the same weights."""
    observe = {"eval_every": 1, "eval_prompts": 6}
    config = vllm_settings(tiny_folder, schedule={"preset": preset}, observe=observe)
    run_dir, result = run(config, tmp_path)
    assert result.best is not None
    found = [m for m in run_dir.read_metrics() if "eval/score" in m]
    assert (found[0]["eval/step"], found[-1]["eval/step"]) == (0, 3)
    own = config.changed_in("rollout", engine="torch", engine_args={}).model_copy(
        update={"runtime": "inline", "cluster": ClusterConfig()}
    )
    _, theirs = run(own.model_copy(update={"steps": 1}), tmp_path)
    for name in ("eval/score", "eval/length_mean", "eval/ended", "eval/count"):
        assert found[0][name] == pytest.approx(theirs.history[0][name])


def test_stragglers_move_between_two_instances(tiny_folder: Path, tmp_path: Path) -> None:
    config = vllm_settings(
        tiny_folder,
        engines=2,
        schedule={"preset": "rlhfuse", "migrate": 0.75, "chunk_tokens": 2},
        rollout={"max_new_tokens": 40},
    )
    run_dir, _ = run(config, tmp_path)
    check(run_dir)
    assert [s for s in run_dir.trace.read().spans if s.name == "migrate"]


def test_adapters_are_trained_and_synced(tiny_folder: Path, tmp_path: Path) -> None:
    check(run(vllm_settings(tiny_folder, model={"lora_rank": 2}), tmp_path)[0])


def test_a_student_in_it_learns_from_a_teacher(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's advantage is the teacher's log-prob less the student's, by naive passes of both
    over the tokens that vLLM sampled.
    """
    batches: list[TrainBatch] = []
    collect = schedule.train_batch

    def recording(rollouts: Sequence[Rollout]) -> TrainBatch:
        batches.append(collect(rollouts))
        return batches[-1]

    monkeypatch.setattr(schedule, "train_batch", recording)
    folder = tmp_path / "teacher"
    folder.mkdir()
    teacher = make_teacher(folder, 5)
    algorithm = {"name": "distill", "teacher": str(teacher)}
    config = vllm_settings(tiny_folder, steps=2, algorithm=algorithm)
    metrics = check(run(config, tmp_path)[0], steps=2)
    experience = prepare(collate(batches[0], {"task": 1.0}), config.algorithm, config.reward, 1.0)
    gaps = []
    with torch.no_grad():
        cpu, folders = torch.device("cpu"), (folder, tiny_folder)
        models = [load_causal_lm(path, torch.float32, cpu) for path in folders]
        for i, response in enumerate(batches[0].responses()):
            of_teacher, of_student = (left_padded_logprobs(m, [response])[0] for m in models)
            gaps.append(of_teacher - of_student)
            got = experience.advantages[i][experience.mask[i]]
            torch.testing.assert_close(got, gaps[-1], rtol=FLOAT32, atol=FLOAT32)
    mean = torch.cat(gaps).mean().item()
    assert abs(mean) > 0.1
    assert metrics[0]["distill/reverse_kl"] == pytest.approx(-mean, abs=FLOAT32)


def test_a_run_is_resumed(tiny_folder: Path, tmp_path: Path) -> None:
    """It goes on with what was carried, and trains on nothing twice."""
    config = vllm_settings(
        tiny_folder,
        steps=4,
        schedule={"preset": "oppo", "chunk_tokens": 5, "overcommit": 2},
        observe={"checkpoint_every": 1, "progress": "off", "samples": 0},
    )
    killed = RunDirectory.create(tmp_path, "killed", config)
    with killed_by_ctrl_c():
        runs.train(config, run_dir=killed, progress=Kill(2))
    again = RunDirectory.open(killed.path)
    runs.train(config, run_dir=again, resume=True, progress=Progress())
    check(again, steps=4)


def test_a_process_of_vllms_that_dies_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    config = vllm_settings(tiny_folder, steps=4)
    run_dir = RunDirectory.create(tmp_path, "run", config)
    runs.train(config, run_dir=run_dir, progress=Killer("generator"))
    check(run_dir, steps=4)


def test_what_is_refused_says_why(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sets 'seed', which follows from other settings"):
        run(vllm_settings(tiny_folder, rollout={"engine_args": {"seed": 3}}), tmp_path)
    with pytest.raises(EngineError, match="vLLM does not start with this model"):
        run(
            vllm_settings(tiny_folder, rollout={"engine_args": {"kv_cache_dtype": "none"}}),
            tmp_path,
        )


def test_it_takes_the_parts_of_a_learners_ranks_in_slices_of_its_own(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Two ranks of the learner have rows each; two of vLLM's cut what they make whole."""
    processes = [
        {"roles": ["generator"], "python": PYTHON, "ranks": 2},
        {"roles": ["learner"], "ranks": 2},
    ]
    config = vllm_settings(tiny_folder, steps=2, cluster={"processes": processes})
    check(run(config, tmp_path)[0], steps=2)
