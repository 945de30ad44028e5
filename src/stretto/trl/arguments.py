"""Arguments of TRL's PPO trainer, each turned into a setting, a remark, or a refusal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, Literal

from stretto.config import PRESETS
from stretto.config.sections import MISSING_EOS
from stretto.errors import ConfigError, is_installed, nearest
from stretto.trl.config import OWN_ADAMW, REFUSALS, REMARKS, SETS, PPOConfig

REWARD_MODEL = "model:reward_model"
"""Name of the reward model among the reward sources."""

CORRECTIONS = {
    f"{level}_{kind}": (kind, level)
    for level in ("token", "sequence")
    for kind in ("truncate", "mask")
}
"""Values of ``vllm_importance_sampling_mode``: the kind and the level of importance weights."""

_SCHEDULES = {name: name for name in ("linear", "cosine", "constant")} | {
    "constant_with_warmup": "constant"
}
_TRACKERS = ("tensorboard", "wandb")

CHOICES: dict[str, Collection[str | None]] = {
    "kl_estimator": ("k1", "k3"),
    "lr_scheduler_type": _SCHEDULES,
    "save_strategy": ("no", "steps", "epoch"),
    "stop_token": ("eos", None),
    "vllm_importance_sampling_mode": CORRECTIONS,
    "vllm_mode": ("colocate", "server"),
}
"""Values that an argument may have."""

_COUNTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"),
    *("response_length", "num_ppo_epochs", "local_rollout_forward_batch_size"),
    "vllm_tensor_parallel_size",
)
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cliprange_value": (lambda value: value > 0, "must be above 0"),
    "gradient_checkpointing_kwargs": (
        lambda value: value in (None, {"use_reentrant": False}),
        "recomputation is not re-entrant here; leave it out",
    ),
    "missing_eos_penalty": (
        lambda value: value is None or value > 0,
        "is taken off the score and must be above 0, or None",
    ),
    "optim": (lambda value: value in _OPTIMIZERS, OWN_ADAMW),
    "vf_coef": (lambda value: value > 0, "must be above 0: the value model has to be trained"),
    **dict.fromkeys(_COUNTS, (lambda value: value >= 1, "must be 1 or more")),
}
"""What else an argument must fulfil, and what a refusal of other values says."""

_DEFAULTS = {f.name: f.default for f in fields(PPOConfig)}


def check(args: PPOConfig) -> None:
    """Refuse what cannot be done here, whatever the models and the data are."""
    for name, why in REFUSALS.items():
        _require(not _is_set(args, name), args, name, why, "argument-refused")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ConfigError(
            f"{processes} processes were started (WORLD_SIZE), and training runs in one process: "
            "start the script with 'python', not with torchrun or 'accelerate launch'",
            "several-processes",
        )
    for name, choices in CHOICES.items():
        rule = f"must be one of {', '.join(map(repr, choices))}"
        _require(_plain(getattr(args, name)) in choices, args, name, rule)
    for name, (holds, rule) in RULES.items():
        _require(holds(getattr(args, name)), args, name, rule)
    order = f"the order of the prompts follows seed = {args.seed}; leave data_seed out"
    _require(args.data_seed in (None, args.seed), args, "data_seed", order)
    both = args.stop_token and args.stop_token_id is not None
    _require_one(not both, args, "stop_token", "stop_token_id", "what ends a response")


def derive_sizes(args: PPOConfig, rows: int) -> None:
    """Write the sizes of a run on ``rows`` prompts into the arguments, where scripts read them.

    As of TRL 0.17 a batch is ``per_device_train_batch_size * gradient_accumulation_steps``, and
    ``num_mini_batches`` splits it. Before, it was ``num_mini_batches`` times as large, which
    ``batch_size`` can ask for.
    """
    unit = args.per_device_train_batch_size * args.gradient_accumulation_steps
    most = unit * args.num_mini_batches
    batch = args.batch_size or unit
    if batch not in (unit, most):
        raise ConfigError(
            f"batch_size = {batch}: TRL derived it as per_device_train_batch_size * "
            f"gradient_accumulation_steps = {unit}, until 0.16 times num_mini_batches = {most}; "
            "leave it out, or change those",
            "argument-derived",
        )
    if batch % args.num_mini_batches:
        raise ConfigError(
            f"num_mini_batches = {args.num_mini_batches} does not divide the batch of {batch} "
            "responses (per_device_train_batch_size * gradient_accumulation_steps); choose a "
            "divisor",
            "batch-not-minibatches",
        )
    episodes = args.total_episodes
    if args.max_steps > 0:
        same = episodes in (None, args.max_steps * batch)
        _require_one(same, args, "max_steps", "total_episodes", "how long to train")
        episodes = args.max_steps * batch
    elif episodes is None:
        episodes = int(args.num_train_epochs * rows)
    if episodes < 1:
        remedy = "raise total_episodes or num_train_epochs"
        raise ConfigError(f"{episodes} responses are asked for in all; {remedy}", "no-episodes")
    minibatch = batch // args.num_mini_batches
    derived = {
        "world_size": 1,
        "num_total_batches": math.ceil(episodes / batch),  # the last may go beyond the episodes
        "micro_batch_size": args.per_device_train_batch_size,
        **dict.fromkeys(("local_batch_size", "batch_size"), batch),
        **dict.fromkeys(("local_mini_batch_size", "mini_batch_size"), minibatch),
        "total_episodes": episodes,
    }
    for name, value in derived.items():
        if getattr(args, name) not in (None, value):
            raise ConfigError(
                f"{name} = {getattr(args, name)} is derived from other arguments, and comes out as "
                f"{value}; leave it out",
                "argument-derived",
            )
    for name, value in derived.items():
        setattr(args, name, value)


def notes(args: PPOConfig) -> list[str]:
    """Return notes on the derived sizes, and on arguments that are set and have no effect here."""
    factors = f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps}"
    split = ""
    if args.num_mini_batches > 1:
        split = (
            f", {args.num_mini_batches} mini-batches of {args.mini_batch_size} (TRL until 0.16 "
            "made the batch num_mini_batches times as large; batch_size asks for that)"
        )
    sizes = (
        f"batch {args.batch_size} = per_device_train_batch_size x gradient_accumulation_steps = "
        f"{factors}{split}; {args.total_episodes} episodes: {args.num_total_batches} steps"
    )
    reasons = dict(REMARKS)
    if not args.use_vllm:
        vllm = (name for name in _DEFAULTS if name.startswith("vllm_"))
        reasons |= dict.fromkeys(vllm, "use_vllm is False")
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        if _is_set(args, name):
            by_reason.setdefault(why, []).append(name)
    idle = [f"without effect: {', '.join(names)} ({why})" for why, names in by_reason.items()]
    return [sizes, *idle]


def settings(
    args: PPOConfig, rows: int, longest: int, dtype: Literal["float32", "bfloat16"]
) -> dict[str, Any]:
    """Return the settings of a run, as a recipe has them, but for the models' names. The sizes have
    been derived, and the longest of ``rows`` prompts has ``longest`` tokens.
    """
    batch, steps = args.batch_size or 0, args.num_total_batches or 0
    epoch = math.ceil(rows / batch)
    checkpoints = {"no": 0, "steps": _count(args.save_steps, steps), "epoch": epoch}
    stops = bool(args.stop_token) or args.stop_token_id is not None
    penalty = args.missing_eos_penalty
    own_penalty = penalty is not None and not stops
    found: dict[str, Any] = {
        "steps": steps,
        "out": str(args.output_dir),
        # vLLM needs a process of its own.
        "runtime": "local" if args.use_vllm and args.runtime == "inline" else args.runtime,
        "schedule": _schedule(args),
        "model.dtype": dtype,
        "model.device": "cpu" if args.use_cpu or args.no_cuda else "auto",
        "model.gradient_checkpointing": bool(args.gradient_checkpointing),
        "task.kind": "dataset",
        "task.name": "train_dataset",
        "task.chat": "off",
        "task.max_prompt_tokens": longest,
        "reward.sources": (REWARD_MODEL, MISSING_EOS) if own_penalty else (REWARD_MODEL,),
        "reward.missing_eos": "subtract" if stops and penalty is not None else "off",
        "reward.missing_eos_penalty": penalty or 0.0,
        "rollout.batch": batch,
        "algorithm.name": "ppo",
        "algorithm.kl_in": "reward",
        "training.lr": args.learning_rate,
        "training.critic_lr": args.learning_rate,
        "training.lr_schedule": _SCHEDULES[_plain(args.lr_scheduler_type)],
        "training.warmup_steps": _warmup(args, steps),
        "training.betas": (args.adam_beta1, args.adam_beta2),
        "training.grad_clip": args.max_grad_norm or 0.0,
        "training.microbatch_tokens": args.per_device_train_batch_size
        * (longest + args.response_length),
        "observe.progress": "plain" if args.disable_tqdm else "auto",
        "observe.trackers": _trackers(args),
        "observe.samples": 4 if args.num_sample_generations else 0,
        "observe.checkpoint_minutes": 0.0,  # save_strategy says when
        "observe.checkpoint_every": checkpoints[_plain(args.save_strategy)],
        **_vllm(args),
    }
    found |= {setting: getattr(args, name) for name, setting in SETS.items()}
    nested: dict[str, Any] = {}
    for name, value in found.items():
        section, dot, key = name.partition(".")
        nested |= {section: nested.get(section, {}) | {key: value} if dot else value}
    return nested


def _vllm(args: PPOConfig) -> dict[str, Any]:
    """Return the settings of a run that generates with vLLM; none without it.

    vLLM is started with the run, in a process of its own, whatever ``vllm_mode`` says. With
    ``"colocate"`` it is given the share of the GPU that ``vllm_gpu_memory_utilization`` names.
    """
    if not args.use_vllm:
        return {}
    options: dict[str, Any] = {"model_impl": args.vllm_model_impl}
    if args.vllm_enable_sleep_mode:
        options["enable_sleep_mode"] = True
    if args.vllm_mode == "colocate":
        options["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
    found: dict[str, Any] = {"rollout.engine": "vllm", "rollout.engine_args": options}
    if args.vllm_tensor_parallel_size > 1:
        generator = {"roles": ("generator",), "tp": args.vllm_tensor_parallel_size}
        found["cluster.processes"] = [generator]
    if args.vllm_importance_sampling_correction:
        kind, level = CORRECTIONS[args.vllm_importance_sampling_mode]
        found |= {
            "algorithm.old_policy": "proximal",
            "algorithm.correction": kind,
            "algorithm.correction_level": level,
            "algorithm.correction_cap": args.vllm_importance_sampling_cap,
        }
    return found


def _schedule(args: PPOConfig) -> dict[str, Any]:
    schedule = _plain(args.schedule)
    if isinstance(schedule, str) and schedule.lstrip().startswith("{"):
        try:
            schedule = json.loads(schedule)
        except json.JSONDecodeError as error:
            message = f"schedule = {schedule!r} is not valid JSON: {error}"
            raise ConfigError(message, "schedule-not-json") from error
    if schedule is None or isinstance(schedule, Mapping):
        return dict(schedule or {})
    if schedule not in PRESETS:
        message = f"schedule = {schedule!r} is no preset. {nearest(str(schedule), PRESETS)}"
        raise ConfigError(message, "unknown-preset")
    return {"preset": schedule}


def _warmup(args: PPOConfig, steps: int) -> int:
    both = args.warmup_steps and args.warmup_ratio
    _require_one(not both, args, "warmup_steps", "warmup_ratio", "how long the warm-up is")
    return _count(args.warmup_steps or args.warmup_ratio, steps)


def _count(value: float, total: int) -> int:
    """Return a count; below 1 it is a share of all, as in transformers 5."""
    return math.ceil(value * total) if 0 < value < 1 else int(value)


def _trackers(args: PPOConfig) -> tuple[str, ...]:
    trackers = args.report_to
    names = [trackers] if isinstance(trackers, str) else list(trackers or ())
    if names == ["all"]:
        return tuple(name for name in _TRACKERS if is_installed(name))
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(
                f"report_to = '{name}': figures go to tensorboard and wandb, and always to "
                "metrics.jsonl in the run's folder; choose of those, or 'none'",
                "unknown-tracker",
            )
    return tuple(names)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _require(
    holds: bool, args: PPOConfig, name: str, rule: str, code: str = "argument-value"
) -> None:
    if not holds:
        raise ConfigError(f"{name} = {getattr(args, name)!r}: {rule}", code)


def _require_one(holds: bool, args: PPOConfig, name: str, other: str, what: str) -> None:
    if not holds:
        values = f"{name} = {getattr(args, name)!r} and {other} = {getattr(args, other)!r}"
        raise ConfigError(f"{values} both say {what}; leave one of them out", "arguments-compete")


def _is_set(args: PPOConfig, name: str) -> bool:
    return getattr(args, name) not in (_DEFAULTS[name], None, "", [], {})
