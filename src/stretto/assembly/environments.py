"""Opens a run's environments before any model: their processes, and how turns continue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.config import ENVIRONMENT, Config, EnvironmentConfig
from stretto.config.sections import reward_source
from stretto.environments.bridge import Bridge
from stretto.environments.executors import (
    EnvironmentExecutor,
    EnvironmentProcess,
    LocalEnvironment,
    close_all,
    locate_source,
    settings_of,
)
from stretto.environments.program import PlacedPrograms, ProgramEnvironment
from stretto.environments.renderer import open_bridge
from stretto.environments.role import EnvironmentRole
from stretto.environments.sessions import Bridges, EpisodeLimits, Sessions
from stretto.environments.templates import TemplateShape
from stretto.errors import ConfigError, require
from stretto.protocols import Environment
from stretto.saying import Say, working
from stretto.scoring.conventions import ENVIRONMENTS
from stretto.scoring.functions import FunctionScorer, locate
from stretto.tasks.encode import Encoder
from stretto.tasks.messages import TOOLS
from stretto.tasks.prompts import PromptSource


def open_environment(
    config: Config,
    prompts: PromptSource,
    stack: ExitStack,
    say: Say,
    overrides: Overrides = NO_OVERRIDES,
    judges: Sequence[FunctionScorer] = (),
) -> Environment | None:
    """Open the environment that answers turns. ``None`` without one: responses are single turns.

    From then on the prompts describe its tools. Raises ConfigError if a source is missing or of an
    unknown kind, or if the chat template cannot continue after an answer.

    Args:
        judges: reward functions that read environments.
    """
    settings = config.environment
    if not settings.sources:
        return None
    with working(say, "starting the environment"):
        names, timeout_s = [judge.name for judge in judges], config.reward.timeout_s
        functions = overrides.functions
        places = open_places(settings, overrides.environment, names, functions, timeout_s)
        stack.callback(close_all, places)
    if not places[0].ready["rewards"] and ENVIRONMENT in config.reward.sources:
        raise ConfigError(
            "reward.sources has 'environment', and environment.sources names functions, none of "
            "which returns a reward. Name another source, or return text, reward and metrics with "
            "the type hint tuple[str, float, dict]",
            "environment-without-rewards",
        )
    if places[0].ready["kind"] == "program":
        return _programs(config, places, prompts, stack, overrides, say)
    if config.task.chat == "off":
        raise ConfigError(
            "task.chat = 'off' gives plain text, and an environment answers in a conversation; set "
            "task.chat = 'auto'",
            "environment-without-chat",
        )
    tools = places[0].ready["tools"]
    ends = overrides.end_tokens or frozenset()
    stop = config.rollout.stop
    bridge = bridge_for(places[0].ready, prompts.encoder, settings, say, ends, stop)
    prompts.with_tools = bool(tools)
    prompts.render = lambda messages, rows, arguments: bridge.of(arguments).prompt(
        messages, [*tools, *rows]
    )
    return EnvironmentRole(
        settings,
        places,
        bridge,
        prompts.encoder,
        config.task.max_prompt_tokens,
        judges,
        tools_column=config.task.columns.get(TOOLS, TOOLS),
    )


def turn_ends(config: Config, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the chat template's end-of-turn tokens, or none without an environment. Base models
    have another end token and would otherwise continue past the end of their turn.
    """
    if not config.environment.sources or not tokenizer.chat_template:
        return frozenset()
    encoder = Encoder(tokenizer, config.task.template_arguments)
    return TemplateShape(encoder, reads_calls=False).ends


def bridge_for(
    ready: Mapping[str, Any],
    encoder: Encoder,
    settings: EnvironmentConfig,
    say: Say,
    end_tokens: frozenset[int] = frozenset(),
    stop: Sequence[str] = (),
) -> Bridge:
    """Derive from the chat template how turns continue. Report kinds of turns for which it cannot.

    Raises ConfigError for an unusable template, or if ``environment.on_break`` refuses such turns.

    Args:
        ready: the environment's description of itself. Functions answer only as tools.
    """
    bridge = open_bridge(encoder, ready["tools"], end_tokens, stop)
    breaks = bridge.breaks_among(("tool",) if ready["kind"] == "functions" else ("tool", "user"))
    if breaks and settings.on_break == "refuse":
        raise ConfigError(f"environment.on_break = 'refuse': {breaks}", "template-rewrites-history")
    if breaks:
        say(f"where earlier turns are rewritten, a new sample begins: {breaks}")
    return bridge


def _programs(
    config: Config,
    places: Sequence[EnvironmentExecutor],
    prompts: PromptSource,
    stack: ExitStack,
    overrides: Overrides,
    say: Say,
) -> Environment:
    """Build a program's environment. Its server starts listening with the first episode."""
    for library in ("starlette", "uvicorn"):
        require(library, "serve", "a program as environment.sources")
    from stretto.serving.programs import ProgramServer

    settings = config.environment
    rollout, max_prompt_tokens = config.rollout, config.task.max_prompt_tokens
    ends = overrides.end_tokens or frozenset()
    bridges = Bridges(prompts.encoder, ends, rollout.stop)
    sampling = (rollout.temperature, rollout.top_k, rollout.top_p)
    max_new_tokens = rollout.max_new_tokens
    limits = EpisodeLimits(
        max_prompt_tokens, max_new_tokens, settings.on_break, sampling, rollout.stop
    )
    sessions = Sessions(bridges, prompts.encoder, limits, say)
    name = Path(config.model.name).name
    server = ProgramServer(sessions, prompts.tokenizer, name)
    stack.callback(server.close)
    return ProgramEnvironment(PlacedPrograms(places), sessions, server.start, settings)


def open_places(
    settings: EnvironmentConfig,
    objects: Mapping[str, Any],
    judges: Sequence[str] = (),
    functions: Mapping[str, Callable[..., Any]] = NO_OVERRIDES.functions,
    reward_timeout_s: float = 0.0,
) -> Sequence[EnvironmentExecutor]:
    """Start the hosts of episodes: processes, or this process for objects.

    ``judges`` names reward functions that read environments. Raises ConfigError if functions and
    environments are not both objects or both names.
    """
    instances = {name: objects[name] for name in settings.sources if name in objects}
    names = [name for name in settings.sources if name not in objects]
    places: list[EnvironmentExecutor]
    if instances and names:
        raise ConfigError(
            f"`environment.sources`: '{names[0]}' is a name, and '{next(iter(instances))}' an "
            "object of this process; give all as objects, or all by name",
            "environments-mixed",
        )
    for name in judges:
        if bool(instances) != (name in functions):
            one, other = ("a name", "objects") if instances else ("an object", "names")
            raise ConfigError(
                f"reward.sources: '{name}' has the parameter '{ENVIRONMENTS}' and is {one}, "
                f"and environment.sources are {other}; give both as objects, or both by name",
                "environments-mixed",
            )
    how = {**settings_of(settings), "reward_timeout_s": reward_timeout_s}
    if instances:
        places = [LocalEnvironment(instances, how, {name: functions[name] for name in judges})]
    else:
        opening = {
            "sources": {name: locate_source(name) for name in names},
            "settings": how,
            "judges": {name: locate(reward_source(name)) for name in judges},
        }
        places = [EnvironmentProcess(opening) for _ in range(settings.processes)]
    try:
        for place in places:
            place.start()
    except BaseException:
        close_all(places)
        raise
    return places
