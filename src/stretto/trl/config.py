"""``PPOConfig``: the arguments of TRL's PPO trainer, under their names and with their defaults.

They are TRL's own and those of ``transformers.TrainingArguments``, of transformers 4 and 5. What
becomes of each is said beside it: the setting whose value it is, a remark, or a refusal. What
becomes of the others stands in :mod:`stretto.trl.arguments`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

from stretto.errors import ConfigError, nearest


class Sets(str):
    """Names of the settings whose value an argument is."""


class Remark(str):
    """Reason why an argument has nothing to act on here; a line says it where it is set."""


class Refusal(str):
    """Reason why an argument is refused where it is set, with the remedy."""


FOR_SCRIPTS = "looked at by the script alone, as with TRL's trainer"
_ONE_PROCESS = Remark("training runs in one process")
_NO_EVALUATION = Remark("no evaluation runs within training, as none did in TRL's PPO trainer")
_ONE_BY_ONE = Remark("rows are read one at a time, and nothing is padded to be generated from")
_EVERY_STEP = Remark("every step is recorded in metrics.jsonl and shown")
_NO_UPLOAD = Remark("nothing is uploaded")
_WHOLE_CHECKPOINTS = Remark(
    "the newest checkpoint is kept, with all that a run needs to go on, and weights are always "
    "safetensors"
)
_SPEED_ALONE = Remark(
    "it would change the speed or the memory alone, and the engine and the learner "
    "here have their own ways"
)
OWN_ADAMW = Refusal("the learner has its own AdamW on float32 masters; leave it out")
_ONE_DEVICE = Refusal(
    "training runs on one device here; leave it out, and where memory is short use "
    "peft_config, gradient_checkpointing and a small per_device_train_batch_size"
)
_OWN_SERVER = Refusal("vLLM is started with the run, in a process of its own; leave it out")
_Json = dict[str, Any] | str | None
_RENAMED = Refusal("say gradient_checkpointing instead")


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
    """

    # The run
    output_dir: str = "trainer_output"
    exp_name: str = "ppo"
    run_name: str | None = None
    seed: Annotated[int, Sets("seed")] = 42
    schedule: _Json = None
    runtime: str = "inline"

    # How much
    total_episodes: int | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_mini_batches: Annotated[int, Sets("training.minibatches")] = 1
    num_ppo_epochs: Annotated[int, Sets("training.epochs")] = 4
    local_rollout_forward_batch_size: Annotated[int, Sets("rollout.slots")] = 64

    # Derived from those; the trainer writes them
    world_size: int | None = None
    num_total_batches: int | None = None
    micro_batch_size: int | None = None
    local_batch_size: int | None = None
    batch_size: int | None = None
    local_mini_batch_size: int | None = None
    mini_batch_size: int | None = None

    # Responses and what they are worth
    response_length: Annotated[int, Sets("rollout.max_new_tokens")] = 53
    stop_token: Literal["eos"] | None = None
    stop_token_id: int | None = None
    temperature: Annotated[float, Sets("rollout.temperature")] = 0.7
    missing_eos_penalty: float | None = None

    # Generation by vLLM, as TRL's other online trainers have it
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_tensor_parallel_size: int = 1
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: Annotated[
        str | None,
        Refusal(
            "log-probabilities would be of another distribution than the learner's; leave it out"
        ),
    ] = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_cap: float = 3.0
    vllm_server_base_url: Annotated[str | None, _OWN_SERVER] = None
    vllm_server_host: Annotated[str, _OWN_SERVER] = "0.0.0.0"
    vllm_server_port: Annotated[int, _OWN_SERVER] = 8000
    vllm_server_timeout: Annotated[float, _OWN_SERVER] = 240.0
    vllm_group_port: Annotated[int, _OWN_SERVER] = 51216

    # The loss
    whiten_rewards: Annotated[bool, Sets("algorithm.whiten_rewards")] = False
    kl_coef: Annotated[float, Sets("algorithm.kl_coef")] = 0.05
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Sets("algorithm.kl_estimator")] = "k1"
    cliprange: Annotated[float, Sets("algorithm.clip")] = 0.2
    cliprange_value: Annotated[float, Sets("algorithm.value_clip")] = 0.2
    vf_coef: float = 0.1
    gamma: Annotated[float, Sets("algorithm.gamma")] = 1.0
    lam: Annotated[float, Sets("algorithm.lam")] = 0.95

    # The optimizer
    learning_rate: Annotated[float, Sets("training.lr training.critic_lr")] = 3e-6
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Annotated[
        _Json,
        Refusal("the learning-rate schedules here take no further arguments; leave it out"),
    ] = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    weight_decay: Annotated[float, Sets("training.weight_decay")] = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: Annotated[float, Refusal("AdamW's epsilon is 1e-8 here; leave it out")] = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch_fused"
    optim_args: Annotated[str | None, OWN_ADAMW] = None
    optim_target_modules: Annotated[str | None, OWN_ADAMW] = None
    adafactor: Annotated[bool, OWN_ADAMW] = False
    label_smoothing_factor: Annotated[
        float, Refusal("PPO's losses have no labels to smooth; leave it out")
    ] = 0.0
    neftune_noise_alpha: Annotated[
        float | None,
        Refusal(
            "noise in the embeddings would make the policy that is trained another than the "
            "one that sampled; leave it out"
        ),
    ] = None

    # How and where to compute
    use_cpu: bool = False
    no_cuda: bool = False
    use_mps_device: Annotated[bool, Refusal("models run on CPU or CUDA here; leave it out")] = False
    bf16: bool | None = None
    fp16: Annotated[
        bool, Refusal("float16 is not computed with here; use bf16=True, or leave both out")
    ] = False
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: _Json = None
    activation_checkpointing: Annotated[bool | None, _RENAMED] = None
    activation_checkpointing_kwargs: Annotated[_Json, _RENAMED] = None
    deepspeed: Annotated[_Json, _ONE_DEVICE] = None
    fsdp: Annotated[str | None, _ONE_DEVICE] = None
    fsdp_config: Annotated[_Json, _ONE_DEVICE] = None
    parallelism_config: Annotated[_Json, _ONE_DEVICE] = None
    accelerator_config: Annotated[_Json, Refusal("accelerate is not used here; leave it out")] = (
        None
    )
    auto_find_batch_size: Annotated[
        bool,
        Refusal(
            "batch sizes are what the settings say; lower per_device_train_batch_size, which "
            "bounds memory and does not change the result"
        ),
    ] = False
    data_seed: int | None = None
    model_adapter_name: Annotated[str | None, Refusal("there is one adapter; leave it out")] = None
    ref_adapter_name: Annotated[
        str | None,
        Refusal(
            "with adapters the reference is the policy without them; to measure the KL to "
            "another model give it as ref_model"
        ),
    ] = None

    # What is kept and shown
    report_to: None | str | list[str] = None  # noqa: RUF036  HfArgumentParser reads this order
    disable_tqdm: bool | None = None
    num_sample_generations: int = 10
    save_strategy: str = "steps"
    save_steps: float = 500
    resume_from_checkpoint: str | None = None
    push_to_hub: Annotated[
        bool,
        Refusal(
            "nothing is uploaded from here; leave it out, and afterwards upload the folder "
            "of trainer.save_model with 'hf upload'"
        ),
    ] = False
    load_best_model_at_end: Annotated[
        bool, Refusal("no evaluation says which model is best; leave it out")
    ] = False

    # For the script alone
    sft_model_path: Annotated[str, FOR_SCRIPTS] = "EleutherAI/pythia-160m"
    reward_model_path: Annotated[str, FOR_SCRIPTS] = "EleutherAI/pythia-160m"
    dataset_num_proc: Annotated[int | None, FOR_SCRIPTS] = None
    do_train: Annotated[bool, FOR_SCRIPTS] = False
    do_eval: Annotated[bool, FOR_SCRIPTS] = False
    do_predict: Annotated[bool, FOR_SCRIPTS] = False

    # Without anything to act on here
    average_tokens_across_devices: Annotated[bool, _ONE_PROCESS] = True
    ddp_backend: Annotated[str | None, _ONE_PROCESS] = None
    ddp_broadcast_buffers: Annotated[bool | None, _ONE_PROCESS] = None
    ddp_bucket_cap_mb: Annotated[int | None, _ONE_PROCESS] = None
    ddp_find_unused_parameters: Annotated[bool | None, _ONE_PROCESS] = None
    ddp_static_graph: Annotated[bool | None, _ONE_PROCESS] = None
    ddp_timeout: Annotated[int, _ONE_PROCESS] = 1800
    ds3_gather_for_generation: Annotated[bool, _ONE_PROCESS] = True
    local_rank: Annotated[int, _ONE_PROCESS] = -1
    log_level_replica: Annotated[str, _ONE_PROCESS] = "warning"
    log_on_each_node: Annotated[bool, _ONE_PROCESS] = True
    save_on_each_node: Annotated[bool, _ONE_PROCESS] = False
    batch_eval_metrics: Annotated[bool, _NO_EVALUATION] = False
    bf16_full_eval: Annotated[bool, _NO_EVALUATION] = False
    eval_accumulation_steps: Annotated[int | None, _NO_EVALUATION] = None
    eval_delay: Annotated[float, _NO_EVALUATION] = 0
    eval_do_concat_batches: Annotated[bool, _NO_EVALUATION] = True
    eval_on_start: Annotated[bool, _NO_EVALUATION] = False
    eval_steps: Annotated[float | None, _NO_EVALUATION] = None
    eval_strategy: Annotated[str, _NO_EVALUATION] = "no"
    eval_use_gather_object: Annotated[bool, _NO_EVALUATION] = False
    fp16_full_eval: Annotated[bool, _NO_EVALUATION] = False
    greater_is_better: Annotated[bool | None, _NO_EVALUATION] = None
    include_for_metrics: Annotated[str | None, _NO_EVALUATION] = None
    label_names: Annotated[str | None, _NO_EVALUATION] = None
    metric_for_best_model: Annotated[str | None, _NO_EVALUATION] = None
    per_device_eval_batch_size: Annotated[int, _NO_EVALUATION] = 8
    prediction_loss_only: Annotated[bool, _NO_EVALUATION] = False
    dataloader_drop_last: Annotated[bool, _ONE_BY_ONE] = False
    dataloader_in_order: Annotated[bool, _ONE_BY_ONE] = True
    dataloader_multiprocessing_context: Annotated[str | None, _ONE_BY_ONE] = None
    dataloader_num_workers: Annotated[int, _ONE_BY_ONE] = 0
    dataloader_persistent_workers: Annotated[bool, _ONE_BY_ONE] = False
    dataloader_pin_memory: Annotated[bool, _ONE_BY_ONE] = True
    dataloader_prefetch_factor: Annotated[int | None, _ONE_BY_ONE] = None
    group_by_length: Annotated[bool, _ONE_BY_ONE] = False
    length_column_name: Annotated[str, _ONE_BY_ONE] = "length"
    remove_unused_columns: Annotated[bool, _ONE_BY_ONE] = True
    train_sampling_strategy: Annotated[str, _ONE_BY_ONE] = "random"
    debug: Annotated[str, _EVERY_STEP] = ""
    include_num_input_tokens_seen: Annotated[str, _EVERY_STEP] = "no"
    include_tokens_per_second: Annotated[bool, _EVERY_STEP] = False
    log_level: Annotated[str, _EVERY_STEP] = "passive"
    logging_dir: Annotated[str | None, _EVERY_STEP] = None
    logging_first_step: Annotated[bool, _EVERY_STEP] = False
    logging_nan_inf_filter: Annotated[bool, _EVERY_STEP] = True
    logging_steps: Annotated[float, _EVERY_STEP] = 10
    logging_strategy: Annotated[str, _EVERY_STEP] = "steps"
    skip_memory_metrics: Annotated[bool, _EVERY_STEP] = True
    hub_always_push: Annotated[bool, _NO_UPLOAD] = False
    hub_model_id: Annotated[str | None, _NO_UPLOAD] = None
    hub_private_repo: Annotated[bool | None, _NO_UPLOAD] = None
    hub_revision: Annotated[str | None, _NO_UPLOAD] = None
    hub_strategy: Annotated[str, _NO_UPLOAD] = "every_save"
    hub_token: Annotated[str | None, _NO_UPLOAD] = None
    project: Annotated[str, _NO_UPLOAD] = "huggingface"
    trackio_bucket_id: Annotated[str | None, _NO_UPLOAD] = None
    trackio_space_id: Annotated[str | None, _NO_UPLOAD] = None
    trackio_static_space_id: Annotated[str | None, _NO_UPLOAD] = None
    overwrite_output_dir: Annotated[
        bool, Remark("each run has a folder of its own in output_dir, so that none is written over")
    ] = False
    enable_jit_checkpoint: Annotated[bool, _WHOLE_CHECKPOINTS] = False
    ignore_data_skip: Annotated[bool, _WHOLE_CHECKPOINTS] = False
    restore_callback_states_from_checkpoint: Annotated[bool, _WHOLE_CHECKPOINTS] = False
    save_only_model: Annotated[bool, _WHOLE_CHECKPOINTS] = False
    save_safetensors: Annotated[bool, _WHOLE_CHECKPOINTS] = True
    save_total_limit: Annotated[int | None, _WHOLE_CHECKPOINTS] = None
    activation_offloading: Annotated[bool, _SPEED_ALONE] = False
    liger_kernel_config: Annotated[_Json, _SPEED_ALONE] = None
    tf32: Annotated[bool | None, _SPEED_ALONE] = None
    torch_compile: Annotated[bool, _SPEED_ALONE] = False
    torch_compile_backend: Annotated[str | None, _SPEED_ALONE] = None
    torch_compile_mode: Annotated[str | None, _SPEED_ALONE] = None
    torch_empty_cache_steps: Annotated[int | None, _SPEED_ALONE] = None
    torchdynamo: Annotated[str | None, _SPEED_ALONE] = None
    use_cache: Annotated[bool, _SPEED_ALONE] = False
    use_liger_kernel: Annotated[bool, _SPEED_ALONE] = False
    full_determinism: Annotated[bool, Remark("the seed alone decides what is drawn")] = False
    vllm_max_model_length: Annotated[
        int | None, Remark("the longest prompt and response_length are what vLLM needs")
    ] = None

    def __new__(cls, *args: Any, **named: Any) -> Self:
        """Refuse unknown names with the nearest one there is."""
        known = [f.name for f in fields(cls)]
        for name in named:
            if name not in known:
                raise ConfigError(f"PPOConfig has no argument '{name}'. {nearest(name, known)}")
        return super().__new__(cls)
