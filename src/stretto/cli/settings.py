"""The settings of :mod:`stretto.config` as command-line options.

tyro makes the options and their help. It parses into plain dataclasses that mirror the settings
classes, so that validation happens in one place, for files and command line alike, with one kind
of message.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tomli_w
import tyro
from pydantic import BaseModel

from stretto.api.settings import HELD_OUT, ROWS, other_rows
from stretto.config import Config, Section, recipes
from stretto.errors import ConfigError

S = TypeVar("S", bound=Section)

RECIPE_HELP = "A recipe's name ('stretto recipes' lists them), a .toml file, or a run's folder."


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command that is no setting of the run."""

    kind: Any
    default: Any
    help: str
    metavar: str


def parse_with_config(
    command: str,
    description: str,
    arguments: Sequence[str],
    config: S,
    options: Mapping[str, Option],
    only: Sequence[str] = (),
    start: Mapping[str, Any] | None = None,
    where: str = "command line",
) -> tuple[S, dict[str, Any]]:
    """Parse options that override settings, and the command's own.

    Rows that are named in place of others take ``task.held_out`` with them, see
    :data:`stretto.api.settings.ROWS`.

    Args:
        command: its name, for usage and messages.
        description: shown on top of the help.
        arguments: what follows the command's name.
        config: where settings take their defaults from; the result is of its class.
        options: the command's own options, by name.
        only: dotted settings or sections to offer; empty offers all.
        start: settings in the place of ``config``'s, which are yet to be checked with the others.
        where: all of them come from, for messages.

    Raises:
        ConfigError: the resulting settings are not valid.
        SystemExit: help was asked for (0), or the command line does not parse (2).
    """
    defaults = config.model_dump() if start is None else start
    settings = _mirror(type(config), tuple(only), "")
    own = _own(options)
    # Both without a prefix of their own: --steps, not --settings.steps.
    flat = tyro.conf.arg(name="")
    both = dataclasses.make_dataclass(
        "Options", [("own", Annotated[own, flat]), ("settings", Annotated[settings, flat])]
    )
    own_defaults = own(**{name: option.default for name, option in options.items()})
    parsed: Any = tyro.cli(
        both,
        prog=f"stretto {command}",
        description=description,
        args=list(arguments),
        default=both(own_defaults, _fill(settings, defaults)),
    )
    merged = _merge(defaults, parsed.settings)
    if isinstance(config, Config) and other_rows(_named(arguments, (*ROWS, HELD_OUT))):
        merged["task"]["held_out"] = 0.0
    return recipes.build(merged, where, type(config)), dataclasses.asdict(parsed.own)


def _named(arguments: Sequence[str], settings: Sequence[str]) -> set[str]:
    """The settings, among those given, that the command line names, in either tyro spelling."""
    given = {a.partition("=")[0].removeprefix("--").replace("-", "_") for a in arguments}
    return given.intersection(settings)


def leading_recipe(arguments: Sequence[str]) -> str:
    """The recipe, which comes before all options as their defaults depend on it; '' without one."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else ""


def check_recipe_is_first(arguments: Sequence[str], parsed: str) -> None:
    """Refuse a recipe that stands after options: those had been read with other defaults.

    Raises:
        ConfigError: it does.
    """
    if parsed not in ("", leading_recipe(arguments)):
        raise ConfigError(f"the recipe comes before the options: write '{parsed}' first")


def check_task(config: Config, recipe: str) -> None:
    """Refuse a recipe whose data the user has yet to name.

    Raises:
        ConfigError: the task has no name.
    """
    if not config.task.name:
        raise ConfigError(
            f"task.name is empty: '{recipe}' brings no data of its own; "
            "give its file with --task.name PATH"
        )


def _own(options: Mapping[str, Option]) -> type[Any]:
    fields = [
        (name, Annotated[option.kind, tyro.conf.arg(help=option.help, metavar=option.metavar)])
        for name, option in options.items()
    ]
    return dataclasses.make_dataclass("Own", fields)


def _mirror(section: type[BaseModel], only: tuple[str, ...], prefix: str) -> type[Any]:
    """A dataclass with the fields of ``section`` that ``only`` lets through."""
    fields: list[tuple[str, Any]] = []
    for name, info in section.model_fields.items():
        kind, key = info.annotation, prefix + name
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = _mirror(kind, only, f"{key}.")
            if dataclasses.fields(inner):
                fields.append((name, inner))
        elif any(isinstance(k, type) and issubclass(k, BaseModel) for k in typing.get_args(kind)):
            continue  # tables in a list, which files alone can spell
        elif not only or any(key == allowed or key.startswith(f"{allowed}.") for allowed in only):
            text = info.description
            if typing.get_origin(kind) is dict:
                # Any key can be given, also one that the recipe's table has not.
                kind, text = tuple[str, ...], f"{text} As key=value; replaces the recipe's."
            fields.append((name, Annotated[kind, tyro.conf.arg(help=text)]))
    made = dataclasses.make_dataclass(section.__name__, fields)
    made.__doc__ = section.__doc__
    return made


def _fill(mirror: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of the mirror with ``values``, which may hold more than it has fields for."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(mirror):
        value = values[field.name]
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            value = _fill(field.type, value)
        arguments[field.name] = _pairs(value) if isinstance(value, dict) else value
    return mirror(**arguments)


def _merge(base: Mapping[str, Any], parsed: Any, prefix: str = "") -> dict[str, Any]:
    """``base`` with what was parsed into a mirror put in, section by section."""
    merged = dict(base)
    for field in dataclasses.fields(parsed):
        value, key = getattr(parsed, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            merged[field.name] = _merge(base[field.name], value, f"{key}.")
        elif isinstance(base[field.name], dict):
            merged[field.name] = _table(value, key)
        else:
            merged[field.name] = value
    return merged


def _pairs(table: Mapping[str, Any]) -> tuple[str, ...]:
    """A table as 'key=value' words, the values as TOML writes them."""
    return tuple(
        tomli_w.dumps({key: value}).strip().replace(" = ", "=", 1) for key, value in table.items()
    )


def _table(pairs: Sequence[str], key: str) -> dict[str, Any]:
    """The inverse of :func:`_pairs`; what is no TOML value is text."""
    table: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not (name and sign):
            option = "--" + key.replace("_", "-")
            raise ConfigError(f"{option} takes words of the form key=value; got '{pair}'")
        try:
            table[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[name] = text
    return table
