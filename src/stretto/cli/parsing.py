"""Command lines read by tyro, with its refusals in the words of Stretto's errors."""

from __future__ import annotations

import functools
import inspect
import io
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any

import tyro

from stretto import interfaces
from stretto.errors import ConfigError, near


def read(kind: Any, command: str, arguments: Sequence[str], description: str | None = None) -> Any:
    """Make a ``kind`` of arguments; ConfigError if they do not fit, SystemExit after help."""
    if inspect.isfunction(kind):
        interfaces.offer(
            {
                name: name.upper() if each.kind is each.POSITIONAL_ONLY else interfaces.option(name)
                for name, each in inspect.signature(kind).parameters.items()
            }
        )
    refusal = io.StringIO()  # tyro draws a box, and prints the help of options in it
    try:
        with redirect_stderr(refusal):
            return tyro.cli(
                kind, prog=f"stretto {command}", description=description, args=list(arguments)
            )
    except SystemExit as end:
        if not end.code:
            raise
        text = refusal.getvalue()
    raise ConfigError(_sentence(text, command, kind), "command-line") from None


def call(function: Callable[..., int | None], command: str, arguments: Sequence[str]) -> int:
    """Call a command's function with the arguments of a command line."""

    @functools.wraps(function)
    def later(*positional: Any, **named: Any) -> Callable[[], int | None]:
        return functools.partial(function, *positional, **named)  # runs outside the parser

    return read(later, command, arguments)() or 0


_TYPES = {"INT": "a whole number", "FLOAT": "a number", "True,False": "True or False"}


_FRAME = re.compile(r"\x1b\[[\d;]*m|[│╭╮╰╯─]|-{4,}")
"""Colours and lines of boxes, in either of the characters that tyro draws them with."""


def _sentence(text: str, command: str, kind: Any) -> str:
    """Say in a line what a box of tyro's says."""
    title, _, rest = _FRAME.sub("", text).strip().partition("\n")
    title = title.strip()
    lines = [line.strip() for line in rest.strip().splitlines()]
    blank = lines.index("") if "" in lines else len(lines)  # behind it, help
    body = " ".join(lines[:blank])
    see = f"'stretto {command} --help' documents the options."
    if title == "Unrecognized options":
        first = body.partition(": ")[2].partition(",")[0]
        if first.startswith("--"):
            return f"unknown option '{first}'. {_advice(first, command, kind)}"
        if first.startswith("-"):
            return f"unknown option '{first}': options begin with two dashes. {see}"
        return f"'{first}' is one word too many for 'stretto {command}'. {see}"
    if title == "Required options":
        named = re.findall(r"[A-Z][A-Z_.\[\]]+|--[\w.-]+", " ".join(lines[1:2]))
        return f"'stretto {command}' needs {' and '.join(named) or body}. {see}"
    choice = re.match(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", body)
    if choice:
        value, option, known = choice[1], choice[2], re.findall(r"'([^']*)'", choice[3])
        meant = f" Did you mean '{near(value, known)[0]}'?" if near(value, known) else ""
        return f"{option} {value}: must be one of {', '.join(map(repr, known))}.{meant}"
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


def _advice(option: str, command: str, kind: Any) -> str:
    """Name the options of a command whose function has no settings that one may stand for."""
    name = option.partition("=")[0].removeprefix("--").replace("-", "_")
    otherwise = f"'stretto {command} --help' lists the options."
    return interfaces.advice(name, inspect.signature(kind).parameters, otherwise)
