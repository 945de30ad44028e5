"""Run a schedule on a described cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stretto.assembly.controls import controls
from stretto.config.schedule import Settings
from stretto.observe.idle import TimeSheet
from stretto.observe.spans import Span, Spans, Window
from stretto.protocols import DRIVER, RECORDS, Generator, Learner, Tracer
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, known
from stretto.runtime.sim.costs import DriverCost
from stretto.runtime.sim.devices import Cores, Device, SimWorker
from stretto.runtime.sim.faults import Faults, faulty
from stretto.runtime.sim.generator import SimGenerator
from stretto.runtime.sim.lengths import Lengths
from stretto.runtime.sim.loop import VirtualClock, run, spend
from stretto.runtime.sim.roles import SimLearner, SimScorer
from stretto.saying import Advance, unseen
from stretto.schedules.chunking import ReplayedChunk
from stretto.schedules.overcommit import ReplayedOvercommit
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


@dataclass(frozen=True, slots=True)
class SimResult:
    """The outcome of a simulated run.

    Attributes:
        steps: metrics of each step, the learner's and the schedule's.
        spans: all work and all recorded waiting, in virtual seconds.
        makespan_s: from the start to the last step's end.
        samples_per_s: responses of all steps over the makespan.
        utilisation: share of the makespan in which a role worked, by role.
        idle_s: seconds in which it did not, by (role, cause).
        device_utilisation: share of the makespan in which a device worked, by number.
        ledger: dispatched, trained, rejected by reason, and what is in flight.
    """

    steps: Sequence[Stats]
    spans: Sequence[Span]
    makespan_s: float
    samples_per_s: float
    utilisation: Mapping[str, float]
    idle_s: Mapping[tuple[str, str], float]
    device_utilisation: Sequence[float]
    ledger: Mapping[str, Any]


class _DriverSpans(Spans):
    """A recorder in virtual time, where the driver's own work takes what it costs.

    The schedule is the real one, and marks its work at the very places where it does it.
    """

    def __init__(self, costs: Mapping[str, DriverCost]) -> None:
        super().__init__(VirtualClock())
        self._costs = costs

    @contextmanager
    def span(self, role: str, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        with super().span(role, name, **attributes) as found:
            yield found
            if role == DRIVER and name in self._costs:
                spend(self._costs[name].seconds(attributes["items"]))


def simulate(
    cluster: Cluster,
    *,
    steps: int = 0,
    seed: int = 0,
    shuffle: bool = False,
    advance: Advance = unseen,
) -> SimResult:
    """Run the description's schedule.

    Args:
        cluster: who works where, on what, and when.
        steps: to look at, of those that the description has; 0 for all.
        seed: of the order of simultaneous events; used with ``shuffle`` alone.
        shuffle: explore orders of simultaneous events.
        advance: told of each step.

    Raises:
        ConfigError: costs follow from models; see :func:`stretto.planner.formulas.priced`.
        StalledError: a role did not answer in time, or nothing could ever happen again.
    """
    found = _simulate(cluster, steps or cluster.workload.steps, advance)
    return run(found, seed=seed, shuffle=shuffle)


async def _simulate(cluster: Cluster, count: int, advance: Advance) -> SimResult:
    clock = VirtualClock()
    spans = _DriverSpans(cluster.driver)
    roles = make_roles(cluster, spans)
    schedule = make_schedule(cluster, roles, spans)
    steps = []
    async with schedule:
        for _ in range(min(count, cluster.workload.steps)):
            step = await schedule.step()
            with spans.span(DRIVER, RECORDS, items=len(step.batch)):
                steps.append(step.stats)
            advance(1)
        makespan_s = clock.now()
    metrics = TimeSheet().add(Window(0.0, makespan_s, spans.records))
    idle = (
        key.removeprefix("idle_s/").rpartition("/")[::2]  # names of roles may have slashes
        for key in metrics
        if key.startswith("idle_s/")
    )
    samples = cluster.workload.batch * len(steps)
    return SimResult(
        steps=steps,
        spans=spans.records,
        makespan_s=makespan_s,
        samples_per_s=samples / makespan_s if makespan_s else 0.0,
        utilisation={
            key.removeprefix("utilisation/"): share
            for key, share in metrics.items()
            if key.startswith("utilisation/")
        },
        idle_s={(role, cause): metrics[f"idle_s/{role}/{cause}"] for role, cause in idle},
        device_utilisation=[d.busy_s / makespan_s if makespan_s else 0.0 for d in roles.devices],
        ledger=schedule.ledger.state_dict(),
    )


def make_schedule(cluster: Cluster, roles: SimRoles, tracer: Tracer) -> Schedule:
    """Make the schedule that the description asks for; call it in a running loop."""
    w, engines = cluster.workload, len(cluster.generators)
    migrates = cluster.schedule.knobs.migrates(engines)
    turned = controls(
        cluster.schedule,
        Settings(
            w.batch,
            w.samples_per_prompt,
            w.max_new_tokens,
            w.steps,
            drop_failures=w.on_failure == "drop",
            group_at_least=w.group_at_least,
            restarts=cluster.restarts,
        ),
        engines,
        w.seed,
        cluster.migrating if migrates else None,
    )
    if w.chunks and not cluster.schedule.chunk_tokens:
        turned = replace(turned, chunk=ReplayedChunk(w.chunks))
    if w.deltas and cluster.schedule.knobs.overcommit == "auto":
        turned = replace(turned, overcommit=ReplayedOvercommit(w.deltas))
    return Schedule(
        _prompts(cluster),
        roles.generators,
        roles.replicas,
        roles.learner,
        turned,
        VirtualClock(),
        tracer,
    )


def make_roles(cluster: Cluster, tracer: Tracer) -> SimRoles:
    """Make the description's roles, with its faults, on its devices; call it in a running loop.

    Raises:
        ConfigError: costs follow from models; see :func:`stretto.planner.formulas.priced`.
    """
    devices = [Device(i) for i in range(cluster.device_count)]
    w = cluster.workload
    lengths = Lengths(w.response_tokens, w.seed)

    cores = Cores(cluster.cores) if cluster.cores else None

    def worker(name: str, role: GeneratorRole | ScorerRole | LearnerRole) -> SimWorker:
        used = [devices[i] for i in role.devices]
        return SimWorker(
            name, used, tracer, cores=cores, threads=role.threads, call_s=cluster.call_s
        )

    def put(role: R, name: str) -> R:
        return faulty(role, cluster.faults, name) if cluster.faults != Faults() else role

    several = len(cluster.generators) > 1
    generators: list[Generator] = []
    for i, g in enumerate(cluster.generators):
        name = f"generator {i}" if several else "generator"
        generators.append(
            put(
                SimGenerator(
                    worker(name, g),
                    known(g.cost),
                    lengths,
                    max_new_tokens=w.max_new_tokens,
                    slots=g.slots or None,
                    replicas=g.replicas,
                    carry=cluster.schedule.carry,
                ),
                name,
            )
        )
    replicas = []
    for i, s in enumerate(cluster.scorers):
        cost = s.cost or known(None)
        scorer = SimScorer(
            worker(s.name, s),
            cost,
            s.kind,
            reward=w.reward,
            follows=s.follows,
            streams=s.streams,
            padded=s.padded,
            worthwhile_tokens=s.worthwhile_tokens,
            load_s=s.load_s,
        )
        replicas.append(ScorerReplica(put(scorer, f"{s.name} {i}"), s.host))
    learner = SimLearner(
        worker("learner", cluster.learner),
        known(cluster.learner.cost),
        cluster.learner.trains,
        padded=cluster.learner.padded,
    )
    return SimRoles(devices, generators, replicas, put(learner, "learner"))


def _prompts(cluster: Cluster) -> Callable[[], Prompt]:
    """Return a source of prompts in order; they have lengths, and placeholders for tokens."""
    lengths = Lengths(cluster.workload.prompt_tokens, cluster.workload.seed + 1)
    drawn = 0

    def draw() -> Prompt:
        nonlocal drawn
        prompt = Prompt(drawn, (0,) * lengths(drawn), "")
        drawn += 1
        return prompt

    return draw
