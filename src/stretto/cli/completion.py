"""``stretto completion``: prints shell scripts that complete commands, options and recipes."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from functools import cache
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

_BASH = """\
_stretto() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} prefix= offers=
  if [[ $before == = ]]; then  # bash makes three words of --option=value
    before=${{COMP_WORDS[COMP_CWORD-2]}}
  elif [[ $current == = ]]; then
    current=
  elif [[ $current == --*=* ]]; then
    before=${{current%%=*}} prefix=${{current%%=*}}= current=${{current#*=}}
  fi
  case "${{COMP_WORDS[1]}} $before" in
{values}
  *) case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
{words}
    esac ;;
  esac
  COMPREPLY=($(compgen -P "$prefix" -W "$offers" -- "$current"))
}}
complete -o default -F _stretto stretto
"""

_FISH = """\
function __stretto
  set -l words (commandline -opc)
  set -l current (commandline -ct)
  set -l before $words[-1]
  set -l prefix ''
  if string match -q -- '--*=*' $current
    set before (string split -m 1 = -- $current)[1]
    set prefix $before=
  end
  set -l offers
  switch "$words[2] $before"
{values}
  case '*'
    switch (count $words)" $words[2]"
{words}
    end
  end
  string match -- "$current*" $prefix$offers
  or __fish_complete_path $current
end
complete -c stretto -f -a '(__stretto)'
"""


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
    script, case = (_FISH, _fish_case) if shell == "fish" else (_BASH, _bash_case)
    of_values = "\n".join(case(patterns, choices) for choices, patterns in values.items())
    of_words = "\n".join(case([pattern], offers) for pattern, offers in words.items())
    print(script.format(values=of_values, words=of_words), end="")


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
