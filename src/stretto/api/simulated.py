"""Compares schedules in virtual time, without models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

from stretto.api.runs import Job, config_of_job, schedule_of
from stretto.config import recipes
from stretto.observe.comparison import VariantResult
from stretto.observe.idle import ALL_DEVICES
from stretto.saying import Advance, unseen

if TYPE_CHECKING:
    from stretto.runtime.sim.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Simulation:
    """The cluster of each run of a comparison, and the seed of a replayed run."""

    cluster_of: Callable[[Job], Cluster]
    seed: int | None = None

    def asked(self, job: Job, steps: int = 0) -> Cluster:
        """Return the cluster of one run of ``steps`` (0: its own). ConfigError if invalid."""
        cluster = self.cluster_of(job)
        changed = {"seed": job.seed, "steps": steps or cluster.workload.steps}
        workload = {**dict(cluster.workload), **changed}
        checked = recipes.build(workload, "`seeds`", type(cluster.workload))
        return cluster.model_copy(update={"workload": checked})

    def run(self, job: Job, cluster: Cluster, advance: Advance = unseen) -> VariantResult:
        """Simulate one run, on its cluster of :meth:`asked`."""
        from stretto.runtime.sim.simulate import simulate

        result = simulate(cluster, advance=advance)
        # In a replay, devices are workers of a process, and some schedules have more of them.
        replayed = self.seed is not None
        in_all = {} if replayed else {ALL_DEVICES: fmean(result.device_utilisation)}
        return VariantResult(
            variant=job.variant,
            seed=job.seed,
            times_s=list(accumulate(step["timing_s/step"] for step in result.steps)),
            samples=[cluster.workload.batch] * len(result.steps),
            metrics=result.steps,
            utilisation={**result.utilisation, **in_all},
        )


def described(file: str) -> Simulation:
    """Simulate on a described cluster. Raises ConfigError if the description is invalid."""
    from stretto.planner.formulas import priced
    from stretto.runtime.sim.cluster import Cluster

    cluster = priced(Cluster.read(file))

    def of(job: Job) -> Cluster:
        changed = {"schedule": schedule_of(cluster.schedule, job.variant)}
        return recipes.build({**dict(cluster), **changed}, f"variant '{job.variant}'", Cluster)

    return Simulation(of)


def recorded(folder: str, placement: str = "") -> Simulation:
    """Simulate on a run's records: its costs, response lengths and seed.

    ``runtime``, ``[cluster]`` and ``rollout.engines`` of the ``placement`` (a recipe, a file, or
    another run's folder) replace those of the run. Raises ConfigError if that is impossible,
    StateError if the run recorded too little.
    """
    from stretto.planner.replay import Recording

    run = Recording.read(folder)
    config = run.config
    if placement:
        target = recipes.load(placement)
        rollout = {**dict(config.rollout), "engines": target.rollout.engines}
        placed = {"runtime": target.runtime, "cluster": target.cluster, "rollout": rollout}
        config = recipes.build({**dict(config), **placed}, f"`placement = {placement}`")
    return Simulation(lambda job: run.cluster(config_of_job(config, job, "")), config.seed)
