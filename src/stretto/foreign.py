"""Names of settings in TRL, verl, OpenRLHF, peft and transformers, for advice in errors. Advice
quotes settings for :mod:`stretto.interfaces`.
"""

from __future__ import annotations

from collections.abc import Mapping

RENAMED = {
    "algorithm.group_std": "algorithm.scale_rewards",
    "task.prompt_column": "task.columns",
    "task.answer_column": "task.columns",
    "schedule.batches_per_handover": "schedule.weight_sync_interval",
    "cluster.handover_timeout_s": "cluster.weight_sync_timeout_s",
    "cluster.processes.fsdp": "cluster.processes.layout",
    "cluster.processes.tp": "cluster.processes.layout",
    "pipeline.actor_stages": "pipeline.stage_counts",
    "pipeline.critic_stages": "pipeline.stage_counts",
}
"""Names of settings in earlier versions, with their present names."""

_ELSEWHERE = {
    "algorithm.clip": "cliprange clip_ratio clip_ratio_low eps_clip epsilon",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "algorithm.entropy_coef": "entropy_coeff",
    "algorithm.kl_coef": "beta kl_beta init_kl_coef kl_loss_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty",
    "algorithm.lam": "lambd gae_lambda",
    "algorithm.name": "loss_type adv_estimator advantage_estimator algorithm algo",
    "algorithm.value_clip": "cliprange_value value_clip_range",
    "data.max_tokens": "max_seq_length max_seq_len max_length",
    "data.name": "dataset dataset_name train_dataset train_files data_path",
    "environment.sources": "environment_factory tools",
    "model.device": "device_map use_cpu",
    "model.dtype": "torch_dtype precision mixed_precision",
    "model.gradient_checkpointing": "use_gradient_checkpointing enable_gradient_checkpointing",
    "model.load_in_4bit": "qlora",
    "model.lora_alpha": "alpha",
    "model.lora_rank": "lora_r rank r lora use_lora use_peft peft_config",
    "model.lora_targets": "lora_target_modules target_modules",
    "model.name": "model model_name model_name_or_path pretrain model_path path",
    "observe.checkpoint_every": "save_steps save_freq save_strategy",
    "observe.eval_every": "eval_steps test_freq eval_strategy evaluation_strategy do_eval",
    "observe.eval_patience": "early_stopping_patience",
    "observe.samples": "log_completions num_completions_to_print",
    "observe.trackers": "report_to logger",
    "out": "output_dir output outdir save_path default_local_dir",
    "reward.sources": "reward reward_funcs reward_model reward_model_path remote_rm_url "
    "reward_pretrain",
    "reward.weights": "reward_weights",
    "rollout.batch": "batch_size train_batch_size per_device_train_batch_size rollout_batch_size",
    "batch": "batch_size train_batch_size per_device_train_batch_size",
    "rollout.engine": "use_vllm vllm vllm_mode",
    "rollout.engine_args": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "rollout.max_new_tokens": "max_completion_length response_length max_response_length "
    "generate_max_len max_tokens",
    "rollout.max_skipped": "max_num_gen_batches dynamic_sampling_max_gen_batches "
    "max_sample_batches",
    "rollout.samples_per_prompt": "num_generations n n_samples_per_prompt rloo_k group_size",
    "rollout.skip_equal_groups": "filter_groups dynamic_sampling use_dynamic_sampling "
    "dynamic_filtering dynamic_filtering_enable",
    "rollout.slots": "local_rollout_forward_batch_size",
    "rollout.stop": "stop_sequences stop_strings",
    "schedule.preset": "schedule",
    "seed": "data_seed random_seed",
    "steps": "max_steps total_training_steps num_steps train_steps",
    "task.columns": "input_key prompt_key label_key answer_key",
    "task.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "task.shuffle": "shuffle_dataset",
    "task.name": "dataset dataset_name train_dataset prompt_data train_files data task",
    "task.system": "system_prompt",
    "task.template_arguments": "apply_chat_template_kwargs chat_template_kwargs",
    "training.betas": "adam_beta1 adam_beta2",
    "training.critic_lr": "critic_learning_rate",
    "training.epochs": "num_ppo_epochs ppo_epochs num_iterations max_epochs num_train_epochs",
    "training.grad_clip": "max_grad_norm max_norm",
    "training.lr": "learning_rate actor_learning_rate",
    "training.lr_schedule": "lr_scheduler_type lr_scheduler lr_warmup_style",
    "training.microbatch_tokens": "gradient_accumulation_steps micro_train_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "training.minibatches": "num_mini_batches ppo_mini_batch_size",
    "training.optim": "optimizer",
}

ELSEWHERE: dict[str, list[str]] = {}
"""Settings by the last part of their names elsewhere. A command takes the first that it has."""
for _ours, _names in _ELSEWHERE.items():
    for _name in _names.split():
        ELSEWHERE.setdefault(_name, []).append(_ours)


def spellings(name: str) -> list[str]:
    """Return possible names of a setting in options and keywords, its own last part last."""
    return [name, *_ELSEWHERE.get(name, "").split(), name.rpartition(".")[2]]


_ADVICE = {
    "Write `model.dtype = bfloat16`.": "bf16 bfloat16",
    "float16 is not offered. `model.dtype` takes bfloat16 or float32.": "fp16 float16",
    "Write `observe.trackers = wandb`.": "wandb use_wandb",
    "Write `observe.trackers = tensorboard`.": "tensorboard use_tensorboard",
    "Write `rollout.engine = vllm`.": "use_vllm vllm",
    "Write `model.device = cpu`.": "cpu no_cuda use_cpu",
    "Write `model.device = cuda`.": "gpu cuda",
    "Write `observe.progress = off`.": "no_progress disable_tqdm quiet silent",
    "8-bit weights are not offered, 4-bit ones are: `model.load_in_4bit`.": "load_in_8bit",
    "Reinforcement learning on several GPUs needs tables [[cluster.processes]] in a .toml file; "
    "without them one GPU does all. `stretto plan RECIPE --gpus N` finds a layout.": "gpus "
    "num_gpus n_gpus ngpus n_gpus_per_node nproc_per_node num_processes world_size nnodes nodes "
    "tensor_parallel_size tensor_model_parallel_size tp tp_size fsdp deepspeed ds_config "
    "zero_stage accelerate_config",
    "A .toml file with settings stands in place of the recipe, before all options.": "config "
    "config_file config_path cfg recipe",
    "`stretto recipes` lists the recipes.": "list list_recipes recipes",
    "A run goes on with `stretto train --resume RUN_DIR`.": "resume_from_checkpoint "
    "resume resume_from resume_mode load_checkpoint_path",
    "Nothing is uploaded: the folder model of a run has all files of a hub model.": "push_to_hub "
    "hub_model_id hub_token hub_strategy",
    "Every step is logged, to metrics.jsonl in the run's folder.": "logging_steps log_interval "
    "logging_strategy log_every logging_first_step",
    "A run's folder is named after its recipe, with the next free number; `out` is the folder "
    "that it is made in.": "run_name experiment_name project_name exp_name logging_dir",
    "The number of warm-up steps is set, not a share: `training.warmup_steps`.": "warmup_ratio "
    "lr_warmup_ratio lr_warmup_steps_ratio",
    "The tokenizer is the model's own.": "tokenizer tokenizer_name tokenizer_name_or_path "
    "tokenizer_path processing_class",
}

ADVICE: Mapping[str, str] = {n: text for text, names in _ADVICE.items() for n in names.split()}
"""Advice on names that match no setting, or a setting with a certain value."""

OF_RUNS: Mapping[str, str] = {
    "num_train_epochs": "The number of steps is set, not of passes over the rows: `steps`."
}
"""Advice for reinforcement learning only."""
