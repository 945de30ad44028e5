"""Arguments of TRL's PPO trainer, each turned into a setting, a remark, or a refusal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, Literal, get_type_hints

from stretto.config import PRESETS
from stretto.config.sections import MISSING_EOS
from stretto.errors import ConfigError, is_installed, nearest
from stretto.trl import vllm
from stretto.trl.config import OWN_ADAMW, PPOConfig, Refusal, Remark, Sets

REWARD_MODEL = "model:reward_model"
"""Name of the reward model among the reward sources."""

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant"} | {
    "constant_with_warmup": "constant"
}
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_TRACKERS = ("tensorboard", "wandb")


_DEFAULTS = {f.name: f.default for f in fields(PPOConfig) if f.default is not MISSING}

TABLE: dict[str, Any] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(PPOConfig, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
"""What becomes of an argument, where :class:`PPOConfig` says it."""

REMARKS = {name: entry.why for name, entry in TABLE.items() if isinstance(entry, Remark)}
REFUSALS = {name: entry.why for name, entry in TABLE.items() if isinstance(entry, Refusal)}


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The sizes of a run, as TRL's trainer derived them from its arguments.

    Attributes:
        batch: responses a step.
        minibatch: responses an optimizer update.
        steps: batches in all.
        episodes: responses in all that were asked for; the last batch may go beyond.
    """

    batch: int
    minibatch: int
    steps: int
    episodes: int


def sizes(args: PPOConfig, rows: int) -> BatchSizes:
    """The sizes of a run on ``rows`` prompts.

    As of TRL 0.17 a batch is ``per_device_train_batch_size * gradient_accumulation_steps``, and
    ``num_mini_batches`` splits it. Before, it was ``num_mini_batches`` times as large, which
    ``batch_size`` can ask for.

    Raises:
        ConfigError: they do not fit together.
    """
    for name in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_mini_batches",
        "response_length",
        "num_ppo_epochs",
        "local_rollout_forward_batch_size",
    ):
        _require(getattr(args, name) >= 1, args, name, "must be 1 or more")
    unit = args.per_device_train_batch_size * args.gradient_accumulation_steps
    batches = {unit, unit * args.num_mini_batches}
    batch = args.batch_size or unit
    if batch not in batches:
        raise ConfigError(
            f"batch_size = {batch}: TRL derived it as per_device_train_batch_size * "
            f"gradient_accumulation_steps = {unit}, until 0.16 times num_mini_batches = "
            f"{max(batches)}; leave it out, or change those"
        )
    if batch % args.num_mini_batches:
        raise ConfigError(
            f"num_mini_batches = {args.num_mini_batches} does not divide the batch of {batch} "
            "responses (per_device_train_batch_size * gradient_accumulation_steps); choose a "
            "divisor"
        )
    if args.max_steps > 0:
        if args.total_episodes not in (None, args.max_steps * batch):
            raise ConfigError(
                f"max_steps = {args.max_steps} and total_episodes = {args.total_episodes} both say "
                "how long to train; leave one of them out"
            )
        episodes = args.max_steps * batch
    elif args.total_episodes is not None:
        episodes = args.total_episodes
    else:
        episodes = int(args.num_train_epochs * rows)
    if episodes < 1:
        raise ConfigError(
            f"{episodes} responses are asked for in all; raise total_episodes or num_train_epochs"
        )
    return BatchSizes(batch, batch // args.num_mini_batches, math.ceil(episodes / batch), episodes)


def write_sizes(args: PPOConfig, run: BatchSizes) -> None:
    """Write the derived sizes into the arguments, where scripts read them.

    Raises:
        ConfigError: one was given another value.
    """
    derived = {
        "world_size": 1,
        "num_total_batches": run.steps,
        "micro_batch_size": args.per_device_train_batch_size,
        "local_batch_size": run.batch,
        "batch_size": run.batch,
        "local_mini_batch_size": run.minibatch,
        "mini_batch_size": run.minibatch,
        "total_episodes": run.episodes,
    }
    for name, value in derived.items():
        if getattr(args, name) not in (None, value):
            raise ConfigError(
                f"{name} = {getattr(args, name)} is derived from other arguments, and comes out as "
                f"{value}; leave it out"
            )
    for name, value in derived.items():
        setattr(args, name, value)


def remarks(args: PPOConfig) -> list[str]:
    """Remarks on arguments that are set and have no effect here, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in REMARKS.items():
        if _is_set(args, name):
            by_reason.setdefault(why, []).append(name)
    if not args.use_vllm:
        idle = [name for name in _DEFAULTS if name.startswith("vllm_") and _is_set(args, name)]
        by_reason |= {"use_vllm is False": idle} if idle else {}
    return [f"without effect: {', '.join(names)} ({why})" for why, names in by_reason.items()]


def check(args: PPOConfig) -> None:
    """Refuse what cannot be done here, whatever the models and the data are.

    Raises:
        ConfigError: an argument is refused; says why, and what to do instead.
    """
    for name, why in REFUSALS.items():
        if _is_set(args, name):
            raise ConfigError(f"{name} = {getattr(args, name)!r}: {why}")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ConfigError(
            f"{processes} processes were started (WORLD_SIZE), and training runs in one process: "
            "start the script with 'python', not with torchrun or 'accelerate launch'"
        )
    _require(args.optim in _OPTIMIZERS, args, "optim", OWN_ADAMW.why)
    _require(args.kl_estimator in ("k1", "k3"), args, "kl_estimator", "must be 'k1' or 'k3'")
    _require(
        args.vf_coef > 0, args, "vf_coef", "must be above 0: the value model has to be trained"
    )
    _require(args.cliprange_value > 0, args, "cliprange_value", "must be above 0")
    _require(args.stop_token in (None, "eos"), args, "stop_token", "must be 'eos' or None")
    _require(
        args.data_seed in (None, args.seed),
        args,
        "data_seed",
        f"the order of the prompts follows seed = {args.seed}; leave data_seed out",
    )
    if args.stop_token and args.stop_token_id is not None:
        raise ConfigError(
            f"stop_token = '{args.stop_token}' and stop_token_id = {args.stop_token_id} both say "
            "what ends a response; leave one of them out"
        )
    vllm.check(args)
    penalty = args.missing_eos_penalty
    _require(
        penalty is None or penalty > 0,
        args,
        "missing_eos_penalty",
        "is taken off the score and must be above 0, or None",
    )
    kwargs = args.gradient_checkpointing_kwargs
    _require(
        kwargs in (None, {"use_reentrant": False}),
        args,
        "gradient_checkpointing_kwargs",
        "recomputation is not re-entrant here; leave it out",
    )


def settings(
    args: PPOConfig, run: BatchSizes, rows: int, longest: int, dtype: Literal["float32", "bfloat16"]
) -> dict[str, Any]:
    """The settings of a run, as a recipe has them; those of the models' names are left out.

    Args:
        run: the sizes that follow from them.
        dtype: that the policy computes in.

    Raises:
        ConfigError: an argument has a value that nothing here corresponds to.
    """
    stops = bool(args.stop_token) or args.stop_token_id is not None
    penalty = args.missing_eos_penalty
    found: dict[str, Any] = {
        "steps": run.steps,
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
        "reward.sources": (REWARD_MODEL,)
        if stops or penalty is None
        else (REWARD_MODEL, MISSING_EOS),
        "reward.missing_eos": "subtract" if stops and penalty is not None else "off",
        "reward.missing_eos_penalty": penalty or 0.0,
        "rollout.batch": run.batch,
        "algorithm.name": "ppo",
        "algorithm.kl_in": "reward",
        "training.lr_schedule": _one_of(args, "lr_scheduler_type", _SCHEDULES),
        "training.warmup_steps": _warmup(args, run.steps),
        "training.betas": (args.adam_beta1, args.adam_beta2),
        "training.grad_clip": args.max_grad_norm or 0.0,
        "training.microbatch_tokens": args.per_device_train_batch_size
        * (longest + args.response_length),
        "observe.progress": "plain" if args.disable_tqdm else "auto",
        "observe.trackers": _trackers(args),
        "observe.samples": 4 if args.num_sample_generations else 0,
        "observe.checkpoint_minutes": 0.0,  # save_strategy says when
        "observe.checkpoint_every": _checkpoint_every(args, run, rows),
    }
    for name, entry in TABLE.items():
        if isinstance(entry, Sets):
            found |= dict.fromkeys(entry.settings, getattr(args, name))
    nested: dict[str, Any] = {}
    for name, value in found.items():
        section, dot, key = name.partition(".")
        nested |= {section: nested.get(section, {}) | {key: value} if dot else value}
    return nested | {
        name: nested.get(name, {}) | part for name, part in vllm.settings(args).items()
    }


def _schedule(args: PPOConfig) -> dict[str, Any]:
    given = _plain(args.schedule)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigError(f"schedule = {given!r} is not valid JSON: {error}") from error
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if given not in PRESETS:
        raise ConfigError(f"schedule = {given!r} is no preset. {nearest(str(given), PRESETS)}")
    return {"preset": given}


def _warmup(args: PPOConfig, steps: int) -> int:
    """Steps; a number below 1 is a share of all, as transformers 5 reads ``warmup_steps``."""
    if args.warmup_steps and args.warmup_ratio:
        raise ConfigError(
            f"warmup_steps = {args.warmup_steps} and warmup_ratio = {args.warmup_ratio} both say "
            "how long the warm-up is; leave one of them out"
        )
    return _count(args.warmup_steps or args.warmup_ratio, steps)


def _checkpoint_every(args: PPOConfig, run: BatchSizes, rows: int) -> int:
    periods = {
        "no": 0,
        "steps": _count(args.save_steps, run.steps),
        "epoch": math.ceil(rows / run.batch),
    }
    return int(_one_of(args, "save_strategy", periods))


def _count(value: float, of: int) -> int:
    return math.ceil(value * of) if 0 < value < 1 else int(value)


def _trackers(args: PPOConfig) -> tuple[str, ...]:
    given = args.report_to
    names = [given] if isinstance(given, str) else list(given or ())
    if names == ["all"]:
        return tuple(name for name in _TRACKERS if is_installed(name))
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(
                f"report_to = '{name}': figures go to tensorboard and wandb, and always to "
                "metrics.jsonl in the run's folder; choose of those, or 'none'"
            )
    return tuple(names)


def _one_of(args: PPOConfig, name: str, known: Mapping[str, Any]) -> Any:
    value = _plain(getattr(args, name))
    _require(value in known, args, name, f"must be one of {', '.join(map(repr, known))}")
    return known[value]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _require(holds: bool, args: PPOConfig, name: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} = {getattr(args, name)!r}: {rule}")


def _is_set(args: PPOConfig, name: str) -> bool:
    value = getattr(args, name)
    return value not in (_DEFAULTS[name], None, "", [], {})
