"""Options that the commands of supervised training have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

from stretto.cli import dry_run
from stretto.cli.settings import (
    RECIPE_HELP,
    Option,
    check_recipe_is_first,
    leading_recipe,
    parse_with_config,
)
from stretto.config import RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError

C = TypeVar("C", SftConfig, RewardModelConfig)


def parse(
    command: str, description: str, arguments: Sequence[str], kind: type[C]
) -> tuple[C, str, bool]:
    """The settings, the name that runs are called by, and whether only the plan is asked for.

    Raises:
        ConfigError: an unknown recipe, invalid settings, or no data.
    """
    given = leading_recipe(arguments)
    start = recipes.load(given, kind) if given else kind()
    recipe = Option(
        tyro.conf.Positional[str], "", f"{RECIPE_HELP} Without one: defaults.", "RECIPE"
    )
    options = {"recipe": recipe, "dry_run": dry_run.OPTION}
    config, own = parse_with_config(command, description, arguments, start, options)
    check_recipe_is_first(arguments, own["recipe"])
    if not config.data.name:
        raise ConfigError(
            "data.name is empty: name a file or a hub dataset to train on with --data.name PATH"
        )
    return config, recipes.name_of(given) if given else command, own["dry_run"]
