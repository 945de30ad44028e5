"""Runs functions as commands: tyro reads options and help from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin

import docstring_parser
import tyro
from tyro.conf import Positional, UseAppendAction, arg

from stretto import bounds, interfaces
from stretto.errors import ConfigError, near

F = TypeVar("F", bound=Callable[..., Any])

File = Annotated[str, arg(metavar="FILE")]
Model = Annotated[str, arg(metavar="MODEL")]


class Option(NamedTuple):
    """An option of a command: a function's parameter and its help."""

    kind: Any
    default: Any
    help: str
    positional: bool


def takes(function: Callable[..., Any], *names: str, **renamed: str) -> Callable[[F], F]:
    """Add parameters of another function, by default all, to a command, which gets them as
    keywords. If the command declares one with a default of its own, only the help is taken.

    Args:
        names: parameters that keep their names.
        renamed: parameters by their new names.
    """

    def marked(command: F) -> F:
        theirs = options_of(function)
        same = names or (() if renamed else theirs)
        sources = {n: n for n in same} | renamed
        _taken.setdefault(command, {}).update({n: theirs[p] for n, p in sources.items()})
        return command

    return marked


_taken: dict[Callable[..., Any], dict[str, Option]] = {}
"""Options that commands take from other functions."""


def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Return a function's parameters and those that it :func:`takes`, without the settings."""
    params = docstring_parser.parse(function.__doc__ or "").params
    texts = {n: p.description for p in params for n in p.arg_name.split(", ")}
    kinds, extras = bounds.kinds(function), _taken.get(function, {})
    options = dict[str, Option]()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or name == "config":
            continue
        options[name] = Option(
            kinds.get(name, str),
            tyro.MISSING if parameter.default is parameter.empty else parameter.default,
            extras[name].help if name in extras else " ".join((texts.get(name) or "").split()),
            parameter.kind is parameter.POSITIONAL_ONLY,
        )
    declared = {name for name, option in options.items() if option.default is not tyro.MISSING}
    return options | {n: option for n, option in extras.items() if n not in declared}


def form(function: Callable[..., Any]) -> type[Any]:
    """Make the dataclass into which tyro reads a command's options."""
    fields = []
    for name, (kind, default, text, positional) in options_of(function).items():
        parts = bounds.parts(kind)
        is_list = positional and tuple in parts  # tyro reads it as possibly empty
        hint = documented(text, () if is_list else default)
        if parts & {dict, Mapping}:
            kind, default = Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")], ()
        elif Path in parts:
            kind = File if name == "out" else Model
        elif type(None) in parts and get_origin(kind) is not Annotated:
            kind = Annotated[kind, arg(metavar="FLOAT" if float in parts else "INT")]
        marks: list[Any] = [Positional] if positional else []
        if parts & {dict, Mapping, Sequence}:
            marks, hint = [UseAppendAction], arg(help=text or None)
        for mark in marks:
            kind = mark[kind]
        if name.endswith("_"):  # a keyword or builtin of Python
            kind = Annotated[kind, arg(name=name.rstrip("_"))]
        fields.append((name, Annotated[kind, hint], default))
    form_class = dataclasses.make_dataclass(function.__name__, fields)
    doc = docstring_parser.parse(function.__doc__ or "")
    form_class.__doc__ = " ".join(f"{doc.short_description} {doc.long_description or ''}".split())
    return form_class


def documented(text: str, default: object) -> Any:
    """Document an option. An empty default is not shown."""
    empty = isinstance(default, str | tuple | None) and not default
    return arg(help=text or None, help_behavior_hint="" if empty else None)


def read(kind: type[Any], command: str, arguments: Sequence[str]) -> Any:
    """Read arguments into a dataclass. Raises ConfigError if invalid, SystemExit after help."""
    refusal = io.StringIO()  # tyro prints errors in a box, with help
    try:
        with redirect_stderr(refusal):
            return tyro.cli(
                kind, prog=f"stretto {command}", description=kind.__doc__, args=list(arguments)
            )
    except SystemExit as end:
        if not end.code:
            raise
        text = refusal.getvalue()
    raise ConfigError(_sentence(text, command, kind), "command-line") from None


def values_of(function: Callable[..., Any], options: Any) -> dict[str, Any]:
    """Return the options' values for the command. Raises ConfigError if out of bounds."""
    kinds = {name: option.kind for name, option in options_of(function).items()}
    values = {name: getattr(options, name) for name in kinds}
    for name, kind in kinds.items():
        if bounds.parts(kind) & {dict, Mapping}:
            values[name] = table_of(values[name], name)
    return bounds.checked(kinds, values)


def call(function: Callable[..., int | None], command: str, arguments: Sequence[str]) -> int:
    """Run a command without settings on its arguments. Returns its exit status."""
    labels = {
        name: name.upper() if option.positional else interfaces.option(name)
        for name, option in options_of(function).items()
    }
    interfaces.offer(labels)
    values = values_of(function, read(form(function), command, arguments))
    positional = [values.pop(name) for name in labels if labels[name].isupper()]
    return function(*positional, **values) or 0


def table_of(pairs: Sequence[str], key: str) -> dict[str, Any]:
    """Read words of the form key=value. A value that is not valid TOML is text."""
    table: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not (name and sign):
            option = interfaces.option(key)
            raise ConfigError(f"{option} takes words of the form key=value; got '{pair}'")
        try:
            table[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[name] = text
    return table


_TYPES = {"INT": "a whole number", "FLOAT": "a number", "True,False": "True or False"}


_FRAME = re.compile(r"\x1b\[[\d;]*m|[│╭╮╰╯─]|-{4,}")
"""Colours and box lines, in both of tyro's character sets."""


def _sentence(text: str, command: str, kind: Any) -> str:
    """Reword one of tyro's boxes as a line."""
    title, _, rest = _FRAME.sub("", text).strip().partition("\n")
    title = title.strip()
    lines = [line.strip() for line in rest.strip().splitlines()]
    blank = lines.index("") if "" in lines else len(lines)  # help follows it
    body = " ".join(lines[:blank])
    see = f"'stretto {command} --help' documents the options."
    if title == "Unrecognized options":
        first = body.partition(": ")[2].partition(",")[0]
        if first.startswith("--"):
            name = first.partition("=")[0].removeprefix("--").replace("-", "_")
            options = inspect.signature(kind).parameters
            otherwise = f"'stretto {command} --help' lists the options."
            return f"unknown option '{first}'. {interfaces.advice(name, options, otherwise)}"
        if first.startswith("-"):
            return f"unknown option '{first}': options begin with two dashes. {see}"
        return f"'{first}' is one word too many for 'stretto {command}'. {see}"
    if title == "Required options":
        matches = [
            re.fullmatch(r"(--[\w.-]+|[A-Z_.\[\]]+)(?: [A-Z]\S*)?", line) for line in lines[1:]
        ]
        missing = [match[1] for match in matches if match]
        return f"'stretto {command}' needs {' and '.join(missing) or body}. {see}"
    choice = re.match(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", body)
    if choice:
        value = choice[1]
        option = choice[2]
        choices = re.findall(r"'([^']*)'", choice[3])
        meant = f" Did you mean '{near(value, choices)[0]}'?" if near(value, choices) else ""
        return f"{option} {value}: must be one of {', '.join(map(repr, choices))}.{meant}"
    value_error = re.match(r"Error parsing ([\w.-]+): (.*)", body)
    if value_error:
        option, reason = value_error.groups()
        kinds = re.findall(rf"{option} (\S+)", " ".join(lines[blank + 1 :]))
        takes = next((words for name, words in _TYPES.items() if kinds and name in kinds[0]), "")
        value = re.search(r"'([^']*)'\W*$", reason)
        if takes and value:
            return f"{option} {value[1]}: must be {takes}"
        return f"{option}: {reason}"
    return f"{body or title}. {see}".replace("..", ".")
