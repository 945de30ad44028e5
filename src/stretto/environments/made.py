"""Constructs environments and verl's tools from the row and ``environment.settings``."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from stretto.environments.launch import parameters_of, takes_any
from stretto.environments.running import Runner
from stretto.errors import ConfigError
from stretto.plain import plain
from stretto.scoring.conventions import as_number

MADE_WITH = ("row", "extras", "env_config")
"""Parameters of environments: the row, SkyRL's name of the row, ``environment.settings``."""

Row = Mapping[str, Any]


class EnvConfig(dict[str, Any]):
    """Settings with attribute access, as SkyRL's environments expect of omegaconf."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"environment.settings has no '{name}'; it has {list(self)}")
        return EnvConfig(self[name]) if isinstance(self[name], dict) else self[name]


def config_for(factory: Any, settings: Mapping[str, Any]) -> Any:
    """Convert settings to the dataclass hinted for ``env_config``, or to :class:`EnvConfig`.

    Raises ConfigError if the dataclass lacks a setting.
    """
    settings = copy.deepcopy(dict(settings))
    try:
        hint = typing.get_type_hints(getattr(factory, "__init__", factory)).get("env_config")
    except Exception:  # a hint may be any expression
        hint = None
    for kind in (hint, *typing.get_args(hint)):
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind):
            try:
                return kind(**settings)
            except TypeError as error:
                raise ConfigError(
                    f"environment.settings does not fit {kind.__name__}: {error}",
                    "environment-settings",
                ) from error
    return EnvConfig(settings)


def made(factory: Any, row: Row, settings: Mapping[str, Any]) -> Any:
    """Construct an environment for a row."""
    if hasattr(factory, "from_dict"):  # rLLM's
        return factory.from_dict(dict(row))
    values = {"row": dict(row), "extras": dict(row)}
    parameters = parameters_of(factory)
    if "env_config" in parameters:
        values["env_config"] = config_for(factory, settings)
    return factory(**{name: value for name, value in values.items() if name in parameters})


def accepted(function: Callable[..., Any], values: Row) -> dict[str, Any]:
    """Select the values that a function accepts by name."""
    parameters = parameters_of(function)
    if takes_any(parameters):
        method = parameters_of(getattr(function, "__func__", function))
        return {k: v for k, v in values.items() if k in parameters or k not in method}
    return {key: value for key, value in values.items() if key in parameters}


def earns(function: Callable[..., Any]) -> bool:
    """Whether a function's return hint is a tuple of text, reward and metrics."""
    try:
        hint = typing.get_type_hints(function).get("return")
    except Exception:  # a hint may be any expression
        return False
    return typing.get_origin(hint) is tuple and len(typing.get_args(hint)) == 3


def is_verl(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("create", "execute", "release"))


class VerlTool:
    """An object of verl's BaseTool, with an instance for each episode.

    Raises ConfigError for a class without a schema, or one that cannot be constructed.
    """

    def __init__(self, source: str, tool: Any, settings: Mapping[str, Any]) -> None:
        try:
            self._tool: Any = tool
            if inspect.isclass(tool):
                make: Any = tool
                self._tool = make(dict(settings), None)
            self.schema = plain(self._tool.get_openai_tool_schema())
            self.name = str(self.schema["function"]["name"])
        except Exception as error:
            raise ConfigError(
                f"`environment.sources`: verl's tool '{source}' cannot be made with config = "
                f"environment.settings and tool_schema = None: {type(error).__name__}: {error}. "
                "Return the schema in get_openai_tool_schema(), or name an object",
                "tool-without-schema",
            ) from error

    async def create(self, row: Row, run: Runner) -> str:
        """Create the instance of an episode and return its id."""
        extra = row.get("extra_info")
        kwargs_by_tool = row.get("tools_kwargs") or (
            isinstance(extra, Mapping) and extra.get("tools_kwargs")
        )
        tool_kwargs = (kwargs_by_tool or {}).get(self.name) or {}
        values = dict(tool_kwargs.get("create_kwargs") or {})
        values = {**values, "create_kwargs": values, "instance_id": str(uuid4())}
        create = self._tool.create
        result = await run(partial(create, **accepted(create, values)), self._tool)
        return str(result[0] if isinstance(result, tuple) else result)

    def call(self, instance: str) -> Callable[..., Any]:
        """Return the tool of one episode as a function of the policy's arguments."""

        def execute(**parameters: Any) -> Any:
            return self._tool.execute(instance, parameters)

        return execute

    async def reward(self, instance: str, run: Runner) -> float | None:
        """Return the reward for an instance's final state."""
        calc_reward = getattr(self._tool, "calc_reward", None)
        if calc_reward is None:
            return None
        reward = await run(partial(calc_reward, instance), self._tool)
        return None if reward is None else as_number(reward)

    async def release(self, instance: str, run: Runner) -> None:
        await run(partial(self._tool.release, instance), self._tool)
