"""Schedules compared in virtual time, without models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

from stretto.api.runs import Job, config_of_job, schedule_of
from stretto.config import recipes
from stretto.observe.compare import VariantResult
from stretto.observe.idle import ALL_DEVICES
from stretto.saying import Advance, unseen

if TYPE_CHECKING:
    from stretto.runtime.sim.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Simulation:
    """Clusters on which the runs of a comparison are simulated.

    Attributes:
        cluster_of: the cluster with a job's schedule.
        seed: that of the run which is replayed; ``None`` for a described cluster.
    """

    cluster_of: Callable[[Job], Cluster]
    seed: int | None = None

    def asked(self, job: Job, steps: int = 0) -> Cluster:
        """The cluster of one run.

        Args:
            steps: batches to train on; 0 leaves it to the cluster's description.

        Raises:
            ConfigError: the schedule, or the seed, does not fit.
        """
        cluster = self.cluster_of(job)
        changed = {"seed": job.seed, "steps": steps or cluster.workload.steps}
        workload = {**dict(cluster.workload), **changed}
        checked = recipes.build(workload, "--seeds", type(cluster.workload))
        return cluster.model_copy(update={"workload": checked})

    def run(self, job: Job, cluster: Cluster, advance: Advance = unseen) -> VariantResult:
        """One run in virtual time.

        Args:
            job: what its outcome is called.
            cluster: of the run, see :meth:`asked`.
            advance: told of each step.
        """
        from stretto.runtime.sim.simulate import simulate

        result = simulate(cluster, advance=advance)
        in_all = {ALL_DEVICES: fmean(result.device_utilisation)}
        if self.seed is not None:
            # A replay's devices stand for the workers of one process, of which a schedule that
            # overlaps has more.
            in_all = {}
        return VariantResult(
            variant=job.variant,
            seed=job.seed,
            times_s=list(accumulate(step["timing_s/step"] for step in result.steps)),
            samples=[cluster.workload.batch] * len(result.steps),
            metrics=result.steps,
            utilisation={**result.utilisation, **in_all},
        )


def described(file: str) -> Simulation:
    """Simulate on a described cluster.

    Raises:
        ConfigError: the description cannot be read, or is wrong.
    """
    from stretto.planner.formulas import priced
    from stretto.runtime.sim.cluster import Cluster

    cluster = priced(Cluster.read(file))

    def of(job: Job) -> Cluster:
        changed = {"schedule": schedule_of(cluster.schedule, job.variant)}
        return recipes.build({**dict(cluster), **changed}, f"variant '{job.variant}'", Cluster)

    return Simulation(of)


def recorded(folder: str, placement: str = "") -> Simulation:
    """Simulate on a run's records: its costs, response lengths and seed.

    Args:
        placement: settings whose ``runtime``, ``[cluster]`` and ``rollout.engines`` take the place
            of the run's: a recipe, a file, or another run's folder.

    Raises:
        ConfigError: it is no run's folder, or the placement is impossible.
        StateError: the run has recorded too little.
    """
    from stretto.planner.replay import Recording

    run = Recording.read(folder)
    config = run.config
    if placement:
        wanted = recipes.load(placement)
        rollout = {**dict(config.rollout), "engines": wanted.rollout.engines}
        placed = {"runtime": wanted.runtime, "cluster": wanted.cluster, "rollout": rollout}
        config = recipes.build({**dict(config), **placed}, f"--placement {placement}")

    def of(job: Job) -> Cluster:
        return run.cluster(config_of_job(config, job, ""))

    return Simulation(of, config.seed)
