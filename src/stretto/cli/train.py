"""``stretto train``: one run, from a recipe to a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from stretto.api import RESUMABLE, begin, check_resumable, execute
from stretto.cli import dry_run
from stretto.cli.settings import RECIPE_HELP, DryRun, leading_recipe, parse_with_config
from stretto.config import Config, recipes
from stretto.errors import ConfigError
from stretto.observe import RunDirectory

DEFAULT_RECIPE = "arithmetic"

COMMON = (
    *("steps", "out", "runtime", "model.name", "model.lora_rank", "task.kind", "task.name"),
    *("task.answer_column", "reward.sources", "rollout.batch", "rollout.samples_per_prompt"),
    *("rollout.max_new_tokens", "schedule.preset", "algorithm.name", "training.lr"),
)
"""Settings that ``--help`` documents: those that most users set."""

_DESCRIPTION = (
    "Train a model. The settings come from the recipe (defaults below are the recipe's) and from "
    "options, which come after it: stretto train tiny --steps 10 --training.lr 1e-5"
)


@dataclass
class Options:
    """The command's own options.

    Attributes:
        overrides: A .toml file whose settings take the place of the recipe's, such as one
            that 'stretto plan --write' wrote. Options come after it.
        warmup_file: For several runs with one warm-up: keep what comes out of it in this file, or
            take it from there.
    """

    recipe: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help=f"{RECIPE_HELP} Without one: {DEFAULT_RECIPE}.", metavar="RECIPE"),
    ] = ""
    dry_run: DryRun = False
    resume: Annotated[
        str,
        tyro.conf.arg(
            help="Go on with this run from its last checkpoint, with its settings. Of these, only "
            f"{', '.join(RESUMABLE)} may be changed.",
            metavar="RUN_DIR",
        ),
    ] = ""
    overrides: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    warmup_file: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""


def run(arguments: Sequence[str]) -> int:
    """Train, and say where the results are."""
    config, recipe, own = parse(arguments)
    if own.dry_run:
        print(dry_run.describe_run(config))
        return 0
    given = None
    if own.warmup_file:  # the import takes long: before there is a folder
        from stretto.assembly.models import Overrides

        given = Overrides(warmup=Path(own.warmup_file))
    execute(begin(config, recipes.name_of(recipe), resume=own.resume), given=given)
    return 0


def parse(arguments: Sequence[str]) -> tuple[Config, str, Options]:
    """The settings, the recipe's name, and the options of the command itself.

    Raises:
        ConfigError: an unknown recipe, invalid settings, or a resumed run changed beyond
            :data:`~stretto.api.RESUMABLE`.
    """
    given, resumed = leading_recipe(arguments), _value_of("--resume", arguments)
    if given and resumed:
        raise ConfigError(
            f"--resume takes the settings of the run it resumes; leave out the recipe '{given}'"
        )
    recipe = given or DEFAULT_RECIPE
    start = recipes.load(RunDirectory.open(resumed).config_file if resumed else recipe)
    config, own = parse_with_config("train", _DESCRIPTION, arguments, start, Options, common=COMMON)
    if own.resume != resumed:
        raise ConfigError("--resume was given twice; name one run directory")
    if resumed:
        check_resumable(start, config)
    return config, recipe, own


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """Find an option's value before parsing, as all defaults depend on it; empty without one."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return ""
