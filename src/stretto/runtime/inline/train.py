"""A training run in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.algorithms.ppo import apply_missing_eos
from stretto.config import Config
from stretto.errors import StrettoError
from stretto.models.load import save_model
from stretto.observe import Progress, Recorder, RunDirectory, Sample
from stretto.runtime.inline.build import Parts, build
from stretto.runtime.inline.roles import drive
from stretto.scoring.text import response_text
from stretto.training import checkpoint
from stretto.training.collate import total_reward
from stretto.types import FinishReason, Rollout, Stats


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run left behind.

    Attributes:
        steps: taken in all, over all resumptions.
        stats: of the last step.
        model: folder of the trained model, in Hugging Face format.
    """

    steps: int
    stats: Stats
    model: Path


def train(
    config: Config, *, run_dir: RunDirectory, resume: bool = False, progress: Progress
) -> TrainResult:
    """Train a model and save it; a run that is stopped after a step saves what it has.

    Args:
        config: of the run.
        run_dir: where records, checkpoints and the model go.
        resume: go on from the newest checkpoint in ``run_dir``.
        progress: the display, already started.

    Raises:
        StrettoError: a setting, a model, a dataset, a judge or the numbers are at fault.
    """
    with ExitStack() as stack:
        first, state = checkpoint.load_latest(run_dir.checkpoints) if resume else (0, None)
        recorder = stack.enter_context(Recorder(config, run_dir, progress, resumed_step=first))
        parts = build(config, stack, progress.note)
        if state is not None:
            parts.load_state_dict(state)
        stats: Stats = {}
        done = first
        try:
            while done < config.steps:
                stats = _step(done + 1, parts, config, recorder)
                done += 1
                if _due(done, config):
                    checkpoint.save(run_dir.checkpoints, done, parts.state_dict())
        except (KeyboardInterrupt, StrettoError):
            if done > first:
                recorder.note(f"stopped after step {done}; saving the model as it is")
                save_model(parts.actor, parts.tokenizer, run_dir.model)
            raise
        save_model(parts.actor, parts.tokenizer, run_dir.model)
        if parts.prompts.skipped:
            recorder.note(
                f"{parts.prompts.skipped} prompts were longer than task.max_prompt_tokens = "
                f"{config.task.max_prompt_tokens} and left out"
            )
    return TrainResult(config.steps, stats, run_dir.model)


def _step(number: int, parts: Parts, config: Config, recorder: Recorder) -> Stats:
    """Take a step and record it."""
    step = drive(parts.schedule.step())
    stats = {**step.stats, **_timings(parts)}
    shown = step.batch[: config.observe.samples]
    recorder.step(number, stats, [_sample(r, config, parts) for r in shown])
    for rollout in step.rejected:
        recorder.note(f"step {number}: left out rollout {rollout.id}: {_reason(rollout)}")
    return stats


def _due(step: int, config: Config) -> bool:
    every = config.observe.checkpoint_every
    return bool(every) and (step % every == 0 or step == config.steps)


def _timings(parts: Parts) -> dict[str, float]:
    """Seconds of each stage in the step that has just ended."""
    totals = parts.spans.totals()
    parts.spans.reset()
    return {f"timing_s/{name}": seconds for name, seconds in totals.items()}


def _sample(rollout: Rollout, config: Config, parts: Parts) -> Sample:
    rule = config.reward
    reward = apply_missing_eos(
        torch.tensor([total_reward(rollout, rule.factors)]),
        torch.tensor([rollout.finish is FinishReason.STOP]),
        rule.missing_eos,
        rule.missing_eos_penalty,
    )
    return Sample(
        prompt=rollout.prompt.text,
        response=response_text(
            parts.tokenizer, rollout.tokens, rollout.finish, config.rollout.stop
        ),
        reward=reward.item(),
        finish=str(rollout.finish),
        tokens=len(rollout),
    )


def _reason(rollout: Rollout) -> str:
    failures: Sequence[str] = [s.failure for s in rollout.scores.values() if s.failure]
    return "; ".join(failures)
