"""The parts of a run, which a runtime places.

What is quick to get wrong comes before what is slow to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto import tasks
from stretto.assembly.checks import (
    check_cuts,
    check_ends,
    check_positions,
    check_rewards,
    look_at_prompts,
)
from stretto.assembly.models import (
    Given,
    Say,
    make_actor,
    make_critic,
    make_reference,
    prepare_torch,
    with_adapters,
)
from stretto.assembly.scorers import open_functions, reward_models
from stretto.assembly.warmup import warmed_up
from stretto.config import Config
from stretto.models.forward import unwrapped
from stretto.models.load import end_token_ids, load_tokenizer, set_checkpointing
from stretto.models.lora import check_lora
from stretto.models.resolve import resolve
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.prompts import PromptSource


@dataclass(frozen=True)
class Parts:
    """What a run is made of, wherever it works.

    Attributes:
        end_tokens: that end a response.
        functions: reward sources that are code.
        rewards: for each seat of the model scorers, the reward models.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    end_tokens: frozenset[int]
    actor: nn.Module
    critic: nn.Module | None
    reference: nn.Module | None
    functions: Sequence[FunctionScorer]
    rewards: Sequence[Sequence[RewardModelScorer]]


def make_parts(config: Config, stack: ExitStack, say: Say, given: Given) -> Parts:
    """Load and check all that a run needs.

    The warm-up is done for a resumed run too: the reference, and under LoRA the frozen weights,
    are what comes out of it, and checkpoints hold only what changes afterwards.

    Args:
        config: of the run.
        stack: closes what must be closed.
        say: told in a line what takes time.
        given: what the caller brings instead of names.

    Raises:
        StrettoError: a setting, a model, a dataset or a reward source is at fault.
    """
    prepare_torch(config)
    trust = config.model.trust_remote_code
    tokenizer = given.tokenizer or load_tokenizer(resolve(config.model.name, say), trust)
    task = given.task or tasks.load(config.task, config.seed)
    prompts = PromptSource(task, config.task, tokenizer, config.seed)
    functions = open_functions(config, task.row(0).data.keys(), tokenizer, stack, given)
    rewards = reward_models(config, tokenizer, given, say)
    base = make_actor(config, given, say)
    ends = given.end_tokens
    ends = end_token_ids(unwrapped(base), tokenizer) if ends is None else ends
    check_ends(config, ends)
    check_positions(config, "the actor", base, generating=True)
    check_rewards(config, rewards[0], look_at_prompts(prompts, say))
    check_lora(base, config.model)
    check_cuts(config, base, rewards[0])
    warmed_up(base, config, task, prompts, given, say)
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
    return Parts(tokenizer, prompts, ends, actor, critic, reference, functions, rewards)
