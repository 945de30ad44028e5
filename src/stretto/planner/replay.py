"""A recorded run, as a cluster that can be simulated, checked and varied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from stretto.assembly.controls import share_cores
from stretto.config import Config, recipes
from stretto.config.cluster import LEARNER
from stretto.errors import ConfigError, StateError
from stretto.machine import Machine
from stretto.observe import RunDirectory
from stretto.observe.run_directory import RolloutRecord
from stretto.observe.spans import Span
from stretto.observe.trace import Trace
from stretto.planner.calibration import Calibration, calibrate, role_of
from stretto.runtime.sim.cluster import (
    Cluster,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
)
from stretto.runtime.sim.costs import SampleCost
from stretto.runtime.sim.lengths import Replayed
from stretto.runtime.sim.roles import LearningCurve
from stretto.scoring.responses import worthwhile_tokens
from stretto.types import ScoreKind, short_name

CPU_TOKEN_BUDGET = 1024
"""Tokens of a pass on a CPU, where the settings leave it open."""

FUNCTION = ""
"""Stands where the name of a reward function does."""

_KINDS: dict[str, ScoreKind] = {"reference": "logprobs", "critic": "values"}


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a role of a run works.

    Attributes:
        devices: of all its ranks; none for a function with a process of its own.
        threads: of its work, in all ranks.
        host: the generator that it sits with, by number.
    """

    devices: tuple[int, ...]
    threads: int
    host: int | None = None


@dataclass(frozen=True)
class Recording:
    """What a run has recorded, with which other schedules and placements can be simulated.

    Attributes:
        config: of the run.
        rollouts: of it, also those in flight at its end.
        spans: of it; best without the first steps, which warm up.
        machine: that it worked on.
        chunks, deltas: sizes of chunks and over-commitment by round, as controllers chose them.
    """

    config: Config
    rollouts: Sequence[RolloutRecord]
    spans: Sequence[Span]
    machine: Machine
    chunks: tuple[int, ...] = ()
    deltas: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: str | Path, warm_steps: int = 1) -> Self:
        """Read a run's folder, without the spans of the first steps.

        Raises:
            ConfigError: it is no run's folder.
            StateError: the run has recorded too little, or a file is damaged.
        """
        run = RunDirectory.open(folder)
        return cls.of(run, run.trace.read(), warm_steps)

    @classmethod
    def of(cls, run: RunDirectory, trace: Trace, warm_steps: int) -> Self:
        """Read a run's folder, all but its trace; see :meth:`read`."""
        warm_s = max((step.end_s for step in trace.steps[:warm_steps]), default=0.0)
        spans = [span for span in trace.spans if span.start_s >= warm_s]
        # Earlier versions did not write it.
        machine = run.read_machine() if run.machine_file.is_file() else Machine("", 0, 0, (), "")
        config, rollouts = recipes.load(run.path), run.read_rollouts(in_flight=True)
        metrics = run.read_metrics()
        chunks = _chosen(config, metrics, "schedule/chunk_tokens")
        deltas = _chosen(config, metrics, "schedule/overcommit")
        return cls(config, rollouts, spans, machine, chunks, deltas)

    @cached_property
    def costs(self) -> Calibration:
        """What work costs alone: what roles at work side by side took from each other is left out.

        Raises:
            StateError: the spans are too few.
        """
        seats = self.seats(self.config)
        functions = seats[FUNCTION][0].threads
        threads = defaultdict(lambda: functions, {role: s[0].threads for role, s in seats.items()})
        return calibrate(self.spans, threads, self._cores(self.config))

    def cluster(self, config: Config | None = None) -> Cluster:
        """Describe the roles of the run, with the recorded costs, lengths and rewards.

        Model scorers find a call worthwhile as they do on a CPU. Of a run in one process, each
        worker is a device here; of others, each process or GPU of their placement. Rewards are the
        recorded ones, whatever the schedule. With the run's own settings so is what its controllers
        chose, as far as it was recorded.

        Args:
            config: the run's, maybe with another schedule, runtime or placement.

        Raises:
            ConfigError: the placement is impossible.
            StateError: too little was recorded to go by.
        """
        config = config or self.config
        if not any(r.finish for r in self.rollouts):
            raise StateError(
                "a run is replayed from its rollouts, and it has recorded none; let it take a few "
                "steps"
            )
        had, wanted = _cuts(self.config), _cuts(config)
        if wanted != had:
            raise ConfigError(
                f"in the run roles had fsdp and tp {had or 'of 1'}, and its records do not say "
                f"what {wanted or 'one rank each'} would take; record a run with these"
            )
        costs, seats = self.costs, self.seats(config)
        definition = config.algorithm.definition
        (learner,) = seats["learner"]
        return Cluster(
            cores=self._cores(config),
            call_s=costs.call_s,
            driver=costs.driver,
            generators=tuple(
                GeneratorRole(
                    devices=seat.devices,
                    threads=seat.threads,
                    cost=costs.generator.model_copy(update={"padded": True}),  # as engines do
                    slots=config.rollout.slots,
                    best_batch=config.most_in_flight,  # as a run takes it
                )
                for seat in seats["generator"]
            ),
            scorers=_scorers(config, costs, seats),
            learner=LearnerRole(
                devices=learner.devices,
                threads=learner.threads,
                trains=("actor", "critic") if definition.critic else ("actor",),
                cost=costs.learner,
            ),
            workload=self._workload(config),
            schedule=config.schedule,
        )

    def seats(self, config: Config) -> dict[str, list[Seat]]:
        """Seat all roles of a run with these settings.

        Returns:
            The seats by role: ``generator`` (one for each), model scorers by their short names (one
            for each replica), ``learner``, and :data:`FUNCTION` for whatever function.

        Raises:
            ConfigError: the placement is impossible.
        """
        reads = {role_of(span) for span in self.spans if span.attributes.get("tokens")}
        models = [s for s in (*config.reward.sources, *_KINDS) if short_name(s) in reads]
        if config.runtime != "inline":
            return _processes(config, self.machine, models)
        return _threads(config, self.machine.threads, map(short_name, models))

    def _cores(self, config: Config) -> int:
        return 0 if config.runtime == "ray" and config.cluster.address else self.machine.cores

    def _workload(self, config: Config) -> Workload:
        rollouts = self.rollouts
        lengths = {r.id: r.tokens for r in rollouts if r.finish}
        so_far = {r.id: r.tokens for r in rollouts if not r.finish}
        # Whose scores are summed up again.
        sources = sum(name not in _KINDS for name in self.costs.scorers)
        by_id = {r.id: r.reward / max(sources, 1) for r in rollouts if r.reward is not None}
        mean = sum(by_id.values()) / len(by_id) if by_id else 0.0
        return Workload(
            batch=config.rollout.batch,
            samples_per_prompt=config.rollout.samples_per_prompt,
            group_at_least=config.algorithm.definition.group,
            steps=config.steps,
            max_new_tokens=config.rollout.max_new_tokens,
            prompt_tokens=Replayed.from_ledger({r.prompt: r.prompt_tokens for r in rollouts}),
            response_tokens=Replayed.from_ledger(lengths, so_far),
            learning=LearningCurve(first=mean, last=mean, versions=0, spread=0),
            chunks=self.chunks if config == self.config else (),
            deltas=self.deltas if config == self.config else (),
            rewards=tuple(by_id.get(i) for i in range(1 + max(by_id, default=-1))),
            on_failure=config.reward.on_failure,
            seed=config.seed,
        )


def _scorers(
    config: Config, costs: Calibration, seats: Mapping[str, Sequence[Seat]]
) -> tuple[ScorerRole, ...]:
    """Describe the run's scorers, by replica; functions have nobody beside them."""
    budget = config.training.microbatch_tokens or CPU_TOKEN_BUDGET
    worthwhile = worthwhile_tokens(budget, streaming=config.schedule.knobs.streams)
    roles = []
    for name, cost in costs.scorers.items():
        common: dict[str, Any] = {"name": name, "kind": _KINDS.get(name, "reward"), "cost": cost}
        common["load_s"] = costs.loads_s.get(name, 0.0)
        if not isinstance(cost, SampleCost):
            common["follows"] = "critic" if name == "critic" else ""
            common["worthwhile_tokens"] = worthwhile
        for seat in seats.get(name, seats[FUNCTION]):
            roles.append(
                ScorerRole(**common, devices=seat.devices, threads=seat.threads, host=seat.host)
            )
    return tuple(roles)


def _chosen(config: Config, metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[int, ...]:
    if any(m.get(name) is None for m in metrics):
        return ()
    rounds = metrics[:: config.schedule.weight_sync_interval]
    return tuple(int(m[name]) for m in rounds)[config.schedule.knobs.lag :]


def _cuts(config: Config) -> dict[str, tuple[int, int]]:
    several = (p for p in config.cluster.processes if p.ranks > 1)
    return {role: (p.fsdp, p.tp) for p in several for role in p.roles}


def _threads(config: Config, threads_here: int, models: Iterable[str]) -> dict[str, list[Seat]]:
    """Seat the roles of a run in one process: all on one worker, or on one each if they overlap."""
    engines, knobs = config.rollout.engines, config.schedule.knobs
    cores = config.threads or max(threads_here, 1)
    if not knobs.overlaps(engines):
        one = [Seat((0,), cores)]
        return {"generator": one, **dict.fromkeys(models, one), "learner": one, FUNCTION: one}
    threads = share_cores(config.schedule, engines, cores)
    if knobs.hosts_scorers(engines):
        scoring = [Seat((i,), threads.scoring, i) for i in range(engines)]
    else:
        scoring = [Seat((engines,), threads.scoring)]
    return {
        "generator": [Seat((i,), threads.generating) for i in range(engines)],
        **dict.fromkeys(models, scoring),
        "learner": [Seat((engines + 1,), threads.training)],
        FUNCTION: [Seat((), 1)],
    }


def _processes(config: Config, machine: Machine, models: Collection[str]) -> dict[str, list[Seat]]:
    """Seat the roles of a run over processes, as its placement says."""
    from stretto.runtime.placement import places  # imports torch

    named = ((p.device.partition(":")[2], p.fsdp) for p in config.cluster.processes)
    gpus = max(len(machine.gpus), *(int(number) + n for number, n in named if number), 0)
    if config.model.device == "cpu":
        gpus = 0
    cores = config.threads or max(machine.threads, 1)
    seats: defaultdict[str, list[Seat]] = defaultdict(list)
    devices: dict[str, int] = {}
    for place in places(config, cores, gpus, models):
        # Processes on one GPU take turns; others have a device of their own, and share cores.
        keys = [place.name] if place.device == "cpu" else place.devices
        used = tuple(devices.setdefault(key, len(devices)) for key in keys)
        threads = (place.threads or cores) * len(place.devices)
        for seat in place.seats:
            role = short_name(seat.scorer) or (LEARNER if seat.role == LEARNER else "generator")
            seats[role].append(Seat(used, threads, seat.host))
    for role in models:
        seats[short_name(role)].sort(key=lambda seat: seat.host or 0)
    seats[FUNCTION] = [Seat((), 1)]
    return dict(seats)
