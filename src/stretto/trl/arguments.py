"""Translates arguments of TRL's trainers into settings, notes and errors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, Literal

from stretto import outside
from stretto.config import PRESETS
from stretto.config.sections import ARGUMENTS, TRACKERS, wrong_arguments
from stretto.errors import ConfigError, is_installed, nearest
from stretto.trl.config import (
    OPTIMIZERS,
    OTHER_TRACKERS,
    REFUSALS,
    REMARKS,
    SETS,
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RLOOConfig,
    TrlConfig,
)

CORRECTIONS = {
    f"{level}_{kind}": (kind, level)
    for level in ("token", "sequence")
    for kind in ("truncate", "mask")
}
"""``vllm_importance_sampling_mode`` to (kind, level) of the importance weights."""

_SCHEDULES = {name: name for name in ("linear", "cosine", "constant")} | {
    "constant_with_warmup": "constant"
}
_SCALES = {"group": "group", "batch": "batch", "none": "none", True: "group", False: "none"}
_SAMPLING = ("do_sample", "min_p", "repetition_penalty", "top_k", "top_p")

AGGREGATIONS = {
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "grpo": "sequence_mean",
    "dr_grpo": "fixed_length",
    "luspo": "sequence_sum",
}
"""GRPO's ``loss_type`` to ``algorithm.aggregation``."""

CHOICES: dict[str, Collection[Any]] = {
    "eval_strategy": ("no", "steps", "epoch"),
    "importance_sampling_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k3"),
    "lr_scheduler_type": _SCHEDULES,
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "optim": OPTIMIZERS,
    "router_aux_loss_coef": (None, 0.0),
    "save_strategy": ("no", "steps", "epoch"),
    "scale_rewards": _SCALES,
    "stop_token": ("eos", None),
    "vllm_importance_sampling_mode": CORRECTIONS,
    "vllm_mode": ("colocate", "server"),
}
"""Allowed values of arguments. A mapping has the value of the setting for each."""

_COUNTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"),
    *("response_length", "num_ppo_epochs", "local_rollout_forward_batch_size"),
    *("vllm_tensor_parallel_size", "num_iterations", "max_completion_length", "max_new_tokens"),
)
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cliprange_value": (lambda value: value > 0, "must be above 0"),
    "beta": (lambda value: len(set(_listed(value))) == 1, "beta is one number for all epochs here"),
    "missing_eos_penalty": (
        lambda value: value is None or value > 0,
        "is taken off the score and must be above 0, or None",
    ),
    "max_tool_calling_iterations": (
        lambda value: value is None or value >= 0,
        "is a number of turns, or None for no limit",
    ),
    "num_generations": (lambda value: value >= 2, "a response is compared with others; 2 or more"),
    "vf_coef": (lambda value: value > 0, "must be above 0: the value model has to be trained"),
    **dict.fromkeys(_COUNTS, (lambda value: value >= 1, "must be 1 or more")),
}
"""Further checks of arguments, each with the rule that its error message states."""


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes of a run.

    Attributes:
        batch: responses per step.
        minibatches: parts of a batch.
        updates: TRL's steps in one of ours. TRL counts optimizer steps, except in PPO (1 here).
        rows: prompts in the dataset, 0 if its length is unknown.
    """

    batch: int
    steps: int
    minibatches: int
    updates: int
    rows: int


def check(args: TrlConfig) -> None:
    """Raise ConfigError for unsupported arguments, whatever the models and the data are."""
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
        if not hasattr(args, name):
            continue
        rule = f"must be one of {', '.join(map(repr, choices))}"
        _require(_plain(getattr(args, name)) in [*choices], args, name, rule)
    for name, (holds, rule) in RULES.items():
        if hasattr(args, name):
            _require(holds(getattr(args, name)), args, name, rule)
    order = f"the order of the prompts follows seed = {args.seed}; leave data_seed out"
    _require(args.data_seed in (None, args.seed), args, "data_seed", order)
    if isinstance(args, PPOConfig):
        both = args.stop_token and args.stop_token_id is not None
        _require_one(not both, args, "stop_token", "stop_token_id", "what ends a response")
    elif isinstance(args, GRPOConfig):
        cispo = args.loss_type == "cispo"
        types = f"must be one of {', '.join(map(repr, AGGREGATIONS))}, or your own 'file.py:name'"
        is_supported = args.loss_type in AGGREGATIONS or bool(outside.parts(args.loss_type))
        _require(is_supported, args, "loss_type", types)
        above = "is the largest ratio of 'cispo', which is 1 on the policy's own data; 5.0 is usual"
        _require(not cispo or (args.epsilon_high or 0) > 1, args, "epsilon_high", above)
        _require(not (cispo and args.delta), args, "delta", "has no effect on 'cispo'")
    elif isinstance(args, OnlineDPOConfig):
        _require(args.loss_type == "sigmoid", args, "loss_type", "must be 'sigmoid'")


def fill_in_sizes(args: TrlConfig, rows: int) -> RunSizes:
    """Write a run's sizes to ``args``, for scripts, and return them. ``rows`` is 0 if unknown."""
    if isinstance(args, PPOConfig):
        return _fill_in_ppo_sizes(args, rows)
    unit = args.per_device_train_batch_size * args.gradient_accumulation_steps
    minibatches = 1
    group = 2
    epochs = 1
    if isinstance(args, GRPOConfig | RLOOConfig):
        minibatches, group = _fill_in_generation(args), args.num_generations
        epochs = args.num_iterations
        batch = unit * minibatches
    else:
        batch = unit * group  # per_device_train_batch_size counts prompts
    updates = minibatches * epochs
    if args.max_steps > 0:
        steps = math.ceil(args.max_steps / updates)
    elif rows:
        steps = math.ceil(args.num_train_epochs * max(rows * group // batch, 1))
    else:
        raise ConfigError(
            "train_dataset does not tell its length, which num_train_epochs needs; set max_steps",
            "no-length",
        )
    return RunSizes(batch, steps, minibatches, updates, rows)


def _fill_in_generation(args: GRPOConfig | RLOOConfig) -> int:
    """Write the generation sizes to ``args``. Return the number of updates per batch.

    TRL may generate the batch of one update in several parts. They are one batch here, because all
    parts are sampled with the same weights.
    """
    size, unit = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps, batch = args.steps_per_generation, args.generation_batch_size
    same = steps is None or batch in (None, steps * size)
    _require_one(same, args, "steps_per_generation", "generation_batch_size", "what is generated")
    if steps is None:
        steps = unit if batch is None else batch // size
    batch = steps * size if batch is None else batch
    parts = steps < unit and unit % steps == 0 and args.num_iterations == 1
    is_multiple = parts or steps % unit == 0
    if batch != steps * size or not is_multiple or batch % args.num_generations:
        raise ConfigError(
            f"{batch} responses are generated at a time; they must be a multiple of "
            f"per_device_train_batch_size x gradient_accumulation_steps = {size} x {unit}, or with "
            "num_iterations = 1 a divisor of it, and a multiple of num_generations = "
            f"{args.num_generations}",
            "generation-batch",
        )
    args.steps_per_generation, args.generation_batch_size = steps, batch
    return max(1, steps // unit)


def _fill_in_ppo_sizes(args: PPOConfig, rows: int) -> RunSizes:
    """Write the sizes that follow from PPO's arguments. ``num_mini_batches`` splits the batch."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
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
        "num_total_batches": math.ceil(episodes / batch),  # the last may exceed total_episodes
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
    return RunSizes(batch, derived["num_total_batches"] or 0, args.num_mini_batches, 1, rows)


def notes(args: TrlConfig, sizes: RunSizes) -> list[str]:
    """Return notes on the derived sizes, the loss, and arguments that were set without effect."""
    factors = f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps}"
    split = ""
    if isinstance(args, PPOConfig) and args.num_mini_batches > 1:
        split = (
            f", {args.num_mini_batches} mini-batches of {args.mini_batch_size} (TRL until 0.16 "
            "made the batch num_mini_batches times as large)"
        )
    elif isinstance(args, OnlineDPOConfig):
        split = " x 2 responses to a prompt"
    elif sizes.minibatches > 1:
        split = f" x {sizes.minibatches} (steps_per_generation / gradient_accumulation_steps)"
    count = f"{sizes.steps} steps"
    if isinstance(args, PPOConfig):
        count = f"{args.total_episodes} episodes: {count}"
    elif sizes.updates > 1:
        count = f"{count} of {sizes.updates} optimizer steps each, which max_steps counts"
    first = (
        f"batch {sizes.batch} = per_device_train_batch_size x gradient_accumulation_steps = "
        f"{factors}{split}; {count}"
    )
    of_loss = []
    by_length = AGGREGATIONS.get(getattr(args, "loss_type", "")) in ("token_mean", "fixed_length")
    if by_length and getattr(args, "importance_sampling_level", "") == "sequence":
        of_loss = [
            f"loss_type = '{getattr(args, 'loss_type', '')}' weights each response's ratio by its "
            "length; loss_type = 'grpo' weights all equally, as the paper of GSPO does"
        ]
    by_reason: dict[str, list[str]] = {}
    for name, why in _without_effect(args).items():
        by_reason.setdefault(why, []).append(name)
    idle = [f"without effect: {', '.join(names)} ({why})" for why, names in by_reason.items()]
    return [first, *of_loss, *idle]


def _without_effect(args: TrlConfig) -> dict[str, str]:
    """Return the arguments that were set but have no effect, with the reason."""
    reasons = dict(REMARKS)
    if _runtime(args) != "inline":
        del reasons["torch_compile"]
    if not args.use_vllm:
        vllm = (f.name for f in fields(args) if f.name.startswith("vllm_"))
        reasons |= dict.fromkeys(vllm, "use_vllm is False")
    if isinstance(args, PPOConfig):
        reasons |= dict.fromkeys(("eval_steps", "eval_strategy"), "PPO has no evaluations")
    idle = {name: why for name, why in reasons.items() if _is_set(args, name)}
    for name in _generation_options(args)[1]:
        idle[f"{name} of generation_kwargs"] = REMARKS["top_p"]
    for tracker in (t for t in _asked_trackers(args) if t not in TRACKERS):
        why = f"metrics go to metrics.jsonl in the run's folder, and to {', '.join(TRACKERS)}"
        idle[f"report_to = '{tracker}'"] = why
    return idle


def settings(
    args: TrlConfig, sizes: RunSizes, longest: int, dtype: Literal["float32", "bfloat16"]
) -> dict[str, Any]:
    """Return all settings except models, rewards and rows. ``longest`` is in prompt tokens."""
    theirs = sizes.steps * sizes.updates
    epoch = math.ceil(sizes.rows * _group(args) / sizes.batch)
    save_intervals = {"no": 0, "steps": math.ceil(_count(args.save_steps, theirs) / sizes.updates)}
    penalty = getattr(args, "missing_eos_penalty", None)
    recomputes = args.activation_checkpointing  # the name in transformers 5.24
    if recomputes is None:
        recomputes = args.gradient_checkpointing
    flat: dict[str, Any] = {
        "steps": sizes.steps,
        "out": str(args.output_dir),
        "runtime": _runtime(args),
        "schedule": _schedule(args),
        "model.dtype": dtype,
        "model.device": device(args),
        "model.torch_compile": args.torch_compile and _runtime(args) != "inline",
        "model.gradient_checkpointing": bool(recomputes),
        "task.kind": "dataset",
        "task.name": "train_dataset",
        "task.chat": "off",
        "task.columns": {"system": ""},  # TRL does not read this column
        "task.template_arguments": template_arguments(args),
        "task.max_prompt_tokens": longest,
        "rollout.batch": sizes.batch,
        "algorithm.name": args.algorithm,
        "training.warmup_steps": math.ceil(_warmup(args, theirs) / sizes.updates),
        "training.betas": (args.adam_beta1, args.adam_beta2),
        "observe.progress": "plain" if args.disable_tqdm else "auto",
        "observe.trackers": tuple(t for t in _asked_trackers(args) if t in TRACKERS),
        "observe.checkpoint_minutes": 0.0,  # save_strategy decides instead
        "observe.checkpoint_every": {**save_intervals, "epoch": epoch}[_plain(args.save_strategy)],
        "rollout.stop": _generation_options(args)[0],
        # TRL subtracts this penalty from the score. If no token ends a response, a reward source
        # subtracts it instead (:data:`MISSING_EOS`).
        "reward.missing_eos": "subtract" if penalty is not None and stops(args) else "off",
        "reward.missing_eos_penalty": penalty or 0.0,
        **_vllm(args),
        **_translated(args),
    }
    if isinstance(args, PPOConfig):
        flat |= {
            "algorithm.kl_in": "reward",
            "training.critic_lr": args.learning_rate,
            "observe.samples": 4 if args.num_sample_generations else 0,
        }
    elif isinstance(args, OnlineDPOConfig):
        flat |= {"rollout.samples_per_prompt": 2, "algorithm.kl_coef": _listed(args.beta)[0]}
    else:
        flat |= _grouped(args, sizes)
    max_new = flat["rollout.max_new_tokens"]
    flat["training.microbatch_tokens"] = args.per_device_train_batch_size * (longest + max_new)
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        section, dot, key = name.partition(".")
        nested |= {section: nested.get(section, {}) | {key: value} if dot else value}
    return nested


def _translated(args: TrlConfig) -> dict[str, Any]:
    """Return the settings of arguments in ``SETS``, as :data:`CHOICES` translates them."""
    translations: dict[str, Any] = {}
    for name in (name for name in SETS if hasattr(args, name)):
        value, choices = _plain(getattr(args, name)), CHOICES.get(name)
        value = choices[value] if isinstance(choices, Mapping) else value
        translations[SETS[name]] = 0.0 if value is None else value
    if translations.get("algorithm.multi_objective_aggregation") == "normalize_then_sum":
        del translations["algorithm.scale_rewards"]  # TRL ignores scale_rewards then
    return translations


def _generation_options(args: Any) -> tuple[tuple[str, ...], list[str]]:
    """Return the stop strings in ``generation_kwargs``, and its option names without effect."""
    options = mapping(getattr(args, "generation_kwargs", None), "generation_kwargs")
    stops = [text for key in ("stop", "stop_strings") for text in _listed(options.pop(key, []))]
    for name, value in options.items():
        if name not in _SAMPLING:
            raise ConfigError(
                f"generation_kwargs = {{{name!r}: {value!r}}}: of these options 'stop' and "
                "'stop_strings' are supported; leave it out, or set the argument for it, such as "
                "temperature or max_completion_length",
                "argument-refused",
            )
    return tuple(stops), list(options)


def _grouped(args: Any, sizes: RunSizes) -> dict[str, Any]:
    """Return the settings that only GRPO and RLOO have."""
    group_settings: dict[str, Any] = {
        "algorithm.clip_high": args.epsilon_high or 0.0,
        "training.minibatches": sizes.minibatches,
    }
    if isinstance(args, GRPOConfig):
        group_settings |= {
            "algorithm.aggregation": AGGREGATIONS.get(args.loss_type, "auto"),
            "algorithm.entropy_aggregation": "token_mean",
        }
        if outside.parts(args.loss_type):
            group_settings["algorithm.name"] = args.loss_type
        elif args.loss_type == "cispo":
            group_settings |= {
                "algorithm.name": "cispo",
                "algorithm.clip_high": (args.epsilon_high or 0.0) - 1,
            }
    return group_settings


def _runtime(args: TrlConfig) -> str:
    return "local" if args.use_vllm and args.runtime == "inline" else args.runtime


def max_turns(args: Any) -> int:
    """Return the limit of turns. TRL counts turns with executed calls, without limit by default."""
    calls = getattr(args, "max_tool_calling_iterations", None)
    return int(args.max_completion_length if calls is None else calls + 1)


def environments(args: Any, sizes: RunSizes) -> int:
    """Return how many environments of one kind may be alive, 0 for no limit: as in TRL the
    responses generated at a time, unless that is the full step or episodes may outlive their step.
    """
    schedule = {"deadline_s": 0, "preset": "sync", **_schedule(args)}
    limit = int(getattr(args, "generation_batch_size", 0) or 0)
    limited = limit < sizes.batch and len(schedule) == 2 and schedule["preset"] == "sync"
    return limit if limited else 0


def evaluates(args: TrlConfig) -> bool:
    return bool(_plain(args.eval_strategy) != "no")


def eval_every(args: TrlConfig, sizes: RunSizes) -> int:
    """Return the number of steps between evaluations."""
    if _plain(args.eval_strategy) == "epoch":
        return math.ceil(sizes.rows / (sizes.batch // _group(args)))
    steps = _count(args.eval_steps or args.logging_steps, sizes.steps * sizes.updates)
    return math.ceil(steps / sizes.updates)


def stops(args: TrlConfig) -> bool:
    if not isinstance(args, PPOConfig):
        return True
    return bool(args.stop_token) or args.stop_token_id is not None


def _group(args: Any) -> int:
    if isinstance(args, PPOConfig):
        return 1
    return 2 if isinstance(args, OnlineDPOConfig) else int(args.num_generations)


def prompts_of(args: TrlConfig, sizes: RunSizes) -> int:
    return sizes.steps * sizes.batch // _group(args)


def device(args: TrlConfig) -> Literal["auto", "cpu"]:
    return "cpu" if args.use_cpu or args.no_cuda else "auto"


def _vllm(args: TrlConfig) -> dict[str, Any]:
    """Return the settings for generation with vLLM, or none without ``use_vllm``. vLLM always has
    its own process. ``"colocate"`` gives it the share ``vllm_gpu_memory_utilization`` of the GPU.
    """
    if not args.use_vllm:
        return {}
    options: dict[str, Any] = {"model_impl": args.vllm_model_impl}
    if args.vllm_enable_sleep_mode:
        options["enable_sleep_mode"] = True
    if args.vllm_mode == "colocate":
        options["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
    vllm_settings: dict[str, Any] = {"rollout.engine": "vllm", "rollout.engine_args": options}
    if args.vllm_tensor_parallel_size > 1:
        generator = {"roles": ("generator",), "ranks": args.vllm_tensor_parallel_size}
        vllm_settings["cluster.processes"] = [generator]
    if isinstance(args, PPOConfig | GRPOConfig) and args.vllm_importance_sampling_correction:
        kind, level = CORRECTIONS[args.vllm_importance_sampling_mode]
        # The newer name (cap) has no value by default. The older one applies otherwise.
        cap = args.vllm_importance_sampling_cap or getattr(
            args, "vllm_importance_sampling_clip_max", None
        )
        if cap is None:
            raise ConfigError(
                "vllm_importance_sampling_clip_max = None: importance weights have a largest one "
                "here; give it, or set vllm_importance_sampling_correction = False",
                "argument-value",
            )
        vllm_settings |= {
            "algorithm.old_policy": "proximal",
            "algorithm.correction": kind,
            "algorithm.correction_level": level,
            "algorithm.correction_cap": cap,
        }
    return vllm_settings


def mapping(value: Any, name: str) -> dict[str, Any]:
    """Return a mapping argument, also if given as JSON. Raises ConfigError for invalid JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            message = f"{name} = {value!r} is not valid JSON: {error}"
            raise ConfigError(message, "argument-not-json") from error
    return dict(value or {})


def template_arguments(args: TrlConfig) -> dict[str, Any]:
    """Return the chat template's arguments. Raises ConfigError for reserved names."""
    options = mapping(getattr(args, ARGUMENTS, None), ARGUMENTS)
    if why := wrong_arguments(options):
        raise ConfigError(f"{ARGUMENTS}: {why}", "template-argument-reserved")
    return options


def _schedule(args: TrlConfig) -> dict[str, Any]:
    schedule = _plain(args.schedule)
    if not isinstance(schedule, str) or schedule.lstrip().startswith("{"):
        return mapping(schedule, "schedule")
    if schedule not in PRESETS:
        message = f"schedule = {schedule!r} is no preset. {nearest(schedule, PRESETS)}"
        raise ConfigError(message, "unknown-preset")
    return {"preset": schedule}


def _warmup(args: TrlConfig, steps: int) -> int:
    both = args.warmup_steps and args.warmup_ratio
    _require_one(not both, args, "warmup_steps", "warmup_ratio", "how long the warm-up is")
    return _count(args.warmup_steps or args.warmup_ratio, steps)


def _count(value: float, total: int) -> int:
    """Return a count. Values below 1 are a share of ``total``, as in transformers 5."""
    return math.ceil(value * total) if 0 < value < 1 else int(value)


def _asked_trackers(args: TrlConfig) -> list[str]:
    names = [name for name in _listed(args.report_to or "none") if name != "none"]
    if names == ["all"]:
        return [name for name in TRACKERS if is_installed(name)]
    for name in names:
        if name not in (*TRACKERS, *OTHER_TRACKERS):
            raise ConfigError(
                f"report_to = '{name}': metrics go to {', '.join(TRACKERS)}, and always to "
                f"metrics.jsonl in the run's folder. {nearest(name, TRACKERS)}",
                "unknown-tracker",
            )
    return names


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _require(
    holds: bool, args: TrlConfig, name: str, rule: str, code: str = "argument-value"
) -> None:
    if not holds:
        raise ConfigError(f"{name} = {getattr(args, name)!r}: {rule}", code)


def _require_one(holds: bool, args: TrlConfig, name: str, other: str, what: str) -> None:
    if not holds:
        values = f"{name} = {getattr(args, name)!r} and {other} = {getattr(args, other)!r}"
        raise ConfigError(f"{values} both say {what}; leave one of them out", "arguments-compete")


def _is_set(args: TrlConfig, name: str) -> bool:
    dataclass_field = type(args).__dataclass_fields__.get(name)
    if dataclass_field is None or dataclass_field.default is MISSING:
        return False
    return getattr(args, name) not in (dataclass_field.default, None, "", [], {})


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
