"""Callbacks of transformers during a run, and TRL's names for its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.observe import Progress, Sample

if TYPE_CHECKING:
    from stretto.trl.trainer import BaseTrainer

METRICS = {
    "loss": "loss/policy_avg",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "lr",
    "reward": "objective/scores",
    "reward_std": "group/reward_std",
    "frac_reward_zero_std": "group/all_equal",
    "entropy": "policy/entropy_avg",
    "clip_ratio/region_mean": "policy/clipfrac_avg",
    "completions/mean_length": "response/length_mean",
    "completions/max_length": "response/length_max",
    "rewards/margins": "dpo/margin",
    "rewards/accuracies": "dpo/accuracy",
    "step_time": "timing_s/step",
}
"""Names of TRL's metrics, with those that the same figures have in metrics.jsonl."""


class StopTrainingError(StrettoError):
    """Error that ends training, as a callback has asked for it."""


class CallbackProgress(Progress):
    """A display that also tells a trainer's callbacks of the beginning, of each step and its
    figures. A callback that sets ``control.should_training_stop`` ends the run after the step.

    Attributes:
        steps: taken so far.
    """

    def __init__(self, display: Progress, trainer: BaseTrainer) -> None:
        self._display, self._trainer, self.steps = display, trainer, 0
        for name in ("note", "working", "close"):  # as the display does them
            setattr(self, name, getattr(display, name))

    def start(self, headline: str) -> None:
        """Show what will run."""
        self._display.start(headline)
        t = self._trainer
        t.state.compute_steps(t.args, t.state.max_steps)  # type: ignore[no-untyped-call]
        t.tell("on_train_begin")

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Show a step and tell the callbacks; raise StopTrainingError if one wants no more."""
        self._display.step(step, total, stats, samples)
        t, self.steps = self._trainer, step
        t.tell("on_step_begin")
        batch = t.config.rollout.batch
        t.state.global_step = step * t.sizes.updates
        t.state.epoch = step * batch / (t.config.rollout.samples_per_prompt * len(t.train_dataset))
        t.tell("on_step_end")
        t.log({**stats, **as_trl_names(stats), "episode": step * batch})
        if t.control.should_training_stop and step < total:
            raise StopTrainingError(f"a callback ended training after step {step}")


def as_trl_names(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a step by TRL's names, as far as there are such figures.

    ``kl`` is the mean over tokens. ``reward_std`` is the mean of the groups' standard deviations.
    """
    found = {name: stats[own] for name, own in METRICS.items() if own in stats}
    for name, value in stats.items():
        kind, _, source = name.partition("/")
        if kind == "reward":
            found[f"rewards/{source.removeprefix('model:')}/mean"] = value
    if "response/ended" in stats:
        found["completions/clipped_ratio"] = 1 - stats["response/ended"]
    if "loss/kl_avg" in stats:
        found["kl"] = stats["loss/kl_avg"]
    elif "objective/kl" in stats and stats.get("response/length_mean"):
        found["kl"] = stats["objective/kl"] / stats["response/length_mean"]
    return found
