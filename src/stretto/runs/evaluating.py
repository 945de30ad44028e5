"""Evaluations during training: metrics, the best evaluation's model, and early stopping."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from stretto import files
from stretto.assembly.run_models import Overrides
from stretto.config import AlgorithmConfig, ClusterConfig, Config, ScheduleConfig
from stretto.errors import StorageError
from stretto.evaluation import HeldOut
from stretto.observe import RunDirectory
from stretto.observe.card import NAME, is_edited, write_card
from stretto.observe.run_directory import EVALUATED, SCORE, Best
from stretto.observe.spans import CHECKPOINT
from stretto.runs.checkpoint import BackgroundWriter
from stretto.runtime.run import Run, start
from stretto.saying import Say
from stretto.schedules.evaluation import Evaluation
from stretto.schedules.rollout import Rollout, by_episodes, reasons_to_reject, train_batch
from stretto.tasks.task import RIGHT
from stretto.training.collate import describe
from stretto.types import FinishReason
from stretto.workers.drive import drive

BEST = "checkpoint/best"  # name of the spans and staged weights of the best evaluation's model


def figures(config: Config, answers: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of scored answers. RewardError without rewards, or if too many failed."""
    factors, allowed = config.reward.factors, config.reward.failures_allowed
    reasons = reasons_to_reject(
        answers, failures_allowed=allowed, group_at_least=1, weights=factors
    )
    scored_rollouts = [r for r in answers if r.id not in reasons]
    episodes = by_episodes(scored_rollouts, 1)
    metrics = {SCORE: fmean(train_batch(samples).totals(factors)[0] for samples in episodes)}
    if "task" in factors:
        verdicts = [[r.scores["task"].scalar for r in samples] for samples in episodes]
        metrics["eval/pass@1"] = fmean(
            any(v is not None and v >= RIGHT for v in of_episode) for of_episode in verdicts
        )
        if timeouts := sum(r.scores["task"].extra.get("timeouts", 0) for r in scored_rollouts):
            metrics["eval/timeouts"] = float(timeouts)
    source_means = describe(train_batch(scored_rollouts)).items()
    metrics |= {f"eval/{name}": mean for name, mean in source_means if name.startswith("reward/")}
    return {
        **metrics,
        "eval/length_mean": fmean(sum(map(len, samples)) for samples in episodes),
        "eval/ended": fmean(samples[0].finish is FinishReason.STOP for samples in episodes),
        "eval/count": float(len(episodes)),
    }


def answer_all(config: Config, overrides: Overrides, say: Say) -> list[Rollout]:
    """Return scored greedy answers to all prompts of ``overrides.task``, for an evaluation outside
    a run, in row order without ``task.shuffle``. Uses threads and Stretto's own engine.
    """
    settings = {
        "steps": 0,
        "runtime": "inline",
        "cluster": ClusterConfig(),
        "schedule": ScheduleConfig(score_on=config.schedule.score_on),
        "algorithm": AlgorithmConfig(name="grpo", kl_coef=0.0),  # neither critic nor reference
        "model": config.model.model_copy(update={"lora_rank": 0}),
        "rollout": config.rollout.model_copy(update={"engine": "torch", "engine_args": {}}),
        "observe": config.observe.model_copy(update={"eval_every": 0}),
    }
    answers: list[Rollout] = []

    async def take(step: int, scored: Sequence[Rollout], seconds: float) -> None:
        answers.extend(scored)

    async def evaluate(running: Run) -> None:
        prompts = [running.prompts.prompt_by_id(i) for i in range(len(running.prompts.task))]
        running.schedule.evaluation = Evaluation(1, prompts, take)
        async with running.schedule as schedule:
            await schedule.evaluated()

    policy = overrides.actor
    assert policy is not None
    trainable = [p for p in policy.parameters() if p.requires_grad]
    with ExitStack() as stack:
        for parameter in trainable:  # otherwise the learner would make float32 masters of them
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        drive(evaluate(start(config.model_copy(update=settings), stack, say, overrides)))
    return answers


@dataclass(eq=False)
class Evaluator(BackgroundWriter[None]):
    """Runs the evaluations of a run and keeps the best one's model, which is copied before its
    weights change.
    """

    config: Config
    held_out: HeldOut
    run_dir: RunDirectory

    def __post_init__(self) -> None:
        self.news: dict[str, float] = {}  # metrics that no step has recorded yet
        self.best = self.run_dir.best()  # so far; its model is kept
        self._evaluated = {int(m[EVALUATED]) for m in self.run_dir.read_metrics() if EVALUATED in m}
        interval, prompts = self.config.observe.eval_every, self.held_out.prompts
        self.running.schedule.evaluation = Evaluation(interval, prompts, self._take)
        self.note(
            f"evaluated every {interval} steps on {len(prompts)} prompts of "
            f"{self.held_out.facts['rows']}; {self.held_out.facts['seen']}"
        )

    @property
    def exhausted(self) -> str:
        """Reason for early stopping, or empty."""
        patience, best = self.config.observe.eval_patience, self.best
        if not patience or best is None:
            return ""
        worse = sum(step > best.step for step in self._evaluated)  # repeated steps count once
        if worse < patience:
            return ""
        return (
            f"no evaluation of the last {worse} was better than that of step {best.step}; "
            f"observe.eval_patience = {patience}"
        )

    def take_news(self) -> dict[str, float]:
        news, self.news = self.news, {}
        return news

    async def _take(self, step: int, answers: Sequence[Rollout], seconds: float) -> None:
        metrics = figures(self.config, answers)
        self.news = {EVALUATED: float(step), **metrics, "timing_s/eval": seconds}
        await self._written()
        self._evaluated.add(step)
        if self.best and metrics[SCORE] <= self.best.score:
            return
        self.best = Best(step, metrics[SCORE], self.run_dir.best_model)
        await self.running.stage_model(BEST)
        self._begin("evaluation", partial(self._write, step, metrics))

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        folder = self.run_dir.best_model
        with self.running.spans.span(CHECKPOINT, BEST, step=step):
            record = json.dumps({"step": step, **metrics}, indent=2) + "\n"
            with files.explained(folder), files.new_folder(folder) as scratch:
                self.running.save_staged(BEST, scratch)
                if is_edited(folder):
                    shutil.copy2(folder / NAME, scratch / NAME)
                write_card(self.run_dir, self.config.algorithm.name, folder=scratch)
                (scratch / self.run_dir.best_file.name).write_text(record)

    @property
    def _missing(self) -> str:
        return "the model of the best evaluation is not kept"

    def _failed(self, error: StorageError) -> None:
        self.note(f"{error}. The model of the best evaluation is not kept")
        self.best = self.run_dir.best()
        self._evaluated.clear()  # because that model was better than the one on disk
