"""Settings of episodes: responses of several turns, answered by an environment."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from stretto.config.sections import (
    NonNegativeInt,
    PositiveInt,
    Rows,
    Seconds,
    SecondsOrNone,
    Section,
    Workers,
)


class EnvironmentConfig(Section):
    """The environment that answers the policy's turns: tools, an environment, or a program.
    Default: none."""

    sources: tuple[str, ...] = ()
    """Python functions that are tools, or one environment or program: 'file.py:name' or
    'package.module:name'. Functions: the policy reads type hints and docstring. A class with reset
    and step, or with reset and tools as methods (TRL's environment_factory). A program: async def
    run(data, base_url, api_key). Rewards of an environment are the source 'environment' of
    reward.sources."""
    settings: dict[str, JsonValue] = {}
    """Settings of the environment itself, by name: env_config of SkyRL-gym's environments, config
    of verl's tools."""
    max_turns: PositiveInt = 8
    """Limit of turns in an episode."""
    max_turn_tokens: NonNegativeInt = 0
    """Token limit of a turn; a turn that reaches it ends its episode. 0: only
    rollout.max_new_tokens limits it, which counts all tokens of an episode after its prompt,
    including answers of tools."""
    max_observation_tokens: PositiveInt = 1024
    """Token limit of one answer of a tool or an environment. Longer ones are cut, which the policy
    is told."""
    max_seconds: SecondsOrNone = 0.0
    """Time limit of an episode in seconds of decoding and waiting, after which its next turn is the
    last; 0 is no limit."""
    timeout_s: Seconds = 60.0
    """Time limit of one call in seconds, after which the policy reads that it took too long."""
    processes: Workers = 1
    """Number of processes for the episodes."""
    parallel: Rows = 64
    """Limit of concurrent calls in one process."""
    replay: Literal["auto", "pure", "recorded", "no"] = "auto"
    """How an episode continues after a restart, or if its process was lost. pure: the same turns
    are repeated in a new environment. recorded: the recorded answers are enough, because no state
    is kept between calls. no: it starts again. auto: as the environment declares, else recorded for
    functions, pure for environments, no for programs."""
    on_break: Literal["fork", "refuse"] = "fork"
    """Reaction if the chat template cannot continue from the existing tokens, because it rewrites
    earlier turns. fork: a new sample of the episode begins with the rewritten conversation. refuse:
    the run does not start, or ends."""
