"""Settings of episodes: responses of several turns, which an environment answers."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from stretto.config.sections import ENVIRONMENT as ENVIRONMENT
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
    """What answers the policy's turns: tools, an environment, or a program; none by default."""

    sources: tuple[str, ...] = ()
    """Python functions that are tools, or one environment or program: 'file.py:name' or 'package.module:name'. Functions: type hints and docstring are what the policy reads. A class with reset and step, or with reset and tools as methods (TRL's environment_factory). A program: async def run(data, base_url, api_key). Rewards of an environment are the source 'environment' of reward.sources."""
    settings: dict[str, JsonValue] = {}
    """Settings of the environment itself, by name: env_config of SkyRL-gym's environments, config of verl's tools."""
    max_turns: PositiveInt = 8
    """Turns of an episode, at most."""
    max_turn_tokens: NonNegativeInt = 0
    """Tokens of a turn, at most; a turn that reaches them ends its episode. 0: no other limit than rollout.max_new_tokens, which counts all tokens of an episode behind its prompt, answers of tools among them."""
    max_observation_tokens: PositiveInt = 1024
    """Tokens of one answer of a tool or an environment, at most; more is cut, and the policy told so."""
    max_seconds: SecondsOrNone = 0.0
    """Seconds of an episode, decoding and waiting, after which its next turn is its last; 0 is no limit."""
    timeout_s: Seconds = 60.0
    """Seconds that one call may take, after which the policy reads that it took too long."""
    processes: Workers = 1
    """Processes that the episodes are spread over."""
    parallel: Rows = 64
    """Calls that one process works on at a time, at most."""
    replay: Literal["auto", "pure", "recorded", "no"] = "auto"
    """Way in which an episode goes on after a restart, or when its process was lost. pure: a new environment is given the same turns. recorded: the recorded answers are enough, as nothing else is kept between calls. no: it is begun anew. auto: what the environment says of itself, else recorded for functions, pure for environments, no for programs."""
    on_break: Literal["fork", "refuse"] = "fork"
    """Reaction where the chat template cannot go on from the tokens that stand, as it rewrites earlier turns. fork: a new sample of the episode begins with the rewritten conversation. refuse: the run does not start, or ends."""
