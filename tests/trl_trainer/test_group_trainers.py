"""The GRPO, RLOO and Online DPO trainers under TRL's names: arguments, rewards, prompts, callbacks.

What a step of each computes is compared with TRL's in test_values.py.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    TrainerCallback,
)

import stretto
from raising import raises
from run_helpers import lines
from stretto import (
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from stretto.config import Config, recipes
from stretto.errors import ConfigError, ModelError, StateError, StrettoError, TaskError
from stretto.trl import arguments
from stretto.trl.callbacks import as_trl_names, means_of
from stretto.trl.config import REFUSALS, REMARKS, TrlConfig
from stretto.trl.trainer_inputs import PromptTask, rewards_of

ROWS = [{"prompt": f"say {word}", "answer": word} for word in ("cat", "dog", "horse", "cow")]
SHARED: Mapping[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_cpu": True,
    "report_to": "none",
    "seed": 3,
}
BASE: Mapping[type[TrlConfig], dict[str, Any]] = {
    GRPOConfig: {**SHARED, "num_generations": 4, "max_completion_length": 6},
    RLOOConfig: {**SHARED, "max_completion_length": 6},
    OnlineDPOConfig: {**SHARED, "max_new_tokens": 6},
}
TRAINERS: Mapping[type[TrlConfig], Any] = {
    GRPOConfig: GRPOTrainer,
    RLOOConfig: RLOOTrainer,
    OnlineDPOConfig: OnlineDPOTrainer,
}


def letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def make_trainer(
    folder: Path,
    out: Path,
    kind: type[TrlConfig] = GRPOConfig,
    settings: Mapping[str, Any] | None = None,
    **parts: Any,
) -> Any:
    """A trainer as scripts make it: the model by its name, and rows of text."""
    args = kind(str(out), **{**BASE[kind], **(settings or {})})
    given = {"model": str(folder), "reward_funcs": letters, "args": args, "train_dataset": ROWS}
    return TRAINERS[kind](**{**given, **parts})


def understood(kind: type[TrlConfig], settings: Mapping[str, Any], rows: int = 10) -> Config:
    """What arguments come to, on prompts of up to 9 tokens."""
    args = kind(**{**BASE[kind], **settings})
    arguments.check(args)
    data = arguments.settings(args, arguments.fill_in_sizes(args, rows), 9, "float32")
    return recipes.build(data, "test")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


OWN: Mapping[type[TrlConfig], dict[str, Any]] = {
    GRPOConfig: {
        "rollout__batch": 8,
        "rollout__samples_per_prompt": 4,
        "algorithm": {"name": "grpo", "kl_coef": 0.0, "aggregation": "token_mean"},
    },
    RLOOConfig: {
        "rollout__batch": 8,
        "rollout__samples_per_prompt": 2,
        "algorithm__name": "proximal-rloo",
    },
    OnlineDPOConfig: {
        "rollout__batch": 16,
        "rollout__samples_per_prompt": 2,
        "rollout__temperature": 0.9,
        "algorithm": {"name": "online-dpo", "kl_coef": 0.1},
    },
}
"""What the trainers' defaults are called here."""


@pytest.mark.parametrize("kind", BASE)
def test_the_numbers_are_those_of_our_own_settings(
    kind: type[TrlConfig], tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_folder, tmp_path / "theirs", kind)
    output = trainer.train()
    own = stretto.train(
        Config(steps=2, seed=3, out=str(tmp_path / "ours")),
        model={"name": str(tiny_folder), "device": "cpu", "dtype": "float32"},
        dataset=ROWS,
        reward=letters,
        reward__missing_eos="off",
        task__chat="off",
        **OWN[kind],
        rollout__max_new_tokens=6,
        training__lr=1e-2,
        training__microbatch_tokens=4 * (9 + 6),
        observe__progress="off",
    )
    ours = weights(AutoModelForCausalLM.from_pretrained(own.model))
    assert all(torch.equal(ours[n], p) for n, p in weights(trainer.model).items())
    assert (output.steps, output.global_step) == (2, 2)
    assert output.model == trainer.run_dir.model
    *rows, summary = trainer.state.log_history
    logged = [row["loss"] for row in rows]
    assert output.training_loss == output.metrics["train_loss"] == sum(logged) / 2
    assert summary == {**output.metrics, "step": 2}
    for name in ("reward", "rewards/letters/mean", "completions/mean_length"):
        assert summary[name] == pytest.approx(fmean(row[name] for row in rows))
    assert not {"loss", "grad_norm", "learning_rate", "episode"} & set(summary)
    took_s, batch = summary["train_runtime"], trainer.config.rollout.batch
    assert summary["train_samples_per_second"] == pytest.approx(2 * batch / took_s)
    assert summary["train_steps_per_second"] == pytest.approx(2 / took_s)
    start = weights(AutoModelForCausalLM.from_pretrained(tiny_folder))
    assert not all(torch.equal(start[n], p) for n, p in ours.items())

    trainer.save_model(tmp_path / "saved")
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    assert all(torch.equal(ours[n], saved[n]) for n in ours)
    with raises(StateError, "trained-already"):
        trainer.train()


GROUPED: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "rollout.batch", 8),
    ({"chat_template_kwargs": {"a": 1}}, "task.template_arguments", {"a": 1}),
    ({"chat_template_kwargs": '{"a": false}'}, "task.template_arguments", {"a": False}),
    ({"generation_batch_size": 16}, "rollout.batch", 16),
    ({"generation_batch_size": 16}, "training.minibatches", 2),
    ({"steps_per_generation": 6}, "training.minibatches", 3),
    ({"steps_per_generation": 4}, "steps", 1),  # of 2 optimizer steps
    ({"steps_per_generation": 4, "max_steps": 5}, "steps", 3),
    ({"steps_per_generation": 1}, "rollout.batch", 8),  # two parts with the same weights
    ({"steps_per_generation": 1}, "training.minibatches", 1),
    ({"shuffle_dataset": False}, "task.shuffle", False),
    ({"generation_kwargs": {"stop": "\n"}}, "rollout.stop", ("\n",)),
    (
        {"generation_kwargs": '{"stop_strings": ["a", "b"], "top_p": 0.9}'},
        "rollout.stop",
        ("a", "b"),
    ),
    ({"skip_equal_groups": True}, "rollout.skip_equal_groups", True),
    ({"num_iterations": 3}, "training.epochs", 3),
    ({"num_iterations": 3, "max_steps": 9}, "steps", 3),
    ({"num_iterations": 2, "max_steps": 8, "warmup_steps": 4}, "training.warmup_steps", 2),
    (
        {"num_iterations": 2, "save_strategy": "steps", "save_steps": 3},
        "observe.checkpoint_every",
        2,
    ),
    ({"max_completion_length": 11}, "rollout.max_new_tokens", 11),
    ({"per_device_train_batch_size": 8}, "training.microbatch_tokens", 8 * (9 + 6)),
    ({"temperature": 0.7}, "rollout.temperature", 0.7),
    ({"beta": 0.04}, "algorithm.kl_coef", 0.04),
    ({"epsilon": 0.1}, "algorithm.clip", 0.1),
    ({"epsilon_high": 0.28}, "algorithm.clip_high", 0.28),
    ({"mask_truncated_completions": True}, "algorithm.mask_truncated_completions", True),
    ({}, "reward.missing_eos", "off"),
    ({"router_aux_loss_coef": 0.0}, "training.lr", 1e-2),
    ({"schedule": "async"}, "schedule.preset", "async"),
    ({"runtime": "local"}, "runtime", "local"),
]
OF_GRPO: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "algorithm.name", "grpo"),
    ({}, "rollout.samples_per_prompt", 4),
    ({"num_generations": 2}, "rollout.samples_per_prompt", 2),
    ({"max_steps": -1, "num_train_epochs": 3}, "steps", 15),  # 10 prompts, 2 a step
    ({}, "algorithm.kl_coef", 0.0),
    ({}, "algorithm.aggregation", "token_mean"),
    ({"loss_type": "grpo"}, "algorithm.aggregation", "sequence_mean"),
    ({"loss_type": "bnpo"}, "algorithm.aggregation", "token_mean"),
    ({"loss_type": "dr_grpo"}, "algorithm.aggregation", "fixed_length"),
    ({"loss_type": "luspo"}, "algorithm.aggregation", "sequence_sum"),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.name", "cispo"),
    ({"loss_type": "mine.py:spec"}, "algorithm.name", "mine.py:spec"),
    ({"loss_type": "mine.py:spec"}, "algorithm.aggregation", "auto"),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.clip_high", 4.0),
    ({"delta": 3.0}, "algorithm.dual_clip", 3.0),
    ({"scale_rewards": "batch"}, "algorithm.scale_rewards", "batch"),
    ({"scale_rewards": False}, "algorithm.scale_rewards", "none"),
    ({"scale_rewards": True}, "algorithm.scale_rewards", "group"),
    (
        {"importance_sampling_level": "sequence"},
        "algorithm.importance_sampling_level",
        "sequence",
    ),
    ({}, "algorithm.use_bias_correction_kl", True),
    ({"use_bias_correction_kl": False}, "algorithm.use_bias_correction_kl", False),
    ({"entropy_coef": 0.01}, "algorithm.entropy_coef", 0.01),
    ({"use_vllm": True}, "algorithm.correction_cap", 3.0),
    ({"use_vllm": True, "vllm_importance_sampling_clip_max": 2.0}, "algorithm.correction_cap", 2.0),
    ({"use_vllm": True, "vllm_importance_sampling_cap": 1.5}, "algorithm.correction_cap", 1.5),
    (
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
        "algorithm.multi_objective_aggregation",
        "normalize_then_sum",
    ),
]
OF_RLOO: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "algorithm.name", "proximal-rloo"),
    ({}, "algorithm.kl_coef", 0.05),
    ({}, "algorithm.kl_place", "reward"),
    ({}, "rollout.samples_per_prompt", 2),
]
OF_DPO: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "algorithm.name", "online-dpo"),
    ({}, "algorithm.kl_coef", 0.1),
    ({"beta": [0.2]}, "algorithm.kl_coef", 0.2),
    ({"beta": 0.3}, "algorithm.kl_coef", 0.3),
    ({}, "rollout.batch", 16),  # per_device_train_batch_size counts prompts
    ({}, "rollout.samples_per_prompt", 2),
    ({}, "rollout.temperature", 0.9),
    ({"max_new_tokens": 9}, "rollout.max_new_tokens", 9),
    ({"missing_eos_penalty": 1.5}, "reward.missing_eos", "subtract"),
    ({"missing_eos_penalty": 1.5}, "reward.missing_eos_penalty", 1.5),
]
ARGUMENTS = [
    *((kind, *row) for kind in (GRPOConfig, RLOOConfig) for row in GROUPED),
    *((GRPOConfig, *row) for row in OF_GRPO),
    *((RLOOConfig, *row) for row in OF_RLOO),
    *((OnlineDPOConfig, *row) for row in OF_DPO),
]


@pytest.mark.parametrize(("kind", "given", "setting", "value"), ARGUMENTS, ids=str)
def test_arguments_become_settings(
    kind: type[TrlConfig], given: dict[str, Any], setting: str, value: Any
) -> None:
    found: Any = understood(kind, given)
    for part in setting.split("."):
        found = getattr(found, part)
    assert found == value


def test_every_argument_is_heeded_remarked_on_refused_or_the_scripts_own() -> None:
    """Those of transformers and of vLLM are the same for all trainers: test_trl.py has them."""
    taken = {name for _, given, _, _ in ARGUMENTS for name in given}
    here = {"loss_type", "reward_weights", "model_init_kwargs", "trust_remote_code"}
    here.add("max_tool_calling_iterations")  # of episodes
    scripts = {"reward_model_path"}
    common = {field.name for field in fields(TrlConfig)}
    for kind in BASE:
        own = {field.name for field in fields(kind)} - common
        groups = [
            (taken | here) & own,
            set(REMARKS) & own,
            set(REFUSALS) & own,
            scripts & own,
            {"vllm_importance_sampling_correction", "vllm_importance_sampling_mode"} & own,
        ]
        assert set().union(*groups) == own
        assert sum(map(len, groups)) == len(own)


REFUSED: list[tuple[type[TrlConfig], dict[str, Any], str | None, str]] = [
    (GRPOConfig, {"generation_kwargs": {"a": 1}}, "argument-refused", "generation_kwargs"),
    (GRPOConfig, {"steps_per_generation": 1, "num_iterations": 2}, "generation-batch", "divisor"),
    (GRPOConfig, {"loss_type": "vespo"}, "argument-value", "'dapo'"),
    (GRPOConfig, {"loss_type": "cispo"}, "argument-value", "epsilon_high = None"),
    (GRPOConfig, {"scale_rewards": "std"}, "argument-value", "'batch'"),
    (GRPOConfig, {"delta": 1.1}, "dual-clip-inside-clip", "1.2"),
    (GRPOConfig, {"num_generations": 1}, "argument-value", "2 or more"),
    (GRPOConfig, {"num_generations": 3}, "generation-batch", "num_generations = 3"),
    (GRPOConfig, {"steps_per_generation": 3}, "generation-batch", "4 x 2"),
    (
        GRPOConfig,
        {"steps_per_generation": 2, "generation_batch_size": 16},
        *("arguments-compete", "what is generated"),
    ),
    (GRPOConfig, {"multi_objective_aggregation": "x"}, "argument-value", "'sum_then_normalize'"),
    (GRPOConfig, {"use_adaptive_entropy": True}, "argument-refused", "no such term"),
    (GRPOConfig, {"router_aux_loss_coef": 0.1}, "argument-value", "0.0"),
    (
        GRPOConfig,
        {"use_vllm": True, "vllm_importance_sampling_clip_max": None},
        *("argument-value", "largest one"),
    ),
    (RLOOConfig, {"reward_clip_range": [-1.0, 1.0]}, "argument-refused", "reward function"),
    (RLOOConfig, {"normalize_advantages": True}, "argument-refused", "no such term"),
    (RLOOConfig, {"sync_ref_model": True}, "argument-refused", "as it starts"),
    (OnlineDPOConfig, {"loss_type": "ipo"}, "argument-value", "'sigmoid'"),
    (OnlineDPOConfig, {"beta": [0.1, 0.2]}, "argument-value", "one number"),
    (OnlineDPOConfig, {"missing_eos_penalty": -1.0}, "argument-value", "above 0"),
]


@pytest.mark.parametrize(("kind", "given", "code", "fact"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_done_is_refused(
    kind: type[TrlConfig], given: dict[str, Any], code: str | None, fact: str
) -> None:
    with raises(ConfigError, code, fact):
        understood(kind, given)


def test_sizes_are_written_where_scripts_read_them_and_said(
    tiny_folder: Path, tmp_path: Path
) -> None:
    more = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8}
    trainer = make_trainer(tiny_folder, tmp_path, settings=more)
    assert (trainer.args.generation_batch_size, trainer.args.steps_per_generation) == (16, 4)
    assert (trainer.state.max_steps, trainer.config.steps) == (8, 2)
    assert arguments.notes(trainer.args, trainer.sizes) == [
        "batch 16 = per_device_train_batch_size x gradient_accumulation_steps = 4 x 2 x 2 "
        "(steps_per_generation / gradient_accumulation_steps); 2 steps of 4 optimizer steps each, "
        "which max_steps counts"
    ]


# -- rewards -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    folder = tmp_path_factory.mktemp("models") / "judge"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


async def late(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
    """Awaited; says nothing about some rows."""
    return [None if a == "cow" else float(len(a)) for a in answer]


def test_rewards_are_functions_and_models_and_names_in_one_list(
    tiny_folder: Path, judge_folder: Path, tmp_path: Path
) -> None:
    judge = AutoModelForSequenceClassification.from_pretrained(judge_folder, num_labels=1)
    trainer = make_trainer(
        tiny_folder,
        tmp_path,
        settings={"reward_weights": [1.0, 0.5, 2.0, 0.25]},
        reward_funcs=[letters, late, str(judge_folder), judge],
    )
    assert trainer.reward_func_names == ["letters", "late", "judge", "judge_"]
    trainer.train()
    for record in trainer.run_dir.read_rollouts():
        assert record.reward is not None
    for sample in lines(trainer.run_dir.samples_file):
        given = sample["scores"]
        word = sample["prompt"].removeprefix("say ")
        assert given["letters"] == pytest.approx(letters([sample["response"]])[0])
        assert given.get("late") == (None if word == "cow" else len(word))
        assert given["model:judge"] == given["model:judge_"]
        total = given["letters"] + 0.5 * (given.get("late") or 0) + 2.25 * given["model:judge"]
        assert sample["reward"] == pytest.approx(total, rel=1e-5)
    kinds = ([None] if function else [judge_folder] for function in (True, True, False, False))
    for given, wanted in zip(trainer.reward_processing_classes, kinds, strict=True):
        assert [given and Path(given.name_or_path)] == wanted
    assert [isinstance(reward, torch.nn.Module) for reward in trainer.reward_funcs[1:]] == [
        False,
        True,
        True,
    ]
    assert trainer.reward_weights.tolist() == [1.0, 0.5, 2.0, 0.25]
    last = trainer.state.log_history[-2]
    assert last["rewards/judge/mean"] == last["rewards/judge_/mean"]
    assert last["rewards/judge/std"] == last["rewards/judge_/std"] > 0


@pytest.mark.parametrize(
    ("settings", "unlogged"),
    [
        ({"logging_steps": 10}, 3),
        ({"logging_steps": 2}, 1),
        ({"logging_steps": 1}, 0),
        ({"logging_steps": 10, "logging_first_step": True}, 2),
        ({"logging_strategy": "no"}, 3),
        ({"logging_steps": 4, "steps_per_generation": 4, "max_steps": 6}, 1),
        ({"logging_steps": 5, "steps_per_generation": 4, "max_steps": 6}, 0),  # 5 is in the last
        ({"logging_strategy": "epoch"}, 0),  # the end of training ends the epoch
    ],
)
def test_the_last_row_has_the_metrics_that_are_not_logged_yet(
    settings: dict[str, Any], unlogged: int, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, settings={"max_steps": 3, **settings})
    trainer.train()
    *rows, last = trainer.state.log_history
    assert ("rewards/letters/mean" in last) == bool(unlogged)
    if unlogged:
        means = [row["rewards/letters/mean"] for row in rows[-unlogged:]]
        assert last["rewards/letters/mean"] == pytest.approx(fmean(means))


def test_the_loss_has_the_entropy_bonus(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, settings={"entropy_coef": 0.1})
    output = trainer.train()
    *rows, _ = trainer.state.log_history
    for row in rows:
        assert row["loss"] == pytest.approx(row["policy_loss"] - 0.1 * row["entropy"])
        assert row["entropy"] > 1
    assert output.training_loss == pytest.approx(fmean(row["loss"] for row in rows))


def test_settings_without_an_argument_are_changed_before_training(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """As docs/coming-from-trl.md has it."""
    trainer = make_trainer(tiny_folder, tmp_path, settings={"max_steps": 1})
    trainer.config = trainer.config.changed_in("training", ratio_tolerance=0.125)
    trainer.train()
    (saved,) = tmp_path.rglob("config.toml")
    assert tomllib.loads(saved.read_text())["training"]["ratio_tolerance"] == 0.125


def test_means_of_metrics_leave_out_nan() -> None:
    rows = [{"a": 1.0, "b": math.nan}, {"a": 3.0, "b": 5.0}, {"c": math.nan}]
    assert means_of(rows) == {"a": 2.0, "b": 5.0}


def test_rewards_have_names_of_their_own(tiny_folder: Path, judge_folder: Path) -> None:
    class Judge:
        def __call__(self, completions: Any, **_: Any) -> list[float]:
            return [0.0]

    named = [partial(letters), letters, lambda completions, **_: [0.0], Judge()]
    found = rewards_of(named, None, OnlineDPOConfig())
    assert list(found.sources) == ["letters", "letters_", "<lambda>", "Judge"]
    with raises(ConfigError, "no-rewards"):
        rewards_of(None, None, GRPOConfig())
    with raises(ConfigError, "reward-classes-count", "2 entries for 1"):
        rewards_of([letters], [None, None], GRPOConfig())
    own = AutoTokenizer.from_pretrained(judge_folder)
    judge = AutoModelForSequenceClassification.from_pretrained(judge_folder, num_labels=1)
    found = rewards_of([letters, judge], [None, own], GRPOConfig())
    assert found.models["model:judge"] == (judge, own)
    with raises(ModelError, "no-model-folder"):
        rewards_of("./nowhere", None, GRPOConfig())


# -- prompts and models --------------------------------------------------------------------------


def test_texts_stay_texts_on_a_model_for_chats_and_messages_are_templated(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    texts = PromptTask(ROWS, tokenizer, "train_dataset")
    turns = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    talks = PromptTask(turns, tokenizer, "train_dataset")
    assert (texts.chat, talks.chat) == ("off", "auto")
    assert (texts.longest, talks.longest) == (len("say horse"), len("<say horse>"))
    seen: list[Any] = []

    def judge(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.append((prompts[0], completions[0]))
        return [0.0] * len(prompts)

    one = {"max_steps": 1}
    for rows in (ROWS, turns):
        parts = {"train_dataset": rows, "reward_funcs": judge, "processing_class": tokenizer}
        make_trainer(tiny_folder, tmp_path, settings=one, **parts).train()
    (text, answer), (messages, replies) = seen
    assert isinstance(text, str)
    assert isinstance(answer, str)
    assert messages[0]["role"] == "user"
    assert replies[0]["role"] == "assistant"


def test_datasets_of_all_kinds_are_taken(tiny_folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    endless = datasets.IterableDataset.from_generator(lambda: iter(ROWS * 100))
    for rows, count in ((table, 4), (endless, 4), (ROWS, 4)):  # 2 steps of 2 prompts
        trainer = make_trainer(tiny_folder, tmp_path, train_dataset=rows)
        assert len(trainer.train_dataset) == count
    evaluated: dict[str, Any] = {"eval_dataset": {"a": table, "b": table}}
    assert make_trainer(tiny_folder, tmp_path, **evaluated).eval_dataset["a"] is table
    with raises(ConfigError, "no-length", "max_steps"):
        make_trainer(tiny_folder, tmp_path, settings={"max_steps": -1}, train_dataset=endless)


def test_models_are_loaded_as_model_init_kwargs_say(tiny_folder: Path, tmp_path: Path) -> None:
    how = '{"dtype": "bfloat16", "attn_implementation": "eager", "device_map": null}'
    trainer = make_trainer(tiny_folder, tmp_path, settings={"model_init_kwargs": how})
    assert trainer.model.dtype is torch.bfloat16
    assert trainer.config.model.dtype == "bfloat16"
    assert make_trainer(tiny_folder, tmp_path).model.dtype is torch.float32
    bare = GRPOTrainer(str(tiny_folder), letters, train_dataset=ROWS)
    assert bare.args.output_dir == f"{tiny_folder.name}-GRPO"


WRONG: list[tuple[dict[str, Any], type[StrettoError], str, str]] = [
    ({"train_dataset": None}, ConfigError, "argument-missing", "train_dataset"),
    ({"train_dataset": {"train": ROWS}}, TaskError, "several-datasets", "(train)"),
    ({"train_dataset": [{"text": "a"}]}, TaskError, "missing-column", "'prompt'"),
    ({"train_dataset": [{"prompt": 3}]}, TaskError, "prompt-not-text", "row 0"),
    ({"train_dataset": [{"prompt": "a", "image": "b"}]}, TaskError, "images", "row 0"),
    ({"reward_funcs": None}, ConfigError, "no-rewards", "reward_funcs"),
    ({"args": RLOOConfig()}, ConfigError, "args-of-other-class", "GRPOConfig, GRPOTrainer"),
    ({"tools": [letters]}, ConfigError, "tool-without-schema", "letters"),
    ({"tools": ["letters"]}, ConfigError, "tool-not-function", "letters"),
    ({"environment_factory": object}, ConfigError, "unknown-environment", "object"),
    ({"rollout_func": letters}, ConfigError, "argument-refused", "rollout_func"),
    ({"optimizers": (object(), None)}, ConfigError, "argument-refused", "learning_rate"),
    ({"model": "./nowhere"}, ModelError, "no-model-folder", "nowhere"),
]


@pytest.mark.parametrize(
    ("parts", "error", "code", "fact"),
    WRONG,
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_wrong_parts_are_refused_before_anything_starts(
    parts: dict[str, Any],
    error: type[StrettoError],
    code: str,
    fact: str,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    with raises(error, code, fact):
        make_trainer(tiny_folder, tmp_path / "out", **parts)
    assert not (tmp_path / "out").exists()


def test_adapters_are_merged_when_training_ends(tiny_folder: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["v_proj"])
    trainer = make_trainer(tiny_folder, tmp_path, peft_config=lora)
    trainer.train()
    start = weights(AutoModelForCausalLM.from_pretrained(tiny_folder))
    moved = {n for n, p in weights(trainer.model).items() if not torch.equal(start[n], p)}
    assert moved == {f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 1)}


# -- what scripts ask of a trainer ---------------------------------------------------------------


class Listening(TrainerCallback):
    """Keeps what it is told; ends training after the step that it is told to."""

    last = 0

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("init")

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        assert more["model"] is not None
        self.events.append(f"begin of {state.max_steps}")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("epoch begins")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"epoch ends at {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise AssertionError

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"step {state.global_step} logs {control.should_log}")
        control.should_training_stop |= state.global_step == self.last

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.events.append(f"{logs['epoch']} {'reward' in logs}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("end")


def test_callbacks_are_objects_or_classes_and_come_and_go(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"logging_steps": 2, "num_iterations": 2, "max_steps": 6}
    trainer = make_trainer(tiny_folder, tmp_path, settings=few, callbacks=[Listening])
    told = trainer.pop_callback(Listening)
    assert told.events == ["init"]
    trainer.add_callback(told)
    extra = Listening()
    trainer.add_callback(extra)
    trainer.remove_callback(extra)
    output = trainer.train()
    # A step of ours is 2 of the optimizer's, on 2 of the 4 prompts.
    first = ["step 2 logs True", "0.5 True", "step 4 logs True", "1.0 True", "epoch ends at 4"]
    second = ["step 6 logs True", "1.5 True", "epoch ends at 6"]
    begins = "epoch begins"
    assert told.events == [
        "init",
        "begin of 6",
        begins,
        *first,
        begins,
        *second,
        "1.5 False",
        "end",
    ]
    assert "without effect: on_save of Listening" in capsys.readouterr().out
    assert extra.events == []
    assert output.global_step == 6
    assert [row["step"] for row in trainer.state.log_history] == [2, 4, 6, 6]

    stopping = Listening()
    stopping.last = 1
    stopped = make_trainer(tiny_folder, tmp_path, callbacks=[stopping])
    output = stopped.train()
    assert (output.steps, output.global_step, stopped.config.steps) == (1, 1, 2)
    assert stopping.events[-1] == "end"
    kept = weights(AutoModelForCausalLM.from_pretrained(output.model))
    assert all(torch.equal(kept[n], p) for n, p in weights(stopped.model).items())


class Saving(TrainerCallback):
    """Asks for a checkpoint after the first step, and keeps what evaluations are told."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == 1

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.evaluations.append(metrics)


def test_a_callback_asks_for_a_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, callbacks=[Saving])
    trainer.train()
    assert [path.name for path in trainer.run_dir.checkpoints.iterdir()] == ["step-000001"]


def test_evaluations_are_of_eval_dataset(tiny_folder: Path, tmp_path: Path) -> None:
    told = Saving()
    held_out = [{"prompt": "say something longer", "answer": "x"}, {"prompt": "no", "answer": "y"}]
    often = {"eval_strategy": "steps", "eval_steps": 2, "num_iterations": 2, "max_steps": 4}
    parts: dict[str, Any] = {"eval_dataset": held_out, "callbacks": [told]}
    trainer = make_trainer(tiny_folder, tmp_path, settings=often, **parts)
    observe, task = trainer.config.observe, trainer.config.task
    assert (observe.eval_every, observe.eval_prompts) == (1, 2)
    assert task.max_prompt_tokens == len("say something longer")
    output = trainer.train()
    assert lines(Path(task.held_out_rows)) == held_out
    assert output.best is not None
    figures = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    assert [metrics["eval_reward"] for metrics in told.evaluations] == figures
    assert figures[-1] == output.history[-1]["eval/score"]
    with raises(ConfigError, "no-eval-dataset"):
        make_trainer(tiny_folder, tmp_path, settings=often)


@pytest.mark.parametrize("adapters", [False, True])
def test_evaluate_measures_the_policy_before_and_after_training(
    adapters: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """As the evaluations during training do; and they do not change what is trained."""
    lora = LoraConfig(r=2, target_modules=["q_proj"]) if adapters else None
    held_out = [{"prompt": f"say {n}", "answer": "x" * n} for n in (7, 1, 4)]
    parts: dict[str, Any] = {"eval_dataset": held_out, "reward_funcs": [letters, late]}
    parts |= {"peft_config": lora}
    often = {"eval_strategy": "steps", "eval_steps": 1, "reward_weights": [2.0, 0.5]}
    told = Saving()
    trainer = make_trainer(tiny_folder, tmp_path, settings=often, callbacks=[told], **parts)
    before = trainer.evaluate()
    assert before["eval_rewards/late/mean"] == 4.0  # answers of 7, 1 and 4 letters
    wanted = 2 * before["eval_rewards/letters/mean"] + 0.5 * 4.0
    assert before["eval_reward"] == pytest.approx(wanted)
    assert trainer.state.log_history == [{**before, "step": 0}]
    trainer.train()
    after = trainer.evaluate()
    first, last = (trainer.run_dir.read_metrics()[i] for i in (0, -1))
    for found, recorded in ((before, first), (after, last)):
        assert found["eval_reward"] == pytest.approx(recorded["eval/score"])
        assert found["eval_completions/mean_length"] == recorded["eval/length_mean"]
        assert found["eval_rewards/letters/mean"] == pytest.approx(recorded["eval/reward/letters"])
    assert [told.evaluations[0], told.evaluations[-1]] == [before, after]
    several = trainer.evaluate({"a": held_out[:1], "b": held_out[1:]}, metric_key_prefix="test")
    assert several["test_a_rewards/late/mean"] == 7.0
    assert several["test_b_rewards/late/mean"] == 2.5

    plain = make_trainer(tiny_folder, tmp_path, **parts, settings={"reward_weights": [2.0, 0.5]})
    plain.train()
    theirs = weights(plain.model)
    assert all(torch.equal(theirs[n], p) for n, p in weights(trainer.model).items())


class Impatient(TrainerCallback):
    """Evaluates while the run trains."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with raises(StateError, "evaluates-in-training"):
            self.trainer.evaluate()


def test_a_callback_cannot_evaluate(tiny_folder: Path, tmp_path: Path) -> None:
    told = Impatient()
    told.trainer = make_trainer(tiny_folder, tmp_path, callbacks=[told], eval_dataset=ROWS)
    told.trainer.train()
    assert told.trainer.evaluate()["eval_count"] == len(ROWS)


def test_metrics_of_rewards_have_trls_names_and_values(tiny_folder: Path, tmp_path: Path) -> None:
    """A sample's standard deviation, of n - 1, over all responses of a step."""
    steps: list[list[float]] = []

    def noted(completions: Sequence[str], log_metric: Any, **_: Any) -> list[float]:
        found = letters(completions)
        steps.append(found)
        log_metric("spread/of_letters", max(found) - min(found))
        return found

    rewards: list[Any] = [noted, late]
    weighted = {"reward_weights": [2.0, 0.5]}
    trainer = make_trainer(tiny_folder, tmp_path, settings=weighted, reward_funcs=rewards)
    trainer.train()
    *rows, _ = trainer.state.log_history
    samples = trainer.run_dir.read_rollouts()
    assert len(rows) == len(steps) == 2
    for number, (row, found) in enumerate(zip(rows, steps, strict=True), 1):
        totals = [r.reward for r in samples if r.step == number]
        assert row["rewards/noted/mean"] == pytest.approx(fmean(found))
        assert row["rewards/noted/std"] == pytest.approx(stdev(found))
        assert row["reward"] == pytest.approx(fmean(totals))
        assert row["reward_std"] == pytest.approx(stdev(totals), rel=1e-5)
        assert row["spread/of_letters"] == pytest.approx(max(found) - min(found))
        assert not any(name.startswith("rewards/noted/spread") for name in row)


def test_figures_have_trls_names() -> None:
    stats = {
        "objective/scores": 0.5,
        "reward/letters": 0.25,
        "reward/model:judge": -1.0,
        "response/ended": 0.75,
        "response/length_mean": 8.0,
        "objective/kl": 2.0,
        "lr": 1e-3,
    }
    assert as_trl_names(stats) == {
        "reward": 0.5,
        "rewards/letters/mean": 0.25,
        "rewards/judge/mean": -1.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_length": 8.0,
        "kl": 0.25,  # a token
        "learning_rate": 1e-3,
    }
    assert as_trl_names({**stats, "loss/kl_avg": 0.125})["kl"] == 0.125


def test_true_resumes_the_newest_run_of_the_folder(tiny_folder: Path, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make_trainer(tiny_folder, tmp_path / "whole", settings=saving)
    whole.train()
    stopping = Listening()
    stopping.last = 2
    out = tmp_path / "out"
    with raises(StateError, "no-checkpoint", "grpo"):
        make_trainer(tiny_folder, out, settings=saving).train(resume_from_checkpoint=True)
    stopped = make_trainer(tiny_folder, out, settings=saving, callbacks=[stopping])
    stopped.train()
    name = stopped.run_dir.path.name.rpartition("-")[0]
    other = make_trainer(tiny_folder, out, settings={**saving, "run_name": f"{name}-b"})
    other.train()
    resumed = make_trainer(tiny_folder, out, settings=saving)
    output = resumed.train(resume_from_checkpoint=True)
    assert resumed.run_dir.path == stopped.run_dir.path
    assert output.steps == 3
    theirs = weights(whole.model)
    assert all(torch.equal(theirs[n], p) for n, p in weights(resumed.model).items())


@pytest.mark.parametrize("kind", BASE)
def test_configs_can_be_written_down_and_parsed(kind: type[TrlConfig], tmp_path: Path) -> None:
    args = kind(str(tmp_path), **BASE[kind])
    written = json.loads(args.to_json_string())
    assert written == json.loads(json.dumps(args.to_dict()))
    assert written["per_device_train_batch_size"] == 4
    assert args.to_sanitized_dict()["learning_rate"] == 1e-2
    words = f"--output_dir {tmp_path} --beta 0.5 --schedule oppo --reward_weights 1 2"
    (parsed,) = HfArgumentParser(kind).parse_args_into_dataclasses(words.split())
    assert parsed.beta in (0.5, [0.5])
    assert parsed.reward_weights == [1.0, 2.0]
    with raises(ConfigError, "unknown-argument", "num_generation", kind.__name__):
        kind(num_generation=3)


def test_what_example_scripts_call_is_there(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tiny_folder, tmp_path)
    output = trainer.train()
    trainer.accelerator.print("done with it")
    assert trainer.accelerator.is_main_process
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model
    assert trainer.is_world_process_zero()
    trainer.log({"mine": 1.0})
    assert trainer.state.log_history[-1] == {"mine": 1.0, "epoch": 1.0, "step": 2}
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    trainer.create_model_card(model_name="mine")
    assert "| objective/scores |" in (tmp_path / "README.md").read_text()
    trainer.save_model(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("mine")
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"
    trainer.end()
    shown = capsys.readouterr().out
    assert "done with it" in shown
    assert "train_runtime" in shown
    assert json.loads((tmp_path / "train_results.json").read_text())["train_loss"] is not None
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2
    with raises(ConfigError, "no-upload"):
        trainer.push_to_hub()
    with raises(ConfigError, "no-eval-dataset"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("loss_type", "level", "noted"),
    [
        ("dapo", "sequence", True),
        ("dr_grpo", "sequence", True),
        ("grpo", "sequence", False),
        ("luspo", "sequence", False),
        ("dapo", "token", False),
    ],
)
def test_losses_that_weight_ratios_of_responses_by_length_are_noted(
    loss_type: str, level: str, noted: bool
) -> None:
    args = GRPOConfig(loss_type=loss_type, importance_sampling_level=level)
    notes = arguments.notes(args, arguments.fill_in_sizes(args, 10))
    assert any(f"'{loss_type}' weights each response" in note for note in notes) is noted
