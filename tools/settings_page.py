"""The reference of all settings as Markdown, out of their classes: choices and ranges in words."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.config import Config, RewardModelConfig, SftConfig

INTRO = """# Settings

All of them, with default and range. In a file, `rollout.batch = 64` is `batch = 64` below
`[rollout]`; on the command line it is `--rollout.batch 64`, and in Python `rollout={"batch": 64}`
or `rollout__batch=64`. `stretto train --help-all` prints the same.
"""

COMMANDS = (
    ("train", Config, "Reinforcement learning", "`stretto train`, `stretto.train`"),
    ("sft", SftConfig, "Supervised fine-tuning", "`stretto sft`, `stretto.sft`"),
    (
        "reward",
        RewardModelConfig,
        "Reward models",
        "`stretto reward`, `stretto.train_reward_model`",
    ),
)


def page() -> str:
    """Write the page."""
    seen: set[type[BaseModel]] = set()
    parts = [INTRO]
    for command, kind, title, who in COMMANDS:
        first = command == "train"
        parts.append(f"## {title}\n\n{who}.\n")
        parts += _section(kind, "", "" if first else f"{command}.", seen)
    return "\n".join(parts)


def _section(
    kind: type[BaseModel], path: str, anchor: str, seen: set[type[BaseModel]]
) -> Iterator[str]:
    """The settings of a section, then its sections; one that was shown before by its name alone."""
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in kind.model_fields.items():
        dotted = path + name
        if section := _section_of(field.annotation):
            inner.append((dotted, section))
            continue
        default = "" if field.is_required() else f"; default {_value(field.default)}"
        rule = in_words(field.annotation, field.metadata)
        yield f"#### `{dotted}` {{#{anchor}{dotted}}}\n\n*{rule}{default}.* {field.description}\n"
    for dotted, section in inner:
        title = f"### `[{dotted}]`"
        if section in seen:
            yield f"{title}\n\nAs [above](#{dotted}).\n"
            continue
        seen.add(section)
        tables = section.__name__ == "ProcessConfig"
        brackets = f"[[{dotted}]]` (in a file only)" if tables else f"[{dotted}]`"
        yield f"### `{brackets} {{#{anchor}{dotted}}}\n\n{section.__doc__}\n"
        yield from _section(section, f"{dotted}.", anchor, seen)


def _section_of(kind: Any) -> type[BaseModel] | None:
    """The class of a section, or of the tables in a list; ``None`` for a setting."""
    for each in (kind, *typing.get_args(kind)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def in_words(kind: Any, limits: Iterable[Any] = ()) -> str:
    """Say which values a setting takes.

    Args:
        kind: its annotation.
        limits: what pydantic knows besides, such as ``Gt(0)``.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        more = [m for i in inner[1:] for m in (i.metadata if isinstance(i, FieldInfo) else [i])]
        return in_words(inner[0], [*limits, *more])
    if origin is typing.Literal:
        choices = [_value(value) for value in inner]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(each) for each in inner).replace(" or one of ", ", ")
    if origin is tuple and not inner:
        return "empty list"
    if origin is tuple and inner[-1] is Ellipsis:
        return f"list; each {in_words(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)}; each {in_words(inner[0])}"
    if origin is dict:
        return "table"
    if kind in (int, float):
        return _range(kind, list(limits))
    return {bool: "true or false", str: "text"}[kind]


def _range(kind: type, limits: list[Any]) -> str:
    """A range of numbers in words."""
    low: Any = next((m for m in limits if isinstance(m, Ge | Gt)), None)
    high: Any = next((m for m in limits if isinstance(m, Le | Lt)), None)
    whole = kind is int
    name = "whole number" if whole else "number"
    if low is None:
        return name
    least = low.ge if isinstance(low, Ge) else low.gt
    if isinstance(low, Gt) and whole:
        least += 1
    above = isinstance(low, Gt) and not whole
    if high is None:
        return f"{name} above {least}" if above else f"{name}, {least} or more"
    start = f"above {least}" if above else f"from {least}"
    end = f"below {high.lt}" if isinstance(high, Lt) else f"at most {high.le}"
    return f"{name} {start}, {end}".replace(str(2**63 - 1), "2^63 - 1")


def _value(value: Any) -> str:
    """A value as it stands in a file; an empty one in words."""
    if value == "":
        return "empty"
    if isinstance(value, tuple):
        return f"`[{', '.join(_value(each).strip('`') for each in value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value}`"
