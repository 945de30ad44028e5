"""Generation in this process, and verdicts on what was generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal, Protocol

from torch import nn

from stretto.assembly.models import NO_OVERRIDES, Overrides, make_actor, prepare_torch
from stretto.assembly.roles import make_engine
from stretto.config import Config, ModelConfig, RolloutConfig, TaskConfig
from stretto.config.sections import require_seed
from stretto.errors import MissingExtraError, RewardError
from stretto.models.backend import fastest_dtype, pick_device, pick_dtype
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.observe.progress import on_stderr
from stretto.rollout.base import Engine
from stretto.rollout.registry import ENGINES
from stretto.saying import working
from stretto.schedules.rollout import Rollout
from stretto.scoring.responses import response_text
from stretto.tasks.base import TaskRow
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import render
from stretto.types import FinishReason, Prompt, Response, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Answers:
    """A model's responses to prompts.

    Attributes:
        rollouts: finished; those of one prompt follow one another and share a group.
    """

    rollouts: Sequence[Rollout]

    @property
    def mean_tokens(self) -> float:
        """Response tokens."""
        return fmean(len(r) for r in self.rollouts)

    @property
    def ended(self) -> float:
        """Share of the responses that ended before the token limit."""
        return fmean(r.finish is FinishReason.STOP for r in self.rollouts)


def of_model(config: Config, model: str) -> Config:
    """Settings with another model."""
    return config.model_copy(update={"model": config.model.model_copy(update={"name": model})})


def open_engine(
    config: Config, tokenizer: PreTrainedTokenizerBase, given: Overrides = NO_OVERRIDES
) -> tuple[Engine, nn.Module]:
    """Load the model of the settings, and open the engine that they name over it, in this process.

    Where that engine's library is not installed here, Stretto's own takes its place.

    Returns:
        The engine, and the model; on the CPU if the engine has weights of its own.

    Raises:
        ModelError: the model cannot be loaded.
    """
    kind = ENGINES[config.rollout.engine]
    try:
        kind.check()
    except MissingExtraError as error:
        on_stderr(f"{error}; here Stretto's own engine answers")
        own = config.rollout.model_copy(update={"engine": "torch", "engine_args": {}})
        config, kind = config.model_copy(update={"rollout": own}), ENGINES["torch"]
    loading = config
    if kind.own_weights:
        m = config.model
        dtype = str(pick_dtype(m.dtype, pick_device(m.device))).removeprefix("torch.")
        on_cpu = m.model_copy(update={"dtype": dtype, "device": "cpu"})
        loading = config.model_copy(update={"model": on_cpu})
    actor = make_actor(loading.model, given, on_stderr)
    rows, overridden = config.rollout.batch, given.actor is not None
    return make_engine(config, actor, tokenizer, rows, overridden=overridden), actor


def answer(engine: Engine, prompts: Sequence[Prompt], per_prompt: int = 1) -> Answers:
    """Let an engine answer prompts.

    Args:
        prompts: with ids of their own; at least one.
        per_prompt: responses to each.
    """
    rollouts = [
        Rollout(n * per_prompt + i, prompt, prompt.id)
        for n, prompt in enumerate(prompts)
        for i in range(per_prompt)
    ]
    with working(on_stderr, "answering prompts", len(rollouts)) as advance:
        for _ in completed(engine, rollouts):
            advance(1)
    return Answers(rollouts)


def generate(
    config: ModelConfig,
    prompts: Sequence[str],
    options: RolloutConfig,
    *,
    seed: int = 0,
    chat: Literal["auto", "on", "off"] = "auto",
    given: Overrides = NO_OVERRIDES,
) -> Iterator[tuple[int, str]]:
    """Answer prompts: (index of the prompt, text), each as soon as it has ended.

    Args:
        chat: whether to apply the tokenizer's chat template.
        given: model and tokenizer, where the caller has them as objects.

    Raises:
        ConfigError: the seed is out of range.
    """
    require_seed(seed)
    task = TaskConfig(chat=chat)
    settings = Config.model_construct(seed=seed, model=config, rollout=options, task=task)
    prepare_torch(seed, 0)
    tokenizer = given.tokenizer or load_tokenizer(resolve(config.name, on_stderr), say=on_stderr)
    encoder = Encoder(tokenizer)
    rollouts = [
        Rollout(i, render(TaskRow(prompt=text), task, tokenizer, i, encoder=encoder), i)
        for i, text in enumerate(prompts)
    ]
    if given.actor is None and config.dtype == "auto":
        with working(on_stderr, "trying which type is faster"):
            dtype, because = fastest_dtype(pick_device(config.device))
        kind = str(dtype).removeprefix("torch.")
        on_stderr(f"computing in {kind}: {because}; --dtype takes another")
    longest = max(len(r.prompt.tokens) for r in rollouts)
    room = task.model_copy(update={"max_prompt_tokens": longest})
    engine, _ = open_engine(settings.model_copy(update={"task": room}), tokenizer, given)
    for r in completed(engine, rollouts):
        yield r.id, response_text(tokenizer, r.tokens, r.finish, options.stop)


class WholeScorer(Protocol):
    """A scorer of finished rollouts."""

    def admit(self, responses: Sequence[Response]) -> None:
        """Take in responses that will be scored."""

    def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        """Return the scores of these rollouts, in the order asked."""
        ...


def score_all(function: WholeScorer, rollouts: Sequence[Rollout], batch: int) -> list[float]:
    """The verdict on each rollout; asked in batches, as a reward function's time limit is for one.

    Raises:
        RewardError: it failed on one, or does not apply to one.
    """
    values = []
    with working(on_stderr, "scoring responses", len(rollouts)) as advance:
        for start in range(0, len(rollouts), batch):
            part = rollouts[start : start + batch]
            function.admit([r.response(text=True) for r in part])
            values += [_number(score) for score in function.finish([r.id for r in part])]
            advance(len(part))
    return values


def _number(score: Score) -> float:
    if score.failure:
        raise RewardError(score.failure, [score.rollout_id])
    if score.scalar is None:
        raise RewardError(
            f"'{score.source}' gave None for response {score.rollout_id}, so it does not "
            "apply there; here every response needs a number",
            [score.rollout_id],
        )
    return score.scalar


def completed(
    engine: Engine, rollouts: Sequence[Rollout], chunk_tokens: int = 16
) -> Iterator[Rollout]:
    """Decode rollouts to their ends, outside a schedule; each is yielded once it has finished.

    Args:
        rollouts: with ids of their own; whatever else the engine holds must have ended.
        chunk_tokens: decoded of each between two looks at which have finished.
    """
    by_id = {r.id: r for r in rollouts}
    engine.admit([r.response() for r in rollouts])
    left = len(rollouts)
    while left:
        for chunk in engine.decode(chunk_tokens).chunks:
            rollout = by_id[chunk.rollout_id]
            rollout.append(chunk)
            if rollout.finish:
                left -= 1
                yield rollout
