"""The reference of all settings as Markdown, out of their classes: choices and ranges in words.

Those of virtual clusters have a page of their own.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.config import Config, RewardModelConfig, ScheduleConfig, SftConfig
from stretto.runtime.sim.cluster import Cluster

INTRO = """# Settings: every option with its default and range

In a file, `rollout.batch = 64` is `batch = 64` below `[rollout]`; on the command line it is
`--rollout.batch 64`, and in Python `rollout={"batch": 64}` or `rollout__batch=64`. `stretto train
--help-all` prints the same.
"""

CLUSTERS = """# Files of virtual clusters, for stretto compare --sim

Who works where, and what work costs ([the simulator](../simulator.md)). `benchmarks/clusters` has
examples; `stretto.simulate` takes the same as an object.
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
    seen: dict[type[BaseModel], str] = {}
    parts = [INTRO]
    for command, kind, title, who in COMMANDS:
        first = command == "train"
        parts.append(f"## {title}\n\n{who}.\n")
        parts += _section(kind, "", "" if first else f"{command}.", seen)
    return "\n".join(parts)


def clusters() -> str:
    """Write the page on files of virtual clusters."""
    seen: dict[type[BaseModel], str] = {ScheduleConfig: "settings.md#schedule"}
    return "\n".join([CLUSTERS, *_section(Cluster, "", "", seen)])


def _section(
    kind: type[BaseModel], path: str, anchor: str, seen: dict[type[BaseModel], str]
) -> Iterator[str]:
    """The settings of a section, then its sections; one that was shown before by its name alone.

    Args:
        kind: the class of the section.
        path: its dotted name and a dot; empty for the settings outside of sections.
        anchor: what links to its settings begin with, before their dotted names.
        seen: links to the sections that were shown, which this adds to.
    """
    inner: list[tuple[str, FieldInfo]] = []
    for name, field in kind.model_fields.items():
        dotted = path + name
        if list(_sections_of(field.annotation)):
            inner.append((dotted, field))
            continue
        if name == "kind" and len(typing.get_args(field.annotation)) == 1:
            continue  # it stands in the title
        rule = in_words(field.annotation, field.metadata) + _default(field)
        yield f"#### `{dotted}` {{#{anchor}{dotted}}}\n\n*{rule}.* {field.description or ''}\n"
    for dotted, field in inner:
        sections = list(_sections_of(field.annotation))
        for section in sections:
            name = f"`{_table(dotted, field)}`"
            place = anchor
            if len(sections) > 1:
                name, place = f"{name}: {_label(section)}", f"{anchor}{section.__name__}."
            if section in seen:
                yield f"### {name}\n\nThe same settings as [here]({seen[section]}).\n"
                continue
            seen[section] = f"#{place}{dotted}"
            only = " (in a file only)" if name.startswith("`[[") and kind is not Cluster else ""
            yield f"### {name}{only} {{#{place}{dotted}}}\n\n{inspect.getdoc(section)}\n"
            yield from _section(section, f"{dotted}.", place, seen)


def _sections_of(kind: Any) -> Iterator[type[BaseModel]]:
    """The class of a section, those of several to choose from, or of the tables in a list."""
    for each in (kind, *typing.get_args(kind)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield each


def _table(dotted: str, field: FieldInfo) -> str:
    """What stands over a section in a file."""
    origin = typing.get_origin(field.annotation)
    if origin is tuple:
        return f"[[{dotted}]]"
    return f"[{dotted}.NAME]" if origin is Mapping else f"[{dotted}]"


def _label(section: type[BaseModel]) -> str:
    """What tells a section from others that may stand in its place."""
    kind = section.model_fields.get("kind")
    return f"`kind = {_value(kind.default).strip('`')}`" if kind else section.__name__


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "; must be set"
    value = field.get_default(call_default_factory=True)
    return "; may be left out" if value is None else f"; default {_value(value)}"


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
        words = [in_words(each) for each in inner if each is not type(None)]
        return " or ".join(words).replace(" or one of ", ", ")
    if origin is tuple and not inner:
        return "empty list"
    if origin is tuple and inner[-1] is Ellipsis:
        return f"list; each {in_words(inner[0])}"
    if origin is tuple:
        each = list(dict.fromkeys(in_words(one) for one in inner))
        return (
            f"list of {', '.join(each)}"
            if len(each) == len(inner)
            else f"list of {len(inner)}; each {each[0]}"
        )
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
