"""``PPOConfig``: the arguments of TRL's PPO trainer, under their names and with their defaults.

They are TRL's own and those of ``transformers.TrainingArguments``, of transformers 4 and 5. What
becomes of each stands in :mod:`stretto.trl.arguments` and :mod:`stretto.trl.tables`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from stretto.errors import ConfigError, nearest


@dataclass
class PPOConfig:
    """Arguments of a script written for TRL's ``PPOConfig``, ``schedule`` and ``runtime``.

    Each argument takes effect, or has no effect here (training says so when it starts), or is
    refused with the reason. The attributes can be read and set as in TRL, and
    ``transformers.HfArgumentParser`` makes one from a command line.

    Attributes:
        schedule: when each stage of a step runs: a preset's name (``"sync"``, ``"oppo"``,
            ``"async"``, ``"rlhfuse"``, ``"stretto"``), or settings of the schedule as a mapping
            (as JSON on a command line); ``None`` is ``"sync"``, the order that TRL had.
        runtime: where: ``"inline"``, on threads of this process; ``"local"``, in processes of this
            machine; ``"ray"``, in processes of a Ray cluster. Classes of the models must then be
            importable from a module.

    Raises:
        ConfigError: an argument has an unknown name.
    """

    # The run
    output_dir: str = "trainer_output"
    exp_name: str = "ppo"
    run_name: str | None = None
    seed: int = 42
    schedule: dict[str, Any] | str | None = None
    runtime: str = "inline"

    # How much
    total_episodes: int | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_mini_batches: int = 1
    num_ppo_epochs: int = 4
    local_rollout_forward_batch_size: int = 64

    # Derived from those; the trainer writes them
    world_size: int | None = None
    num_total_batches: int | None = None
    micro_batch_size: int | None = None
    local_batch_size: int | None = None
    batch_size: int | None = None
    local_mini_batch_size: int | None = None
    mini_batch_size: int | None = None

    # Responses and what they are worth
    response_length: int = 53
    stop_token: Literal["eos"] | None = None
    stop_token_id: int | None = None
    temperature: float = 0.7
    missing_eos_penalty: float | None = None

    # Generation by vLLM, as TRL's other online trainers have it
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_tensor_parallel_size: int = 1
    vllm_max_model_length: int | None = None
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_cap: float = 3.0
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216

    # The loss
    whiten_rewards: bool = False
    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95

    # The optimizer
    learning_rate: float = 3e-6
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    optim_target_modules: str | None = None
    adafactor: bool = False
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None

    # How and where to compute
    use_cpu: bool = False
    no_cuda: bool = False
    use_mps_device: bool = False
    bf16: bool | None = None
    fp16: bool = False
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    deepspeed: dict[str, Any] | str | None = None
    fsdp: str | None = None
    fsdp_config: dict[str, Any] | str | None = None
    parallelism_config: dict[str, Any] | str | None = None
    accelerator_config: dict[str, Any] | str | None = None
    auto_find_batch_size: bool = False
    data_seed: int | None = None
    model_adapter_name: str | None = None
    ref_adapter_name: str | None = None

    # What is kept and shown
    report_to: None | str | list[str] = None  # noqa: RUF036  HfArgumentParser reads this order
    disable_tqdm: bool | None = None
    num_sample_generations: int = 10
    save_strategy: str = "steps"
    save_steps: float = 500
    resume_from_checkpoint: str | None = None
    push_to_hub: bool = False
    load_best_model_at_end: bool = False

    # For the script alone
    sft_model_path: str = "EleutherAI/pythia-160m"
    reward_model_path: str = "EleutherAI/pythia-160m"
    dataset_num_proc: int | None = None
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False

    # Without anything to act on here
    activation_offloading: bool = False
    average_tokens_across_devices: bool = True
    batch_eval_metrics: bool = False
    bf16_full_eval: bool = False
    dataloader_drop_last: bool = False
    dataloader_in_order: bool = True
    dataloader_multiprocessing_context: str | None = None
    dataloader_num_workers: int = 0
    dataloader_persistent_workers: bool = False
    dataloader_pin_memory: bool = True
    dataloader_prefetch_factor: int | None = None
    ddp_backend: str | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_static_graph: bool | None = None
    ddp_timeout: int = 1800
    debug: str = ""
    ds3_gather_for_generation: bool = True
    enable_jit_checkpoint: bool = False
    eval_accumulation_steps: int | None = None
    eval_delay: float = 0
    eval_do_concat_batches: bool = True
    eval_on_start: bool = False
    eval_steps: float | None = None
    eval_strategy: str = "no"
    eval_use_gather_object: bool = False
    fp16_full_eval: bool = False
    full_determinism: bool = False
    greater_is_better: bool | None = None
    group_by_length: bool = False
    hub_always_push: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool | None = None
    hub_revision: str | None = None
    hub_strategy: str = "every_save"
    hub_token: str | None = None
    ignore_data_skip: bool = False
    include_for_metrics: str | None = None
    include_num_input_tokens_seen: str = "no"
    include_tokens_per_second: bool = False
    label_names: str | None = None
    length_column_name: str = "length"
    liger_kernel_config: dict[str, Any] | str | None = None
    local_rank: int = -1
    log_level: str = "passive"
    log_level_replica: str = "warning"
    log_on_each_node: bool = True
    logging_dir: str | None = None
    logging_first_step: bool = False
    logging_nan_inf_filter: bool = True
    logging_steps: float = 10
    logging_strategy: str = "steps"
    metric_for_best_model: str | None = None
    overwrite_output_dir: bool = False
    per_device_eval_batch_size: int = 8
    prediction_loss_only: bool = False
    project: str = "huggingface"
    remove_unused_columns: bool = True
    restore_callback_states_from_checkpoint: bool = False
    save_on_each_node: bool = False
    save_only_model: bool = False
    save_safetensors: bool = True
    save_total_limit: int | None = None
    skip_memory_metrics: bool = True
    tf32: bool | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    torch_empty_cache_steps: int | None = None
    torchdynamo: str | None = None
    trackio_bucket_id: str | None = None
    trackio_space_id: str | None = None
    trackio_static_space_id: str | None = None
    train_sampling_strategy: str = "random"
    use_cache: bool = False
    use_liger_kernel: bool = False

    def __new__(cls, *args: Any, **named: Any) -> Self:
        """Refuse unknown names with the nearest one there is."""
        known = [f.name for f in fields(cls)]
        for name in named:
            if name not in known:
                raise ConfigError(f"PPOConfig has no argument '{name}'. {nearest(name, known)}")
        return super().__new__(cls)
