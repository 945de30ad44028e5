"""Arguments of TRL's that no setting corresponds to: remarks and refusals."""

from __future__ import annotations

ONE_PROCESS = "training runs in one process"
_NO_EVALUATION = "no evaluation runs within training, as none did in TRL's PPO trainer"
_READ_ONE_BY_ONE = "rows are read one at a time, and nothing is padded to be generated from"
_EVERY_STEP = "every step is recorded in metrics.jsonl and shown"
_NO_UPLOAD = "nothing is uploaded"

_REMARKS = {
    ONE_PROCESS: "average_tokens_across_devices ddp_backend ddp_broadcast_buffers "
    "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout "
    "ds3_gather_for_generation local_rank log_level_replica log_on_each_node save_on_each_node",
    _NO_EVALUATION: "batch_eval_metrics bf16_full_eval eval_accumulation_steps eval_delay "
    "eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object "
    "fp16_full_eval greater_is_better include_for_metrics label_names metric_for_best_model "
    "prediction_loss_only per_device_eval_batch_size",
    _READ_ONE_BY_ONE: "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context "
    "dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory "
    "dataloader_prefetch_factor group_by_length length_column_name remove_unused_columns "
    "train_sampling_strategy",
    _EVERY_STEP: "include_num_input_tokens_seen include_tokens_per_second log_level logging_dir "
    "logging_first_step logging_nan_inf_filter logging_steps logging_strategy skip_memory_metrics "
    "debug",
    _NO_UPLOAD: "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token "
    "project trackio_bucket_id trackio_space_id trackio_static_space_id",
    "each run has a folder of its own in output_dir, so that none is written over": (
        "overwrite_output_dir"
    ),
    "the newest checkpoint is kept, with all that a run needs to go on, and weights are always "
    "safetensors": "save_total_limit save_only_model save_safetensors enable_jit_checkpoint "
    "ignore_data_skip restore_callback_states_from_checkpoint",
    "it would change the speed or the memory alone, and the engine and the learner here have their "
    "own ways": "activation_offloading liger_kernel_config tf32 torch_compile "
    "torch_compile_backend torch_compile_mode torch_empty_cache_steps torchdynamo use_cache "
    "use_liger_kernel",
    "the seed alone decides what is drawn": "full_determinism",
    "the longest prompt and response_length are what vLLM needs": "vllm_max_model_length",
}
REMARKS = {name: why for why, names in _REMARKS.items() for name in names.split()}
"""Arguments that have nothing to act on here, and why. Said at the start where one is set."""

_ONE_DEVICE = (
    "training runs on one device here; leave it out, and where memory is short use peft_config, "
    "gradient_checkpointing and a small per_device_train_batch_size"
)
_OWN_SERVER = "vLLM is started with the run, in a process of its own; leave it out"
ADAMW = "the learner has its own AdamW on float32 masters; leave it out"
REFUSALS = {
    "lr_scheduler_kwargs": "the learning-rate schedules here take no further arguments; leave it "
    "out",
    "adam_epsilon": "AdamW's epsilon is 1e-8 here; leave it out",
    "optim_args": ADAMW,
    "optim_target_modules": ADAMW,
    "adafactor": ADAMW,
    "label_smoothing_factor": "PPO's losses have no labels to smooth; leave it out",
    "neftune_noise_alpha": "noise in the embeddings would make the policy that is trained another "
    "than the one that sampled; leave it out",
    "use_mps_device": "models run on CPU or CUDA here; leave it out",
    "fp16": "float16 is not computed with here; use bf16=True, or leave both out",
    "activation_checkpointing": "say gradient_checkpointing instead",
    "activation_checkpointing_kwargs": "say gradient_checkpointing instead",
    "deepspeed": _ONE_DEVICE,
    "fsdp": _ONE_DEVICE,
    "fsdp_config": _ONE_DEVICE,
    "parallelism_config": _ONE_DEVICE,
    "accelerator_config": "accelerate is not used here; leave it out",
    "auto_find_batch_size": "batch sizes are what the settings say; lower "
    "per_device_train_batch_size, which bounds memory and does not change the result",
    "model_adapter_name": "there is one adapter; leave it out",
    "ref_adapter_name": "with adapters the reference is the policy without them; to measure the KL "
    "to another model give it as ref_model",
    "push_to_hub": "nothing is uploaded from here; leave it out, and afterwards upload the folder "
    "of trainer.save_model with 'hf upload'",
    "vllm_structured_outputs_regex": "log-probabilities would be of another distribution than the "
    "learner's; leave it out",
    "vllm_server_base_url": _OWN_SERVER,
    "vllm_server_host": _OWN_SERVER,
    "vllm_server_port": _OWN_SERVER,
    "vllm_server_timeout": _OWN_SERVER,
    "vllm_group_port": _OWN_SERVER,
    "load_best_model_at_end": "no evaluation says which model is best; leave it out",
}
"""Arguments that are refused where they are set, and the reason with the remedy."""

FOR_SCRIPTS = frozenset(
    {
        "sft_model_path",
        "reward_model_path",
        "dataset_num_proc",
        "do_train",
        "do_eval",
        "do_predict",
    }
)
"""Arguments that TRL's trainer did not look at either; the script does."""
