"""The PPO trainer under TRL's names: numbers as under our own, and every argument heeded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

import stretto
from raising import raises
from run_helpers import lines
from stretto import PPOConfig, PPOTrainer
from stretto.assembly.run_models import made_ready
from stretto.config import Config, recipes
from stretto.config.cluster_config import ProcessConfig
from stretto.errors import (
    ConfigError,
    ModelError,
    StateError,
    StorageError,
    StrettoError,
    TaskError,
)
from stretto.machine import usable_cores
from stretto.trl import arguments
from stretto.trl.arguments import OPTIMIZERS
from stretto.trl.config import CONFIGS, HEEDED, REFUSALS, REMARKS, TrlConfig
from stretto.trl.trainer_inputs import TokenTask, missing_eos

WORDS = ("cat", "dog", "horse", "cow", "sheep", "pig", "hen", "duck", "goose", "lamb")
STEPS, BATCH, TOKENS = 12, 16, 6


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, and a reward and a value model whose heads have been trained to say something."""
    made = {"policy": tiny_folder}
    for seed, (name, scale) in enumerate({"reward": 8.0, "value": 1.0}.items()):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
        with torch.no_grad():
            model.score.weight *= scale
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
        AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(made[name])
    return made


def scalar(folder: Path, num_labels: int = 1) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels)


BASE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": BATCH // 4,
    "total_episodes": STEPS * BATCH,
    "num_ppo_epochs": 2,
    "response_length": TOKENS,
    "stop_token": "eos",
    "missing_eos_penalty": 0.25,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.01,
    "seed": 3,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_trainer(
    folders: Mapping[str, Path],
    out: Path,
    settings: Mapping[str, Any] | None = None,
    **parts: Any,
) -> PPOTrainer:
    """A trainer as scripts make it: models from checkpoints, prompts tokenised beforehand."""
    tokenizer = AutoTokenizer.from_pretrained(folders["policy"], padding_side="left")
    rows = [{"input_ids": tokenizer(f"say {word}")["input_ids"]} for word in WORDS]
    given: dict[str, Any] = {
        "args": PPOConfig(str(out), **{**BASE, **(settings or {})}),
        "processing_class": tokenizer,
        "model": AutoModelForCausalLM.from_pretrained(folders["policy"]),
        "ref_model": AutoModelForCausalLM.from_pretrained(folders["policy"]),
        "reward_model": scalar(folders["reward"]),
        "value_model": scalar(folders["value"]),
        "train_dataset": rows,
    }
    return PPOTrainer(**{**given, **parts})


def understood(settings: Mapping[str, Any]) -> Config:
    """What arguments come to, on 10 prompts of up to 9 tokens."""
    args = PPOConfig(**{**BASE, **settings})
    arguments.check(args)
    data = arguments.settings(args, arguments.fill_in_sizes(args, len(WORDS)), 9, "float32")
    return recipes.build(data, "test")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def scores(run: Path) -> list[float]:
    return [step["objective/scores"] for step in lines(run / "metrics.jsonl")]


def our_settings(folders: Mapping[str, Path], out: Path) -> Config:
    """The run of :func:`make_trainer` as our own settings name it."""
    return recipes.build(
        {
            "seed": 3,
            "steps": STEPS,
            "out": str(out),
            "model": {"name": str(folders["policy"]), "device": "cpu", "dtype": "float32"},
            "critic": {"init": str(folders["value"])},
            "task": {"max_prompt_tokens": 9, "chat": "off"},
            "reward": {"missing_eos": "subtract", "missing_eos_penalty": 0.25},
            "rollout": {"batch": BATCH, "max_new_tokens": TOKENS, "temperature": 0.7},
            "algorithm": {"kl_coef": 0.01},
            "training": {
                "lr": 1e-2,
                "critic_lr": 1e-2,
                "epochs": 2,
                "microbatch_tokens": 4 * (9 + TOKENS),
            },
            "observe": {"progress": "off"},
        },
        "test",
    )


def test_a_script_learns_and_its_numbers_are_those_of_our_own_settings(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    trainer = make_trainer(folders, tmp_path / "theirs")
    before = weights(trainer.value_model)
    result = trainer.train()
    assert result is not None
    assert result.steps == STEPS
    assert trainer.run_dir is not None
    curve = scores(trainer.run_dir.path)
    assert fmean(curve[-3:]) > fmean(curve[:3]) + 0.5
    assert any(not torch.equal(before[n], p) for n, p in weights(trainer.value_model).items())

    own = stretto.train(
        our_settings(folders, tmp_path / "ours"),
        reward=f"model:{folders['reward']}",
        dataset=[{"prompt": f"say {word}"} for word in WORDS],
    )
    assert scores(own.model.parent) == curve
    ours = weights(AutoModelForCausalLM.from_pretrained(own.model))
    theirs = weights(trainer.policy_model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    trainer.save_model(tmp_path / "saved")
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    assert all(torch.equal(ours[name], saved[name]) for name in ours)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a")["input_ids"] == [97]
    with raises(StateError, "trained-already"):
        trainer.train()


def test_without_a_reference_the_policy_as_it_starts_is_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    few = {"total_episodes": BATCH}
    given = make_trainer(folders, tmp_path, {**few, "run_name": "mine"})
    copied = make_trainer(folders, tmp_path, {**few, "exp_name": "mine"}, ref_model=None)
    given.train()
    copied.train()
    theirs = weights(given.policy_model)
    assert all(torch.equal(p, theirs[n]) for n, p in weights(copied.policy_model).items())
    # Each run in one output_dir has a folder of its own.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine-001", "mine-002"]


def test_a_schedule_overlaps_the_same_script(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_trainer(folders, tmp_path, {"schedule": "oppo", "total_episodes": 2 * BATCH})
    trainer.train()
    assert trainer.run_dir is not None
    assert recipes.load(trainer.run_dir.path).schedule.preset == "oppo"
    assert all(step["schedule/overcommit"] > 0 for step in trainer.run_dir.read_metrics())


def test_the_same_script_trains_in_processes_of_its_own(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    few = {"total_episodes": 2 * BATCH}
    # As many threads as new processes take: a test before this one may have left another number.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", usable_cores())))
    here = make_trainer(folders, tmp_path, few)
    there = make_trainer(folders, tmp_path, {**few, "runtime": "local"})
    for trainer in (here, there):
        trainer.train()
    for one, two in (
        (here.policy_model, there.policy_model),
        (here.value_model, there.value_model),
    ):
        theirs = weights(two)
        assert all(torch.equal(p, theirs[n]) for n, p in weights(one).items())


def test_without_a_stop_token_responses_are_as_long_as_they_may_be(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"stop_token": None, "total_episodes": BATCH, "missing_eos_penalty": 1.5}
    trainer = make_trainer(folders, tmp_path, settings)
    trainer.train()
    assert trainer.run_dir is not None
    lengths = [record.tokens for record in trainer.run_dir.read_rollouts()]
    assert lengths == [TOKENS] * BATCH
    assert missing_eos(9, 1.5)(completion_ids=[[1, 9, 2], [1, 2, 3]]) == [0.0, -1.5]
    for sample in lines(trainer.run_dir.samples_file):
        assert sample["scores"]["missing_eos"] in (0.0, -1.5)


def test_a_stop_token_of_the_scripts_own_ends_responses(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"stop_token": None, "stop_token_id": ord("e"), "missing_eos_penalty": None}
    longer = {"response_length": 64, "total_episodes": BATCH}
    trainer = make_trainer(folders, tmp_path, {**settings, **longer})
    assert trainer.config.reward.missing_eos == "off"
    trainer.train()
    assert trainer.run_dir is not None
    assert any(record.finish == "stop" for record in trainer.run_dir.read_rollouts())
    assert all("e" not in s["response"][:-1] for s in lines(trainer.run_dir.samples_file))


ARGUMENTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"output_dir": "there"}, "out", "there"),
    ({"seed": 7}, "seed", 7),
    ({"schedule": "async"}, "schedule.preset", "async"),
    ({"schedule": {"preset": "oppo", "chunk_tokens": 4}}, "schedule.chunk_tokens", 4),
    ({"schedule": '{"preset": "oppo", "lag": 1}'}, "schedule.lag", 1),
    ({"total_episodes": 100}, "steps", 7),  # of 16, and the last goes beyond
    ({"total_episodes": None, "num_train_epochs": 8}, "steps", 5),  # 8 * 10 / 16
    ({"total_episodes": None, "max_steps": 6}, "steps", 6),
    ({"per_device_train_batch_size": 8}, "rollout.batch", 32),
    ({"gradient_accumulation_steps": 3}, "rollout.batch", 12),
    ({"per_device_train_batch_size": 2}, "training.microbatch_tokens", 2 * (9 + TOKENS)),
    ({"num_mini_batches": 4}, "rollout.batch", 16),
    ({"num_mini_batches": 4}, "training.minibatches", 4),
    ({"num_ppo_epochs": 3}, "training.epochs", 3),
    ({"local_rollout_forward_batch_size": 5}, "rollout.slots", 5),
    ({"response_length": 11}, "rollout.max_new_tokens", 11),
    ({"temperature": 0.9}, "rollout.temperature", 0.9),
    ({"missing_eos_penalty": 2.0}, "reward.missing_eos", "subtract"),
    ({"missing_eos_penalty": 2.0}, "reward.missing_eos_penalty", 2.0),
    ({"missing_eos_penalty": None}, "reward.missing_eos", "off"),
    ({"stop_token": None}, "reward.missing_eos", "off"),
    ({"whiten_rewards": True}, "algorithm.whiten_rewards", True),
    ({}, "algorithm.whiten_advantages", True),  # TRL always did
    ({"kl_coef": 0.2}, "algorithm.kl_coef", 0.2),
    ({"kl_estimator": "k3"}, "algorithm.kl_estimator", "k3"),
    ({}, "algorithm.kl_in", "reward"),
    ({"cliprange": 0.1}, "algorithm.clip", 0.1),
    ({"cliprange_value": 0.3}, "algorithm.value_clip", 0.3),
    ({"vf_coef": 0.5}, "training.critic_lr", 1e-2),  # AdamW does not see the loss's scale
    ({"gamma": 0.9}, "algorithm.gamma", 0.9),
    ({"lam": 0.8}, "algorithm.lam", 0.8),
    ({"learning_rate": 1e-4}, "training.lr", 1e-4),
    ({"learning_rate": 1e-4}, "training.critic_lr", 1e-4),
    ({"lr_scheduler_type": "linear"}, "training.lr_schedule", "linear"),
    ({"lr_scheduler_type": SchedulerType.COSINE}, "training.lr_schedule", "cosine"),
    ({"lr_scheduler_type": "constant_with_warmup"}, "training.lr_schedule", "constant"),
    ({"warmup_steps": 3}, "training.warmup_steps", 3),
    ({"warmup_steps": 0.1}, "training.warmup_steps", 2),  # a share of 12
    ({"warmup_ratio": 0.25}, "training.warmup_steps", 3),
    ({"weight_decay": 0.1}, "training.weight_decay", 0.1),
    ({"adam_beta1": 0.8}, "training.betas", (0.8, 0.999)),
    ({"adam_beta2": 0.9}, "training.betas", (0.9, 0.9)),
    ({"max_grad_norm": 0.5}, "training.grad_clip", 0.5),
    *(({"optim": name}, "training.optim", ours) for name, ours in OPTIMIZERS.items()),
    ({"optim": OptimizerNames.PAGED_ADAMW}, "training.optim", "paged_adamw_32bit"),
    ({"use_cpu": False, "no_cuda": True}, "model.device", "cpu"),
    ({"use_cpu": False}, "model.device", "auto"),
    ({"bf16": False}, "model.dtype", "float32"),
    ({"gradient_checkpointing": True}, "model.gradient_checkpointing", "on"),
    ({"activation_checkpointing": True}, "model.gradient_checkpointing", "on"),
    (
        {"gradient_checkpointing": True, "activation_checkpointing": False},
        "model.gradient_checkpointing",
        "off",
    ),
    ({"report_to": "none"}, "observe.trackers", ()),
    ({"report_to": ["tensorboard"]}, "observe.trackers", ("tensorboard",)),
    ({"report_to": "wandb"}, "observe.trackers", ("wandb",)),
    ({"report_to": ["trackio", "comet_ml"]}, "observe.trackers", ("trackio",)),
    ({"report_to": "mlflow"}, "observe.trackers", ("mlflow",)),
    ({"report_to": "swanlab"}, "observe.trackers", ("swanlab",)),
    ({"report_to": "comet_ml"}, "observe.trackers", ()),
    ({"use_liger_kernel": True}, "model.use_liger_kernel", True),
    ({"torch_compile": True, "runtime": "local"}, "model.torch_compile", True),
    ({"torch_compile": True}, "model.torch_compile", False),
    ({"disable_tqdm": False}, "observe.progress", "auto"),
    ({"num_sample_generations": 0}, "observe.samples", 0),
    ({"save_strategy": "steps", "save_steps": 5}, "observe.checkpoint_every", 5),
    ({"save_strategy": "steps", "save_steps": 0.5}, "observe.checkpoint_every", 6),
    ({"save_strategy": "no"}, "observe.checkpoint_minutes", 0.0),
    ({"save_strategy": "epoch"}, "observe.checkpoint_every", 1),  # 10 prompts in batches of 16
    ({}, "task.max_prompt_tokens", 9),  # none is left out
    ({"runtime": "local"}, "runtime", "local"),
    ({"use_vllm": True}, "rollout.engine", "vllm"),
    ({"use_vllm": True}, "runtime", "local"),  # vLLM has a process of its own
    ({"use_vllm": True, "runtime": "ray"}, "runtime", "ray"),
    (
        {"use_vllm": True},
        "rollout.engine_args",
        {"model_impl": "vllm", "gpu_memory_utilization": 0.3},
    ),
    (
        {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5},
        "rollout.engine_args",
        {"model_impl": "vllm", "gpu_memory_utilization": 0.5},
    ),
    (
        {"use_vllm": True, "vllm_mode": "server", "vllm_model_impl": "transformers"},
        "rollout.engine_args",
        {"model_impl": "transformers"},
    ),
    (
        {"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True},
        "rollout.engine_args",
        {"model_impl": "vllm", "enable_sleep_mode": True},
    ),
    ({"use_vllm": True}, "algorithm.old_policy", "proximal"),
    ({"use_vllm": True}, "algorithm.correction", "mask"),
    ({"use_vllm": True}, "algorithm.correction_level", "sequence"),
    ({"use_vllm": True}, "algorithm.correction_cap", 3.0),
    (
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
        "algorithm.correction",
        "truncate",
    ),
    (
        {"use_vllm": True, "vllm_importance_sampling_cap": 2.0},
        "algorithm.correction_cap",
        2.0,
    ),
    (
        {"use_vllm": True, "vllm_importance_sampling_correction": False},
        "algorithm.correction",
        "off",
    ),
    (
        {"use_vllm": True, "vllm_tensor_parallel_size": 2},
        "cluster.processes",
        (ProcessConfig(roles=("generator",), ranks=2),),
    ),
    ({"vllm_gpu_memory_utilization": 0.5}, "rollout.engine", "auto"),
]

TAKEN = {name for given, _, _ in ARGUMENTS for name in given} | {
    *("exp_name", "run_name", "eval_strategy", "eval_steps"),
    "stop_token_id",
    "data_seed",
    *("resume_from_checkpoint", "save_total_limit"),
    *("world_size", "num_total_batches", "micro_batch_size", "local_batch_size", "batch_size"),
    *("local_mini_batch_size", "mini_batch_size"),
}
"""The others have tests of their own here."""


@pytest.mark.parametrize(("given", "setting", "value"), ARGUMENTS, ids=str)
def test_arguments_become_settings(given: dict[str, Any], setting: str, value: Any) -> None:
    found: Any = understood(given)
    for part in setting.split("."):
        found = getattr(found, part)
    assert found == value


def test_models_are_brought_to_bfloat16(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_trainer(folders, tmp_path, {"bf16": True})
    assert trainer.config.model.dtype == "bfloat16"
    models = trainer.policy_model, trainer.ref_model, trainer.reward_model, trainer.value_model
    assert {p.dtype for model in models for p in model.parameters()} == {torch.bfloat16}
    assert make_trainer(folders, tmp_path).config.model.dtype == "float32"


def test_every_argument_is_heeded_remarked_on_refused_or_the_scripts_own() -> None:
    scripts = {"sft_model_path", "reward_model_path", "dataset_num_proc"}
    scripts |= {"do_train", "do_eval", "do_predict"}
    names = {field.name for field in fields(PPOConfig)}
    groups = [TAKEN, set(REMARKS) & names, set(REFUSALS) & names, scripts]
    assert set().union(*groups) == names
    twice = sorted(n for n in names if sum(n in group for group in groups) > 1)
    assert twice == ["torch_compile"]  # by the runtime
    assert set(HEEDED) <= TAKEN | scripts
    assert "it is not known here" not in REMARKS.values()


def test_derived_sizes_are_written_where_scripts_read_them(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    trainer = make_trainer(folders, tmp_path, {"num_mini_batches": 2})
    a = trainer.args
    assert (a.batch_size, a.local_batch_size, a.mini_batch_size) == (16, 16, 8)
    assert (a.local_mini_batch_size, a.micro_batch_size, a.world_size) == (8, 4, 1)
    assert (a.num_total_batches, a.total_episodes) == (STEPS, STEPS * BATCH)
    first, *rest = arguments.notes(a, trainer.sizes)
    assert first == (
        "batch 16 = per_device_train_batch_size x gradient_accumulation_steps = 4 x 4, 2 "
        "mini-batches of 8 (TRL until 0.16 made the batch num_mini_batches times as large); "
        "192 episodes: 12 steps"
    )
    assert rest == []
    # The same arguments serve another trainer.
    again = make_trainer(folders, tmp_path, {}, args=a)
    assert again.config.rollout.batch == 16


def test_what_has_no_effect_is_said(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 10, "dataloader_num_workers": 4}
    trainer = make_trainer(folders, tmp_path, settings)
    assert [
        line.partition(" (")[0] for line in arguments.notes(trainer.args, trainer.sizes)[1:]
    ] == [
        "without effect: dataloader_num_workers",
        "without effect: eval_steps, eval_strategy",
    ]
    options: dict[str, Any] = {**BASE, "use_vllm": True, "vllm_server_port": 9000}
    served = PPOConfig(**options)
    served.report_to = ["comet_ml", "tensorboard"]
    assert arguments.notes(served, arguments.fill_in_sizes(served, 10))[1:] == [
        "without effect: vllm_server_port (vLLM is started with the run, in a process of its own)",
        "without effect: report_to = 'comet_ml' (metrics go to metrics.jsonl in the run's folder, "
        "and to tensorboard, wandb, mlflow, trackio, swanlab)",
    ]
    alone = make_trainer(folders, tmp_path, {"vllm_importance_sampling_cap": 2.0})
    assert arguments.notes(alone.args, alone.sizes)[1:] == [
        "without effect: vllm_importance_sampling_cap (use_vllm is False)"
    ]


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"fp16": True}, "argument-refused", "fp16 = True"),
    ({"deepspeed": "zero2.json"}, "argument-refused", "deepspeed = 'zero2.json'"),
    ({"fsdp": "full_shard"}, "argument-refused", "fsdp = 'full_shard'"),
    ({"push_to_hub": True}, "argument-refused", "hf upload"),
    ({"optim": "adafactor"}, "argument-value", "optim = 'adafactor'"),
    ({"adam_epsilon": 1e-5}, "argument-refused", "adam_epsilon = 1e-05"),
    ({"lr_scheduler_type": "polynomial"}, "argument-value", "lr_scheduler_type = 'polynomial'"),
    ({"lr_scheduler_kwargs": {"a": 1}}, "argument-refused", "lr_scheduler_kwargs"),
    ({"kl_estimator": "k2"}, "argument-value", "'k1', 'k3'"),
    ({"vf_coef": 0.0}, "argument-value", "vf_coef = 0.0"),
    ({"cliprange_value": 0.0}, "argument-value", "cliprange_value = 0.0"),
    ({"missing_eos_penalty": -1.0}, "argument-value", "missing_eos_penalty = -1.0"),
    ({"stop_token": "eot"}, "argument-value", "'eos', None"),
    ({"stop_token_id": 3}, "arguments-compete", "stop_token_id = 3"),
    ({"data_seed": 4}, "argument-value", "seed = 3"),
    ({"max_steps": 3}, "arguments-compete", "total_episodes = 192"),
    ({"warmup_steps": 1, "warmup_ratio": 0.1}, "arguments-compete", "warmup_ratio = 0.1"),
    ({"num_mini_batches": 3}, "batch-not-minibatches", "the batch of 16"),
    ({"batch_size": 20}, "argument-derived", "batch_size = 20"),
    ({"mini_batch_size": 5}, "argument-derived", "mini_batch_size = 5"),
    ({"world_size": 8}, "argument-derived", "comes out as 1"),
    ({"per_device_train_batch_size": 0}, "argument-value", "1 or more"),
    ({"total_episodes": 0}, "no-episodes", "0 responses"),
    ({"report_to": "wandbb"}, "unknown-tracker", "Did you mean 'wandb'?"),
    ({"optim": "sgd"}, "argument-value", "'paged_adamw_32bit'"),
    ({"schedule": "opo"}, "unknown-preset", "Did you mean 'oppo'?"),
    ({"schedule": "{oppo"}, "argument-not-json", "{oppo"),
    ({"schedule": {"overcomit": 4}}, "extra_forbidden", "schedule.overcommit"),
    ({"temperature": 0.0}, None, "rollout.temperature"),
    ({"save_strategy": "best"}, "argument-value", "'epoch'"),
    ({"neftune_noise_alpha": 5.0}, "argument-refused", "neftune_noise_alpha = 5.0"),
    ({"vllm_mode": "cluster"}, "argument-value", "'colocate', 'server'"),
    ({"vllm_importance_sampling_mode": "tis"}, "argument-value", "'token_truncate'"),
    ({"vllm_tensor_parallel_size": 0}, "argument-value", "1 or more"),
    ({"ref_adapter_name": "ref"}, "argument-refused", "ref_model"),
]


@pytest.mark.parametrize(("given", "code", "fact"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_done_is_refused(given: dict[str, Any], code: str | None, fact: str) -> None:
    with raises(ConfigError, code, fact):
        understood(given)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_refused_argument_is_refused_whatever_it_says(kind: type[TrlConfig]) -> None:
    args = kind()
    arguments.check(args)
    for name, why in REFUSALS.items():
        if not hasattr(args, name):
            continue
        default = getattr(args, name)
        setattr(args, name, "something")
        with raises(ConfigError, "argument-refused", f"{name} = 'something': {why}"):
            arguments.check(args)
        setattr(args, name, default)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with raises(ConfigError, "several-processes", 4):
        arguments.check(PPOConfig())


def test_wrong_names_get_the_nearest_one(folders: dict[str, Path], tmp_path: Path) -> None:
    with raises(ConfigError, "unknown-argument", "clip_range", "'cliprange'"):
        PPOConfig(clip_range=0.2)  # type: ignore[call-arg]
    wrong: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
        ({"reward_modell": None}, "unknown-argument", ("reward_modell", "'reward_model'")),
        ({"policy": scalar(folders["value"])}, "unknown-argument", ("'policy'", "'model'")),
        ({"reward_model": None}, "argument-missing", ("reward_model",)),
        ({"args": TrainingArguments(str(tmp_path), use_cpu=True)}, "args-of-other-class", ()),
    ]
    for parts, code, facts in wrong:
        with raises(ConfigError, code, *facts):
            make_trainer(folders, tmp_path, **parts)


def loaded(folder: Path, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def one_model_twice(f: dict[str, Path]) -> dict[str, Any]:
    model = loaded(f["policy"])
    return {"model": model, "ref_model": model}


Parts = Callable[[dict[str, Path]], dict[str, Any]]
WRONG: list[tuple[Parts, type[StrettoError], str | None, str]] = [
    (
        lambda f: {"train_dataset": [{"prompt": "a", "id": 3}]},
        *(TaskError, "missing-column", "its columns: prompt, id"),
    ),
    (lambda f: {"train_dataset": []}, TaskError, "no-rows", "train_dataset"),
    (lambda f: {"train_dataset": {"train": []}}, TaskError, "several-datasets", "(train)"),
    (lambda f: {"train_dataset": iter(())}, TaskError, "dataset-not-sequence", "iterator"),
    (lambda f: {"train_dataset": [{"input_ids": []}]}, TaskError, "no-tokens", "row 0"),
    (
        lambda f: {"train_dataset": [{"input_ids": [5]}, {"input_ids": [700]}]},
        *(
            TaskError,
            "token-out-of-range",
            "row 1: a token id is 700",
        ),
    ),
    (
        lambda f: {"reward_model": scalar(f["policy"], num_labels=3)},
        *(ModelError, "head-not-scalar", "has 3 outputs"),
    ),
    (
        lambda f: {"reward_model": loaded(f["policy"], num_labels=1)},
        *(ModelError, "head-not-scalar", "reward_model: LlamaForCausalLM"),
    ),
    (
        lambda f: {"value_model": small_classifier()},
        *(ModelError, "model-lacks-tokens", "value_model knows 100 token ids"),
    ),
    (one_model_twice, ConfigError, "models-share-weights", "ref_model and model"),
    (lambda f: {"data_collator": len}, ConfigError, "argument-refused", "data_collator"),
    (lambda f: {"optimizers": (object(), None)}, ConfigError, "argument-refused", "learning_rate"),
    (lambda f: {"peft_config": object()}, ConfigError, "peft-not-lora", "object"),
    (lambda f: {"model": loaded(f["policy"]).half()}, ModelError, None, "model has weights of"),
    (lambda f: {"value_model": scalar(f["value"]).double()}, ModelError, None, "torch.float64"),
]


@pytest.mark.parametrize(
    ("parts", "error", "code", "fact"), WRONG, ids=lambda v: v[:30] if isinstance(v, str) else ""
)
def test_wrong_models_and_data_are_refused_before_anything_starts(
    parts: Parts,
    error: type[StrettoError],
    code: str | None,
    fact: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    with raises(error, code, fact):
        make_trainer(folders, tmp_path / "out", **parts(folders))
    assert not (tmp_path / "out").exists()


def small_classifier() -> Any:
    config = LlamaConfig(
        vocab_size=100, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_labels=1,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def test_padding_is_no_part_of_a_prompt(folders: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders["policy"])
    pad = tokenizer.pad_token_id
    rows = [
        {"input_ids": [pad, pad, 97, pad, 98, pad]},  # the pad in the middle is the script's own
        {"input_ids": torch.tensor([97, pad, 98, 99]), "attention_mask": [0, 1, 1, 0]},
    ]
    task = TokenTask(rows, tokenizer, "train_dataset", 259)
    assert [task.row(i).tokens for i in range(2)] == [(97, pad, 98), (pad, 98)]
    assert task.longest == 3


class Told(TrainerCallback):
    """Keeps what it is told, and ends training after a step."""

    def __init__(self, last: int) -> None:
        self.events: list[str] = []
        self.last = last

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        assert more["model"] is not None
        self.events.append(f"begin of {state.max_steps}")

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if "train_loss" not in more["logs"]:  # the last row, of the whole run
            assert more["logs"]["episode"] == BATCH * state.global_step
        self.events.append("log")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        self.events.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == self.last
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("end")


class Raising(TrainerCallback):
    """Presses Ctrl-C, or fails."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        raise self._error


def test_whatever_ends_training_keeps_what_was_learned(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    one = make_trainer(folders, tmp_path, callbacks=[Told(last=1)])
    one.train()
    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        trainer = make_trainer(folders, tmp_path, callbacks=[Raising(error)])
        start = weights(trainer.policy_model)
        with pytest.raises(type(error)):
            trainer.train()
        assert trainer.run_dir is not None
        saved = weights(AutoModelForCausalLM.from_pretrained(trainer.run_dir.model))
        kept = weights(trainer.policy_model)
        assert all(torch.equal(saved[name], kept[name]) for name in saved)
        assert not all(torch.equal(start[name], kept[name]) for name in kept)
        assert all(torch.equal(kept[n], p) for n, p in weights(one.policy_model).items())


def test_a_save_that_fails_leaves_nothing_of_the_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(folders, tmp_path)
    (tmp_path / "notes").write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    def full(self: Any, to: Path, **_: Any) -> None:
        self.config.save_pretrained(to)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with raises(StorageError, None, "No space left on device"):
            trainer.save_model(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    trainer.save_model(tmp_path)
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path))
    kept = weights(trainer.policy_model)
    assert all(torch.equal(saved[name], kept[name]) for name in saved)
    assert (tmp_path / "notes").read_text() == "mine"


def test_callbacks_end_a_run_which_goes_on_from_its_checkpoint(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "total_episodes": 3 * BATCH}
    whole = make_trainer(folders, tmp_path, saving)
    whole.train()
    told = Told(last=2)
    stopped = make_trainer(folders, tmp_path, saving, callbacks=[told])
    assert stopped.train().steps == 2
    assert told.events == ["begin of 3", "step 1", "log", "step 2", "log", "log", "end"]
    stopped.save_model(tmp_path / "saved")
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    kept = weights(stopped.policy_model)
    assert all(torch.equal(saved[name], kept[name]) for name in saved)

    assert stopped.run_dir is not None
    resumed = make_trainer(folders, tmp_path, saving)
    resumed.train(resume_from_checkpoint=str(stopped.run_dir.path))
    theirs = weights(whole.policy_model)
    assert all(torch.equal(theirs[n], p) for n, p in weights(resumed.policy_model).items())
    again = {**saving, "kl_coef": 0.5, "resume_from_checkpoint": str(stopped.run_dir.path)}
    with raises(ConfigError, "resumed-differs", "kl_coef=0.5", 0.01):
        make_trainer(folders, tmp_path, again).train()


def test_lora_is_what_the_settings_call_it(folders: dict[str, Path], tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=12, target_modules=["v_proj", "q_proj"], lora_dropout=0.1)
    few = {"total_episodes": BATCH}
    trainer = make_trainer(folders, tmp_path, few, ref_model=None, peft_config=lora)
    m = trainer.config.model
    assert (m.lora_rank, m.lora_alpha, m.lora_targets) == (4, 12.0, ("q_proj", "v_proj"))
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    start = weights(AutoModelForCausalLM.from_pretrained(folders["policy"]))
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "merged"))
    moved = {name for name in start if not torch.equal(start[name], saved[name])}
    assert moved == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qv"
    }
    assert make_trainer(folders, tmp_path, peft_config=LoraConfig()).config.model.lora_targets == (
        "q_proj",
        "v_proj",
    )
    kinds = {"rslora": LoraConfig(use_rslora=True), "dora": LoraConfig(use_dora=True)}
    for kind, asked in kinds.items():
        trainer = make_trainer(folders, tmp_path, peft_config=asked)
        assert trainer.config.model.lora_kind == kind
    both = {"use_dora": True, "use_rslora": True}
    for more in (both, {"bias": "all"}, {"modules_to_save": ["lm_head"]}):
        with raises(ConfigError, "lora-argument-refused", next(iter(more))):
            make_trainer(folders, tmp_path, peft_config=LoraConfig(**more))
    pattern = LoraConfig(target_modules=".*q_proj")
    config = make_trainer(folders, tmp_path, peft_config=pattern).config
    assert config.model.lora_targets == ("q_proj",)


def test_the_script_with_use_peft_goes_to_its_end(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's examples/scripts/ppo/ppo.py: train, save, complete; the policy may have adapters."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["v_proj"])
    policy: Any = AutoModelForCausalLM.from_pretrained(folders["policy"])
    names = list(weights(policy))
    with_own = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = make_trainer(
        folders,
        tmp_path,
        {"total_episodes": BATCH},
        model=with_own,
        ref_model=None,
        peft_config=lora,
        eval_dataset=[{"input_ids": list(b"one")}],
    )
    value_names = list(weights(trainer.value_model))
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert len(trainer.generate_completions()) == 1
    capsys.readouterr()
    trained = weights(trainer.policy_model)
    assert list(trained) == names
    assert list(weights(trainer.value_model)) == value_names
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    assert all(torch.equal(trained[name], saved[name]) for name in names)


def test_completions_are_greedy_and_scored(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"input_ids": list(text.encode())} for text in ("one", "seven", "two")]
    trainer = make_trainer(
        folders, tmp_path, {"per_device_eval_batch_size": 2}, eval_dataset=prompts
    )
    rows = trainer.generate_completions()
    assert [row["query"] for row in rows] == ["one", "seven", "two"]
    assert "model response" in capsys.readouterr().out
    end = trainer.processing_class.eos_token_id
    policy, judge = trainer.policy_model, trainer.reward_model
    for prompt, row in zip(prompts, rows, strict=True):
        ids = list(prompt["input_ids"])
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] == end:
                    break
            score = judge(torch.tensor([ids])).logits[0, 0].item()
        response = ids[len(prompt["input_ids"]) :]
        assert row["model response"] == trainer.processing_class.decode(response)
        assert row["score"] == pytest.approx(score, abs=1e-5)
    assert trainer.generate_completions(sampling=True) == rows[:2]
    evaluated = trainer.evaluate()["eval_rewards/reward_model/mean"]
    assert evaluated == pytest.approx(sum(row["score"] for row in rows) / 3)
    with raises(ConfigError, "no-eval-dataset"):
        make_trainer(folders, tmp_path).generate_completions()
    with raises(ConfigError, "no-upload", "hf upload"):
        trainer.push_to_hub()


def test_a_function_may_be_the_reward_model(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def brevity(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    parts = {"reward_model": brevity, "eval_dataset": [{"input_ids": list(b"one")}]}
    trainer = make_trainer(folders, tmp_path, {"total_episodes": BATCH}, **parts)
    trainer.train()
    assert trainer.run_dir is not None
    for sample in lines(trainer.run_dir.samples_file):
        assert sample["scores"] == {"brevity": -len(sample["response"])}
    (row,) = trainer.generate_completions()
    assert row["score"] <= 0
    capsys.readouterr()


def test_arguments_come_from_a_command_line_too() -> None:
    words = "--output_dir there --kl_coef 0.1 --stop_token eos --schedule oppo --total_episodes 64"
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(words.split())
    assert args == PPOConfig(
        "there", kl_coef=0.1, stop_token="eos", schedule="oppo", total_episodes=64
    )


def test_models_that_are_brought_have_no_dropout() -> None:
    config = LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, attention_dropout=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    model.extra = torch.nn.Dropout(0.4)
    ready: Any = made_ready(model, "cpu")
    assert ready is model
    assert (ready.model.layers[0].self_attn.attention_dropout, ready.extra.p) == (0.0, 0.0)
    assert not ready.training
