"""Calls transformers' callbacks during a run, and translates metrics to TRL's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from stretto.observe.run_directory import EVALUATED, SCORE

if TYPE_CHECKING:
    from stretto.trl.base_trainer import BaseTrainer

METRICS = {
    "loss": "loss/policy_avg",
    "policy_loss": "loss/policy_avg",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "lr",
    "reward": "objective/scores",
    "reward_std": "objective/scores_std",
    "frac_reward_zero_std": "group/all_equal",
    "entropy": "policy/entropy_avg",
    "clip_ratio/region_mean": "policy/clipfrac_avg",
    "completions/mean_length": "response/length_mean",
    "completions/max_length": "response/length_max",
    "rewards/margins": "dpo/margin",
    "rewards/accuracies": "dpo/accuracy",
    "step_time": "timing_s/step",
}
"""TRL's names of metrics to those in metrics.jsonl."""

_TOOLS = ("tools/call_frequency", "tools/failure_frequency")
"""Metrics of a trainer with tools, 0 in a step without calls."""

_REWARDS = {"reward": "mean", "reward_std": "std"}

_OF_TRAINING = {"loss", "grad_norm", "learning_rate"}
"""Metrics in transformers' rows of steps that a run's last row lacks."""

_NEVER = (
    *("on_save", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_predict", "on_prediction_step"),
)


def after_step(
    t: BaseTrainer, step: int, stats: Mapping[str, float]
) -> Literal["stop", "save"] | None:
    """Report a step and its metrics to the callbacks. Return their request to stop or save."""
    t.tell("on_step_begin")
    batch, epochs = t.config.rollout.batch, int(t.state.epoch or 0)
    t.state.global_step = step * t.sizes.updates
    t.state.epoch = step * batch / (t.config.rollout.samples_per_prompt * len(t.train_dataset))
    t.tell("on_step_end")
    wishes = t.control.should_training_stop, t.control.should_save
    logs = t.control.should_log or _logs_between(t, (step - 1) * t.sizes.updates)
    tools = _TOOLS if t.config.environment.sources else ()
    trl_metrics = {**as_trl_names(stats, t.source_names), **{n: stats.get(n, 0.0) for n in tools}}
    if (coef := t.config.algorithm.entropy_coef) and "loss" in trl_metrics:
        trl_metrics["loss"] -= coef * trl_metrics["entropy"]
    t.log({**stats, **trl_metrics, "episode": step * batch})
    evaluation = evaluated(stats, t.source_names) if EVALUATED in stats else {}
    skipped = {*_OF_TRAINING, *evaluation}
    t.unlogged.append({n: v for n, v in trl_metrics.items() if n not in skipped})
    if evaluation:
        t.tell("on_evaluate", metrics=evaluation)
    stops = t.control.should_training_stop or wishes[0] or step == t.config.steps
    if stops or int(t.state.epoch) > epochs:
        t.tell("on_epoch_end")
    if logs or t.control.should_log:
        t.unlogged.clear()
    if stops or t.control.should_training_stop:
        return "stop"
    if int(t.state.epoch) > epochs:
        wishes = False, wishes[1] or t.control.should_save
        t.tell("on_epoch_begin")
    return "save" if t.control.should_save or wishes[1] else None


def _logs_between(t: BaseTrainer, before: int) -> bool:
    """Return whether an optimizer update since ``before`` is a multiple of ``logging_steps``."""
    interval = t.state.logging_steps if t.args.logging_strategy == "steps" else 0
    first = t.args.logging_first_step and before == 0
    return first or bool(interval and t.state.global_step // interval > before // interval)


def means_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the rows that have it, without NaN, as TRL does."""
    values: dict[str, list[float]] = {}
    for name, value in (item for row in rows for item in row.items()):
        if not math.isnan(value):
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}


def never_called(handler: CallbackHandler) -> list[str]:
    """Return a note on each event hook of a callback that is never called."""
    return [
        f"without effect: {hook} of {type(callback).__name__} (callbacks are not told of it)"
        for callback in handler.callbacks
        for hook in _NEVER
        if getattr(type(callback), hook, None) is not getattr(TrainerCallback, hook)
    ]


def evaluated(
    stats: Mapping[str, float], source_names: Mapping[str, str] | None = None, prefix: str = "eval"
) -> dict[str, float]:
    """Return the metrics of an evaluation, under TRL's names and our own."""
    ours = {name.removeprefix("eval/"): v for name, v in stats.items() if name.startswith("eval/")}
    theirs = as_trl_names({n: v for n, v in ours.items() if n.startswith("reward/")}, source_names)
    theirs |= {
        "reward": stats[SCORE],
        "completions/mean_length": ours["length_mean"],
        "completions/clipped_ratio": 1 - ours["ended"],
    }
    ours = {name: value for name, value in ours.items() if "/" not in name}
    return {f"{prefix}_{name}": value for name, value in {**ours, **theirs}.items()}


def as_trl_names(
    stats: Mapping[str, float], source_names: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return the metrics of a step that have a name in TRL, under that name.

    Numbers logged by a reward function keep its names for them. ``kl`` is a mean over tokens.

    Args:
        source_names: TRL's names of reward sources, if they differ from ours.
    """
    metrics = {name: stats[our_name] for name, our_name in METRICS.items() if our_name in stats}
    for metric, value in stats.items():
        kind, _, rest = metric.partition("/")
        source, _, logged = rest.removeprefix("model:").partition("/")
        source = (source_names or {}).get(source, source)
        if kind in _REWARDS:
            metrics[logged or f"rewards/{source}/{_REWARDS[kind]}"] = value
    if EVALUATED in stats:
        metrics |= evaluated(stats, source_names)
    if "response/ended" in stats:
        metrics["completions/clipped_ratio"] = 1 - stats["response/ended"]
    if "loss/kl_avg" in stats:
        metrics["kl"] = stats["loss/kl_avg"]
    elif "objective/kl" in stats and stats.get("response/length_mean"):
        metrics["kl"] = stats["objective/kl"] / stats["response/length_mean"]
    return metrics
