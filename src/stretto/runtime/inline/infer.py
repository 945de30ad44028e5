"""Generation and evaluation in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from stretto import tasks
from stretto.config import Config, ModelConfig, RolloutConfig, TaskConfig
from stretto.errors import JudgeError, TaskError
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.rollout.engine import TorchEngine
from stretto.runtime.inline.build import load_actor, open_judges, prepare_torch
from stretto.runtime.inline.placement import make_engine
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.text import response_text
from stretto.tasks.base import TaskRow
from stretto.tasks.prompts import PromptSource, render
from stretto.types import FinishReason, Rollout

HELD_OUT_SEED = 1000
"""Added to the seed of a procedural task for evaluation: rows that training does not draw."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Greedy answers, judged.

    Attributes:
        accuracy: mean score by the task's verifier; pass@1 where it says 0 or 1.
        mean_tokens: response tokens.
        ended: share that ended before the token limit.
        samples: answers judged.
        skipped: rows left out, as their prompts are longer than ``task.max_prompt_tokens``.
    """

    accuracy: float
    mean_tokens: float
    ended: float
    samples: int
    skipped: int


def evaluate(config: Config, *, model: str, samples: int) -> EvalResult:
    """pass@1 of a model on a task: one greedy answer to each of ``samples`` prompts.

    Procedural tasks are drawn with a seed of their own. Rows of a file or the hub are taken as they
    are: name a file or a split that training does not see.

    Raises:
        JudgeError: the verifier failed on an answer.
    """
    greedy = config.rollout.model_copy(update={"temperature": 0.0, "samples_per_prompt": 1})
    config = config.model_copy(
        update={
            "seed": config.seed + HELD_OUT_SEED
            if config.task.kind == "reasoning-gym"
            else config.seed,
            "model": config.model.model_copy(update={"name": model}),
            "rollout": greedy,
            "reward": config.reward.model_copy(
                update={"sources": ("task",), "weights": (), "on_failure": "stop"}
            ),
        }
    )
    with ExitStack() as stack:
        prepare_torch(config)
        tokenizer = load_tokenizer(resolve(model, _say), config.model.trust_remote_code)
        task = tasks.load(config.task, config.seed)
        judge = open_judges(config, task, tokenizer, stack)[0]
        prompts = PromptSource(task, config.task, tokenizer, config.seed)
        engine = make_engine(config, load_actor(config, _say), tokenizer, config.rollout.batch)
        rollouts, skipped = _each_row_once(prompts, config, len(task), samples)
        for _ in _decode_all(engine, rollouts):
            pass
        scores = _judge_all(judge, rollouts, config.rollout.batch)
    return EvalResult(
        accuracy=fmean(scores),
        mean_tokens=fmean(len(r) for r in rollouts),
        ended=fmean(r.finish is FinishReason.STOP for r in rollouts),
        samples=len(rollouts),
        skipped=skipped,
    )


def generate(
    model: str,
    prompts: Sequence[str],
    options: RolloutConfig,
    *,
    seed: int = 0,
    chat: Literal["auto", "on", "off"] = "auto",
) -> Iterator[tuple[int, str]]:
    """Answer prompts: (index of the prompt, text), each as soon as it has ended."""
    settings = Config.model_construct(
        seed=seed, model=ModelConfig(name=model), rollout=options, task=TaskConfig(chat=chat)
    )
    prepare_torch(settings)
    tokenizer = load_tokenizer(resolve(model, _say))
    rollouts = [
        Rollout(i, render(TaskRow(prompt=text), settings.task, tokenizer, i), i)
        for i, text in enumerate(prompts)
    ]
    engine = make_engine(settings, load_actor(settings, _say), tokenizer, options.batch)
    for r in _decode_all(engine, rollouts):
        yield r.id, response_text(tokenizer, r.tokens, r.finish, options.stop)


def _each_row_once(
    prompts: PromptSource, config: Config, rows: int, samples: int
) -> tuple[list[Rollout], int]:
    """Rollouts for up to ``samples`` different rows, and how many rows were too long."""
    rollouts: list[Rollout] = []
    skipped = 0
    for place in range(rows):
        if len(rollouts) == samples:
            break
        prompt = prompts.prompt_by_id(place)
        if len(prompt.tokens) > config.task.max_prompt_tokens:
            skipped += 1
        else:
            rollouts.append(Rollout(len(rollouts), prompt, place))
    if not rollouts:
        raise TaskError(
            f"all {rows} prompts are longer than task.max_prompt_tokens = "
            f"{config.task.max_prompt_tokens}; raise that limit"
        )
    return rollouts, skipped


def _say(text: str) -> None:
    """Standard output is for the answers."""
    print(text, file=sys.stderr)


def _judge_all(judge: FunctionScorer, rollouts: Sequence[Rollout], batch: int) -> list[float]:
    """The verdict on each rollout; asked in batches, as the judge's time limit is for one."""
    values = []
    for start in range(0, len(rollouts), batch):
        part = rollouts[start : start + batch]
        judge.admit(part)
        for score in judge.finish([r.id for r in part]):
            if score.failure:
                raise JudgeError(score.failure, [score.rollout_id])
            values.append(score.scalar)
    return values


def _decode_all(engine: TorchEngine, rollouts: Sequence[Rollout]) -> Iterator[Rollout]:
    """Decode rollouts to their ends; each is yielded when it is finished."""
    by_id = {r.id: r for r in rollouts}
    engine.admit(rollouts)
    left = len(rollouts)
    while left:
        for chunk in engine.decode(16):
            rollout = by_id[chunk.rollout_id]
            rollout.append(chunk)
            if rollout.finish:
                left -= 1
                yield rollout
