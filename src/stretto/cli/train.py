"""``stretto train``, ``sft`` and ``reward``: one run, from a recipe to a run directory; and
``recipes``, which lists what they take by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from stretto.api import RESUMABLE, begin, check_resumable, execute
from stretto.cli.dry_run import describe_run, describe_supervised
from stretto.cli.settings import (
    RECIPE_HELP,
    DryRun,
    leading_recipe,
    parse_with_config,
    value_of,
)
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError
from stretto.observe import RunDirectory

C = TypeVar("C", SftConfig, RewardModelConfig)

DEFAULT_RECIPE = "arithmetic"

COMMON = (
    *("steps", "out", "runtime", "model.name", "model.lora_rank", "task.kind", "task.name"),
    *("task.answer_column", "reward.sources", "rollout.batch", "rollout.samples_per_prompt"),
    *("rollout.max_new_tokens", "schedule.preset", "algorithm.name", "training.lr"),
)
"""Settings that ``--help`` documents: those that most users set."""


@dataclass
class TrainOptions:
    """Train a model. The settings come from the recipe (defaults below are the recipe's) and from
    options, which come after it: stretto train tiny --steps 10 --training.lr 1e-5

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


@dataclass
class SftOptions:
    """Fine-tune a language model on demonstrations: rows with conversations (messages), or with a
    prompt and its completion. Only what the assistant says is learned, the end of its turn
    included. For example: stretto sft --data.name chats.jsonl --model.name smollm2-135m
    """

    recipe: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help=f"{RECIPE_HELP} Without one: defaults.", metavar="RECIPE"),
    ] = ""
    dry_run: DryRun = False


@dataclass
class RewardOptions(SftOptions):
    """Train a reward model on pairs of responses of which one was preferred (chosen, rejected),
    with a prompt of their own or the beginning that both share. What is saved is a
    sequence-classification checkpoint, for reward.sources as model:FOLDER. 'stretto reward label'
    judges pairs instead.
    """


def run_train(arguments: Sequence[str]) -> int:
    """Train with reinforcement learning, and say where the results are."""
    config, own = parse(arguments)
    if own.dry_run:
        print(describe_run(config))
        return 0
    overrides = None
    if own.warmup_file:  # the import takes long: before there is a folder
        from stretto.assembly.models import Overrides

        overrides = Overrides(warmup=Path(own.warmup_file))
    name = recipes.name_of(own.recipe or DEFAULT_RECIPE)
    execute(begin(config, name, resume=own.resume, overrides=overrides))
    return 0


def parse(arguments: Sequence[str]) -> tuple[Config, TrainOptions]:
    """Return the settings, and the options of the command itself."""
    recipe, resumed = leading_recipe(arguments), value_of("--resume", arguments)
    if recipe and resumed:
        raise ConfigError(
            f"--resume takes the settings of the run it resumes; leave out the recipe '{recipe}'"
        )
    source = RunDirectory.open(resumed).config_file if resumed else recipe or DEFAULT_RECIPE
    start = recipes.load(source)
    config, own = parse_with_config("train", arguments, start, TrainOptions, common=COMMON)
    if own.resume != (resumed or ""):
        raise ConfigError("--resume was given twice; name one run directory")
    if resumed:
        check_resumable(start, config)
    return config, own


def run_sft(arguments: Sequence[str]) -> int:
    """Fine-tune a language model, and say where the results are."""
    return _supervised("sft", arguments, SftConfig, SftOptions)


def run_reward(arguments: Sequence[str]) -> int:
    """Train a reward model, and say where the results are; or label pairs."""
    if arguments and arguments[0] == "label":
        from stretto.cli import models

        return models.run_label(arguments[1:])
    return _supervised("reward", arguments, RewardModelConfig, RewardOptions)


def _supervised(
    command: str, arguments: Sequence[str], kind: type[C], options: type[SftOptions]
) -> int:
    recipe = leading_recipe(arguments)
    start = recipes.load(recipe, kind) if recipe else kind()
    config, own = parse_with_config(command, arguments, start, options)
    if not config.data.name:
        raise ConfigError(
            "data.name is empty: name a file or a hub dataset to train on with --data.name PATH"
        )
    if own.dry_run:
        print(describe_supervised(config))
    else:
        execute(begin(config, recipes.name_of(recipe) if recipe else command))
    return 0


def command_recipes() -> None:
    """List the recipes that commands take by name; 'stretto eval' takes those of 'train'."""
    rows = [
        (folder or "train", name, recipes.describe(name, kind))
        for kind, folder in recipes.FOLDERS.items()
        for name in recipes.names(kind)
    ]
    width = max(len(name) for _, name, _ in rows)
    for command, name, description in rows:
        print(f"{command:<6}  {name:<{width}}  {description}")
