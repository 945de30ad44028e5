"""``stretto compare --sim``: the comparison in virtual time, without models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from stretto.api import simulated
from stretto.cli import compare as comparison
from stretto.cli.parsing import read
from stretto.config import recipes
from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Compare schedules in virtual time: no model is loaded, and no accelerator needed."""

    sim: str
    """A cluster's description, a .toml file; or the folder of a run, whose costs, response lengths
    and placement are then taken."""
    placement: Annotated[str, tyro.conf.arg(metavar="RECIPE")] = ""
    """With a run's folder: a recipe, or a .toml file, whose runtime, [cluster] and rollout.engines
    take the place of the run's."""
    variants: Annotated[str, tyro.conf.arg(help=comparison.VARIANTS_HELP, metavar="NAME,...")] = (
        comparison.DEFAULT_VARIANTS
    )
    seeds: Annotated[str, tyro.conf.arg(metavar="INT,...")] = ""
    """Seeds of lengths and rewards, separated by commas; without them: 0,1,2, and for a run's
    folder its own seed, as its lengths are what they were."""
    steps: int = 0
    """Batches to train on; 0 leaves it to the description."""
    target: Annotated[
        float | None, tyro.conf.arg(help=comparison.TARGET_HELP, metavar="REWARD")
    ] = None
    out: str = "runs"
    """Folder in which the comparison gets a folder of its own."""


def run(arguments: Sequence[str]) -> int:
    """Compare, print the table and write it."""
    options = read(SimOptions, "compare", arguments)
    sim, placement = options.sim, options.placement
    if options.steps < 0:
        raise ConfigError(f"--steps {options.steps}: must be 1 or more, or 0", "greater_than_equal")
    replayed = Path(sim).is_dir()
    if replayed and options.seeds:
        problem = f"--seeds {options.seeds}: lengths of '{sim}' depend on no seed; leave it out"
        raise ConfigError(problem, "seeds-of-replay")
    if placement and not replayed:
        problem = f"--placement {placement}: leave it out, or give a run's folder as --sim"
        raise ConfigError(problem, "placement-of-description")
    where = f"virtual time, with costs and lengths of {sim}"
    if replayed:
        simulation = simulated.recorded(sim, placement)
        jobs = comparison.plan(options.variants, str(simulation.seed))
        where += "; rewards are those of the run's responses, whatever trains on them"
    else:
        simulation = simulated.described(sim)
        jobs = comparison.plan(options.variants, options.seeds or comparison.DEFAULT_SEEDS)
    # What is wrong with any of them is said before the first one starts.
    clusters = {job: simulation.asked(job, options.steps) for job in jobs}
    collected = comparison.collect(
        jobs,
        lambda job, advance: simulation.run(job, clusters[job], advance),
        clusters[jobs[0]].workload.steps,
        simulated=True,
    )
    folder = comparison.new_folder(options.out, f"{recipes.name_of(sim)}-compare")
    comparison.publish(collected, options.target, folder, arguments, where)
    return comparison.exit_status(collected)
