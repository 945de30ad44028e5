"""A run: a schedule over roles on threads or processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from stretto import files
from stretto.assembly.controllers import bounds_what_waits, controls_of, migrating_of
from stretto.assembly.environments import open_environment
from stretto.assembly.parts import look_at_prompts, open_prompts
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import NO_OVERRIDES, Overrides, prepare_torch
from stretto.config import Config
from stretto.config.cluster_config import LEARNER, generator_names
from stretto.errors import RankError, StrettoError, first_line
from stretto.evaluation import HeldOut, open_held_out
from stretto.files import FileSum
from stretto.models.backend import hardware, pick_device
from stretto.models.weights import copy_into
from stretto.observe.spans import Spans, WorkSpans
from stretto.protocols import Generator, RealClock
from stretto.runtime.clients import (
    CodeAnswer,
    EnvironmentClient,
    GeneratorClient,
    KVRouter,
    LearnerClient,
    ScorerClient,
)
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.placement import RolePlacement
from stretto.runtime.process_messages import MoveRates
from stretto.runtime.processes import MemoryWatch, ProcessWorkers
from stretto.runtime.role_services import GeneratorService, ScorerService
from stretto.runtime.sim.tuning import AutoTuner, CostModel
from stretto.runtime.state import DRIVER, Staged, copied, write
from stretto.runtime.state import LEARNER as LEARNER_FOLDER
from stretto.runtime.thread_workers import ThreadWorkers
from stretto.runtime.weight_sync import Tolerance, WeightSync
from stretto.saying import Say, working
from stretto.schedules.controls import Controls
from stretto.schedules.hold import HoldLimits
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.streaming import CodeScorer
from stretto.tasks.prompts import PromptSource
from stretto.types import Reply, WeightsRef, short_name
from stretto.weights.transfer import Meeting, open_store
from stretto.workers.gate import EventGate
from stretto.workers.rank import stacks
from stretto.workers.threads import (
    CallerThread,
    Executor,
    Method,
    T,
    ThreadExecutor,
    Ts,
    WorkerThread,
)

PATIENCE_S = 60.0  # how long shutdown waits for an update of the weights in progress
SAVE_S = 3600.0  # time limit for writing the model
COPY_GAIN = 100.0  # assumed speed of copying a KV cache in memory, relative to prefill

Workers = ThreadWorkers | ProcessWorkers
CostsOf = Callable[[Config, Spans, EventGate, tuple[float, float]], CostModel]
"""Makes a run's cost model. The last argument is its ``thread_scaling``."""


class DriverState(NamedTuple):
    """The state of the schedule's process between two steps."""

    content: Mapping[str, Any]  # of driver.pt
    kept: Sequence[WeightsRef]  # see Run._kept


class Halted(NamedTuple):
    """The outcome of :meth:`Run.halt`."""

    whole: bool  # the actor's weights are not in the middle of an update
    staged: Staged | None = None  # the requested state
    lost: str = ""  # why the state could not be staged


@dataclass(frozen=True)
class Run:
    """An assembled run. :mod:`stretto.runs` takes its steps."""

    overrides: Overrides
    gate: EventGate
    prompts: PromptSource
    workers: Workers
    functions: Sequence[CodeScorer]
    sync: WeightSync
    memory: MemoryWatch | None
    lags: bool  # followers may work with older weights than the learner's
    schedule: Schedule
    spans: Spans  # trace of all work
    held_out: HeldOut | None  # evaluation prompts, if evaluation is on

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.prompts.tokenizer

    @property
    def learner(self) -> Executor:
        return self.workers.executors[LEARNER]

    async def stage(self, *, copy: bool = True) -> Staged:
        """Stage the state between two steps, under ``weights_lock``. Copied by default."""
        state = self.driver_state()
        staging = partial(self._on_learner, LearnerService.stage, copy, state.kept)
        live, size = await self.gate.outcome(LEARNER, "stage", staging)
        self.gate.recorder.flush()
        return self._staged(state, size, live=live)

    def driver_state(self) -> DriverState:
        prompts, schedule = copied(self.prompts.state_dict()), copied(self.schedule.state_dict())
        return DriverState({"prompts": prompts, "schedule": schedule}, self._kept)

    def _staged(self, state: DriverState, size: int, *, live: bool) -> Staged:
        def write_driver(file: Path) -> Mapping[str, FileSum]:
            return {"": write(file, state.content)}

        def write_learner(folder: Path) -> Mapping[str, FileSum]:
            files.leave_room(folder, size)
            folder.mkdir()
            return dict(self._aside(LearnerService.write, folder.absolute()))

        return Staged({DRIVER: write_driver, LEARNER_FOLDER: write_learner}, live)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``driver.pt`` and the learner's files, which may come from another runtime."""
        driver = state[DRIVER]
        self.prompts.load_state_dict(driver["prompts"])
        channel = self.workers.channel
        self.schedule.load_state_dict(driver["schedule"], self.prompts.prompt_by_id, channel)
        folder = state[LEARNER_FOLDER].absolute()
        newest = (await self.learner.call(LearnerService.load, folder, self._kept)).value
        self.sync.load_all(self.schedule.fleet.held if self._kept else newest)

    @property
    def _kept(self) -> Sequence[WeightsRef]:
        """Tickets of weights in use or pending, which may be older than the learner's."""
        current, pending = self.schedule.fleet.held, self.schedule.pending
        return [*current.values(), *pending.values()] if self.lags else []

    async def _on_learner(self, method: Method[*Ts, Reply[T]], *args: *Ts) -> T:
        return (await self.learner.call(method, *args)).value

    def _aside(self, method: Method[*Ts, T], *args: *Ts) -> list[T]:
        return self.learner.aside_on_all(method, *args, timeout_s=SAVE_S)

    def metrics(self) -> Mapping[str, float]:
        left_out = self.prompts.task.left_out + len(self.prompts.refused)
        rows = {"rows_left_out": float(left_out)} if left_out else {}
        return {**rows, **self.sync.metrics, **(self.memory.metrics() if self.memory else {})}

    def stacks(self) -> str:
        return "\n\n".join(g.stacks() for g in self.workers.groups) or stacks()

    def save(self, folder: Path) -> None:
        """Write the trained model atomically."""
        # On the side, because the learner may be in the middle of an aborted step.
        self._aside(LearnerService.save, folder.absolute())
        caller_models = {"actor": self.overrides.actor, "critic": self.overrides.critic}
        models = {name: model for name, model in caller_models.items() if model is not None}
        if models and self.workers.groups:  # as if trained in place
            trained = self._aside(LearnerService.trained)[0].value
            for name, model in models.items():
                copy_into(model, trained[name])

    async def stage_model(self, use: str, *, held: bool = True) -> None:
        ref = self.schedule.fleet.held["actor"] if self.lags and held else None
        staging = partial(self._on_learner, LearnerService.stage_model, use, ref)
        await self.gate.outcome(LEARNER, "stage_model", staging)

    def save_staged(self, use: str, folder: Path) -> None:
        """Write the staged copy atomically, during training."""
        self._aside(LearnerService.save_staged, use, folder.absolute())

    def halt(self, state: DriverState | None = None) -> Halted:
        """End all work after an error or a signal. With the driver's state, the learner's is staged
        too. The learner must not have trained since the driver's state was taken.
        """
        self.workers.close_followers()
        for function in self.functions:  # a thread that waits for a function cannot be interrupted
            function.close()
        self.sync.close()
        aside = self.learner.aside_on_all
        try:
            intact = all(aside(LearnerService.end_updates, timeout_s=PATIENCE_S))
            if not (intact and state):
                return Halted(intact)
            try:
                sizes = aside(LearnerService.stage_live, state.kept, timeout_s=PATIENCE_S)
            except StrettoError as error:  # for example because a rank is gone
                return Halted(intact, lost=first_line(error))
            return Halted(intact, self._staged(state, sum(sizes), live=True))
        except RankError:
            return Halted(whole=False)
        finally:
            self.workers.close()


def start(
    config: Config,
    stack: ExitStack,
    say: Say,
    overrides: Overrides = NO_OVERRIDES,
    folder: Path | None = None,
    gate: EventGate | None = None,
    costs_of: CostsOf | None = None,
) -> Run:
    """Assemble a run on the configured runtime. Its processes log to ``folder``. The outcomes of
    its roles' calls pass ``gate``. ``costs_of`` is needed to train with the preset ``auto``.
    """
    prepare_torch(config.seed, config.threads)
    gate = gate or EventGate()
    prompts = open_prompts(config, overrides, say)
    with working(say, "starting the reward functions"):
        functions = RoleFactory(config, say).open_functions(prompts, stack, overrides)
    judges = [f for f in functions if isinstance(f, FunctionScorer) and f.looks_inside]
    environment = open_environment(config, prompts, stack, say, overrides, judges)
    first = look_at_prompts(prompts, config, say)
    held_out = None
    if config.observe.eval_every:
        with working(say, "reading the prompts of evaluations"):
            held_out = open_held_out(config, overrides, prompts, stack)
    workers: Workers
    if config.runtime_kind.has_processes:
        workers = ProcessWorkers(config, overrides, stack, say, first, folder)
    else:
        workers = ThreadWorkers(config, overrides, stack, say, prompts, gate)
    spans = Spans(RealClock(), workers.devices, workers.processes)
    sync = _open_sync(config, workers, spans, stack, say)
    clients = _Clients(config, workers, sync, spans, gate)
    generators = [clients.generator(name) for name in generator_names(config.rollout.engines)]
    replicas = [clients.function(f, say) for f in functions if f not in judges]
    if held_out and (verifier := held_out.verifier):
        replicas.append(clients.function(verifier, say, held_out=True))
        functions = [*functions, verifier]
    replicas += [clients.model(p, overrides, say) for p in workers.scorers]
    if workers.groups:
        with working(say, "syncing the first weights"):
            sync.load_all(workers.ready.refs)  # to the roles of all clients so far
    schedule = Schedule(
        prompts.next,
        generators,
        replicas,
        LearnerClient(LEARNER, LEARNER, workers.executors[LEARNER], spans, gate),
        clients.controls(judges, costs_of),
        gate,
        WorkSpans(spans) if gate.script else spans,
        workers.ready.refs,
        sync.begin,
        environment and EnvironmentClient(environment, gate),
    )
    gate.fact("threads", lambda: {role: e.threads for role, e in workers.executors.items()})
    gate.fact("device", lambda: hardware(pick_device(config.model.device)))  # bits depend on both
    lags = config.schedule.knobs.copies_weights
    memory = _watch_memory(config, workers, stack)
    return Run(
        overrides, gate, prompts, workers, functions, sync, memory, lags, schedule, spans, held_out
    )


def _open_sync(
    config: Config, workers: Workers, spans: Spans, stack: ExitStack, say: Say
) -> WeightSync:
    meeting = None
    if host := workers.meeting:
        # Two tries and the detection of hanging followers must fit into the schedule's deadline.
        patience_s = min(config.cluster.weight_sync_timeout_s, config.schedule.deadline_s / 4)
        store, port = open_store(host)
        stack.callback(lambda: store)  # the store ends with its last reference
        meeting = Meeting(host, port, patience_s, config.schedule.deadline_s / 4)
    tolerance = Tolerance(config.cluster.probe_tolerance, workers.ready.dtype)
    sync = WeightSync(workers.executors[LEARNER], meeting, tolerance, spans, say)
    stack.callback(sync.close)
    return sync


def _watch_memory(config: Config, workers: Workers, stack: ExitStack) -> MemoryWatch | None:
    device = "" if workers.groups else str(pick_device(config.model.device))
    if device == "cpu":
        return None
    memory = MemoryWatch(workers.groups, RealClock(), device)
    stack.callback(memory.close)
    return memory


@dataclass(frozen=True)
class _Clients:
    """Makes the schedule's clients of a run's workers, and its controllers."""

    config: Config
    workers: Workers
    sync: WeightSync
    spans: Spans
    gate: EventGate

    @cached_property
    def kv_router(self) -> KVRouter | None:
        return KVRouter(self.sync.meeting) if self.sync.meeting else None

    def generator(self, name: str) -> Generator:
        executor = self.workers.executors[name]
        load = self.sync.follow(name, executor, "actor")
        return GeneratorClient(
            name, name, executor, self.spans, self.gate, sync=load, kv_router=self.kv_router
        )

    def function(self, function: CodeScorer, say: Say, *, held_out: bool = False) -> ScorerReplica:
        worker = self.workers.thread_of(function.info.name)
        thread: WorkerThread | CallerThread = worker
        if function.in_process:
            if self.config.schedule.knobs.overlaps(self.config.rollout.engines):
                say(
                    f"reward function '{function.info.name}' runs on a thread, because stages "
                    "overlap; one that uses signal.alarm, as math-verify does, needs 'file.py:name'"
                )
            else:
                thread = CallerThread(worker)
        executor, info = ThreadExecutor(ScorerService(function), thread), function.info
        client = ScorerClient(
            info.name,
            short_name(info.name),
            executor,
            self.spans,
            self.gate,
            CodeAnswer(info),
            info=info,
        )
        return ScorerReplica(client, held_out=held_out)

    def model(self, placed: RolePlacement, overrides: Overrides, say: Say) -> ScorerReplica:
        executor, has_process = self.workers.executors[placed.role], bool(self.workers.groups)
        info, notes = executor.ask(ScorerService.ready)
        for line in notes:
            say(line)
        load = self.sync.follow(placed.role, executor, info.follows) if info.follows else None
        if has_process and placed.scorer == "reference" and overrides.reference is None:
            executor.ask(ScorerService.require, self.workers.ready)
        # Replicas on threads share a model and its name in traces.
        name = short_name(placed.role if has_process else info.name)
        client = ScorerClient(
            placed.role, name, executor, self.spans, self.gate, sync=load, info=info
        )
        return ScorerReplica(client, placed.host, name if has_process else "")

    def controls(self, judges: Sequence[FunctionScorer], costs_of: CostsOf | None) -> Controls:
        config, gate = self.config, self.gate
        workers = self.workers
        migrating = holding = None
        if config.schedule.knobs.migrates(config.rollout.engines):
            prefill_rate, copy_rate = gate.fact("speeds", self._speeds)
            migrating = migrating_of(config, prefill_rate, copy_rate)
        if bounds_what_waits(config):
            generator = workers.executors[generator_names(config.rollout.engines)[0]]
            rates = MoveRates(
                *gate.fact("rates", lambda: astuple(generator.ask(GeneratorService.rates)))
            )
            copied = rates.host_bytes_per_s / rates.kv_bytes if rates.kv_bytes else 0.0
            room = config.rollout.slots * config.longest
            holding = HoldLimits(room, rates.prefill_tokens_per_s, copied, apart=True)
        restarts = gate.fact("restarts", lambda: config.cluster.restarts if workers.groups else 0)
        names = [judge.name for judge in judges]
        controls = controls_of(config, migrating, holding, restarts=restarts, judges=names)
        if config.schedule.preset != "auto" or costs_of is None:
            return controls
        costs = costs_of(config, self.spans, gate, workers.thread_scaling)
        workers.tuner = AutoTuner(config.schedule, controls.settings, costs)
        return replace(controls, tuner=workers.tuner)

    def _speeds(self) -> tuple[float, float | None]:
        one, other, *_ = generator_names(self.config.rollout.engines)
        rates = self.workers.executors[one].ask(GeneratorService.rates)
        moving: float | None = COPY_GAIN * rates.prefill_tokens_per_s
        if router := self.kv_router:
            moving = router.bytes_per_s(one, other) / rates.kv_bytes if rates.kv_bytes else None
        return rates.prefill_tokens_per_s, moving
