"""``stretto compare``: the same training under several schedules, side by side.

Each run is a ``stretto train`` in a process of its own. Runs go seed by seed, with the variants in
turn within a seed, so that whatever drifts on the machine hits all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from stretto.api.runs import REPLACED, Job, Trainings, config_of_job, report
from stretto.api.settings import settled
from stretto.checks import check_run
from stretto.cli import compare_sim
from stretto.cli.settings import Recipe, leading_recipe, parse_with_config
from stretto.cli.variants import (
    DEFAULT_SEEDS,
    DEFAULT_VARIANTS,
    TARGET_HELP,
    VARIANTS_HELP,
    collect,
    exit_status,
    new_folder,
    plan,
    publish,
)
from stretto.config import Config, recipes
from stretto.errors import ConfigError
from stretto.machine import Machine
from stretto.observe.lock import locked
from stretto.observe.progress import on_stderr
from stretto.observe.report import MAX_RUNS
from stretto.saying import CHECKING, LOADING, working

_SIM = "--sim"

_DESCRIPTION = (
    "Train with several schedules, on the same recipe, seeds and data order, and compare them in "
    "one table. Settings come from the recipe and from options, which come after it, and hold for "
    "all runs; a variant replaces the recipe's schedule.preset and its four knobs. The runs, with "
    "their trained models, and the table go into a new folder in --out. With --sim and no recipe: "
    "the same in virtual time ('stretto compare --sim CLUSTER.toml --help')."
)


@dataclass
class Options:
    """The command's own options."""

    recipe: Recipe = tyro.MISSING
    variants: Annotated[str, tyro.conf.arg(help=VARIANTS_HELP, metavar="NAME,...")] = (
        DEFAULT_VARIANTS
    )
    seeds: Annotated[str, tyro.conf.arg(metavar="INT,...")] = DEFAULT_SEEDS
    """Seeds, separated by commas."""
    target: Annotated[float | None, tyro.conf.arg(help=TARGET_HELP, metavar="REWARD")] = None


def run(arguments: Sequence[str]) -> int:
    """Compare, print the table and write it; status 1 when a run failed."""
    if any(argument == _SIM or argument.startswith(f"{_SIM}=") for argument in arguments):
        if recipe := leading_recipe(arguments):
            raise ConfigError(
                f"{_SIM} describes what is compared, and so does the recipe '{recipe}'; leave one "
                "of them out"
            )
        return compare_sim.run(arguments)
    return _trained(arguments)


def _trained(arguments: Sequence[str]) -> int:
    recipe = leading_recipe(arguments)
    # Without a recipe the parser answers: with the help, or by what it misses.
    start = recipes.load(recipe or "arithmetic")
    config, own = parse_with_config("compare", _DESCRIPTION, arguments, start, Options, _offered())
    with working(on_stderr, CHECKING):
        check_run(config)
    jobs = plan(own.variants, own.seeds)
    for job in jobs:  # what is wrong with any of them is said before the first one starts
        config_of_job(config, job, "")

    with working(on_stderr, LOADING):
        config = settled(config, print)  # once, as runs that decide for themselves may differ
    folder = new_folder(config.out, f"{recipes.name_of(recipe)}-compare")
    print(f"{len(jobs)} runs of {config.steps} steps, in {folder}", flush=True)
    with locked(folder, print):
        return _run_all(jobs, config, folder, arguments, own.target)


def _run_all(
    jobs: Sequence[Job],
    config: Config,
    folder: Path,
    arguments: Sequence[str],
    target: float | None,
) -> int:
    trainings = Trainings(config, jobs, folder)
    collected = collect(jobs, trainings.run, config.steps)
    publish(collected, target, folder, arguments, str(Machine.here()))
    first = [path for job, path in trainings.folders.items() if job.seed == jobs[0].seed][:MAX_RUNS]
    if first:
        page = report(first, folder / "report.html")
        print(f"wrote {page}: the runs of seed {jobs[0].seed} ({len(first)} of them)")
    return exit_status(collected)


def _offered() -> list[str]:
    own = {"seed", "observe.progress", *(f"schedule.{knob}" for knob in REPLACED)}
    return [name for name in recipes.setting_names() if name not in own]
