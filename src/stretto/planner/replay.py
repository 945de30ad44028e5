"""A recorded run, as a cluster that can be simulated, compared and varied."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import numpy as np

from stretto.assembly.controllers import share_cores
from stretto.config import ENVIRONMENT, ClusterConfig, Config, ScheduleConfig, recipes
from stretto.config.cluster_config import LEARNER
from stretto.config.knobs import RoundKnobs
from stretto.errors import ConfigError, StateError, StrettoError
from stretto.machine import SCALING_TOKENS, Machine
from stretto.observe import RunDirectory
from stretto.observe.idle import Intervals, is_generator, seconds, union
from stretto.observe.run_directory import RolloutRecord
from stretto.observe.spans import DRIVER_CPU, Span
from stretto.observe.trace import Trace
from stretto.planner.calibration import Calibration, calibrate, role_of
from stretto.planner.memory_model import SYNC
from stretto.protocols import DRIVER
from stretto.runtime.sim.cluster import (
    Cluster,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
    divided_prompts,
)
from stretto.runtime.sim.costs import SampleCost, SimSpeculation
from stretto.runtime.sim.lengths import LearningCurve, Replayed
from stretto.runtime.sim.simulate import simulate
from stretto.runtime.sim.tuning import fixed
from stretto.runtime.sim.turns import SimEpisodes
from stretto.scoring.response_buffer import worthwhile_tokens
from stretto.types import FORKS, ScoreKind, short_name

CPU_TOKEN_BUDGET = 1024  # tokens of a pass on a CPU, if the settings leave it open
BUSY = 0.25
"""Least share of the time with open calls of an environment in which the driver computes, if the
calls work instead of waiting."""
FUNCTION = ""  # role name of all reward functions in :meth:`Recording.role_devices`
_KINDS: dict[str, ScoreKind] = {"reference": "logprobs", "critic": "values"}


class RoleDevices(NamedTuple):
    """Devices (none for a function) and threads of all ranks of a role, and its host generator."""

    devices: tuple[int, ...]
    threads: int
    host: int | None = None


@dataclass(frozen=True)
class Recording:
    """Records of a run, from which other schedules and placements can be simulated.

    Rollouts include those in flight at its end. Spans should omit the first steps, which warm up.
    Chunks and deltas (over-commitment) are the chosen ones, by round. ``waits`` are in seconds, by
    rollout and number of the answered turn, from 1. 0 is the opening of the episode.
    ``call_work_s`` are the seconds for which an environment's call works, 0 if calls mostly wait.
    """

    config: Config
    rollouts: Sequence[RolloutRecord]
    spans: Sequence[Span]
    machine: Machine
    chunks: tuple[int, ...] = ()
    deltas: tuple[int, ...] = ()
    waits: Mapping[tuple[int, int], float] = field(default_factory=dict)
    call_work_s: float = 0.0

    @classmethod
    def read(cls, folder: str | Path, warm_steps: int = 1, trace: Trace | None = None) -> Self:
        """Read a run, without spans of its first steps. Raises StateError for a damaged file."""
        run = RunDirectory.open(folder)
        trace = trace or run.trace.read()
        warm_s = max((step.end_s for step in trace.steps[:warm_steps]), default=0.0)
        spans = [span for span in trace.spans if span.start_s >= warm_s]
        # Earlier versions did not write the machine's file.
        machine = run.read_machine() if run.machine_file.is_file() else Machine("", 0, 0, (), "")
        config, rollouts = recipes.load(run.path), run.read_rollouts(in_flight=True)
        metrics = [m for m in run.read_metrics() if m["step"]]  # step 0 is an evaluation
        names = "chunk_tokens", "overcommit"
        chunks, deltas = (_chosen(config.schedule, metrics, name) for name in names)
        waits = {
            (s.attributes["rollout"], s.attributes["turn"]): s.end_s - s.start_s
            for s in trace.spans
            if s.role == ENVIRONMENT and s.name in ("open", "step")
        }
        read = {step.step for step in trace.steps[warm_steps:]}
        cpu_s = sum(m.get(DRIVER_CPU) or 0.0 for m in metrics if m["step"] in read)
        work_s = call_work_s(spans, cpu_s, [r for r in rollouts if r.step in read])
        return cls(config, rollouts, spans, machine, chunks, deltas, waits, work_s)

    @cached_property
    def costs(self) -> Calibration:
        """Costs of work at full speed, without the slowdown by other roles on the same cores."""
        roles = self.role_devices()
        functions = roles[FUNCTION][0].threads
        threads = defaultdict(lambda: functions, {role: r[0].threads for role, r in roles.items()})
        return calibrate(self.spans, threads, self._cores, self._thread_scaling)

    def cluster(self, config: Config | None = None) -> Cluster:
        """Describe the roles of the run, with the recorded costs, lengths and rewards. ``config``
        is the run's, with any other schedule, runtime or placement. Raises ConfigError if the
        placement is impossible, StateError if too little was recorded."""
        if not any(r.finish for r in self.rollouts):
            problem = "a run is replayed from its rollouts, and it has none; let it take more steps"
            raise StateError(problem, "no-rollouts")
        if config is None or config == self.config:
            return self._with(self.costs)
        run_value, new_value = _cuts(self.config.cluster), _cuts(config.cluster)
        if new_value != run_value:
            raise ConfigError(
                f"in the run roles had the layouts {run_value or 'of one rank each'}, and its "
                f"records do not say what {new_value or 'one rank each'} would take; record a run "
                "with these",
                "cuts-not-recorded",
            )
        for name in ("speculative_tokens", "speculative_rows", "speculative_model"):
            run_value, new_value = (getattr(c.rollout, name) for c in (self.config, config))
            if run_value != new_value:
                raise ConfigError(
                    f"the run's engine had {name} = {run_value!r}, and its records do not say "
                    f"what steps would cost and accept with {new_value!r}; record a run with that",
                    "speculation-not-recorded",
                )
        return replace(self, config=config, chunks=(), deltas=())._with(self.costs)

    def _with(self, costs: Calibration) -> Cluster:
        config, roles = self.config, self.role_devices()
        (learner,) = roles[LEARNER]
        return Cluster(
            cores=self._cores,
            thread_scaling=self._thread_scaling,
            call_s=costs.call_s,
            driver=costs.driver,
            generators=tuple(
                GeneratorRole(
                    devices=role.devices,
                    threads=role.threads,
                    cost=costs.generator.model_copy(update={"padded": True}),  # engines pad
                    slots=config.rollout.slots,
                    speculation=self._speculation(),
                    best_batch=config.most_in_flight,  # as runs set it
                )
                for role in roles["generator"]
            ),
            scorers=tuple(self._scorers(costs, roles)),
            learner=LearnerRole(
                devices=learner.devices,
                threads=learner.threads,
                trains=("actor", "critic") if config.algorithm.definition.critic else ("actor",),
                cost=costs.learner,
            ),
            # Recorded rewards are sums over these sources, and the simulation will sum them again.
            workload=self._workload(sum(name not in self._kinds for name in costs.scorers)),
            schedule=config.schedule,
        )

    def _speculation(self) -> SimSpeculation:
        names = "eligible", "proposed", "accepted"
        eligible, proposed, accepted = (
            sum(s.attributes.get(name, 0) for s in self.spans if s.name == "gen") for name in names
        )
        if not eligible:
            return SimSpeculation()
        rows = self.config.rollout.speculative_rows
        return SimSpeculation(rows=rows, proposed=proposed / eligible, accepted=accepted / eligible)

    @property
    def _thread_scaling(self) -> float:
        """The machine's scaling for rows of the run's mean length. Linear in its logarithm."""
        rows = [r.prompt_tokens + r.tokens for r in self.rollouts if r.finish]
        if self.config.runtime_kind.has_processes or not rows:
            return 0.0
        at, measured_at = np.log(fmean(rows)), np.log(SCALING_TOKENS)
        return float(np.interp(at, measured_at, self.machine.thread_scaling))

    @property
    def _cores(self) -> int:
        return 0 if self.config.is_elsewhere else self.machine.cores

    def _workload(self, sources: int) -> Workload:
        config, rollouts = self.config, self.rollouts
        lengths = {r.id: r.tokens for r in rollouts if r.finish}
        so_far = {r.id: r.tokens for r in rollouts if not r.finish}
        sources += ENVIRONMENT in config.reward.sources
        by_id = {r.id: r.reward / max(sources, 1) for r in rollouts if r.reward is not None}
        mean = sum(by_id.values()) / len(by_id) if by_id else 0.0
        return Workload(
            batch=config.rollout.batch,
            samples_per_prompt=config.rollout.samples_per_prompt,
            group_at_least=config.algorithm.group,
            most_skipped=config.rollout.most_skipped,
            steps=config.steps,
            max_new_tokens=config.rollout.max_new_tokens,
            prompt_tokens=Replayed.from_ledger({r.prompt: r.prompt_tokens for r in rollouts}),
            response_tokens=Replayed.from_ledger(lengths, so_far),
            episodes=self._episodes(),
            learning=LearningCurve(first=mean, last=mean, versions=0, spread=0),
            chunks=self.chunks,
            deltas=self.deltas,
            rewards=tuple(by_id.get(i) for i in range(1 + max(by_id, default=-1))),
            failures_allowed=config.reward.failures_allowed,
            seed=config.seed,
        )

    def _episodes(self) -> SimEpisodes | None:
        """Return the turns of all episodes, for unfinished ones those of the next finished one.
        Forks are left out, because their turns were decoded next to those of their origin."""
        episodes = [r for r in self.rollouts if r.finish and r.turns and r.id < FORKS]
        if not episodes:
            return None
        turns_by_id = {r.id: tuple(self._turns(r)) for r in episodes}
        ids, turns = sorted(turns_by_id), list[tuple[tuple[int, float, int], ...]]()
        for i in range(ids[-1] + 1):
            turns.append(turns_by_id[ids[bisect_left(ids, i)]])
        max_turn_tokens = self.config.environment.max_turn_tokens
        rewarded = ENVIRONMENT in self.config.reward.sources
        recorded = SimEpisodes(
            max_turn_tokens=max_turn_tokens, rewarded=rewarded, recorded=tuple(turns)
        )
        if self.call_work_s and self._cores:
            return recorded.at_once().model_copy(update={"work_s": self.call_work_s})
        opened = sorted(i for i, number in self.waits if not number)
        openings_s = [self.waits[i, 0] for i in opened]
        openings = (
            openings_s[min(bisect_left(opened, i), len(opened) - 1)]
            for i in range(ids[-1] + 1 if opened else 0)
        )
        return recorded.model_copy(update={"openings_s": tuple(openings)})

    def _turns(self, r: RolloutRecord) -> Iterator[tuple[int, float, int]]:
        for number, turn in enumerate(r.turns, 1):
            wait_s = self.waits.get((r.id, number), turn["wait_s"])
            yield max(turn["tokens"], 1), wait_s, turn["context"]

    def _scorers(
        self, costs: Calibration, roles: Mapping[str, Sequence[RoleDevices]]
    ) -> Iterator[ScorerRole]:
        budget = self.config.training.microbatch_tokens or CPU_TOKEN_BUDGET
        worthwhile = worthwhile_tokens(budget, streaming=self.config.schedule.knobs.streams)
        prompts = self._prompts()
        for name, cost in costs.scorers.items():
            common: dict[str, Any] = {"name": name, "kind": self._kinds.get(name, "reward")}
            common |= {"cost": cost, "load_s": costs.loads_s.get(name, 0.0)}
            if not isinstance(cost, SampleCost):
                common["follows"] = "critic" if name == "critic" else ""
                common["worthwhile_tokens"] = worthwhile
            if name in prompts:
                common["prompts"] = prompts[name]
            for replica in roles.get(name, roles[FUNCTION]):
                yield ScorerRole(**common, **replica._asdict())

    def _prompts(self) -> dict[str, tuple[float, float]]:
        """Return the part of the prompts that each of several teachers reads, by its tokens."""
        read = dict.fromkeys(self.config.algorithm.teacher_models, 0.0)
        for span in self.spans:
            if (name := role_of(span)) in read:
                read[name] += span.attributes.get("tokens", 0)
        return divided_prompts(read)

    @property
    def _kinds(self) -> dict[str, ScoreKind]:
        """Kinds of the scorers that give no rewards."""
        teachers: dict[str, ScoreKind] = {}
        for name in self.config.algorithm.teacher_models:
            teachers[name] = "logprobs"
        return teachers | _KINDS

    def role_devices(self) -> dict[str, list[RoleDevices]]:
        """Return the devices of each role's replicas. All functions are under :data:`FUNCTION`."""
        reads = {role_of(span) for span in self.spans if span.attributes.get("tokens")}
        models = [s for s in (*self.config.reward.sources, *self._kinds) if short_name(s) in reads]
        cores = self.config.threads or max(self.machine.threads, 1)
        if self.config.runtime_kind.has_processes:
            return self._in_processes(cores, models)
        return self._in_threads(cores, [short_name(s) for s in models])

    def _in_threads(self, cores: int, models: Sequence[str]) -> dict[str, list[RoleDevices]]:
        engines, schedule = self.config.rollout.engines, self.config.schedule
        if not schedule.knobs.overlaps(engines):
            one = [RoleDevices((0,), cores)]
            return {"generator": one, **dict.fromkeys(models, one), LEARNER: one, FUNCTION: one}
        is_auto = schedule.preset == "auto"  # shares follow the round: the first overlap nothing
        shared = fixed(schedule, RoundKnobs()) if is_auto else schedule
        threads = share_cores(shared, engines, cores)
        if schedule.knobs.hosts_scorers(engines):
            scoring = [RoleDevices((i,), threads.scoring, i) for i in range(engines)]
        else:
            scoring = [RoleDevices((engines,), threads.scoring)]
        return {
            "generator": [RoleDevices((i,), threads.generating) for i in range(engines)],
            **dict.fromkeys(models, scoring),
            LEARNER: [RoleDevices((engines + 1,), threads.training)],
            FUNCTION: [RoleDevices((), 1)],
        }

    def _in_processes(self, cores: int, models: Sequence[str]) -> dict[str, list[RoleDevices]]:
        from stretto.runtime.placement import places  # imports torch

        config = self.config
        gpu_ranges = ((p.device.partition(":")[2], p.ranks) for p in config.cluster.processes)
        gpus = max(len(self.machine.gpus), *(int(first) + n for first, n in gpu_ranges if first), 0)
        if config.model.device == "cpu":
            gpus = 0
        roles: defaultdict[str, list[RoleDevices]] = defaultdict(list)
        devices: dict[str, int] = {}
        for place in places(config, cores, gpus, models):
            # Processes on one GPU take turns. Others have a device of their own, and share cores.
            keys = [place.name] if place.device == "cpu" else place.devices
            device_ids = tuple(devices.setdefault(key, len(devices)) for key in keys)
            threads = (place.threads or cores) * len(place.devices)
            for seat in place.roles:
                role = short_name(seat.scorer) or (LEARNER if seat.role == LEARNER else "generator")
                roles[role].append(RoleDevices(device_ids, threads, seat.host))
        for role in models:
            roles[short_name(role)].sort(key=lambda replica: replica.host or 0)
        roles[FUNCTION] = [RoleDevices((), 1)]
        return dict(roles)


def _chosen(schedule: ScheduleConfig, metrics: list[dict[str, Any]], name: str) -> tuple[int, ...]:
    key = f"schedule/{name}"
    if any(m.get(key) is None for m in metrics):
        return ()
    rounds = metrics[:: schedule.weight_sync_interval]
    return tuple(int(m[key]) for m in rounds)[schedule.knobs.lag :]


def call_work_s(spans: Sequence[Span], cpu_s: float, rollouts: Iterable[RolloutRecord]) -> float:
    """Return the seconds of work of an environment's call; 0 if calls mostly wait. They work if the
    driver, which sends and reads them, is busy for much of the time in which any is open.

    Args:
        cpu_s: the driver's CPU time.
        rollouts: those whose calls are among the spans.
    """
    calls = sum(len(r.turns) + 1 for r in rollouts if r.turns)
    open_s = seconds(union((s.start_s, s.end_s) for s in spans if s.role == ENVIRONMENT))
    others_s = sum(s.end_s - s.start_s for s in spans if s.role == DRIVER)
    return open_s / calls if calls and cpu_s - others_s > BUSY * open_s else 0.0


def _cuts(cluster: ClusterConfig) -> dict[str, str]:
    multi_rank = (p for p in cluster.processes if p.ranks > 1)
    return {role: str(p.layout_of(role)) for p in multi_rank for role in p.roles}


WARM_STEPS = 3
LEAST_STEPS = 5
MOST_STEPS = 200
"""Initial warm-up steps to skip, fewest further steps for a mean, and most steps that are read and
simulated, which takes seconds."""
STEP = "whole step"
_SCORING, _SCORING_BY = ("prefill", "score"), "scoring: "
_PHASES = {
    "gen": "generation",
    "migrate": "moving responses",
    "accumulate": "training",
    "update": "training",
    "publish": SYNC,
    "send": SYNC,
    "load": SYNC,
    DRIVER: "the driver itself",
}
_ORDER = list(dict.fromkeys(_PHASES.values()))


class PhaseTime(NamedTuple):
    """Mean seconds per step of one kind of work or waiting."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float | None:
        return self.predicted_s / self.measured_s if self.measured_s else None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Phases of a run's steps ``first`` to ``last`` of ``taken``. The last one is the full step."""

    phases: Sequence[PhaseTime] = ()
    first: int = 0
    last: int = 0
    taken: int = 0
    why: str = ""  # reason for no prediction, in one line

    @property
    def title(self) -> str:
        left_out = f" of {self.taken:,}" if self.taken > self.last else ""
        return f"seconds a step, means of steps {self.first} to {self.last}{left_out}"

    def table(self) -> str:
        """Return the phases as a text table, one line each."""
        width = max(len(phase.name) for phase in self.phases)
        lines = [f"  {'':{width}}  measured  predicted  ratio"]
        for p in self.phases:
            ratio = f"{p.ratio:.2f}" if p.ratio is not None else "-"
            lines.append(
                f"  {p.name:{width}}  {p.measured_s:8.4f}  {p.predicted_s:9.4f}  {ratio:>5}"
            )
        return "\n".join(lines)

    def text(self, name: str) -> str:
        """Return the table under the run's name, or the reason for no prediction."""
        if self.why:
            return f"{name}: no prediction: {self.why}"
        title = f"{name}, measured and as the simulator predicts it from its own records"
        return f"{title} ({self.title}):\n{self.table()}"

    def data(self) -> dict[str, Any]:
        if self.why:
            return {"why": self.why}
        return {"title": self.title, "phases": [list(phase) for phase in self.phases]}


def predict(folder: str | Path) -> Prediction:
    """Replay a run's records. Raises ConfigError if there is no run, StateError for damage."""
    run = RunDirectory.open(folder)
    if not run.trace.path.is_file():
        problem = "a prediction is made from a run's trace.json, and there is none"
        raise StateError(problem, "no-trace")
    trace = run.trace.read(MOST_STEPS)
    steps = trace.steps[WARM_STEPS:]
    if len(steps) < LEAST_STEPS:
        raise StateError(
            f"a prediction takes {WARM_STEPS + LEAST_STEPS} steps, of which the first {WARM_STEPS} "
            f"warm up; there are {len(trace.steps)}",
            "too-few-steps",
        )
    result = simulate(Recording.read(folder, WARM_STEPS, trace).cluster(), steps=len(trace.steps))
    ends_s = list(accumulate(step["timing_s/step"] for step in result.steps))
    window = (ends_s[WARM_STEPS - 1], ends_s[-1])
    measured_s = phases_of(trace.spans, steps[0].start_s, steps[-1].end_s, len(steps))
    simulated_s = phases_of(result.spans, *window, len(ends_s) - WARM_STEPS)
    names = dict.fromkeys((*measured_s, *simulated_s))
    phases = [PhaseTime(n, measured_s.get(n, 0.0), simulated_s.get(n, 0.0)) for n in names]
    phases.sort(key=lambda phase: phase.name == STEP)
    metrics = run.read_metrics()
    total_steps = int(metrics[-1]["step"]) if metrics else steps[-1].step
    return Prediction(phases, steps[0].step, steps[-1].step, total_steps)


def predicted(folders: Sequence[str | Path]) -> list[Prediction]:
    """Predict each run from its own records, with a reason for each that recorded too little."""
    predictions = []
    for folder in folders:
        try:
            predictions.append(predict(folder))
        except StrettoError as error:
            predictions.append(Prediction(why=" ".join(str(error).split())))
    return predictions


def phases_of(spans: Iterable[Span], start_s: float, end_s: float, steps: int) -> dict[str, float]:
    """Return the seconds per step of each phase between two moments (docs/simulator.md)."""
    work: defaultdict[tuple[str, str], Intervals] = defaultdict(list)  # by phase and role
    busy: defaultdict[str, Intervals] = defaultdict(list)
    for span in spans:
        part = (max(span.start_s, start_s), min(span.end_s, end_s))
        kind = span.name.partition("/")[0]
        phase = f"{_SCORING_BY}{role_of(span)}" if kind in _SCORING else _PHASES.get(kind, "")
        if span.waits or not phase or part[0] > part[1]:
            continue
        # All participants of a weight sync work on it together, so it counts once.
        work[phase, "" if phase == SYNC else span.role].append(part)
        busy[span.role] += [part] if phase != SYNC else []
    phase_s: defaultdict[str, float] = defaultdict(float)
    for (phase, _), parts in sorted(work.items(), key=lambda item: _order(item[0][0])):
        phase_s[phase] += seconds(union(parts))
    total_s = end_s - start_s
    idle = {role: total_s - seconds(union(parts)) for role, parts in busy.items()}
    phase_s["generators waiting"] = sum(s for role, s in idle.items() if is_generator(role))
    phase_s["learner waiting"] = idle.get("learner", total_s)
    phase_s["no role at work"] = total_s - seconds(union(chain.from_iterable(work.values())))
    phase_s[STEP] = total_s
    return {phase: s / steps for phase, s in phase_s.items()}


def _order(phase: str) -> tuple[int, str]:
    return (2 * _ORDER.index(phase), "") if phase in _ORDER else (1, phase)
