"""``stretto compare``: the same training under several schedules, side by side.

Each run is a ``stretto train`` in a process of its own. Runs go seed by seed, with the variants in
turn within a seed, so that whatever drifts on the machine hits all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from stretto.api.runs import REPLACED, Trainings, config_of_job, report
from stretto.api.settings import settled
from stretto.checks import check_run
from stretto.cli import compare_sim
from stretto.cli import variants as common
from stretto.cli.settings import Recipe, leading_recipe, parse_with_recipe, value_of
from stretto.config import recipes
from stretto.errors import ConfigError
from stretto.machine import Machine
from stretto.observe.lock import locked
from stretto.observe.progress import on_stderr
from stretto.observe.report import MAX_RUNS
from stretto.saying import CHECKING, LOADING, working


@dataclass
class Options:
    """Train with several schedules, on the same recipe, seeds and data order, and compare them in
    one table. Settings come from the recipe and from options, which come after it, and hold for all
    runs; a variant replaces the recipe's schedule.preset and its four knobs. The runs, with their
    trained models, and the table go into a new folder in --out. With --sim and no recipe: the same
    in virtual time ('stretto compare --sim CLUSTER.toml --help').
    """

    recipe: Recipe = tyro.MISSING
    variants: common.Names = common.DEFAULT_VARIANTS
    seeds: Annotated[str, tyro.conf.arg(metavar="INT,...")] = common.DEFAULT_SEEDS
    """Seeds, separated by commas."""
    target: common.Target = None


def run(arguments: Sequence[str]) -> int:
    """Compare, print the table and write it; status 1 when a run failed."""
    if value_of("--sim", arguments) is not None:
        if recipe := leading_recipe(arguments):
            raise ConfigError(
                f"--sim describes what is compared, and so does the recipe '{recipe}'; leave one "
                "of them out"
            )
        return compare_sim.run(arguments)
    kept = {"seed", "observe.progress", *(f"schedule.{knob}" for knob in REPLACED)}
    offered = [name for name in recipes.setting_names() if name not in kept]
    config, own = parse_with_recipe("compare", arguments, Options, offered)
    with working(on_stderr, CHECKING):
        check_run(config)
    jobs = common.plan(own.variants, own.seeds)
    for job in jobs:  # what is wrong with any of them is said before the first one starts
        config_of_job(config, job, "")

    with working(on_stderr, LOADING):
        config = settled(config, print)  # once, as runs that decide for themselves may differ
    folder = common.new_folder(config.out, f"{recipes.name_of(own.recipe)}-compare")
    print(f"{len(jobs)} runs of {config.steps} steps, in {folder}", flush=True)
    with locked(folder, print):
        trainings = Trainings(config, jobs, folder)
        collected = common.collect(jobs, trainings.run, config.steps)
        common.publish(collected, own.target, folder, arguments, str(Machine.here()))
        first = [path for job, path in trainings.folders.items() if job.seed == jobs[0].seed]
        if shown := first[:MAX_RUNS]:
            page = report(shown, folder / "report.html")
            print(f"wrote {page}: the runs of seed {jobs[0].seed} ({len(shown)} of them)")
        return common.exit_status(collected)
