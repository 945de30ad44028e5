"""``stretto completion``: a script by which a shell completes commands, options and recipes."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Annotated, Literal

import tyro

from stretto.config import Config, RewardModelConfig, Section, SftConfig, recipes
from stretto.errors import ConfigError

_RECIPES_OF: Mapping[str, type[Section]] = {
    **dict.fromkeys(("train", "compare", "plan", "eval", "recipes"), Config),
    "sft": SftConfig,
    "reward": RewardModelConfig,
}

_BASH = """\
_stretto() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=
  if ((COMP_CWORD == 1)); then
    words="{commands}"
  else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _stretto stretto
"""


def command(
    shell: Annotated[tyro.conf.Positional[Literal["bash", "zsh"]], tyro.conf.arg(metavar="SHELL")],
    /,
) -> None:
    """Print a script that completes commands, their options and recipes.

    Args:
        shell: bash or zsh. For bash: stretto completion bash >> ~/.bashrc
    """
    from stretto.cli.main import COMMANDS

    cases = "\n".join(f'    {name}) words="{" ".join(words(name))}" ;;' for name in COMMANDS)
    if shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    print(_BASH.format(commands=" ".join([*COMMANDS, "help", "version"]), cases=cases), end="")


def words(name: str) -> list[str]:
    """Return the options of a command, and its recipes."""
    kind = _RECIPES_OF.get(name)
    known = recipes.names(kind) if kind else []
    # All options are in the help, whichever way a command reads them.
    try:
        text = _help(name, "--help-all")
    except ConfigError:  # it has no settings
        text = _help(name, "--help")
    lines = re.findall(r"^\W*?(-h, --help|--[a-z].*)", text, flags=re.MULTILINE)
    names = " ".join(line.partition("  ")[0] for line in lines)  # its text is two blanks away
    options = re.findall(r"(?<![\w-])--[a-z][\w.-]+", names)
    return [*known, *dict.fromkeys(options)]


def _help(name: str, option: str) -> str:
    from stretto.cli.main import dispatch

    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            dispatch([name, option])
    except SystemExit:
        pass
    return shown.getvalue()
