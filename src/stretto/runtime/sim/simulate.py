"""Run a schedule on a described cluster, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from stretto.assembly.controllers import ScheduledRun, controls
from stretto.config import ENVIRONMENT
from stretto.config.knobs import Settings
from stretto.observe.idle import TimeSheet
from stretto.observe.spans import Span, Spans, Window
from stretto.protocols import DRIVER, RECORDS, Generator, Learner, Tracer
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole
from stretto.runtime.sim.costs import DriverCost
from stretto.runtime.sim.faults import Faults, faulty
from stretto.runtime.sim.generator import SimGenerator
from stretto.runtime.sim.lengths import Lengths
from stretto.runtime.sim.loop import VirtualClock, run, spend
from stretto.runtime.sim.resources import Cores, Device, SimWorker
from stretto.runtime.sim.sim_roles import SimLearner, SimScorer
from stretto.runtime.sim.turns import SimEnvironment
from stretto.saying import Advance, unseen
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.types import Prompt, Stats

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SimRoles:
    """The roles of a simulated run, and their devices."""

    devices: Sequence[Device]
    generators: Sequence[Generator]
    replicas: Sequence[ScorerReplica]
    learner: Learner
    environment: Callable[[], Awaitable[object]] | None = None  # the work of one of its calls


@dataclass(frozen=True, slots=True)
class SimResult:
    """The outcome of a simulated run.

    Attributes:
        steps: metrics of each step, the learner's and the schedule's.
        spans: all work and all recorded waiting, in virtual seconds.
        makespan_s: from the start to the last step's end.
        samples_per_s: responses of all steps over the makespan.
        utilisation: share of the makespan in which a role worked.
        idle_s: seconds in which it did not, by (role, cause).
        device_utilisation: share of the makespan in which a device worked, by number.
        ledger: dispatched, trained and in flight, and rejected by reason.
        decisions: of the preset ``auto``: the step at whose end each was made, and a line about it.
    """

    steps: Sequence[Stats]
    spans: Sequence[Span]
    makespan_s: float
    samples_per_s: float
    utilisation: Mapping[str, float]
    idle_s: Mapping[tuple[str, str], float]
    device_utilisation: Sequence[float]
    ledger: Mapping[str, Any]
    decisions: Sequence[tuple[int, str]] = ()


class _DriverSpans(Spans):
    """A recorder in virtual time, in which the driver's own work takes its modelled time."""

    def __init__(self, costs: Mapping[str, DriverCost], cores: Cores | None) -> None:
        super().__init__(VirtualClock())
        self._costs = costs
        self._compute = cores.compute if cores else spend

    @contextmanager
    def span(self, role: str, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        with super().span(role, name, **attributes) as record:
            yield record
            if role == DRIVER and name in self._costs:
                self._compute(self._costs[name].seconds(attributes["items"]))


def simulate(
    cluster: Cluster,
    *,
    steps: int = 0,
    seed: int = 0,
    shuffle: bool = False,
    advance: Advance = unseen,
) -> SimResult:
    """Simulate ``steps`` steps of the description's schedule, or all of them (0).

    Raises ConfigError if costs follow from models (see :func:`stretto.planner.formulas.priced`),
    StalledError if a role did not answer in time, or if no further event is possible.

    Args:
        seed: of the order of simultaneous events, with ``shuffle`` only.
        shuffle: permute simultaneous events.
    """
    simulation = _simulate(cluster, steps or cluster.workload.steps, advance)
    return run(simulation, seed=seed, shuffle=shuffle)


async def _simulate(cluster: Cluster, limit: int, advance: Advance) -> SimResult:
    clock = VirtualClock()
    cores = _cores_of(cluster)
    spans = _DriverSpans(cluster.driver, cores)
    roles = make_roles(cluster, spans, cores)
    schedule = make_schedule(cluster, roles, spans)
    steps = []
    decisions: list[tuple[int, str]] = []
    async with schedule:
        for number in range(1, 1 + min(limit, cluster.workload.steps)):
            step = await schedule.step()
            with spans.span(DRIVER, RECORDS, items=len(step.batch)):
                steps.append(step.stats)
                decisions += [(number, line) for line in step.decisions]
            advance(1)
        makespan_s = clock.now()
    metrics = TimeSheet().add(Window(0.0, makespan_s, spans.records))
    shares: dict[str, dict[str, float]] = {"utilisation": {}, "idle_s": {}}
    for key, value in metrics.items():
        kind, _, role = key.partition("/")
        if kind in shares:
            shares[kind][role] = value
    samples = cluster.workload.batch * len(steps)
    return SimResult(
        steps=steps,
        spans=spans.records,
        makespan_s=makespan_s,
        samples_per_s=samples / makespan_s if makespan_s else 0.0,
        utilisation=shares["utilisation"],
        # Names of roles may contain slashes, causes do not.
        idle_s={key.rpartition("/")[::2]: s for key, s in shares["idle_s"].items()},
        device_utilisation=[d.busy_s / makespan_s if makespan_s else 0.0 for d in roles.devices],
        ledger=schedule.ledger.state_dict(),
        decisions=decisions,
    )


def make_schedule(cluster: Cluster, roles: SimRoles, tracer: Tracer) -> Schedule:
    """Make the schedule of the description. Must be called in a running loop."""
    w = cluster.workload
    engines = len(cluster.generators)
    schedule = cluster.schedule
    settings = Settings(
        w.batch,
        w.samples_per_prompt,
        w.max_new_tokens,
        w.steps,
        failures_allowed=w.failures_allowed,
        group_at_least=w.group_at_least,
        most_skipped=w.most_skipped,
        restarts=cluster.restarts,
        episodes=w.sampling,
        environment_rewards=(ENVIRONMENT,) if w.episodes and w.episodes.rewarded else (),
    )
    migrating = cluster.migrating if schedule.knobs.migrates(engines) else None
    turned = controls(ScheduledRun(schedule, settings, engines, w.seed, migrating, cluster.holding))
    if w.chunks and not schedule.chunk_tokens:
        turned = replace(turned, chunk=FixedChunk(*w.chunks))
    if w.deltas and schedule.knobs.overcommit == "auto":
        turned = replace(turned, overcommit=FixedOvercommit(*w.deltas))
    if schedule.preset == "auto":
        from stretto.runtime.sim.tuning import AutoTuner, DescribedCosts  # which simulates itself

        tuner = AutoTuner(schedule, turned.settings, DescribedCosts(cluster))
        turned = replace(turned, tuner=tuner)
    replicas, learner = roles.replicas, roles.learner
    lengths = Lengths(w.prompt_tokens, w.seed + 1)
    prompts = (Prompt(i, (0,) * lengths(i), "") for i in count()).__next__
    environment = None
    if w.episodes and w.turns:
        rewarded = {"reward": w.reward} if w.episodes.rewarded else {}
        environment = SimEnvironment(
            w.turns,
            w.max_new_tokens,
            opening_s=w.turns.opening_s,
            work=roles.environment,
            **rewarded,
        )
    return Schedule(
        prompts,
        roles.generators,
        replicas,
        learner,
        turned,
        VirtualClock(),
        tracer,
        environment=environment,
    )


def make_roles(cluster: Cluster, tracer: Tracer, cores: Cores | None = None) -> SimRoles:
    """Make the description's roles, with its faults, on its devices, in a running loop. The driver
    computes on ``cores``, too, if they are given."""
    cores = cores or _cores_of(cluster)
    devices = [Device(i) for i in range(cluster.device_count)]
    w = cluster.workload
    lengths, turns = Lengths(w.response_tokens, w.seed), w.turns or (lambda rollout_id: ())

    def worker(name: str, role: GeneratorRole | ScorerRole | LearnerRole) -> SimWorker:
        role_devices, call_s = [devices[i] for i in role.devices], cluster.call_s
        return SimWorker(
            name, role_devices, tracer, cores=cores, threads=role.threads, call_s=call_s
        )

    def put(role: R, name: str) -> R:
        return faulty(role, cluster.faults, name) if cluster.faults != Faults() else role

    generators: list[Generator] = []
    for i, g in enumerate(cluster.generators):
        name = f"generator {i}" if len(cluster.generators) > 1 else "generator"
        limit, carry = w.max_new_tokens, cluster.schedule.carry
        generator = SimGenerator(
            worker(name, g), g, lengths, max_new_tokens=limit, carry=carry, turns=turns
        )
        generators.append(put(generator, name))
    replicas = [
        ScorerReplica(put(SimScorer(worker(s.name, s), s, w.reward), f"{s.name} {i}"), s.host)
        for i, s in enumerate(cluster.scorers)
    ]
    learner = SimLearner(worker("learner", cluster.learner), cluster.learner)
    environment = None
    if w.episodes and w.episodes.work_s and cores:
        environment = partial(_answered, asyncio.Lock(), cores, w.episodes.work_s)
    return SimRoles(devices, generators, replicas, put(learner, "learner"), environment)


def _cores_of(cluster: Cluster) -> Cores | None:
    return Cores(cluster.cores, cluster.thread_scaling) if cluster.cores else None


async def _answered(turn: asyncio.Lock, cores: Cores, seconds: float) -> None:
    """Let the driver, and threads of its process, work on an environment's call."""
    if cores.in_processes:
        cores.compute(seconds)
        return
    async with turn:
        await cores.work(seconds, 1, in_python=True)
