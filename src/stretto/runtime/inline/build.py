"""From settings to the parts of a run; what is quick to get wrong before what is slow to load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto import tasks
from stretto.clock import RealClock
from stretto.config import Config
from stretto.errors import TaskError
from stretto.models.forward import unwrapped
from stretto.models.load import end_token_ids, load_tokenizer, set_checkpointing
from stretto.models.lora import check_lora
from stretto.models.resolve import resolve
from stretto.observe.spans import Spans
from stretto.pipelines.executor.layout import Name
from stretto.pipelines.executor.ranks import Ranks
from stretto.process import keep_freed_memory
from stretto.runtime.controls import controls
from stretto.runtime.inline.checks import (
    check_ends,
    check_positions,
    check_rewards,
    look_at_prompts,
)
from stretto.runtime.inline.models import (
    NOTHING,
    Given,
    Say,
    make_actor,
    make_critic,
    make_reference,
    model_scorers,
    reward_models,
    with_adapters,
)
from stretto.runtime.inline.placement import Placement
from stretto.runtime.inline.roles import PlainScorer
from stretto.schedules.schedule import Schedule
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import PromptSource
from stretto.training.learner import PolicyLearner
from stretto.training.partition import check_stages
from stretto.training.trained import Course, TrainedModel
from stretto.training.warmup import warm_up, warm_up_once
from stretto.types import Rollout


@dataclass(frozen=True)
class Parts:
    """A run, put together."""

    actor: nn.Module
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    scorers: Sequence[PlainScorer]
    learner: PolicyLearner
    placement: Placement
    schedule: Schedule
    spans: Spans

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a run; to be taken between two steps."""
        return {
            "prompts": self.prompts.state_dict(),
            "learner": self.learner.state_dict(),
            "placement": self.placement.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.prompts.load_state_dict(state["prompts"])
        self.learner.load_state_dict(state["learner"])
        self.placement.load_state_dict(state["placement"])
        self.schedule.load_state_dict(state["schedule"], self.prompts.prompt_by_id)


def build(config: Config, stack: ExitStack, say: Say, given: Given = NOTHING) -> Parts:
    """Put a run together.

    The warm-up is done for a resumed run too: the reference, and under LoRA the frozen weights,
    are what comes out of it, and checkpoints hold only what changes afterwards.

    Args:
        config: of the run.
        stack: closes what must be closed.
        say: told in a line what takes time.
        given: what the caller brings instead of names.
    """
    prepare_torch(config)
    trust = config.model.trust_remote_code
    tokenizer = given.tokenizer or load_tokenizer(resolve(config.model.name, say), trust)
    task = given.task or tasks.load(config.task, config.seed)
    prompts = PromptSource(task, config.task, tokenizer, config.seed)
    judges = open_judges(config, task, tokenizer, stack, given)
    rewards = reward_models(config, tokenizer, given, say)
    base = make_actor(config, given, say)
    ends = given.end_tokens
    ends = end_token_ids(unwrapped(base), tokenizer) if ends is None else ends
    check_ends(config, ends)
    check_positions(config, "the actor", base, generating=True)
    check_rewards(config, rewards[0], look_at_prompts(prompts, say))
    check_lora(base, config.model)
    _check_stages(config, base, rewards[0])
    if config.warmup_examples:
        examples = _examples(config, task, prompts)
        loss = (
            warm_up_once(base, examples, config, given.warmup)
            if given.warmup
            else warm_up(base, examples, config)
        )
        say(f"warmed up on {config.warmup_examples} examples: {loss:.3f} nats a token")
    critic = make_critic(config, base, tokenizer, rewards[0], given, say)
    if critic is not None:
        brought = given.critic is not None
        critic = with_adapters(critic, config, "SEQ_CLS", stack, brought=brought)
    actor = with_adapters(base, config, "CAUSAL_LM", stack, brought=given.actor is not None)
    reference = make_reference(config, base, actor, given)
    check_positions(config, "the critic", critic)
    check_positions(config, "the reference", reference)
    for model in filter(None, (actor, critic)):
        set_checkpointing(model, config.model)
    place = Placement(config, actor, critic, tokenizer, stack, ends)
    models = [
        [*own, *model_scorers(config, reference, values, say)]
        for own, values in zip(rewards, place.critics, strict=True)
    ]
    learner, ranks = _make_learner(config, actor, critic, place, stack)
    spans = Spans(RealClock())
    schedule = Schedule(
        prompts.next,
        place.generators(spans),
        place.seats(judges, models, spans),
        place.learner(learner, spans, ranks),
        controls(config, place.migrating(config)),
        RealClock(),
        spans,
    )
    scorers = [*judges, *(scorer for seat in models for scorer in seat)]
    return Parts(actor, tokenizer, prompts, scorers, learner, place, schedule, spans)


def prepare_torch(config: Config) -> None:
    """Memory, threads, and the random state of initialisation, which no run draws from later."""
    keep_freed_memory()
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)


def open_judges(
    config: Config,
    task: tasks.Task,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    given: Given = NOTHING,
) -> list[FunctionScorer]:
    """The reward sources that are code, each in a process of its own if it is not ``given``."""
    columns = task.row(0).data.keys()
    judges: list[FunctionScorer] = []
    for source in config.reward.sources:
        if source.startswith("model:") or source in given.reward_models:
            continue
        judge = FunctionScorer(
            source,
            config.task,
            config.seed,
            tokenizer,
            stop=config.rollout.stop,
            timeout_s=config.reward.timeout_s,
            columns=columns,
            function=given.functions.get(source),
        )
        stack.callback(judge.close)
        judges.append(judge)
    return judges


def _examples(config: Config, task: tasks.Task, prompts: PromptSource) -> list[Rollout]:
    """The task's own answers as finished responses, from the end of the first epoch's order on:
    the rows that RL reaches last. Again and again where there are too few.
    """
    tokenizer = prompts.tokenizer
    encoder, examples = Encoder(tokenizer), []
    places = chain.from_iterable(prompts.ids(backwards=True) for _ in count())
    for i, place in enumerate(islice(places, config.warmup_examples)):
        prompt = prompts.prompt_by_id(place)
        reference = task.row(prompt.data[tasks.INDEX_KEY]).reference
        if reference is None:
            raise TaskError(
                f"warmup_examples = {config.warmup_examples} trains on the task's own answers, and "
                f"task '{config.task.name}' has none; set warmup_examples = 0"
            )
        answer = encoder.ids(encoder.escape(reference))
        if tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        examples.append(Rollout(i, prompt, i, tokens=answer))
    return examples


def _check_stages(config: Config, actor: nn.Module, rewards: Sequence[RewardModelScorer]) -> None:
    """See before the warm-up that models can be cut; a critic of another kind is yet to come."""
    if not config.pipeline.ranks:
        return
    check_stages(config.pipeline, "actor", actor)
    if config.critic.init in ("actor", "reward"):
        critic = actor if config.critic.init == "actor" else rewards[0].model
        check_stages(config.pipeline, "critic", critic)


def _make_learner(
    config: Config,
    actor: nn.Module,
    critic: nn.Module | None,
    place: Placement,
    stack: ExitStack,
) -> tuple[PolicyLearner, Ranks | None]:
    """The learner, and the ranks that train for it, where there are any."""
    t = config.training
    per_step = t.epochs * t.minibatches
    updates, warmup = config.steps * per_step, t.warmup_steps * per_step
    frozen = min(config.critic.freeze_steps, config.steps) * per_step
    of_actor, of_critic = (
        Course(t.lr, updates - frozen, warmup),
        Course(t.critic_lr, updates, warmup),
    )
    factors = config.reward.factors
    if not config.pipeline.ranks or critic is None:
        learner = PolicyLearner(
            _trained(actor, of_actor, config),
            _trained(critic, of_critic, config) if critic else None,
            config,
            factors,
            snapshots=place.snapshots,
        )
        return learner, None
    # Imported here, as planning brings a compiler that nothing else needs.
    from stretto.training import pipelined

    courses: dict[Name, Course] = {"actor": of_actor, "critic": of_critic}
    staged = pipelined.start(actor, critic, config, courses, place.training_threads)
    stack.callback(staged.ranks.close)
    learner = PolicyLearner(
        staged.actor,
        staged.critic,
        config,
        factors,
        snapshots=place.snapshots,
        passes=staged.passes,
    )
    return learner, staged.ranks


def _trained(model: nn.Module, course: Course, config: Config) -> TrainedModel:
    return TrainedModel(
        model, course.lr, config.training, updates=course.updates, warmup=course.warmup
    )
