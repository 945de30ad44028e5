"""Generation in this process, outside a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import NO_OVERRIDES, Overrides, make_actor, prepare_torch
from stretto.config import Config, EnvironmentConfig, ModelConfig, RolloutConfig, TaskConfig
from stretto.errors import MissingExtraError
from stretto.evaluation.episode_generation import FinishedEpisode, Tools
from stretto.models.backend import with_dtype
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.observe.progress import on_stderr
from stretto.rollout.base import Engine
from stretto.rollout.engine_registry import ENGINES, engine_of
from stretto.saying import silent, working
from stretto.schedules.rollout import Rollout
from stretto.scoring.response_buffer import response_text
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import render
from stretto.tasks.task import TaskRow
from stretto.types import FinishReason, Prompt


def open_engine(
    config: Config, tokenizer: PreTrainedTokenizerBase, overrides: Overrides = NO_OVERRIDES
) -> tuple[Engine, nn.Module]:
    """Load the model of the settings, and open their engine over it in this process.

    If the engine's library is not installed, Stretto's own engine replaces it. The model is on the
    CPU if the engine has weights of its own. Raises ModelError if it cannot be loaded.
    """
    kind, m = engine_of(config.rollout), config.model
    try:
        kind.check()
    except MissingExtraError as error:
        on_stderr(f"{error}; here Stretto's own engine answers")
        rollout = config.rollout.model_copy(update={"engine": "torch", "engine_args": {}})
        config, kind = config.model_copy(update={"rollout": rollout}), ENGINES["torch"]
    if kind.capabilities.own_weights:
        m = with_dtype(m, silent).model_copy(update={"device": "cpu"})
    actor = make_actor(m, overrides, on_stderr)
    rows, overridden = config.rollout.batch, overrides.actor is not None
    factory = RoleFactory(config, on_stderr)
    return factory.make_engine(actor, tokenizer, rows, overridden=overridden), actor


def answer(engine: Engine, prompts: Sequence[Prompt], per_prompt: int = 1) -> list[Rollout]:
    """Answer prompts with different ids. The rollouts of one share a group, in order."""
    rollouts = [
        Rollout(n * per_prompt + i, prompt, prompt.id)
        for n, prompt in enumerate(prompts)
        for i in range(per_prompt)
    ]
    with working(on_stderr, "answering prompts", len(rollouts)) as advance:
        for _ in completed(engine, rollouts):
            advance(1)
    return rollouts


class Answer(NamedTuple):
    """An answer to a prompt, and its number. Answers to one prompt have consecutive numbers.

    Of an episode, the text is the policy's last turn, and ``tokens`` counts all sampled tokens.
    """

    number: int
    text: str
    tokens: int
    finish: FinishReason
    episode: FinishedEpisode | None = None


def generate(
    config: ModelConfig,
    rows: Sequence[TaskRow],
    task: TaskConfig,
    options: RolloutConfig,
    *,
    environment: EnvironmentConfig | None = None,
    seed: int = 0,
    overrides: Overrides = NO_OVERRIDES,
) -> Iterator[Answer]:
    """Yield answers to rows, ``options.samples_per_prompt`` each, as soon as they have ended.

    The overrides are model and tokenizer. Of the task, only settings for making prompts are used.
    With an environment an answer is an episode. Raises ConfigError if it cannot be opened.
    """
    prepare_torch(seed, 0)
    tokenizer = overrides.tokenizer or load_tokenizer(
        resolve(config.name, on_stderr), say=on_stderr
    )
    encoder = Encoder(tokenizer, task.template_arguments)
    samples = options.samples_per_prompt
    with ExitStack() as stack:
        tools = Tools(environment, encoder, stack, options.stop) if environment else None
        render_options: Any = {"encoder": encoder, "render": tools.render if tools else None}
        prompts = [render(row, task, tokenizer, i, **render_options) for i, row in enumerate(rows)]
        rollouts = [Rollout(p.id * samples + i, p, p.id) for p in prompts for i in range(samples)]
        longest = max(len(prompt.tokens) for prompt in prompts)
        if tools and environment:
            longest += environment.max_observation_tokens  # most that an opening may add
        task = task.model_copy(update={"max_prompt_tokens": longest})
        config = with_dtype(config, on_stderr) if overrides.actor is None else config
        settings = Config.model_construct(seed=seed, model=config, rollout=options, task=task)
        engine, _ = open_engine(settings, tokenizer, overrides)
        if tools:
            yield from map(_of_episode, tools.episodes(engine, rollouts, options, longest))
            return
        for r in completed(engine, rollouts):
            assert r.finish
            text = response_text(tokenizer, r.tokens, r.finish, options.stop)
            yield Answer(r.id, text, len(r), r.finish)


def _of_episode(episode: FinishedEpisode) -> Answer:
    first = episode.samples[0]
    assert first.finish
    turns = [m["content"] for m in episode.messages if m["role"] == "assistant"]
    tokens = sum(r.sampled_tokens for r in episode.samples)
    return Answer(first.id, turns[-1] if turns else "", tokens, first.finish, episode)


def completed(
    engine: Engine, rollouts: Sequence[Rollout], chunk_tokens: int = 16
) -> Iterator[Rollout]:
    """Decode rollouts with different ids to their ends. Yield each once it has finished.

    The engine must hold no other live rollouts. It decodes ``chunk_tokens`` between checks.
    """
    by_id = {r.id: r for r in rollouts}
    engine.admit([r.response() for r in rollouts])
    live_count = len(rollouts)
    while live_count:
        for chunk in engine.decode(chunk_tokens).chunks:
            rollout = by_id[chunk.rollout_id]
            rollout.append(chunk)
            if rollout.finish:
                live_count -= 1
                yield rollout
