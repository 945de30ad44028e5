"""Advice on unsupported names of TRL: arguments of earlier releases and overridden methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch

from stretto.errors import ConfigError, nearest
from stretto.foreign import ELSEWHERE, spellings
from stretto.interfaces import SETTINGS

_SAME = (
    "base_model model_name sft_model_path, cliprange epsilon, evaluation_strategy eval_strategy, "
    "exp_name run_name, forward_batch_size local_rollout_forward_batch_size, "
    "gpu_memory_utilization vllm_gpu_memory_utilization, kl_coef init_kl_coef beta, "
    "kl_penalty kl_estimator, log_with report_to, max_completion_length max_new_tokens "
    "response_length, non_eos_penalty penalty_reward_value missing_eos_penalty, num_mini_batches "
    "steps_per_generation, num_ppo_epochs ppo_epochs num_iterations, per_gpu_eval_batch_size "
    "per_device_eval_batch_size, per_gpu_train_batch_size per_device_train_batch_size, rloo_k "
    "num_generations, use_liger_loss use_liger_kernel, vllm_max_model_len vllm_max_model_length, "
    "wandb_log_unique_prompts log_unique_prompts, config args, judge reward_model reward_funcs, "
    "policy model, ref_policy ref_model, tokenizer processing_class"
)
"""Groups of names for one argument across releases, configs and trainers of TRL and transformers.
"""

_GONE = {
    "a reward model or a judge is given to the trainer as reward_funcs": "judge reward_model "
    "reward_model_path",
    "a reward function can do it: give the penalty if completion_ids lacks the end "
    "token": "missing_eos_penalty non_eos_penalty penalty_reward_value",
    "a reward function can do it": "normalize_reward score_clip use_score_norm use_score_scaling "
    "whiten_rewards",
    "it is derived from per_device_train_batch_size and "
    "gradient_accumulation_steps": "*backward_batch_size *batch_size num_total_batches world_size",
    "responses end with the tokens of the model's generation_config": "stop_token stop_token_id",
    "prompts are read whole; drop long rows with dataset.filter": "max_prompt_length",
    "responses are sampled from the distribution that is "
    "trained": "vllm_guided_decoding_regex vllm_sampling_params",
    "samples.jsonl in the run's folder has responses of each step": "num_sample_generations",
    "max_steps says how long to train, in optimizer steps of per_device_train_batch_size x "
    "gradient_accumulation_steps responses": "steps total_episodes",
    "stretto.train has it as algorithm.kl_target and "
    "algorithm.kl_horizon": "adap_kl_ctrl horizon target",
    "the KL is summed over the tokens of a response": "token_level_kl",
    "this algorithm has no value model": "cliprange_value gamma lam vf_coef",
    "vLLM is started with the run, in a process of its own, and caches "
    "prefixes": "vllm_device vllm_dtype vllm_enable_prefix_caching",
    "it has no counterpart here, and the present TRL and transformers lack it, "
    "too": "_n_gpu accelerator_kwargs base_model compare_steps dataset_num_proc dispatch_batches "
    "early_stopping fp16_backend fp16_opt_level fsdp_min_num_params "
    "fsdp_transformer_layer_cls_to_wrap half_precision_backend include_inputs_for_metrics "
    "is_encoder_decoder is_peft_model jit_mode_eval kl_penalty model_name mp_parameters "
    "normalize_advantage optimize_*_cache past_index project_kwargs push_to_hub_* query_dataset "
    "ratio_threshold ray_scope sanity_check sft_model_path split_batches target_kl task_name tpu_* "
    "tracker_kwargs tracker_project_name unsloth_* use_ipex use_legacy_prediction_loop "
    "use_transformers_*",
}
"""Advice to the arguments that TRL had in some release or config."""


def require_known(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for unknown arguments, with advice on TRL's former names."""
    known = [name for name in known if name != "self"]
    for name in given:
        if name in known:
            continue
        same = next((names for names in map(str.split, _SAME.split(", ")) if name in names), [])
        if present := next((other for other in same if other in known), ""):
            advice = f"It is called '{present}' now"
        elif why := _matching(_GONE, name):
            advice = f"Leave it out: {why}"
        elif meant := _settings(name):
            present = next((n for setting in meant for n in spellings(setting) if n in known), "")
            advice = f"It is called '{present}' here" if present else "Leave it out"
        else:
            advice = nearest(name, known)
        raise ConfigError(f"{owner} has no argument '{name}'. {advice}", "unknown-argument")


def _settings(name: str) -> list[str]:
    """Return the settings that match a name of this or another library."""
    return [*ELSEWHERE.get(name, ()), *(s for s in sorted(SETTINGS) if s.endswith(f".{name}"))]


def require_named(trainer: type, named: Iterable[str]) -> None:
    """Raise ConfigError for keyword arguments that a trainer's constructor lacks."""
    parameters = inspect.signature(trainer.__init__).parameters  # type: ignore[misc]
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        require_known(trainer.__name__, named, parameters)


_METHODS = {
    "rewards come from reward_funcs; write a function": "_calculate_rewards "
    "_calculate_rewards_from_functions",
    "the loss is that of the algorithm; choose loss_type, or name your own Algorithm there as "
    "'file.py:name' (docs/algorithms.md)": "_compute_loss _forward _get_last_hidden_state "
    "_get_per_token_logps _get_per_token_logps_and_entropies beta compute_liger_loss "
    "get_gamma_weights get_high_entropy_mask get_off_policy_mask get_sapo_token_loss "
    "null_ref_context compute_loss* training_step",
    "responses come from the engine; give tools or environment_factory": "_generate "
    "_generate_and_score_completions _generate_single_turn _generate_vllm _generate_vllm_colocate "
    "_generate_vllm_server _get_tool_suffix_ids _get_vision_token_ids _tokenize_prompts "
    "_tool_call_loop _truncate_at_image_boundary",
    "rows are read as they are; change them by dataset.map, and for an order of their own set "
    "shuffle_dataset=False": "process_vision_row tokenize_row get_batch_samples get_*_dataloader "
    "_get_*_sampler _prepare_input* _remove_unused_columns _set_signature_columns_if_needed",
    "the optimizer is AdamW; set optim, learning_rate, lr_scheduler_type and "
    "warmup_steps": "create_optimizer* create_scheduler get_decay_parameter_names get_optimizer*",
    "vLLM gets new weights by itself": "_fix_param_name_to_vllm _move_model_to_vllm "
    "_move_model_to_vllm_inner _sync_fsdp1_params_to_vllm _sync_fsdp2_params_to_vllm "
    "_sync_fsdp_params_to_vllm",
    "write a TrainerCallback": "_enable_gradient_checkpointing _log_completion_extra _log_metric "
    "_send_telemetry *",
}
"""Advice to overridden methods (some patterns) of TRL 0.12 to 1.16 and ``transformers.Trainer``."""


def require_called(trainer: type) -> None:
    """Raise ConfigError for a subclass that overrides a method of TRL's that is never called."""
    ours = [part for part in trainer.__mro__ if part.__module__.startswith("stretto.trl.")]
    names = {name for part in trainer.__mro__ if part not in ours for name in vars(part)}
    if not (names := names.difference(dir(ours[0]))):
        return
    from transformers import Trainer

    method_names = " ".join(_METHODS.values()).split()
    for name in sorted(names):
        if name in method_names or callable(getattr(Trainer, name, None)):
            raise ConfigError(
                f"{trainer.__name__}.{name} would never be called, as training here does not go "
                f"through TRL's {name}. Leave it out: {_matching(_METHODS, name)}",
                "method-never-called",
            )


def _matching(table: Mapping[str, str], name: str) -> str:
    rows = ((advice, names.split()) for advice, names in table.items())
    return next((advice for advice, ps in rows if any(fnmatch(name, p) for p in ps)), "")
