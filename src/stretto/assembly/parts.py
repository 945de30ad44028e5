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
    Given,
    load_reward_model,
    make_actor,
    make_critic,
    make_reference,
    with_adapters,
)
from stretto.assembly.scorers import reward_scorer
from stretto.assembly.warmup import warmed_up
from stretto.config import Config
from stretto.config.sections import MODEL
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
    config: Config, given: Given, say: Say
) -> tuple[PreTrainedTokenizerBase, tasks.Task, PromptSource]:
    """Open the actor's tokenizer, the task, and its prompts.

    Raises:
        StrettoError: a setting, the tokenizer or the dataset is at fault.
    """
    trust = config.model.trust_remote_code
    tokenizer = given.tokenizer or load_tokenizer(resolve(config.model.name, say), trust, say)
    task = given.task or given.opened or tasks.load(config.task, config.seed, say)
    prompts = PromptSource(task, config.task, tokenizer, config.seed)
    if given.looks_at:
        given.looks_at(prompts)
    return tokenizer, task, prompts


def trained_models(
    config: Config,
    task: tasks.Task,
    prompts: PromptSource,
    rewards: Sequence[RewardModelScorer],
    stack: ExitStack,
    say: Say,
    given: Given,
) -> Models:
    """Make actor, critic and reference, as training starts.

    A resumed run starts from the outcome of the warm-up, too: it is the reference, and under LoRA
    the frozen weights, and checkpoints hold only what changes afterwards.

    Args:
        stack: gives models that the caller brought back as they were.
        say: called with a line about whatever takes time.
        given: what the caller brings instead of names.
        task, prompts: see :func:`open_task`.
        rewards: the reward models, as far as they are in this process.

    Raises:
        StrettoError: a setting or a model is at fault.
    """
    base = make_actor(config, given, say)
    ends = given.end_tokens
    ends = end_token_ids(unwrapped(base), prompts.tokenizer) if ends is None else ends
    check_ends(config, ends)
    check_positions(config, "the actor", base, generating=True)
    check_rewards(config, rewards, prompts.first(FIRST))
    check_lora(base, config.model)
    check_cuts(config, base, rewards)
    warmed_up(base, config, task, prompts, given, say)
    critic = make_critic(config, base, prompts.tokenizer, rewards, given, say)
    if critic is not None:
        brought = given.critic is not None
        critic = with_adapters(critic, config, "SEQ_CLS", stack, brought=brought)
    actor = with_adapters(base, config, "CAUSAL_LM", stack, brought=given.actor is not None)
    reference = make_reference(config, base, actor, given)
    check_positions(config, "the critic", critic)
    check_positions(config, "the reference", reference)
    for model in filter(None, (actor, critic)):
        set_checkpointing(model, config.model)
    return Models(actor, critic, reference, ends)


def critic_rewards(
    config: Config, tokenizer: PreTrainedTokenizerBase, say: Say, *, in_files: bool = False
) -> list[RewardModelScorer]:
    """Return the reward model that the critic starts from; none where it starts otherwise."""
    if config.critic.init != "reward" or not config.algorithm.definition.critic:
        return []
    source = next(s for s in config.reward.sources if s.startswith(MODEL))
    loaded = load_reward_model(config, source.removeprefix(MODEL), say, in_files=in_files)
    return [reward_scorer(source, config, tokenizer, say, loaded=loaded)]
