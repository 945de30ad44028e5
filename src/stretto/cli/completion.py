"""``stretto completion``: prints shell scripts that complete commands, options and recipes."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import tyro

from stretto.config import Config, RewardModelConfig, Section, SftConfig, recipes
from stretto.errors import ConfigError
from stretto.models.shapes import PUBLIC
from stretto.planner.hardware import GPUS

_RECIPES_OF: Mapping[str, type[Section]] = {
    **dict.fromkeys(("train", "compare", "plan", "eval", "recipes"), Config),
    "sft": SftConfig,
    "reward": RewardModelConfig,
}

_VALUES: Mapping[str, Collection[str]] = {
    "--gpu": GPUS,
    **dict.fromkeys(("--model-shape", "--reward-shape"), PUBLIC),
}
"""Choices of options whose help does not list them."""


def command_completion(
    shell: Annotated[
        tyro.conf.Positional[Literal["bash", "zsh", "fish"]], tyro.conf.arg(metavar="SHELL")
    ],
    /,
) -> None:
    """Print a script that completes commands, options, their values, and recipes.

    Args:
        shell: bash, zsh or fish. For bash: stretto completion bash >> ~/.bashrc
    """
    from stretto.cli.main import COMMANDS

    commands = " ".join([*COMMANDS, "help", "version"])
    words, values = {"1 *": commands, "* help": commands}, defaultdict[str, list[str]](list)
    for name in COMMANDS:
        words[f"* {name}"] = " ".join([*_positionals(name), *options(name)])
        for option, choices in options(name).items():
            values[" ".join(choices)].append(f"{name} {option}")
    values.pop("")
    if shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    script, case = ("fish", _fish_case) if shell == "fish" else ("bash", _bash_case)
    of_values = "\n".join(case(patterns, choices) for choices, patterns in values.items())
    of_words = "\n".join(case([pattern], offers) for pattern, offers in words.items())
    text = Path(__file__).with_name(f"completion.{script}").read_text(encoding="utf-8")
    print(text.replace("@VALUES@", of_values).replace("@WORDS@", of_words), end="")


def _bash_case(patterns: Collection[str], offers: str) -> str:
    either = "|".join(pattern.replace(" ", r"\ ") for pattern in patterns)
    return f'  {either}) offers="{offers}" ;;'


def _fish_case(patterns: Collection[str], offers: str) -> str:
    return f"  case {' '.join(map(repr, patterns))}\n    set offers {offers}"


def _positionals(name: str) -> Collection[str]:
    if kind := _RECIPES_OF.get(name):
        return recipes.names(kind)
    return {"completion": ("bash", "zsh", "fish"), "memory": PUBLIC}.get(name, ())


@cache
def options(name: str) -> Mapping[str, Collection[str]]:
    """Return the options in a command's help, with their choices if it lists them."""
    # The help lists all options, however the command reads them.
    try:
        text = _help(name, "--help-all")
    except ConfigError:  # the command has no settings
        text = _help(name, "--help")
    lines = re.findall(r"^\W*?(-h, --help|--[a-z].*)", text, flags=re.MULTILINE)
    names = " ".join(line.partition("  ")[0] for line in lines)  # text follows two blanks
    option_names = re.findall(r"(?<![\w-])--[a-z][\w.-]+", names)
    unframed = " ".join(re.split(r"[\s│]+", text))
    listed = re.findall(r"(--[a-z][\w.-]+) \[?\{([a-z][^{}A-Z]*)\}", unframed)
    values = {**_VALUES, **{option: re.split(r",\s*", choices) for option, choices in listed}}
    # A flag, for example --gpu of doctor, has no value.
    return {
        o: values.get(o, ()) if o.replace("--", "--no-", 1) not in option_names else ()
        for o in option_names
    }


def _help(name: str, option: str) -> str:
    from stretto.cli.main import dispatch

    output = io.StringIO()
    try:
        with redirect_stdout(output):
            dispatch([name, option])
    except SystemExit:
        pass
    return output.getvalue()
