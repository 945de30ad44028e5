"""``stretto sft``: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import tyro

from stretto.api import begin, execute
from stretto.cli import dry_run
from stretto.cli.settings import RECIPE_HELP, DryRun, leading_recipe, parse_with_config
from stretto.config import RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError

C = TypeVar("C", SftConfig, RewardModelConfig)

_DESCRIPTION = (
    "Fine-tune a language model on demonstrations: rows with conversations (messages), or with a "
    "prompt and its completion. Only what the assistant says is learned, the end of its turn "
    "included. For example: stretto sft --data.name chats.jsonl --model.name smollm2-135m"
)


@dataclass
class Options:
    """The command's own options."""

    recipe: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help=f"{RECIPE_HELP} Without one: defaults.", metavar="RECIPE"),
    ] = ""
    dry_run: DryRun = False


def run(arguments: Sequence[str]) -> int:
    """Fine-tune, and say where the results are."""
    return supervised("sft", _DESCRIPTION, arguments, SftConfig)


def supervised(command: str, description: str, arguments: Sequence[str], kind: type[C]) -> int:
    """Train on examples, and say where the results are.

    Raises:
        ConfigError: an unknown recipe, invalid settings, or no data.
    """
    recipe = leading_recipe(arguments)
    start = recipes.load(recipe, kind) if recipe else kind()
    config, own = parse_with_config(command, description, arguments, start, Options)
    if not config.data.name:
        raise ConfigError(
            "data.name is empty: name a file or a hub dataset to train on with --data.name PATH"
        )
    if own.dry_run:
        print(dry_run.describe_supervised(config))
    else:
        execute(begin(config, recipes.name_of(recipe) if recipe else command))
    return 0
