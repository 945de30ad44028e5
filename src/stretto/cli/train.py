"""``stretto train``: one run, from a recipe to a run directory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import tyro

from stretto import recipes
from stretto.cli.settings import (
    RECIPE_HELP,
    Option,
    check_recipe_is_first,
    check_task,
    leading_recipe,
    parse_with_config,
)
from stretto.config import Config
from stretto.errors import ConfigError, StrettoError
from stretto.observe import RunDirectory, make_progress

DEFAULT_RECIPE = "arithmetic"

RESUMABLE = ("steps", "threads", "observe")
"""Settings that a resumed run may change; any other would make it a different run."""

_DESCRIPTION = (
    "Train a model. The settings come from the recipe (defaults below are the recipe's) and from "
    "options, which come after it: stretto train tiny --steps 10 --training.lr 1e-5"
)


def run(arguments: Sequence[str]) -> int:
    """Train, and say where the results are."""
    config, recipe, resume = parse(arguments)

    from stretto.models.memory import format_plan, plan_for

    progress = make_progress(config.observe.progress)
    try:
        plan = format_plan(plan_for(config))
        if resume:
            run_dir = RunDirectory.open(resume)
            run_dir.save_config(config)
        else:
            run_dir = RunDirectory.create(config.out, recipes.name_of(recipe), config)
        progress.start(config, plan)
        progress.note(f"{'resuming' if resume else 'run directory'}: {run_dir.path}")

        from stretto.runtime import inline

        try:
            inline.train(config, run_dir=run_dir, resume=bool(resume), progress=progress)
        except (KeyboardInterrupt, StrettoError):
            progress.close()
            if run_dir.metrics_file.exists():
                progress.note(f"stopped; what was done so far is in {run_dir.path}")
            elif not resume:  # a run that never took a step leaves nothing behind
                shutil.rmtree(run_dir.path)
            raise
        progress.close()
        progress.note(f"done; metrics, samples and the trained model are in {run_dir.path}")
    finally:
        progress.close()
    return 0


def parse(arguments: Sequence[str]) -> tuple[Config, str, str]:
    """The settings, the recipe's name, and the run directory to resume ('' for a new run).

    Raises:
        ConfigError: an unknown recipe, invalid settings, or a resumed run changed beyond
            :data:`RESUMABLE`.
    """
    given, resumed = leading_recipe(arguments), _value_of("--resume", arguments)
    if given and resumed:
        raise ConfigError(
            f"--resume takes the settings of the run it resumes; leave out the recipe '{given}'"
        )
    recipe = given or DEFAULT_RECIPE
    start = recipes.load(RunDirectory.open(resumed).config_file if resumed else recipe)
    config, own = parse_with_config("train", _DESCRIPTION, arguments, start, _options())
    if own["resume"] != resumed:
        raise ConfigError("--resume was given twice; name one run directory")
    check_recipe_is_first(arguments, own["recipe"])
    if resumed:
        _check_resumable(start, config)
    check_task(config, recipe)
    return config, recipe, resumed


def _options() -> dict[str, Option]:
    return {
        "recipe": Option(
            tyro.conf.Positional[str],
            "",
            f"{RECIPE_HELP} Without one: {DEFAULT_RECIPE}.",
            "RECIPE",
        ),
        "resume": Option(
            str,
            "",
            "Go on with this run from its last checkpoint, with its settings. Of these, only "
            f"{', '.join(RESUMABLE)} may be changed.",
            "RUN_DIR",
        ),
    }


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """What follows an option, looked up before parsing as all defaults depend on it."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return ""


def _check_resumable(before: Config, after: Config) -> None:
    old, new = before.model_dump(), after.model_dump()
    for key in recipes.setting_names():
        if key.partition(".")[0] not in RESUMABLE and _get(old, key) != _get(new, key):
            raise ConfigError(
                f"{key} = {_get(new, key)!r}: the run to resume has {_get(old, key)!r}, and only "
                f"{', '.join(RESUMABLE)} may change. Start a new run for other settings"
            )
    schedule = after.training.lr_schedule
    if schedule != "constant" and before.steps != after.steps:
        raise ConfigError(
            f"steps = {after.steps}: the run to resume has {before.steps}, which its "
            f"{schedule} learning-rate schedule depends on. Keep it, or start a new run"
        )


def _get(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return value
