"""Changes of settings by a file, by options or by arguments of a function.

All three follow one rule: settings that belong to a replaced part are reset, so that users need not
undo settings of the recipe. New rows of a task reset their number, split and held-out rows, and a
task of another kind resets the rest of its section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from stretto.config.recipes import build
from stretto.config.run_config import Config
from stretto.config.sections import Section, subsection
from stretto.errors import ConfigError
from stretto.interfaces import TomlFile, worded

S = TypeVar("S", bound=Section)

OF_ANY_TASK = ("chat", "max_prompt_tokens")
"""Task settings that stay if its kind changes, because they belong to the model."""
OF_THE_ROWS = ("size", "held_out")
"""Task settings that belong to its rows."""


def changed(config: S, changes: Mapping[str, Any], where: str, start: str = "") -> S:
    """Return settings with ``changes``, which are nested as in TOML.

    Values replace lists and tables, for example ``task.settings``, completely. Raises ConfigError
    as :func:`~stretto.config.recipes.build`. Messages name the source ``where`` of the changes, or
    ``start`` if the original settings are invalid.
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
    """Raise ConfigError if the unchanged settings already have this fault."""
    try:
        build(config.model_dump(), start, type(config))
    except ConfigError as error:
        if worded(str(error).removeprefix(start), TomlFile()) == fault:
            raise


def merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], section: type[Section] = Config
) -> dict[str, Any]:
    """Return a section's data with changes merged in, section by section."""
    both = dict(base)
    for key, value in changes.items():
        inner = subsection(section, key)
        if inner and isinstance(value, Mapping):
            former = both.get(key, {})
            # Keep a value in place of a section, so that validation refuses it.
            value = merged(former, value, inner) if isinstance(former, Mapping) else former
        both[key] = value
    return both


def difference(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``data`` that differ from ``base``, table by table."""
    differences = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            if inner := difference(base[key], value):
                differences[key] = inner
        elif value != base.get(key):
            differences[key] = value
    return differences


def _drop_former(data: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Reset settings that belong to a task or rows that changes replace."""
    new_task, task = changes.get("task"), data["task"]
    if not isinstance(new_task, Mapping):
        return
    if new_task.get("kind", task["kind"]) != task["kind"]:
        data["task"] = {**{key: task[key] for key in OF_ANY_TASK}, "name": ""}
        columns = new_task.get("columns", {})
        if new_task["kind"] == "dataset" and not any(map(columns.get, ("answer", "demonstration"))):
            data["warmup_examples"] = 0  # derived from the former task's answers
    elif any(key in new_task and new_task[key] != task[key] for key in ("name", "split")):
        dropped = OF_THE_ROWS if "split" in new_task else (*OF_THE_ROWS, "split")
        data["task"] = {key: value for key, value in task.items() if key not in dropped}
