"""Checks that refuse a run which is known to fail, before its first response."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn

from stretto.config import Config
from stretto.errors import ConfigError
from stretto.models.forward import positions
from stretto.pipelines.executor.stages import check_stages
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.prompts import PromptSource
from stretto.types import Capabilities, Prompt

FIRST = 8
"""Prompts that are looked at before the run."""


def check_positions(
    config: Config, what: str, model: nn.Module | None, *, generating: bool = False
) -> None:
    """Refuse a model that cannot read a prompt with its response, both at their limits.

    Args:
        what: a name of the model, as the subject of a message.
        model: that reads the actor's tokens, if there is one.
        generating: see :func:`~stretto.models.forward.positions`.

    Raises:
        ConfigError: it has too few positions.
    """
    if model is not None:
        config.require_positions(what, positions(model, generating=generating))


def check_ends(config: Config, end_tokens: Collection[int]) -> None:
    """Refuse a run in which no response can end, and each would be penalised for that.

    Raises:
        ConfigError: nothing ends a response, and ``reward.missing_eos`` is on.
    """
    rule = config.reward
    if not (end_tokens or config.rollout.stop or rule.missing_eos == "off"):
        raise ConfigError(
            "nothing ends a response: the tokenizer has no end token, the generation config names "
            "none, and rollout.stop is empty. Each would go on to the token limit, for which "
            f"reward.missing_eos = '{rule.missing_eos}' has a penalty. Set eos_token in the "
            "model's tokenizer_config.json, name a string in rollout.stop, or set "
            "reward.missing_eos = 'off'"
        )


def check_engine(config: Config, able: Capabilities) -> None:
    """Refuse a schedule that asks more of an engine than it can do.

    Raises:
        ConfigError: the settings need an engine that stops in the midst of a response, or that
            gives the log-probabilities of sampled tokens, and this one does not.
    """
    knobs = config.schedule.knobs
    early = [name for name in ("score_on", "overcommit") if knobs.on(name)]
    early += ["migrate"] if knobs.migrates(config.rollout.engines) else []
    if knobs.score_on == "rollout":
        early.remove("score_on")  # whole responses are enough for that
    if early and not able.interruptible:
        raise ConfigError(
            f"schedule.{early[0]} stops decoding in the midst of responses, which the engine "
            "cannot; set schedule.preset = 'sync' or 'async'"
        )
    if able.logprobs == "raw" and config.algorithm.old_policy != "proximal":
        raise ConfigError(
            "the engine gives log-probabilities of the model, not of what it samples from "
            f"(rollout.temperature = {config.rollout.temperature}); set algorithm.old_policy = "
            "'proximal', which takes the learner's own"
        )


def check_rewards(
    config: Config, rewards: Iterable[RewardModelScorer], prompts: Sequence[Prompt]
) -> None:
    """Refuse reward models that cannot read what they are to score.

    A model with a tokenizer of its own may make more tokens of a response than the actor. How many
    is not known beforehand; a response that then does not fit is a failure of its own.

    Raises:
        ConfigError, ModelError: one has too few positions.
    """
    for reward in rewards:
        if reward.same_tokenizer:
            check_positions(config, f"reward model '{reward.name}'", reward.model)
        else:
            reward.require_room(prompts)


def look_at_prompts(prompts: PromptSource, say: Callable[[str], None]) -> list[Prompt]:
    """Return the first prompts of a run, and say so if they spell control tokens.

    Raises:
        TaskError: one cannot be rendered, or none is short enough.
    """
    first = prompts.first(FIRST)
    if prompts.found:
        say(
            f"prompts spell control tokens ({', '.join(sorted(prompts.found))}), which are read as "
            "text; conversations are given as lists of messages"
        )
    return first


def check_cuts(config: Config, actor: nn.Module, rewards: Sequence[RewardModelScorer]) -> None:
    """Check before the warm-up that models can be cut; a critic of another kind comes later."""
    if not config.pipeline.ranks:
        return
    check_stages(config.pipeline, "actor", actor)
    if config.critic.init in ("actor", "reward"):
        critic = actor if config.critic.init == "actor" else rewards[0].model
        check_stages(config.pipeline, "critic", critic)
