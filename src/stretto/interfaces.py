"""Names of settings and commands in messages, by interface: shell, Python, files, TRL scripts.

A message quotes a setting as `training.lr` or `training.lr = 1e-5`, and a command as it is typed in
a shell: `stretto train --resume runs/tiny-001`. An error keeps these quotes, so that it can cross
processes and be part of another message, until it leaves the interface that the user called. There
they become --training.lr 1e-5 on the command line, training__lr=1e-5 in Python, and
learning_rate=1e-5 in a script for TRL.
"""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from stretto.bounds import checked, kinds
from stretto.errors import ConfigError, StrettoError, near
from stretto.foreign import ELSEWHERE, spellings

P = ParamSpec("P")
R = TypeVar("R")

QUOTED = re.compile(r"`(?:stretto ([^`]+)|([a-z]\w*(?:\.\w+)*)(?: = ([^`]*))?)`")
"""A quoted command, or setting with an optional value, in a message."""

BARE = re.compile(
    r"(?<![\w./'\"`$\[-])([a-z]+\.[a-z]\w*|[a-z]\w*(?= = ))(?![\w(/]|\.[a-z])(?:\.\d+)?"
    r"(?: = ('[^']*'|\{[^{}]*\}|\([^()]*\)|[\w.+-]*\w))?"
)
"""An unquoted setting, optionally with its value as Python prints it."""

SETTINGS: set[str] = set()
"""Names of all settings. :mod:`stretto.config` fills it, so it is empty in processes without it."""


class TomlFile:
    """Words of a file of settings. Other interfaces use them for settings that they cannot set."""

    def setting(self, name: str, value: str) -> str:
        """Word a setting, or an option by its parameter. ``value`` is empty if none is proposed."""
        return f"'{name} = {_literal(value, toml=True)}'" if value else f"'{name}'"

    def command(self, line: str) -> str:
        return f"'stretto {line}'"


@dataclass
class CommandLine(TomlFile):
    """Words of the shell. ``options`` maps settings and parameters to options, once known.
    ``line`` is the full command line.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    line: str = ""

    def setting(self, name: str, value: str) -> str:
        """Word a setting as the command's option, or as in files if it has none."""
        matches = (self.options[n] for n in spellings(name) if n in self.options)
        flag = next(matches, "" if self.options else option(name))
        if value in ("false", "False"):  # tyro's flags take no value
            section, dot, last = flag.rpartition(".")
            flag = flag and f"{section}.no-{last}" if dot else flag.replace("--", "--no-")
        if value.lower() in ("true", "false"):
            value = ""
        value = re.sub(r"[(){}',]", "", value.replace(": ", "="))  # a tuple or dict
        return f"{flag} {value}".strip() if flag else super().setting(name, value)


@dataclass
class Python(TomlFile):
    """Words of a function's keywords.

    Attributes:
        takes_settings: whether the function also takes each setting as ``section__name``.
        calls: Python calls by the prefix of the command line that they replace.
        equal: in scripts, maps settings to keywords with the same values, and some ``setting =
            value`` to exact words. Other values are worded as in files, with the keyword that they
            follow from.
    """

    keywords: Collection[str]
    takes_settings: bool
    calls: Mapping[str, str]
    equal: Mapping[str, str] | None = None

    def setting(self, name: str, value: str) -> str:
        """Word a setting as a keyword, or as in files if there is none."""
        names = spellings(name)
        if self.takes_settings:
            names[-1] = name.replace(".", "__")
        keyword = next((n for n in names if n in self.keywords), "")
        keyword = keyword or (names[-1] if self.takes_settings else "")
        if self.equal is not None and name in SETTINGS:
            if exact := self.equal.get(f"{name} = {value}"):
                return exact
            if self.equal.get(name) in self.keywords:
                keyword = self.equal[name]
            elif name.startswith("schedule."):
                pair = f"{names[-1]!r}: {_literal(value) if value else '...'}"
                return f"schedule={{{pair}}}"
            elif value or not keyword:
                origin = f"(from {keyword}=)" if keyword else "of trainer.config"
                return f"{super().setting(name, value)} {origin}"
        return f"{keyword}={value and _literal(value)}" if keyword else super().setting(name, value)

    def command(self, line: str) -> str:
        """Word a command line as a call, if there is one for it."""
        for start, call in self.calls.items():
            if line.startswith(start):
                words = shlex.split(line.removeprefix(start))
                return call.format(*(_literal(w) for w in words if not w.startswith("--")))
        return f"'stretto {line}' in a shell"


CALLS = {
    "train --resume ": "stretto.resume({})",
    "align --resume ": "stretto.resume_alignment({})",
    "eval ": "stretto.evaluate({}, model={})",
    "train RECIPE --model.name ": "stretto.train('RECIPE', model={})",
    "sft RECIPE --model.name ": "stretto.sft('RECIPE', model__name={})",
    "reward RECIPE --model.name ": "stretto.train_reward_model('RECIPE', model__name={})",
    "sft": "stretto.sft",
}

_called: list[TomlFile] = []
"""Interfaces through which this process was called, the outermost first."""


@contextmanager
def through(interface: TomlFile) -> Iterator[None]:
    """Word escaping errors for the outermost interface."""
    _called.append(interface)
    try:
        yield
    except StrettoError as error:
        error.args = tuple(worded(a) if isinstance(a, str) else a for a in error.args)
        raise
    finally:
        _called.remove(interface)


def offer(options: Mapping[str, str]) -> None:
    command_line().options = options


def command_line() -> CommandLine:
    """Return the command line that this process was called by. It is empty in Python."""
    first = next(iter(_called), None)
    return first if isinstance(first, CommandLine) else CommandLine()


def worded(text: str, interface: TomlFile | None = None) -> str:
    """Return a message in the words of an interface, by default the outermost one or files."""
    words = interface or next(iter(_called), TomlFile())
    text = BARE.sub(
        lambda m: (
            words.setting(m[1], (m[2] or "").strip("'")).removesuffix("=")
            if m[1] in SETTINGS
            else m[0]
        ),
        text,
    )
    return QUOTED.sub(
        lambda m: words.command(m[1]) if m[1] else words.setting(m[2], m[3] or ""), text
    )


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that users call: check its numbers, and word its errors for Python."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        keywords = inspect.signature(function).parameters
        takes_settings = any(p.kind is p.VAR_KEYWORD for p in keywords.values())
        with through(Python(keywords, takes_settings, CALLS)):
            unknown = kwargs.keys() - keywords.keys()
            if unknown and not takes_settings:
                name = min(unknown)
                message = f"{function.__name__}() takes no '{name}'. {advice(name, keywords)}"
                raise ConfigError(message, "unknown-argument")
            return function(*args, **checked(kinds(function), kwargs))

    return called


def advice(name: str, parameters: Collection[str], otherwise: str = "") -> str:
    """Return a hint with the parameters that an unknown name may stand for, or else ``otherwise``
    (by default the list of all parameters). For functions without settings.
    """
    # Other libraries' names map to settings, whose last part may be an option.
    elsewhere = [candidate.rpartition(".")[2] for candidate in ELSEWHERE.get(name, ())]
    if same := [candidate for candidate in elsewhere if candidate in parameters]:
        return f"It is called `{same[0]}` here."
    if matches := near(name, parameters, 3):
        return f"Did you mean {' or '.join(f'`{candidate}`' for candidate in matches)}?"
    return otherwise or f"It takes {', '.join(f'`{candidate}`' for candidate in parameters)}."


def option(name: str) -> str:
    """Return a parameter's option. A keyword of Python ends with an underscore: ``from_``."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _literal(value: str, *, toml: bool = False) -> str:
    if re.fullmatch(r"-?(\d[\d.e-]*|nan|inf)|[Tt]rue|[Ff]alse", value):
        return value.capitalize() if value[0] in "tfTF" and not toml else value.lower()
    if value[0] in "({":
        return value.replace(": ", " = ").replace("(", "[").replace(")", "]") if toml else value
    if pair := re.fullmatch(r"(\w+)=(\S+)", value):
        return f'{{{pair[1]} = "{pair[2]}"}}' if toml else f"{{{pair[1]!r}: {pair[2]!r}}}"
    return f'"{value}"' if toml else repr(value)
