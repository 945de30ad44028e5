"""Names that TRL has or had, and these trainers lack: what a script that has one is told."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import Trainer

from raising import raises
from stretto import (
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from stretto.config import recipes
from stretto.config.algorithm import AlgorithmConfig
from stretto.config.sections import TRACKERS
from stretto.config.training_config import OptimizerConfig
from stretto.errors import ConfigError, StrettoError
from stretto.trl import arguments
from stretto.trl.config import CONFIGS, REFUSALS, REMARKS, SETS, TrlConfig

# From TRL's repository: all fields of its configs in the tags v0.9.3 to v1.9.0 that 1.16 lacks.
OF_GRPO = """max_prompt_length vllm_device vllm_dtype vllm_max_model_len vllm_guided_decoding_regex
vllm_enable_prefix_caching use_liger_loss wandb_log_unique_prompts"""
OF_RLOO = """exp_name reward_model_path num_ppo_epochs whiten_rewards kl_coef cliprange rloo_k
sanity_check dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size
num_sample_generations response_length stop_token stop_token_id penalty_reward_value non_eos_penalty
sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size
local_mini_batch_size mini_batch_size missing_eos_penalty normalize_reward normalize_advantage
token_level_kl max_prompt_length vllm_guided_decoding_regex wandb_log_unique_prompts base_model
vf_coef cliprange_value gamma lam"""
OF_DPO = "dataset_num_proc judge gpu_memory_utilization use_transformers_paged"
OF_PPO = """log_with task_name model_name query_dataset reward_model tracker_kwargs
accelerator_kwargs project_kwargs tracker_project_name push_to_hub_if_best_kwargs steps adap_kl_ctrl
init_kl_coef kl_penalty target horizon forward_batch_size ppo_epochs optimize_cuda_cache
optimize_device_cache early_stopping target_kl compare_steps ratio_threshold use_score_scaling
use_score_norm score_clip is_encoder_decoder is_peft_model backward_batch_size
global_backward_batch_size global_batch_size sanity_check penalty_reward_value non_eos_penalty
base_model"""
# Fields of TrainingArguments of transformers 4.40 that 5.24 lacks.
OF_TRANSFORMERS = """evaluation_strategy per_gpu_train_batch_size per_gpu_eval_batch_size
jit_mode_eval use_ipex fp16_opt_level half_precision_backend tpu_num_cores tpu_metrics_debug
past_index fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap use_legacy_prediction_loop
include_inputs_for_metrics fp16_backend push_to_hub_model_id push_to_hub_organization
push_to_hub_token _n_gpu mp_parameters ray_scope dispatch_batches split_batches"""
OLD = [
    *((GRPOConfig, name) for name in OF_GRPO.split()),
    *((RLOOConfig, name) for name in OF_RLOO.split()),
    *((OnlineDPOConfig, name) for name in OF_DPO.split()),
    *((PPOConfig, name) for name in OF_PPO.split()),
    *((kind, name) for kind in CONFIGS for name in OF_TRANSFORMERS.split()),
]


def advice(kind: type[TrlConfig], name: str) -> str:
    with raises(ConfigError, "unknown-argument", f"no argument '{name}'") as caught:
        options: dict[str, Any] = {name: 1}
        kind(**options)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "name"), OLD)
def test_an_argument_that_trl_has_had_comes_with_what_to_do(
    kind: type[TrlConfig], name: str
) -> None:
    message = advice(kind, name)
    assert "Leave it out" in message or "It is called '" in message
    if "It is called '" in message:
        present = message.partition("It is called '")[2].partition("'")[0]
        assert present in {field.name for field in fields(kind)}


RENAMED = [
    (GRPOConfig, "use_liger_loss", "use_liger_kernel"),
    (GRPOConfig, "max_new_tokens", "max_completion_length"),
    (OnlineDPOConfig, "max_completion_length", "max_new_tokens"),
    (PPOConfig, "init_kl_coef", "kl_coef"),
    (GRPOConfig, "init_kl_coef", "beta"),
    (RLOOConfig, "rloo_k", "num_generations"),
    (RLOOConfig, "num_mini_batches", "steps_per_generation"),
    (RLOOConfig, "evaluation_strategy", "eval_strategy"),
]


@pytest.mark.parametrize(("kind", "name", "present"), RENAMED)
def test_a_name_of_another_release_has_the_present_one(
    kind: type[TrlConfig], name: str, present: str
) -> None:
    assert f"It is called '{present}' now" in advice(kind, name)


def test_max_prompt_length_is_not_taken_for_the_limit_of_completions() -> None:
    message = advice(GRPOConfig, "max_prompt_length")
    assert "prompts are read whole" in message
    assert "max_completion_length" not in message


@pytest.mark.parametrize(
    ("trainer", "named", "fact"),
    [
        (GRPOTrainer, {"model": "m", "tokenizer": None}, "'processing_class'"),
        (RLOOTrainer, {"policy": "m"}, "'model'"),
        (OnlineDPOTrainer, {"model": "m", "judge": None}, "'reward_funcs'"),
        (GRPOTrainer, {"model": "m", "train_data": []}, "'train_dataset'"),
    ],
)
def test_a_trainers_unknown_arguments_come_with_what_to_do(
    trainer: Any, named: dict[str, Any], fact: str
) -> None:
    with raises(ConfigError, "unknown-argument", trainer.__name__, fact):
        trainer(**named)


@pytest.mark.parametrize(
    ("kind", "name", "fact"),
    [(GRPOConfig, "lr", "'learning_rate'"), (PPOConfig, "num_generations", "Leave it out")],
)
def test_a_name_of_another_library_has_the_present_one_or_none(
    kind: type[TrlConfig], name: str, fact: str
) -> None:
    assert fact in advice(kind, name)


@pytest.mark.parametrize(
    ("named", "fact"),
    [
        ({"model": 3}, "got 3"),
        ({"processing_class": "gpt2"}, "AutoTokenizer"),
        ({"callbacks": [3]}, "TrainerCallback"),
        ({"train_dataset": "nowhere"}, "load_dataset"),
    ],
)
def test_objects_of_other_kinds_are_refused(
    named: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    usual = {"model": "tiny", "reward_funcs": len, "train_dataset": [{"prompt": "a"}]}
    args = GRPOConfig(output_dir=str(tmp_path), max_steps=1)
    with raises(StrettoError, None, fact):
        GRPOTrainer(args=args, **{**usual, **named})


TRAINERS = (GRPOTrainer, RLOOTrainer, OnlineDPOTrainer, PPOTrainer)
OVERRIDDEN = [
    ("compute_loss", "loss_type"),
    ("_compute_loss", "loss_type"),
    ("_calculate_rewards", "reward_funcs"),
    ("create_optimizer", "lr_scheduler_type"),
    ("_generate_and_score_completions", "environment_factory"),
    ("_tool_call_loop", "environment_factory"),
    ("get_train_dataloader", "shuffle_dataset"),
    ("_get_train_sampler", "shuffle_dataset"),
    ("_save_checkpoint", "TrainerCallback"),
    ("beta", "loss_type"),
]


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("name", "fact"), OVERRIDDEN)
def test_a_method_that_would_never_be_called_is_refused(
    trainer: type, name: str, fact: str
) -> None:
    mine = type("Mine", (trainer,), {name: lambda self, *args: None})
    with raises(ConfigError, "method-never-called", f"Mine.{name}", fact):
        mine("model")


def test_every_method_of_transformers_is_refused_or_there() -> None:
    ours = set(dir(GRPOTrainer))
    for name in dir(Trainer):
        if name.startswith("__") or name in ours or not callable(getattr(Trainer, name)):
            continue
        with raises(ConfigError, "method-never-called", name):
            type("Mine", (GRPOTrainer,), {name: lambda self: None})("model")


def test_a_mixins_methods_count_and_a_subclass_of_a_subclass() -> None:
    class Scaled:
        def training_step(self) -> None: ...

    class First(GRPOTrainer):
        def compute_loss(self) -> None: ...

    class Second(First): ...

    with raises(ConfigError, "method-never-called", "Mixed.training_step"):
        type("Mixed", (Scaled, GRPOTrainer), {})("model")
    with raises(ConfigError, "method-never-called", "Second.compute_loss"):
        Second("model")


def test_methods_that_are_called_and_a_scripts_own_may_be_defined() -> None:
    class Mine(GRPOTrainer):
        """Logs under another name."""

        temperature_loss = 0.5

        def __init__(self, model: Any, extra: int, **named: Any) -> None:
            super().__init__(model, **named)
            self.extra = extra

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({f"mine/{name}": value for name, value in logs.items()}, start_time)

        def helper_mask(self) -> None: ...

    with raises(ConfigError, "argument-missing", "train_dataset"):
        Mine("model", extra=3)


def test_no_refusal_names_a_thing_that_a_setting_has() -> None:
    """A value of an argument that is refused is no value of the setting which does the same."""
    for name, setting in SETS.items():
        assert name not in {*REFUSALS, *REMARKS}, setting
    by_last = {name.rpartition(".")[2]: name for name in recipes.setting_names()}
    # The core refuses top_k and top_p in training, and torch_compile without processes.
    refused = {*REFUSALS, *REMARKS} - {"top_k", "top_p", "torch_compile"}
    assert not refused & by_last.keys()
    kinds: Any = get_args(OptimizerConfig.model_fields["optim"].annotation)
    assert set(arguments.OPTIMIZERS.values()) == set(kinds)
    schedules: Any = get_args(OptimizerConfig.model_fields["lr_schedule"].annotation)
    assert set(schedules) <= set(arguments.CHOICES["lr_scheduler_type"])
    for tracker in TRACKERS:
        args = GRPOConfig(report_to=tracker)
        assert arguments.notes(args, arguments.fill_in_sizes(args, 8))[1:] == []
    for name in ("scale_rewards", "importance_sampling_level", "multi_objective_aggregation"):
        field = AlgorithmConfig.model_fields.get(name)
        values: Any = get_args(field.annotation) if field else ()
        assert set(values) <= set(arguments.CHOICES[name])
