"""Arguments of TRL's PPO, GRPO, RLOO and Online DPO trainers, with TRL's names and defaults.

They include those of ``transformers.TrainingArguments`` (4 and 5). The tables here say which
setting an argument becomes, or why it is refused or has no effect. Arguments that need a
computation are translated in :mod:`stretto.trl.arguments`.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from transformers import TrainingArguments

from stretto.trl.compat import require_known

_Json = dict[str, Any] | str | None


@dataclass(repr=False)
class TrlConfig(TrainingArguments):
    """Arguments that all trainers share, plus ``schedule`` and ``runtime``, which TRL lacks.

    An argument takes effect, has no effect (reported when training starts), or is refused with the
    reason. Attributes are read and set as in TRL. ``TrlParser`` and
    ``transformers.HfArgumentParser`` build a config from a command line.

    Attributes:
        algorithm: value of ``algorithm.name`` for this config.
        schedule: when each stage of a step runs: a preset (``"sync"``, ``"oppo"``, ``"async"``,
            ``"rlhfuse"``, ``"stretto"``) or a mapping of schedule settings (JSON on a command
            line). ``None`` is ``"sync"``, TRL's order.
        runtime: ``"inline"`` runs on threads of this process, ``"local"`` in processes on this
            machine, ``"ray"`` in processes of a Ray cluster. Processes must import the models'
            classes.
    """

    algorithm: ClassVar[str]

    # The run
    output_dir: str = "trainer_output"
    schedule: _Json = None
    runtime: str = "inline"

    # Generation by vLLM
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_tensor_parallel_size: int = 1
    vllm_enable_sleep_mode: bool = False
    vllm_max_model_length: int | None = None
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216

    # Devices and memory
    bf16: bool | None = None  # type: ignore[assignment]
    gradient_checkpointing: bool = True
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: _Json = None
    activation_offloading: bool = False
    ds3_gather_for_generation: bool = True
    no_cuda: bool = False
    use_mps_device: bool = False
    group_by_length: bool = False
    torchdynamo: str | None = None
    warmup_ratio: float = 0.0
    adafactor: bool = False

    # Logging and saving
    logging_steps: float = 10
    logging_dir: str | None = None
    debug: str = ""
    include_num_input_tokens_seen: str = "no"
    include_tokens_per_second: bool = False
    overwrite_output_dir: bool = False
    save_safetensors: bool = True

    def __new__(cls, *args: Any, **named: Any) -> Self:
        require_known(cls.__name__, named, (f.name for f in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Skip transformers' checks, which would look for devices."""


@dataclass(repr=False)
class PPOConfig(TrlConfig):
    """Arguments of TRL's ``PPOConfig``. See :class:`TrlConfig`."""

    algorithm = "ppo"

    exp_name: str = "ppo"

    # Batch sizes
    total_episodes: int | None = None
    num_mini_batches: int = 1
    num_ppo_epochs: int = 4
    local_rollout_forward_batch_size: int = 64

    # Derived from the batch sizes, written by the trainer
    world_size: int | None = None
    num_total_batches: int | None = None
    micro_batch_size: int | None = None
    local_batch_size: int | None = None
    batch_size: int | None = None
    local_mini_batch_size: int | None = None
    mini_batch_size: int | None = None

    # Responses and scores
    response_length: int = 53
    stop_token: Literal["eos"] | None = None
    stop_token_id: int | None = None
    temperature: float = 0.7
    missing_eos_penalty: float | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_cap: float = 3.0

    # Loss and optimizer
    whiten_rewards: bool = False
    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    learning_rate: float = 3e-6
    model_adapter_name: str | None = None
    ref_adapter_name: str | None = None

    # Logging
    num_sample_generations: int = 10

    # Only read by scripts
    sft_model_path: str = "EleutherAI/pythia-160m"
    reward_model_path: str = "EleutherAI/pythia-160m"
    dataset_num_proc: int | None = None


@dataclass(repr=False)
class _PromptsConfig(TrlConfig):
    """Arguments of trainers that tokenize prompts and load models by name."""

    model_init_kwargs: _Json = None
    trust_remote_code: bool = False
    disable_dropout: bool = False
    reward_weights: list[float] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: _Json = None
    cache_implementation: str | None = None
    remove_unused_columns: bool = False


@dataclass(repr=False)
class _GroupConfig(_PromptsConfig):
    """Arguments that GRPO and RLOO share."""

    learning_rate: float = 1e-6

    # Batch sizes
    num_generations: int = 8
    skip_equal_groups: bool = False
    num_generations_eval: int | None = None
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int = 1
    max_completion_length: int = 512
    shuffle_dataset: bool = True
    pad_to_multiple_of: str | None = "auto"
    chat_template_kwargs: _Json = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: _Json = None
    use_transformers_paged: bool = False

    # The loss
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    mask_truncated_completions: bool = False
    router_aux_loss_coef: float | None = None
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512

    # Logging
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False


@dataclass(repr=False)
class GRPOConfig(_GroupConfig):
    """Arguments of TRL's ``GRPOConfig``. See :class:`TrlConfig`."""

    algorithm = "grpo"

    loss_type: str = "dapo"
    scale_rewards: str = "group"
    importance_sampling_level: str = "token"
    multi_objective_aggregation: str = "sum_then_normalize"
    delta: float | None = None
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None
    cast_lm_head_to_fp32: bool = False
    max_tool_calling_iterations: int | None = None
    log_completions_hub_repo: str | None = None


@dataclass(repr=False)
class RLOOConfig(_GroupConfig):
    """Arguments of TRL's ``RLOOConfig``. See :class:`TrlConfig`."""

    algorithm = "proximal-rloo"

    num_generations: int = 2
    beta: float = 0.05
    normalize_advantages: bool = False
    reward_clip_range: list[float] | None = None


@dataclass(repr=False)
class OnlineDPOConfig(_PromptsConfig):
    """Arguments of TRL's ``OnlineDPOConfig``. See :class:`TrlConfig`."""

    algorithm = "online-dpo"

    learning_rate: float = 5e-7
    disable_dropout: bool = True
    reward_model_path: str | None = None
    max_new_tokens: int = 64
    max_length: int = 512
    temperature: float = 0.9
    missing_eos_penalty: float | None = None
    beta: list[float] = field(default_factory=lambda: [0.1])
    loss_type: str = "sigmoid"
    vllm_gpu_memory_utilization: float = 0.55


CONFIGS = (PPOConfig, GRPOConfig, RLOOConfig, OnlineDPOConfig)

SETS = {
    "seed": "seed",
    "num_mini_batches": "training.minibatches",
    "num_ppo_epochs": "training.epochs",
    "num_iterations": "training.epochs",
    "local_rollout_forward_batch_size": "rollout.slots",
    "num_generations": "rollout.samples_per_prompt",
    "skip_equal_groups": "rollout.skip_equal_groups",
    "response_length": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "whiten_rewards": "algorithm.whiten_rewards",
    "kl_coef": "algorithm.kl_coef",
    "beta": "algorithm.kl_coef",
    "kl_estimator": "algorithm.kl_estimator",
    "cliprange": "algorithm.clip",
    "cliprange_value": "algorithm.value_clip",
    "epsilon": "algorithm.clip",
    "importance_sampling_level": "algorithm.importance_sampling_level",
    "multi_objective_aggregation": "algorithm.multi_objective_aggregation",
    "scale_rewards": "algorithm.scale_rewards",
    "mask_truncated_completions": "algorithm.mask_truncated_completions",
    "use_bias_correction_kl": "algorithm.use_bias_correction_kl",
    "entropy_coef": "algorithm.entropy_coef",
    "shuffle_dataset": "task.shuffle",
    "use_liger_kernel": "model.use_liger_kernel",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "delta": "algorithm.dual_clip",
    "learning_rate": "training.lr",
    "lr_scheduler_type": "training.lr_schedule",
    "optim": "training.optim",
    "weight_decay": "training.weight_decay",
    "max_grad_norm": "training.grad_clip",
}
"""Arguments whose value, as it is or translated by a choice, becomes the value of a setting. None
is 0.
"""

IN_SCRIPTS = {
    "out": "output_dir",
    "runtime": "runtime",
    "reward.sources": "reward_funcs",
    "reward.weights": "reward_weights",
    "model.name": "model",
    "model.device = cpu": "use_cpu=True",
    "model.dtype = bfloat16": "bf16=True",
    "model.dtype = float32": "bf16=False",
    "rollout.engine = torch": "use_vllm=False",
    "rollout.engine = vllm": "use_vllm=True",
}
"""How scripts write further settings, or single values of them, in messages."""

OTHER_TRACKERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow"),
    "neptune",
)
"""Trackers of transformers that receive no metrics here."""

_ADAMW = "adamw_torch_fused"
OPTIMIZERS = {
    **dict.fromkeys((_ADAMW, "adamw_torch", "adamw_hf", "adamw_apex_fused"), _ADAMW),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "paged_adamw_32bit"),
}
"""``optim`` to ``training.optim``."""

_REFUSED = {
    "AdamW's epsilon is 1e-8 here; leave it out": "adam_epsilon",
    "batch sizes are what the settings say; lower per_device_train_batch_size, which bounds memory "
    "and does not change the result": "auto_find_batch_size",
    "float16 is not computed with here; use bf16=True, or leave both out": "fp16",
    "log-probabilities would be of another distribution than the learner's; leave it "
    "out": "vllm_structured_outputs_regex",
    "models run on CPU or CUDA here; leave it out": "use_mps_device",
    "the model stays as it is trained; the best evaluation's is in the run's folder, in "
    "model-best": "load_best_model_at_end",
    "noise in the embeddings would make the policy that is trained another than the one that "
    "sampled; leave it out": "neftune_noise_alpha",
    "nothing is uploaded from here; leave it out, and afterwards upload the folder of "
    "trainer.save_model with 'hf upload'": "log_completions_hub_repo push_to_hub",
    "the optimizer is AdamW, with optim, learning_rate, weight_decay, adam_beta1 and adam_beta2; "
    "leave it out": "adafactor optim_args optim_target_modules",
    "PPO's losses have no labels to smooth; leave it out": "label_smoothing_factor",
    "the learning-rate schedules here take no further arguments; leave it "
    "out": "lr_scheduler_kwargs",
    "the losses here have no such term; leave it out": "normalize_advantages "
    "off_policy_mask_threshold top_entropy_quantile use_adaptive_entropy",
    "the lower bound of importance weights is 1 / vllm_importance_sampling_clip_max where they are "
    "masked, and none where they are truncated; leave it out": "vllm_importance_sampling_clip_min",
    "the model's head computes in the type of its weights; load the model in float32, or leave it "
    "out": "cast_lm_head_to_fp32",
    "the reference stays the policy as it starts; leave it out": "sync_ref_model",
    "there is one adapter; leave it out": "model_adapter_name",
    "training runs on one device here; leave it out, and where memory is short use peft_config, "
    "gradient_checkpointing and a small per_device_train_batch_size": "deepspeed fsdp fsdp_config "
    "parallelism_config",
    "with adapters the reference is the policy without them; to measure the KL to another model "
    "give it as ref_model": "ref_adapter_name",
    "write it into the reward function; leave it out": "reward_clip_range",
}
_IDLE = {
    "models have no dropout here": "disable_dropout",
    "no loss_type that is supported here reads it": "sapo_* vespo_*",
    "prompts are read whole": "max_length",
    "responses are sampled from the distribution that is trained": "min_p repetition_penalty top_k "
    "top_p",
    "vLLM is started with the run, in a process of its own": "vllm_group_port vllm_server_*",
    "samples.jsonl in the run's folder has responses of each step": "log_completions "
    "log_multimodal log_unique_prompts num_completions_to_print",
    "sync_ref_model is False": "ref_model_mixup_alpha ref_model_sync_steps",
    "training runs in one process": "accelerator_config average_tokens_across_devices ddp_* "
    "ds3_gather_for_generation local_rank log_level_replica log_on_each_node save_on_each_node",
    "an evaluation has one greedy answer to each held-out prompt": "batch_eval_metrics "
    "bf16_full_eval eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start "
    "eval_use_gather_object fp16_full_eval greater_is_better include_for_metrics label_names "
    "metric_for_best_model num_generations_eval per_device_eval_batch_size prediction_loss_only",
    "rows are read one at a time, and nothing is padded to be generated from": "dataloader_* "
    "group_by_length length_column_name pad_to_multiple_of remove_unused_columns "
    "train_sampling_strategy",
    "every step is recorded in metrics.jsonl and shown": "debug include_num_input_tokens_seen "
    "include_tokens_per_second log_level logging_* skip_memory_metrics",
    "nothing is uploaded": "hub_* project trackio_*",
    "each run has a folder of its own in output_dir, so that none is written "
    "over": "overwrite_output_dir",
    "a checkpoint has all that a run needs to go on, and weights are always "
    "safetensors": "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint "
    "save_only_model save_safetensors",
    "it would change the speed or the memory alone, and the engine and the learner here have their "
    "own ways": "*_checkpointing_kwargs activation_offloading cache_implementation "
    "liger_kernel_config tf32 torch_compile_* torch_empty_cache_steps torchdynamo "
    "transformers_continuous_batching_config use_cache use_transformers_*",
    "the seed alone decides what is drawn": "full_determinism",
    "the engine decodes with the same layers; set runtime = 'local'": "torch_compile",
    "the longest prompt and the most new tokens are what vLLM needs": "vllm_max_model_length",
    "use_adaptive_entropy is False": "entropy_coef_* entropy_target",
}

HEEDED = (
    *("run_name", "num_train_epochs", "max_steps", "per_device_train_batch_size", "warmup_steps"),
    *("gradient_accumulation_steps", "adam_beta1", "adam_beta2", "use_cpu"),
    *("data_seed", "report_to", "disable_tqdm", "save_strategy", "eval_strategy", "eval_steps"),
    *("save_steps", "save_total_limit", "resume_from_checkpoint"),
    *("do_train", "do_eval", "do_predict"),
)
"""Further arguments of transformers that have an effect here or in the script."""

_NAMES = sorted({f.name for config in CONFIGS for f in fields(config)})


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {
        name: why
        for why, patterns in table.items()
        for pattern in patterns.split()
        for name in fnmatch.filter(_NAMES, pattern)
    }


REFUSALS = _by_name(_REFUSED)
"""Refused arguments, with the reason and the remedy."""

REMARKS = _by_name(_IDLE)
"""Arguments without effect, with the reason for the note that reports them."""

_OWN = {
    name
    for config in CONFIGS
    for part in config.__mro__
    if issubclass(part, TrlConfig)
    for name in part.__annotations__
}
REMARKS |= {
    name: "it is not known here"
    for name in _NAMES
    if name not in {*_OWN, *SETS, *HEEDED, *REFUSALS, *REMARKS}
}
