"""Generation and evaluation in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, Protocol

from torch import nn

from stretto import tasks
from stretto.config import Config, ModelConfig, RolloutConfig, TaskConfig, require_seed
from stretto.errors import JudgeError, TaskError
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.rollout.engine import TorchEngine
from stretto.runtime.inline.build import open_judges, prepare_torch
from stretto.runtime.inline.models import load_actor
from stretto.runtime.inline.placement import make_engine
from stretto.scoring.text import response_text
from stretto.tasks.base import TaskRow
from stretto.tasks.files import SUFFIXES
from stretto.tasks.prompts import PromptSource, render
from stretto.types import FinishReason, Rollout, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


@dataclass(frozen=True, slots=True)
class Answers:
    """A model's responses to prompts of a task.

    Attributes:
        rollouts: finished; those of one prompt follow one another and share a group.
        skipped: rows left out, as their prompts are longer than ``task.max_prompt_tokens``.
    """

    rollouts: Sequence[Rollout]
    skipped: int

    @property
    def mean_tokens(self) -> float:
        """Response tokens."""
        return fmean(len(r) for r in self.rollouts)

    @property
    def ended(self) -> float:
        """Share of the responses that ended before the token limit."""
        return fmean(r.finish is FinishReason.STOP for r in self.rollouts)


def evaluate(config: Config, *, model: str, samples: int) -> EvalResult:
    """pass@1 of a model on a task: one greedy answer to each of ``samples`` prompts.

    Procedural tasks are drawn with a seed of their own. Rows of a file or the hub are taken as they
    are: name a file or a split that training does not see.

    Raises:
        JudgeError: the verifier failed on an answer.
    """
    greedy = config.rollout.model_copy(update={"temperature": 0.0, "samples_per_prompt": 1})
    reward = {"sources": ("task",), "weights": (), "on_failure": "stop"}
    config = of_model(held_out(config), model).model_copy(
        update={"rollout": greedy, "reward": config.reward.model_copy(update=reward)}
    )
    with ExitStack() as stack:
        prepare_torch(config)
        tokenizer = load_tokenizer(resolve(model, say), config.model.trust_remote_code)
        task = tasks.load(config.task, config.seed)
        judge = open_judges(config, task, tokenizer, stack)[0]
        answers = answer(config, load_actor(config, say), task, tokenizer, samples)
        scores = judge_all(judge, answers.rollouts, config.rollout.batch)
    return EvalResult(
        accuracy=fmean(scores),
        mean_tokens=answers.mean_tokens,
        ended=answers.ended,
        samples=len(answers.rollouts),
        skipped=answers.skipped,
    )


def held_out(config: Config) -> Config:
    """Settings under which a task gives other rows than training sees, where it has them."""
    task, rows = config.task, config.task.held_out
    if task.kind == "reasoning-gym":
        return config.model_copy(update={"seed": config.seed + HELD_OUT_SEED})
    if not rows:
        return config
    is_file = Path(rows).suffix in SUFFIXES
    changes = {"name": rows, "split": "train"} if is_file else {"split": rows}
    return config.model_copy(update={"task": task.model_copy(update={**changes, "size": 0})})


def of_model(config: Config, model: str) -> Config:
    """Settings with another model."""
    return config.model_copy(update={"model": config.model.model_copy(update={"name": model})})


def answer(
    config: Config,
    actor: nn.Module,
    task: tasks.Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: int,
    per_prompt: int = 1,
) -> Answers:
    """Let a model answer the first prompts of a task's order, each row once.

    Args:
        config: of the task, and of sampling.
        actor: the model.
        task: has the prompts.
        tokenizer: the model's.
        prompts: answered, at most.
        per_prompt: responses to each.

    Raises:
        TaskError: all prompts are longer than ``task.max_prompt_tokens``.
    """
    source = PromptSource(task, config.task, tokenizer, config.seed)
    rollouts, skipped = _each_row_once(source, config, len(task), prompts, per_prompt)
    engine = make_engine(config, actor, tokenizer, config.rollout.batch)
    for _ in _decode_all(engine, rollouts):
        pass
    return Answers(rollouts, skipped)


def generate(
    model: str,
    prompts: Sequence[str],
    options: RolloutConfig,
    *,
    seed: int = 0,
    chat: Literal["auto", "on", "off"] = "auto",
) -> Iterator[tuple[int, str]]:
    """Answer prompts: (index of the prompt, text), each as soon as it has ended.

    Raises:
        ConfigError: the seed is out of range.
    """
    require_seed(seed)
    settings = Config.model_construct(
        seed=seed, model=ModelConfig(name=model), rollout=options, task=TaskConfig(chat=chat)
    )
    prepare_torch(settings)
    tokenizer = load_tokenizer(resolve(model, say))
    rollouts = [
        Rollout(i, render(TaskRow(prompt=text), settings.task, tokenizer, i), i)
        for i, text in enumerate(prompts)
    ]
    engine = make_engine(settings, load_actor(settings, say), tokenizer, options.batch)
    for r in _decode_all(engine, rollouts):
        yield r.id, response_text(tokenizer, r.tokens, r.finish, options.stop)


def say(text: str) -> None:
    """Standard output is for the answers."""
    print(text, file=sys.stderr)


class WholeScorer(Protocol):
    """What judges finished rollouts."""

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Learn of them."""

    def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        """Score them, in the order asked."""
        ...


def judge_all(judge: WholeScorer, rollouts: Sequence[Rollout], batch: int) -> list[float]:
    """The verdict on each rollout; asked in batches, as a judge's time limit is for one.

    Raises:
        JudgeError: it failed on one.
    """
    values = []
    for start in range(0, len(rollouts), batch):
        part = rollouts[start : start + batch]
        judge.admit(part)
        for score in judge.finish([r.id for r in part]):
            if score.failure:
                raise JudgeError(score.failure, [score.rollout_id])
            values.append(score.scalar)
    return values


def _each_row_once(
    prompts: PromptSource, config: Config, rows: int, wanted: int, per_prompt: int
) -> tuple[list[Rollout], int]:
    """Rollouts for up to ``wanted`` different rows, and how many rows were too long."""
    rollouts: list[Rollout] = []
    skipped = 0
    for place in range(rows):
        if len(rollouts) == wanted * per_prompt:
            break
        prompt = prompts.prompt_by_id(place)
        if len(prompt.tokens) > config.task.max_prompt_tokens:
            skipped += 1
        else:
            rollouts += [Rollout(len(rollouts) + i, prompt, place) for i in range(per_prompt)]
    if not rollouts:
        raise TaskError(
            f"all {rows} prompts are longer than task.max_prompt_tokens = "
            f"{config.task.max_prompt_tokens}; raise that limit"
        )
    return rollouts, skipped


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
