"""From settings to the parts of a run; what is quick to get wrong before what is slow to load."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto import tasks
from stretto.clock import RealClock
from stretto.config import Config
from stretto.errors import ConfigError, TaskError
from stretto.models.forward import token_budget, unwrapped
from stretto.models.heads import critic_from_actor
from stretto.models.load import (
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    pick_device,
    pick_dtype,
)
from stretto.models.lora import add_lora
from stretto.models.resolve import resolve
from stretto.observe.spans import Spans
from stretto.process import keep_freed_memory
from stretto.runtime.controls import controls, model_seats
from stretto.runtime.inline.placement import Placement, scorer_slots
from stretto.runtime.inline.roles import PlainScorer
from stretto.schedules.schedule import Schedule
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.models import (
    RewardModelScorer,
    critic_scorer,
    reference_scorer,
    same_tokenizer,
)
from stretto.tasks.prompts import PromptSource
from stretto.training.learner import PPOLearner
from stretto.training.trained import TrainedModel
from stretto.training.warmup import warm_up
from stretto.types import Rollout

Say = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """A run, put together."""

    actor: nn.Module
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    scorers: Sequence[PlainScorer]
    learner: PPOLearner
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


def build(config: Config, stack: ExitStack, say: Say) -> Parts:
    """Put a run together.

    The warm-up is done for a resumed run too: the reference, and under LoRA the frozen weights,
    are what comes out of it, and checkpoints hold only what changes afterwards.

    Args:
        config: of the run.
        stack: closes what must be closed.
        say: told in a line what takes time.
    """
    prepare_torch(config)
    tokenizer = load_tokenizer(resolve(config.model.name, say), config.model.trust_remote_code)
    task = tasks.load(config.task, config.seed)
    prompts = PromptSource(task, config.task, tokenizer, config.seed)
    judges = open_judges(config, task, tokenizer, stack)
    rewards = _reward_models(config, tokenizer, say)
    actor = load_actor(config, say)
    if config.warmup_examples:
        loss = warm_up(actor, _examples(config, task, prompts), config)
        say(f"warmed up on {config.warmup_examples} examples: {loss:.3f} nats a token")
    critic = _make_critic(config, actor, tokenizer, rewards[0], say)
    reference = None
    if config.model.lora_rank:
        actor = add_lora(actor, config.model, "CAUSAL_LM")
    if config.algorithm.kl_coef:  # under LoRA it is the actor with its adapters off
        reference = actor if config.model.lora_rank else frozen_copy(actor)
    for model in (actor, critic):
        _set_checkpointing(model, config)
    place = Placement(config, actor, critic, tokenizer, stack)
    models = [
        [*own, *_model_scorers(config, reference, values, say)]
        for own, values in zip(rewards, place.critics, strict=True)
    ]
    learner = _make_learner(config, actor, critic, place.snapshots)
    spans = Spans(RealClock())
    schedule = Schedule(
        prompts.next,
        place.generators(spans),
        place.seats(judges, models, spans),
        place.learner(learner, spans),
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


def load_actor(config: Config, say: Say) -> nn.Module:
    """The actor, as the settings name it."""
    m = config.model
    device = pick_device(m.device)
    return load_causal_lm(
        resolve(m.name, say), pick_dtype(m.dtype, device), device, m.trust_remote_code
    )


def open_judges(
    config: Config, task: tasks.Task, tokenizer: PreTrainedTokenizerBase, stack: ExitStack
) -> list[FunctionScorer]:
    """The reward sources that are code, each in a process of its own."""
    columns = task.row(0).data.keys()
    judges: list[FunctionScorer] = []
    for source in config.reward.sources:
        if source.startswith("model:"):
            continue
        judge = FunctionScorer(
            source,
            config.task,
            config.seed,
            tokenizer,
            stop=config.rollout.stop,
            timeout_s=config.reward.timeout_s,
            columns=columns,
        )
        stack.callback(judge.close)
        judges.append(judge)
    return judges


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that is never trained."""
    return copy.deepcopy(model).requires_grad_(False)


def _examples(config: Config, task: tasks.Task, prompts: PromptSource) -> list[Rollout]:
    """The task's own answers as finished responses, from the end of the first epoch's order on:
    the rows that RL reaches last.
    """
    tokenizer, size = prompts.tokenizer, len(task)
    examples = []
    for i in range(config.warmup_examples):
        prompt = prompts.prompt_by_id(size - 1 - i % size)
        reference = task.row(prompt.data[tasks.INDEX_KEY]).reference
        if reference is None:
            raise TaskError(
                f"warmup_examples = {config.warmup_examples} trains on the task's own answers, and "
                f"task '{config.task.name}' has none; set warmup_examples = 0"
            )
        answer = list(tokenizer(reference, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        examples.append(Rollout(i, prompt, i, tokens=answer))
    return examples


def _reward_models(
    config: Config, tokenizer: PreTrainedTokenizerBase, say: Say
) -> list[list[RewardModelScorer]]:
    """For each seat of the model scorers, one for each reward model; seats share the models."""
    m = config.model
    device = pick_device(m.device)
    seats: list[list[RewardModelScorer]] = [[] for _ in range(model_seats(config))]
    for source in config.reward.sources:
        kind, _, name = source.partition(":")
        if kind != "model":
            continue
        path = resolve(name, say)
        model = load_sequence_classifier(
            path, pick_dtype(m.dtype, device), device, m.trust_remote_code
        ).requires_grad_(False)
        for seat in seats:
            seat.append(
                RewardModelScorer(
                    source,
                    model,
                    load_tokenizer(path, m.trust_remote_code),
                    tokenizer,
                    token_budget(config.training.microbatch_tokens, device),
                    config.rollout.stop,
                    slots=scorer_slots(config, model, say),
                    say=say,
                )
            )
    return seats


def _make_critic(
    config: Config,
    actor: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[RewardModelScorer],
    say: Say,
) -> nn.Module:
    """The value model; see ``critic.init``."""
    m, init = config.model, config.critic.init
    if init == "actor":
        critic = critic_from_actor(actor)
    elif init == "reward":
        first = rewards[0]
        _require_same_tokenizer(init, first.same_tokenizer)
        critic = copy.deepcopy(first.model).requires_grad_(True)
    else:
        device = pick_device(m.device)
        dtype = pick_dtype(m.dtype, device)
        path = resolve(init, say)
        own = load_tokenizer(path, m.trust_remote_code)
        _require_same_tokenizer(init, same_tokenizer(own, tokenizer))
        critic = load_sequence_classifier(path, dtype, device, m.trust_remote_code)
    return add_lora(critic, m, "SEQ_CLS") if m.lora_rank else critic


def _model_scorers(
    config: Config, reference: nn.Module | None, critic: nn.Module, say: Say
) -> list[PlainScorer]:
    """Reference, where there is a KL penalty, and critic."""
    budget = token_budget(config.training.microbatch_tokens, pick_device(config.model.device))
    scorers: list[PlainScorer] = []
    if reference is not None:
        slots = scorer_slots(config, reference, say)
        temperature = config.rollout.temperature
        scorers.append(reference_scorer(reference, temperature, budget, slots=slots, say=say))
    slots = scorer_slots(config, critic, say)
    scorers.append(critic_scorer(critic, budget, slots=slots, say=say))
    return scorers


def _require_same_tokenizer(init: str, same: bool) -> None:
    if not same:
        raise ConfigError(
            f"critic.init = '{init}' names a model with another tokenizer than the actor, whose "
            "tokens the critic must read; set critic.init = 'actor'"
        )


def _set_checkpointing(model: nn.Module, config: Config) -> None:
    if config.model.gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the new name is not in all of 5.x
            unwrapped(model).gradient_checkpointing_enable({"use_reentrant": False})


def _make_learner(
    config: Config, actor: nn.Module, critic: nn.Module, snapshots: Sequence[str]
) -> PPOLearner:
    t = config.training
    per_step = t.epochs * t.minibatches
    updates, warmup = config.steps * per_step, t.warmup_steps * per_step
    frozen = min(config.critic.freeze_steps, config.steps) * per_step
    return PPOLearner(
        TrainedModel(actor, t.lr, t, updates=updates - frozen, warmup=warmup),
        TrainedModel(critic, t.critic_lr, t, updates=updates, warmup=warmup),
        config,
        config.reward.factors,
        snapshots=snapshots,
    )
