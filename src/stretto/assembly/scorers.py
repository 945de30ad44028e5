"""The scorers of responses: functions, reward models, reference and critic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.engines import scorer_slots
from stretto.assembly.models import NO_OVERRIDES, Overrides, load_reward_model, made_ready
from stretto.config import Config, ModelConfig
from stretto.config.sections import ModelSource, RewardSource
from stretto.config.training import token_budget
from stretto.models.load import pick_device
from stretto.saying import Say
from stretto.scoring.base import ModelScorer
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.models import RewardModelScorer, critic_scorer, reference_scorer
from stretto.weights.channel import WeightChannel

_NO_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({})


def open_function(
    source: RewardSource,
    config: Config,
    columns: Collection[str],
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    functions: Mapping[str, Callable[..., Any]] = _NO_FUNCTIONS,
) -> FunctionScorer:
    """Open a reward source that is code, in a process of its own unless the caller brings it.

    Args:
        columns: of the dataset that the prompts are of.
        functions: that the caller brings, by the names of their sources.

    Raises:
        ConfigError: the function cannot be found or used.
        TaskError: the task has no verifier.
    """
    scorer = FunctionScorer(
        source,
        config.task,
        config.seed,
        tokenizer,
        stop=config.rollout.stop,
        timeout_s=config.reward.timeout_s,
        columns=columns,
        function=functions.get(source.name),
    )
    stack.callback(scorer.close)
    return scorer


def open_functions(
    config: Config,
    columns: Collection[str],
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    overrides: Overrides = NO_OVERRIDES,
) -> list[FunctionScorer]:
    """Open all reward sources of a run that are code; see :func:`open_function`."""
    return [
        open_function(source, config, columns, tokenizer, stack, overrides.functions)
        for source in config.reward.parsed
        if not (isinstance(source, ModelSource) or source.name in overrides.reward_models)
    ]


def reward_scorer(
    name: str,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    say: Say,
    loaded: tuple[nn.Module, PreTrainedTokenizerBase],
    *,
    slots: int = 0,
    ends: frozenset[int] = frozenset(),
) -> RewardModelScorer:
    """Make the scorer of a reward source that is a model.

    Args:
        name: of the source.
        say: called with a line about whatever takes time.
        loaded: the model and its tokenizer.
        slots: rollouts that it can follow while they are decoded.
        ends: tokens that end responses which are given, not sampled.

    Raises:
        ModelError: the model has no scalar head.
    """
    model, own = loaded
    budget, stop = _budget(config), config.rollout.stop
    return RewardModelScorer(
        name, model, own, tokenizer, budget, stop, slots=slots, given_ends=ends, say=say
    )


def load_reward(
    source: RewardSource,
    config: ModelConfig,
    overrides: Overrides,
    say: Say,
) -> tuple[nn.Module, PreTrainedTokenizerBase] | None:
    """Return a reward model and its tokenizer, frozen; ``None`` for a source that is no model.

    Raises:
        ModelError: the model cannot be loaded.
    """
    if brought := overrides.reward_models.get(source.name):
        what = f"reward model '{source.name}'"
        made_ready(brought[0], config.device, what).requires_grad_(False)
        return brought
    if not isinstance(source, ModelSource):
        return None
    return load_reward_model(config, source.model, say, in_files=overrides.in_files)


def reward_models(
    config: Config, tokenizer: PreTrainedTokenizerBase, overrides: Overrides, say: Say
) -> list[list[RewardModelScorer]]:
    """Make the scorers of the reward models, one of each for every replica of the model scorers.

    Replicas share the models.
    """
    count = config.schedule.knobs.model_replicas(config.rollout.engines)
    replicas: list[list[RewardModelScorer]] = [[] for _ in range(count)]
    for source in config.reward.parsed:
        loaded = load_reward(source, config.model, overrides, say)
        if loaded is None:
            continue
        slots = scorer_slots(config, loaded[0], say)
        for replica in replicas:
            replica.append(reward_scorer(source.name, config, tokenizer, say, loaded, slots=slots))
    return replicas


def model_scorers(
    config: Config,
    reference: nn.Module | None,
    critic: nn.Module | None,
    channel: WeightChannel | None,
    say: Say,
) -> list[ModelScorer]:
    """Make the scorers of reference and critic, where there are any.

    New weights of the critic come by the channel.
    """
    budget = _budget(config)
    scorers: list[ModelScorer] = []
    if reference is not None:
        slots = scorer_slots(config, reference, say)
        temperature = config.rollout.temperature
        scorers.append(reference_scorer(reference, temperature, budget, slots=slots, say=say))
    if critic is not None:
        slots = scorer_slots(config, critic, say)
        scorers.append(critic_scorer(critic, budget, slots=slots, say=say, channel=channel))
    return scorers


def _budget(config: Config) -> int:
    return token_budget(config.training.microbatch_tokens, pick_device(config.model.device))
