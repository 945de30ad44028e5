"""Settings with some of them changed: by a file, by options, by arguments of a function.

One rule holds for all three. What belonged to the part that a change replaces goes with it: the rows
of a task take their number, split and held-out rows along, and a task of another kind the rest of
its section, so that a user need not take back settings that only the recipe gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from stretto.config.recipes import build, read
from stretto.config.run import Config
from stretto.config.sections import Section, subsection
from stretto.errors import ConfigError
from stretto.interfaces import TomlFile, worded

__all__ = ["changed", "difference", "merged", "read"]

S = TypeVar("S", bound=Section)

OF_ANY_TASK = ("chat", "max_prompt_tokens")
"""Settings of a task that stay when its kind is changed: they belong to the model."""
OF_THE_ROWS = ("size", "held_out")
"""Settings of a task that belong to its rows."""


def changed(config: S, changes: Mapping[str, Any], where: str, start: str = "") -> S:
    """Return settings with ``changes``, nested as in TOML, in their place.

    Lists and tables that are values, such as ``task.settings``, are replaced as a whole. Raises
    ConfigError as :func:`~stretto.config.recipes.build`; messages say ``where`` changes come from,
    or ``start``, where the settings to change are at fault by themselves.
    """
    data = config.model_dump()
    if isinstance(config, Config):
        _drop_former(data, changes)
    try:
        return build(merged(data, changes, type(config)), where, type(config))
    except ConfigError as error:
        if start:
            _refuse_same(config, worded(str(error).removeprefix(where), TomlFile()), start)
        raise


def _refuse_same(config: Section, fault: str, start: str) -> None:
    """Raise ConfigError for settings that have a fault already without changes."""
    try:
        build(config.model_dump(), start, type(config))
    except ConfigError as error:
        if worded(str(error).removeprefix(start), TomlFile()) == fault:
            raise


def merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], section: type[Section] = Config
) -> dict[str, Any]:
    """Return the data of a section with changes in their place, section by section."""
    both = dict(base)
    for key, value in changes.items():
        inner = subsection(section, key)
        if inner and isinstance(value, Mapping):
            former = both.get(key, {})
            # What is no section stays, for the check of all settings to refuse it.
            value = merged(former, value, inner) if isinstance(former, Mapping) else former
        both[key] = value
    return both


def difference(base: Config, config: Config) -> dict[str, Any]:
    return _difference(base.model_dump(), config.model_dump())


def _difference(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            if inner := _difference(base[key], value):
                found[key] = inner
        elif value != base.get(key):
            found[key] = value
    return found


def _drop_former(data: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set to their defaults what belongs to a task, or to rows, that changes replace."""
    named, task = changes.get("task"), data["task"]
    if not isinstance(named, Mapping):
        return
    if named.get("kind", task["kind"]) != task["kind"]:
        data["task"] = {**{key: task[key] for key in OF_ANY_TASK}, "name": ""}
        columns = named.get("columns", {})
        if named["kind"] == "dataset" and not any(map(columns.get, ("answer", "demonstration"))):
            data["warmup_examples"] = 0  # it is made from the former task's answers
    elif any(key in named and named[key] != task[key] for key in ("name", "split")):
        dropped = OF_THE_ROWS if "split" in named else (*OF_THE_ROWS, "split")
        data["task"] = {key: value for key, value in task.items() if key not in dropped}
