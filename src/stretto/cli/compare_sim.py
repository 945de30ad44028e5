"""``stretto compare --sim``: the comparison in virtual time, without models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import tyro

from stretto.cli.variants import (
    DEFAULT_SEEDS,
    DEFAULT_VARIANTS,
    TARGET_HELP,
    VARIANTS_HELP,
    Job,
    collect,
    config_of,
    exit_status,
    new_folder,
    plan,
    publish,
    schedule_of,
)
from stretto.config import recipes
from stretto.errors import ConfigError
from stretto.observe import RunDirectory
from stretto.observe.compare import ALL_DEVICES, Outcome
from stretto.observe.progress import REWARD
from stretto.observe.trace import Trace

if TYPE_CHECKING:
    from stretto.runtime.sim.cluster import Cluster


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Compare schedules in virtual time: no model is loaded, and no accelerator needed."""

    sim: str
    """A cluster's description, a .toml file; or the folder of a run, whose costs and response
    lengths are then taken, with a core or a device for each role that works at the same time as
    others."""
    variants: Annotated[str, tyro.conf.arg(help=VARIANTS_HELP, metavar="NAME,...")] = (
        DEFAULT_VARIANTS
    )
    seeds: Annotated[str, tyro.conf.arg(metavar="INT,...")] = ""
    """Seeds of lengths and rewards, separated by commas; without them: 0,1,2, and for a run's
    folder its own seed, as its lengths are what they were."""
    steps: int = 0
    """Batches to train on; 0 leaves it to the description."""
    target: Annotated[float | None, tyro.conf.arg(help=TARGET_HELP, metavar="REWARD")] = None
    out: str = "runs"
    """Folder in which the comparison gets a folder of its own."""


def run(arguments: Sequence[str]) -> int:
    """Compare, print the table and write it."""
    options = tyro.cli(SimOptions, prog="stretto compare", args=list(arguments))
    if options.steps < 0:
        raise ConfigError(
            f"--steps {options.steps}: must be 1 or more, or 0 for the description's own"
        )
    recorded = Path(options.sim).is_dir()
    cluster_of, seeds = _recorded(options) if recorded else _described(options)
    jobs = plan(options.variants, seeds)
    # What is wrong with any of them is said before the first one starts.
    clusters = {job: _asked(cluster_of(job), job, options.steps) for job in jobs}
    collected = collect(jobs, lambda job: simulated(clusters[job], job, devices=not recorded))
    folder = new_folder(options.out, f"{recipes.name_of(options.sim)}-compare")
    where = f"virtual time, with costs and lengths of {options.sim}"
    if recorded:
        where += "; rewards are those of the run's responses, whatever trains on them"
    publish(collected, options.target, folder, arguments, where)
    return exit_status(collected)


def _asked(cluster: Cluster, job: Job, steps: int) -> Cluster:
    """The cluster with a job's seed, and so many steps where any are asked for."""
    workload = cluster.workload
    changed = {"seed": job.seed, "steps": steps or workload.steps}
    asked = recipes.build({**dict(workload), **changed}, "--seeds", type(workload))
    return cluster.model_copy(update={"workload": asked})


def _described(options: SimOptions) -> tuple[Callable[[Job], Cluster], str]:
    """The described cluster with a job's schedule, and the seeds."""
    from stretto.runtime.sim.cluster import Cluster

    cluster = Cluster.read(options.sim)

    def of(job: Job) -> Cluster:
        changed = {"schedule": schedule_of(cluster.schedule, job.variant)}
        return recipes.build({**dict(cluster), **changed}, f"variant '{job.variant}'", Cluster)

    return of, options.seeds or DEFAULT_SEEDS


def _recorded(options: SimOptions) -> tuple[Callable[[Job], Cluster], str]:
    """What a run has recorded, with a job's schedule, and the run's own seed.

    Raises:
        ConfigError: other seeds are asked for.
        StateError: the run has recorded too little.
    """
    from stretto.runtime.sim.replay import recorded_cluster

    if options.seeds:
        raise ConfigError(
            f"--seeds {options.seeds}: response lengths are replayed as they were in the run "
            f"'{options.sim}', and depend on no seed; leave it out"
        )
    run = RunDirectory.open(options.sim)
    config, rollouts = recipes.load(run.path), run.read_rollouts()
    trace = run.trace.read() if run.trace.path.is_file() else Trace((), ())
    warm_s = trace.steps[0].end_s if trace.steps else 0.0
    spans = [span for span in trace.spans if span.start_s >= warm_s]

    def of(job: Job) -> Cluster:
        # The schedule decides which roles have lanes of their own, and so devices here.
        return recorded_cluster(config_of(config, job, ""), rollouts, spans)

    return of, str(config.seed)


def simulated(cluster: Cluster, job: Job, *, devices: bool) -> Outcome:
    """One run in virtual time.

    Args:
        cluster: with the job's schedule and seed.
        job: what it is.
        devices: whether to tell how busy they were. A replay's devices stand for the lanes of one
            process, of which a schedule that overlaps has more.
    """
    from stretto.runtime.sim.simulate import simulate

    result = simulate(cluster)
    in_all = {ALL_DEVICES: fmean(result.device_utilisation)} if devices else {}
    return Outcome(
        variant=job.variant,
        seed=job.seed,
        times_s=list(accumulate(step["timing_s/step"] for step in result.steps)),
        samples=[cluster.workload.batch] * len(result.steps),
        rewards=[step[REWARD] for step in result.steps],
        staleness_mean=[step["staleness/mean"] for step in result.steps],
        staleness_max=[step["staleness/max"] for step in result.steps],
        utilisation={**result.utilisation, **in_all},
    )
