"""Tools and environments passed as Python objects, validated at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

from stretto.environments.adapters import (
    Factory,
    is_trl,
    made_by,
    not_made,
    shape_of,
    sort_of,
    tools_of,
    unknown_environment,
)
from stretto.environments.made import is_verl
from stretto.environments.tools import schema_of
from stretto.errors import ConfigError

ENVIRONMENTS = "environments"
"""Name of a mapping of environments, from which a row's column ``environment`` chooses."""


def named_objects(tools: Any, environment_factory: Any, most: int = 0) -> dict[str, Any]:
    """Return tools or environment factories in the form of ``environment.sources``.

    At most ``most`` TRL environments of a kind are alive at a time (0: no limit). Raises
    ConfigError for tools together with environments, and for tools other than functions.
    """
    if tools and environment_factory is not None:
        raise ConfigError(
            "tools and environment_factory are both given, and an episode has one of them; make "
            "the tools methods of the environment",
            "environments-mixed",
        )
    if environment_factory is None:
        tool_list = list(tools or ()) if isinstance(tools, list | tuple | None) else [tools]
        for tool in tool_list:
            if not (inspect.isroutine(tool) or is_verl(tool)):
                raise ConfigError(
                    f"tools are functions; got {tool!r:.80}. Give functions, or name them in "
                    "environment.sources as 'file.py:name'",
                    "tool-not-function",
                )
            if inspect.isroutine(tool):
                schema_of(tool, tool.__name__)
        return {getattr(tool, "__name__", type(tool).__name__): tool for tool in tool_list}
    if isinstance(environment_factory, Mapping):
        factories = {
            key: _factory(repr(key), factory, most) for key, factory in environment_factory.items()
        }
        return {ENVIRONMENTS: factories}
    name = getattr(environment_factory, "__name__", type(environment_factory).__name__)
    return {name: _factory(name, environment_factory, most)}


def _factory(name: str, factory: Any, most: int) -> Any:
    """Return a class, or a :class:`Factory`. Raises ConfigError if it makes no environments."""
    if not inspect.isclass(factory):
        if not callable(factory) or shape_of(type(factory)):
            raise unknown_environment(name, sort_of(factory))
        try:
            factory = Factory(factory, most)
        except Exception as error:
            raise not_made(name, error) from error
    kind = made_by(factory)
    if kind is None or not shape_of(kind):
        raise unknown_environment(name, f"{sort_of(factory)} that makes {kind}")
    if is_trl(kind):
        for key in tools_of(kind):
            method = inspect.getattr_static(kind, key)
            bound = MethodType(method, kind) if inspect.isfunction(method) else getattr(kind, key)
            schema_of(bound, name)
        if most and inspect.isclass(factory):
            return Factory(factory, most)
    return factory
