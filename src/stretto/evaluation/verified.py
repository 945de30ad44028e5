"""Greedy answers, scored by the task's own verifier: pass@1 and the mean score."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean

from stretto import tasks
from stretto.assembly.models import load_actor, prepare_torch
from stretto.assembly.scorers import open_function
from stretto.config import Config
from stretto.config.sections import TaskSource
from stretto.evaluation.answers import answer, of_model, score_all
from stretto.evaluation.rates import standard_error
from stretto.evaluation.rows import measured_on, questions
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.observe.progress import on_stderr
from stretto.tasks.base import RIGHT


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Greedy answers, one to a prompt, scored.

    Attributes:
        rows: what was read: a file, a hub dataset and its split, or a procedural task and its seed.
        samples: answers scored.
        distinct: different prompts among theirs.
        skipped: rows left out, as their prompts are longer than ``task.max_prompt_tokens``.
        overlap: share of the prompts that training asks too; ``None`` where that is not known.
        seen: the overlap in words.
        pass_at_1: share of right answers: those with full credit from the verifier.
        pass_at_1_standard_error: sqrt(p (1 - p) / n).
        mean_score: mean of the verifier's scores, partial credit included.
        mean_score_standard_error: of that mean.
        mean_tokens: response tokens.
        ended: share that ended before the token limit.
    """

    rows: str
    samples: int
    distinct: int
    skipped: int
    overlap: float | None
    seen: str
    pass_at_1: float
    pass_at_1_standard_error: float
    mean_score: float
    mean_score_standard_error: float
    mean_tokens: float
    ended: float


def evaluate(
    config: Config, *, model: str, samples: int, trained: Config | None = None
) -> EvalResult:
    """Let a model answer prompts that training leaves out, one greedy answer each, and judge them.

    Args:
        model: a known name, a folder, or a hub name.
        samples: prompts, at most.
        trained: settings that the model was trained with, or is to be; without them ``config``.

    Raises:
        TaskError: the task has no verifier, or no prompts to ask.
        RewardError: the verifier failed on an answer.
        ModelError: the model cannot be loaded.
    """
    greedy = config.rollout.model_copy(update={"temperature": 0.0, "samples_per_prompt": 1})
    reward = {"sources": ("task",), "weights": (), "on_failure": "stop"}
    read = of_model(measured_on(config), model).model_copy(
        update={"rollout": greedy, "reward": config.reward.model_copy(update=reward)}
    )
    with ExitStack() as stack:
        prepare_torch(read.seed, read.threads)
        tokenizer = load_tokenizer(
            resolve(model, on_stderr), read.model.trust_remote_code, on_stderr
        )
        task = tasks.load(read.task, read.seed, on_stderr)
        function = open_function(
            TaskSource("task"), read, task.row(0).data.keys(), tokenizer, stack
        )
        asked = questions(config, task, tokenizer, samples, trained or config)
        answers = answer(read, load_actor(read.model, on_stderr), tokenizer, asked.prompts)
        scores = score_all(function, answers.rollouts, read.rollout.batch)
    right = [float(score >= RIGHT) for score in scores]
    return EvalResult(
        rows=asked.rows,
        samples=len(scores),
        distinct=asked.distinct,
        skipped=asked.skipped,
        overlap=asked.overlap,
        seen=asked.seen,
        pass_at_1=fmean(right),
        pass_at_1_standard_error=standard_error(right),
        mean_score=fmean(scores),
        mean_score_standard_error=standard_error(scores),
        mean_tokens=answers.mean_tokens,
        ended=answers.ended,
    )
