"""Gold rewards: complete responses of any origin, scored by the source that evaluates or labels."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pvariance, variance
from typing import Any

from transformers import PreTrainedTokenizerBase

from stretto import tasks
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import load_reward_model
from stretto.config.sections import reward_source
from stretto.errors import ConfigError, RewardError, TaskError
from stretto.models.info import load_config
from stretto.models.load import named_ends
from stretto.models.resolve import adapter_base, resolve
from stretto.observe.progress import on_stderr
from stretto.saying import working
from stretto.schedules.rollout import Rollout
from stretto.scoring.model_scorers import RewardModelScorer
from stretto.scoring.streaming import CodeScorer
from stretto.tasks.task import INDEX_KEY
from stretto.types import FinishReason, Prompt, Score

Gold = CodeScorer | RewardModelScorer  # a source of rewards that scores complete responses


def open_gold(
    source: str,
    factory: RoleFactory,
    columns: Collection[str],
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    ends: frozenset[int] = frozenset(),
) -> Gold:
    """Open a source of rewards: 'task', 'file.py:name' or 'model:NAME'.

    Args:
        columns: of the prompts' dataset.
        ends: tokens with which given responses end (see :func:`as_rollout`).

    Raises ConfigError if the source has another form, or its function cannot be used, TaskError if
    the task has no verifier, and ModelError if the model cannot be loaded or has no scalar head.
    """
    reward = reward_source(source)
    if reward.kind.is_model:
        model = load_reward_model(factory.config.model, reward.model, on_stderr)
        return factory.reward_scorer(source, tokenizer, model, ends=ends)
    if not reward.kind.named:
        raise ConfigError(
            f"'{source}' is no source of rewards; give 'task', 'file.py:name' or 'model:NAME'",
            "no-reward-source",
        )
    return factory.open_function(reward, columns, tokenizer, stack)


def score_all(gold: Gold, rollouts: Sequence[Rollout], batch: int) -> list[float]:
    """Return the score of each rollout, computed in batches, because a function has one time limit
    for a batch. Raises RewardError if the source failed on a response, or gave no finite number.
    """
    values = list[float]()
    with working(on_stderr, "scoring responses", len(rollouts)) as advance:
        for start in range(0, len(rollouts), batch):
            part = rollouts[start : start + batch]
            gold.admit([r.response(text=True) for r in part])
            values += map(_number, gold.finish([r.id for r in part]), part)
            advance(len(part))
    return values


def _number(score: Score, rollout: Rollout) -> float:
    value = score.scalar
    if score.failure:
        message, code = score.failure, "reward-failed"
    elif value is None:
        code = "reward-without-number"
        message = (
            f"'{score.source}' gave None for response {rollout.id}, and each needs a number here"
        )
    elif not math.isfinite(value):
        code = "reward-not-finite"
        message = (
            f"'{score.source}' gives {value} for the response to prompt {rollout.prompt.id} "
            f"({rollout.prompt.text[:200]!r}), and scores are compared; correct the source"
        )
    else:
        return value
    raise RewardError(message, [rollout.id], code)


def as_rollout(number: int, prompt: Prompt, tokens: Sequence[int]) -> Rollout:
    """Return a given response as if it had been sampled.

    Its finish reason is not 'stop', because then it would be cut at the first stop string in it.
    """
    return Rollout(number, prompt, number, array("i", tokens), finish=FinishReason.LENGTH)


def end_tokens_of(
    path: Path | str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> frozenset[int]:
    """Return the tokens that end a response of a checkpoint's model, without its weights.

    An engine stops at them. They equal :func:`~stretto.models.load.end_token_ids` of the loaded
    model. Raises ModelError if the config cannot be read.
    """
    from transformers import GenerationConfig

    config: Any
    if base := adapter_base(path):
        path = resolve(base)
    try:
        config = GenerationConfig.from_pretrained(str(path))
    except OSError:  # without one, transformers takes the model's config
        config = load_config(path, trust_remote_code).get_text_config(decoder=True)
    return named_ends(config, tokenizer)


def reference_text(task: tasks.Task, data: Mapping[str, Any], column: str) -> str:
    """Return the reference response of a prompt with this data.

    The column must have text, or a conversation that ends with the assistant's turn. Without a
    column, it is the task's own answer. Raises TaskError if the column or response is missing.
    """
    columns = ", ".join(sorted(key for key in data if key != INDEX_KEY))
    if not column:
        answer = task.row(data[INDEX_KEY]).reference
        if answer is None:
            raise TaskError(
                "the task has no answers of its own to compare with; name the column with "
                f"reference responses by `reference_column`. The dataset has: {columns}",
                "task-without-answers",
            )
        return answer
    if column not in data:
        raise TaskError(
            f"`reference_column`: '{column}' is no column of the dataset, which has: {columns}",
            "missing-column",
        )
    cell = data[column]
    if isinstance(cell, list) and cell and isinstance(cell[-1], dict):
        cell = cell[-1].get("content") if cell[-1].get("role") == "assistant" else None
    if not isinstance(cell, str) or not cell.strip():
        raise TaskError(
            f"row {data[INDEX_KEY]}, column '{column}': a reference response is text, or messages "
            f"of which the last is the assistant's, not empty; got {repr(data[column])[:200]}",
            "no-reference-response",
        )
    return cell


@dataclass(frozen=True, slots=True)
class WinRate:
    """A policy's responses against reference responses, compared by one score of each.

    Attributes:
        by: the source of the scores.
        rate: (wins + ties / 2) / samples.
        standard_error: of the rate.
        wins: pairs in which the policy's response scores above the reference.
        ties: pairs with equal scores.
        losses: all other pairs.
        score: mean of the policy's responses.
        reference_score: mean of the reference responses.
    """

    by: str
    rate: float
    standard_error: float
    wins: int
    ties: int
    losses: int
    score: float
    reference_score: float


def compare(by: str, scores: Sequence[float], references: Sequence[float]) -> WinRate:
    """Compare scores pair by pair. There must be at least one pair."""
    points = tally([a - b for a, b in zip(scores, references, strict=True)])
    return WinRate(by=by, **points, score=fmean(scores), reference_score=fmean(references))


def tally(differences: Sequence[float]) -> dict[str, Any]:
    """Return rate, standard error and counts of pairs: won above 0, tied at 0, lost below."""
    points = [0.5 if d == 0 else float(d > 0) for d in differences]
    return {
        "rate": fmean(points),
        "standard_error": standard_error(points, rate=True),
        "wins": points.count(1.0),
        "ties": points.count(0.5),
        "losses": points.count(0.0),
    }


def standard_error(values: Sequence[float], *, rate: bool = False) -> float:
    """Return the standard error of a mean, sqrt(variance / n), or 0 for a single value.

    The variance is divided by n - 1, but that of a rate by n: sqrt(p (1 - p) / n).
    """
    over_n = rate or len(values) < 2
    return math.sqrt((pvariance if over_n else variance)(values) / len(values))
