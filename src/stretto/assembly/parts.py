"""Builds the parts of a run that a runtime places: prompts, models and the actor's warm-up.
Settings and data are checked before models, because models are slow to load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count, islice

import numpy as np
from torch import nn

from stretto import tasks
from stretto.assembly import run_models
from stretto.assembly.environments import turn_ends
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import Overrides
from stretto.assembly.teachers import check_teachers
from stretto.config import Config, PipelineConfig
from stretto.errors import ConfigError
from stretto.models.forward import positions, unwrapped
from stretto.models.load import end_token_ids, load_tokenizer, save_tokenizer, set_checkpointing
from stretto.models.lora import check_lora, starting_policy, trained_names
from stretto.models.resolve import resolve
from stretto.models.weights import fingerprint
from stretto.pipelines.executor.stages import check_stages
from stretto.saying import Say, working
from stretto.scoring.model_scorers import RewardModelScorer
from stretto.tasks.prompts import PromptSource, refuse_templated
from stretto.training.warmup import keep, take, warm_up
from stretto.types import FinishReason, Prompt, Response

ANSWERS_FROM = "the verifier compares with the column"

FIRST = 8
"""How many prompts are checked before the run."""


@dataclass(frozen=True)
class PolicyModels:
    """The actor, the models derived from it, and the tokens that end a response."""

    actor: nn.Module
    critic: nn.Module | None
    reference: nn.Module | None
    end_tokens: frozenset[int]


def open_prompts(config: Config, overrides: Overrides, say: Say) -> PromptSource:
    """Open the prompts of a run, with their task and the actor's tokenizer."""
    m = config.model
    tokenizer = overrides.tokenizer or load_tokenizer(
        resolve(m.name, say), m.trust_remote_code, say
    )
    if overrides.tokenizer:
        save_tokenizer(tokenizer)
    task = overrides.task or overrides.opened or tasks.load(config.task, config.seed, say)
    prompts = PromptSource(task, config.task, tokenizer, config.seed)
    if overrides.looks_at:
        overrides.looks_at(prompts)
    return prompts


def look_at_prompts(prompts: PromptSource, config: Config, say: Say) -> list[Prompt]:
    """Render all rows of a run, and return its first prompts.

    Logs skipped rows, control tokens in texts, template arguments that the chat template never
    reads, and an answer's column that no setting names. Raises TaskError if the chat template was
    already applied to all prompts, or if teachers divide the prompts and a row names none of them.
    """
    task, encoder = prompts.task, prompts.encoder
    check_teachers(task, config.algorithm)
    refuse_templated(map(task.row, task.indices), encoder)
    prompts.check(say)
    first = prompts.first(FIRST)
    if left_out := task.left_out + len(prompts.refused):
        because = task.left_out_because or next(iter(prompts.refused.values()))
        say(f"{left_out} rows cannot be used and are left out; the first: {because}")
    if prompts.found:
        say(
            f"prompts spell control tokens ({', '.join(sorted(prompts.found))}), which are read as "
            "text; conversations are given as lists of messages"
        )
    chats = any(prompt.messages for prompt in first)
    if unread := encoder.unread if chats else encoder.arguments:
        say(
            f"the chat template never reads {', '.join(map(repr, sorted(unread)))}, of "
            "task.template_arguments or a row's chat_template_kwargs, which has no effect"
            + ("" if chats else ": prompts are plain text")
        )
    if "task" in config.reward.sources and (column := task.found_answers):
        say(f"{ANSWERS_FROM} '{column}', as task.columns names no answer")
    return first


def trained_models(
    config: Config,
    prompts: PromptSource,
    rewards: Sequence[RewardModelScorer],
    stack: ExitStack,
    say: Say,
    overrides: Overrides,
) -> PolicyModels:
    """Make the initial actor, critic and reference. ``rewards`` are those in this process.

    A resumed run also starts from the warmed-up model, because that is the reference and, with
    LoRA, the frozen weights. Checkpoints contain only later changes.
    """
    m, tokenizer = config.model, prompts.tokenizer
    base = run_models.make_actor(m, overrides, say, merged=False)
    ends = overrides.end_tokens
    if ends is None:
        ends = end_token_ids(unwrapped(base), tokenizer) | turn_ends(config, tokenizer)
    if not (ends or config.rollout.stop or config.reward.missing_eos == "off"):
        raise ConfigError(
            "no end token and no rollout.stop ends a response, and reward.missing_eos = "
            f"'{config.reward.missing_eos}' has a penalty for the token limit. Set eos_token in "
            "the model's tokenizer_config.json, name a string in rollout.stop, or set "
            "reward.missing_eos = 'off'",
            "nothing-ends-responses",
        )
    config.require_positions("the actor", positions(base, generating=True))
    if draft := config.rollout.speculative_model:
        run_models.check_draft(m, draft, tokenizer, say)
    RoleFactory(config, say).check_rewards(rewards, prompts.first(FIRST))
    check_lora(base, m)
    adapted = run_models.starts_adapted(m, overrides.actor)
    _check_cuts(config.pipeline, config.critic.init, base, rewards)
    warmed_up(base, config, prompts, overrides, say)
    critic, trained = None, trained_names(base)
    if config.algorithm.definition.critic:
        critic = run_models.make_critic(
            m, config.critic.init, base, tokenizer, rewards, overrides, say
        )
        merge_stack = stack if overrides.critic is not None else None
        critic = run_models.with_adapters(critic, m, config.seed, "SEQ_CLS", merge_stack)
    for name, parameter in base.named_parameters():  # the critic's adapters froze them
        parameter.requires_grad_(name in trained)
    merge_stack = stack if overrides.actor is not None else None
    actor = run_models.with_adapters(base, m, config.seed, "CAUSAL_LM", merge_stack)
    reference = None
    if config.algorithm.has_reference:
        if overrides.reference is not None:
            reference = run_models.made_ready(overrides.reference, m.device, "the reference")
            reference.requires_grad_(False)
        elif adapted:
            reference = starting_policy(actor)
        else:  # with LoRA the actor without its adapters is the reference
            reference = actor if m.lora_rank else run_models.frozen_copy(base)
    for name, model in (("critic", critic), ("reference", reference)):
        if model is not None:
            config.require_positions(f"the {name}", positions(model))
    for model in filter(None, (actor, critic)):
        set_checkpointing(model, m)
    return PolicyModels(actor, critic, reference, ends)


def _check_cuts(
    pipeline: PipelineConfig, init: str, actor: nn.Module, rewards: Sequence[RewardModelScorer]
) -> None:
    """Check before the warm-up that models can be cut; a critic of another kind comes later."""
    if not pipeline.ranks:
        return
    check_stages(pipeline, "actor", actor)
    if init in ("actor", "reward"):
        check_stages(pipeline, "critic", actor if init == "actor" else rewards[0].model)


def warmed_up(
    model: nn.Module, config: Config, prompts: PromptSource, overrides: Overrides, say: Say
) -> None:
    """Fine-tune the model on the task's own answers, if the settings request it.

    ``overrides.warmup`` may name a file with the result, to be loaded instead. Raises TaskError if
    the task has no answers, ConfigError if the file has another warm-up, StateError if the file is
    damaged, and StorageError if it cannot be written.
    """
    number, file = config.warmup_examples, overrides.warmup
    if not number:
        return
    key = ""
    if file:
        # Threads, devices and library versions are left out, because they only change the rounding.
        # All processes of a run use the same file, also after a resume.
        depends_on = {
            "model": fingerprint(model.named_parameters()),
            "rows": dict(prompts.task.identity),
            "task": config.task.model_dump(mode="json"),
            "seed": config.seed,
            "examples": number,
            "lr": config.warmup_lr,
            "training": config.training.model_dump(
                mode="json", exclude={"ratio_tolerance", "match_engine"}
            ),
        }
        key = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
    if file and file.exists():
        loss = take(model, key, file)
        say(f"warmed up already on {number} examples ({loss:.3f} nats a token): {file}")
        return
    examples = warmup_examples(number, prompts)
    with working(say, "warming up on examples", len(examples)) as advance:
        loss = warm_up(model, examples, config.warmup_lr, config.training, advance)
    if file:
        keep(model, loss, key, file)
    say(f"warmed up on {number} examples: {loss:.3f} nats a token")


def warmup_examples(number: int, prompts: PromptSource) -> list[Response]:
    """Return the task's demonstrations or answers as finished responses, one per turn.

    Rows are taken from the end of the first epoch's order, because RL reaches them last, and repeat
    if there are too few. Raises TaskError if the task has neither.
    """
    tokenizer = prompts.tokenizer
    encoder, examples = prompts.encoder, list[Response]()
    places = chain.from_iterable(prompts.ids(backwards=True) for _ in count())
    for place in islice(places, number):
        if prompts.refusal(prompts.row_by_id(place)):
            continue
        for prompt, text in prompts.demonstration(place, f"warmup_examples = {number}"):
            answer = encoder.ids(encoder.escape(text))
            if tokenizer.eos_token_id is not None:
                answer.append(tokenizer.eos_token_id)
            tokens, i = np.array(answer, np.int32), len(examples)
            examples.append(Response(i, i, prompt, tokens, finish=FinishReason.STOP))
    return examples
