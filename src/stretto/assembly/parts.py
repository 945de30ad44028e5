"""The parts of a run, which a runtime places.

Checks of settings and data come before models, which are slow to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto import tasks
from stretto.assembly.checks import (
    FIRST,
    check_cuts,
    check_ends,
    check_positions,
    check_rewards,
)
from stretto.assembly.models import (
    Overrides,
    frozen_copy,
    load_reward_model,
    made_ready,
    make_actor,
    make_critic,
    with_adapters,
)
from stretto.assembly.scorers import reward_scorer
from stretto.assembly.warmup import warmed_up
from stretto.config import Config
from stretto.models.forward import unwrapped
from stretto.models.load import end_token_ids, load_tokenizer, set_checkpointing
from stretto.models.lora import check_lora
from stretto.models.resolve import resolve
from stretto.saying import Say
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.prompts import PromptSource

STARTING_FUNCTIONS = "starting the reward functions"
"""Work that is shown."""


@dataclass(frozen=True)
class Models:
    """The models of a run that come of the actor.

    Attributes:
        end_tokens: that end a response.
    """

    actor: nn.Module
    critic: nn.Module | None
    reference: nn.Module | None
    end_tokens: frozenset[int]


def open_task(
    config: Config, overrides: Overrides, say: Say
) -> tuple[PreTrainedTokenizerBase, tasks.Task, PromptSource]:
    """Open the actor's tokenizer, the task, and its prompts.

    Args:
        say: called with a line about whatever takes time.

    Raises:
        StrettoError: a setting, the tokenizer or the dataset is at fault.
    """
    m = config.model
    tokenizer = overrides.tokenizer or load_tokenizer(
        resolve(m.name, say), m.trust_remote_code, say
    )
    task = overrides.task or overrides.opened or tasks.load(config.task, config.seed, say)
    prompts = PromptSource(task, config.task, tokenizer, config.seed)
    if overrides.looks_at:
        overrides.looks_at(prompts)
    return tokenizer, task, prompts


def trained_models(
    config: Config,
    task: tasks.Task,
    prompts: PromptSource,
    rewards: Sequence[RewardModelScorer],
    stack: ExitStack,
    say: Say,
    overrides: Overrides,
) -> Models:
    """Make actor, critic and reference, as training starts.

    A resumed run starts from the outcome of the warm-up, too: it is the reference, and under LoRA
    the frozen weights, and checkpoints hold only what changes afterwards.

    Args:
        rewards: the reward models, as far as they are in this process.

    Raises:
        StrettoError: a setting or a model is at fault.
    """
    m = config.model
    base = make_actor(m, overrides, say)
    ends = overrides.end_tokens
    ends = end_token_ids(unwrapped(base), prompts.tokenizer) if ends is None else ends
    check_ends(config, ends)
    check_positions(config, "the actor", base, generating=True)
    check_rewards(config, rewards, prompts.first(FIRST))
    check_lora(base, m)
    check_cuts(config, base, rewards)
    warmed_up(base, config, task, prompts, overrides, say)
    critic = None
    if config.algorithm.definition.critic:
        init, tokenizer = config.critic.init, prompts.tokenizer
        critic = make_critic(m, init, base, tokenizer, rewards, overrides, say)
        brought = overrides.critic is not None
        critic = with_adapters(critic, m, config.seed, "SEQ_CLS", stack, brought=brought)
    brought = overrides.actor is not None
    actor = with_adapters(base, m, config.seed, "CAUSAL_LM", stack, brought=brought)
    reference = None
    if config.algorithm.has_reference:
        if overrides.reference is not None:
            reference = made_ready(overrides.reference, m.device, "the reference")
            reference.requires_grad_(False)
        else:  # under LoRA the actor is its own reference, without its adapters
            reference = actor if m.lora_rank else frozen_copy(base)
    check_positions(config, "the critic", critic)
    check_positions(config, "the reference", reference)
    for model in filter(None, (actor, critic)):
        set_checkpointing(model, m)
    return Models(actor, critic, reference, ends)


def critic_rewards(
    config: Config, tokenizer: PreTrainedTokenizerBase, say: Say, *, in_files: bool = False
) -> list[RewardModelScorer]:
    """Return the reward model that the critic starts from; none where it starts otherwise."""
    if config.critic.init != "reward" or not config.algorithm.definition.critic:
        return []
    source = config.reward.models[0]
    loaded = load_reward_model(config.model, source.model, say, in_files=in_files)
    return [reward_scorer(source.name, config, tokenizer, say, loaded)]
