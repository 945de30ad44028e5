"""A run: roles on the workers of a placement, behind one schedule.

A role works on a thread of this process (``inline``), or in processes of its own on this machine
(``local``) or a cluster (``ray``). What carries its calls, and how weights get to it, follow from
that; all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stretto import files
from stretto.assembly.controls import Migrating, controls_of, migrating_of
from stretto.assembly.models import NO_OVERRIDES, Overrides, prepare_torch
from stretto.assembly.parts import look_at_prompts, open_prompts
from stretto.assembly.roles import open_functions
from stretto.config import Config
from stretto.config.cluster import LEARNER, generator_names
from stretto.errors import RankError
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.weights import copy_into
from stretto.observe.spans import Spans
from stretto.protocols import Generator, RealClock
from stretto.runtime.clients import generator_client, learner_client, scorer_client
from stretto.runtime.kv_transfer import KVRouter
from stretto.runtime.memory import MemoryWatch
from stretto.runtime.messages import Rates, Ready
from stretto.runtime.placement import Seat
from stretto.runtime.services import ScorerService
from stretto.runtime.state import DRIVER, Staged, copied, write
from stretto.runtime.state import LEARNER as LEARNER_FOLDER
from stretto.runtime.weight_sync import WeightSync
from stretto.saying import Say, working
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.scoring.functions import FunctionScorer
from stretto.tasks.prompts import PromptSource
from stretto.training.agreement import LIMITS, is_coarse
from stretto.types import Prompt, short_name
from stretto.weights.transfer import Backend, Meeting, open_store
from stretto.workers.executor import Executor, ThreadExecutor
from stretto.workers.group import ServiceGroup
from stretto.workers.rank import stacks
from stretto.workers.threads import WorkerThread

PATIENCE_S = 60.0
"""Seconds that the end of a run waits for the learner to end an update of its weights."""

SAVE_S = 3600.0
"""Seconds in which the model must have been written."""

COPY_GAIN = 100.0
"""Factor by which copying keys and values within one memory is faster than computing them."""


@dataclass(frozen=True)
class Opening:
    """What the workers of a run are opened with.

    Attributes:
        prompts: whose tokenizer is the actor's.
        first: some of the prompts.
        folder: of the run; ``None`` where there is none.
    """

    config: Config
    given: Overrides
    stack: ExitStack
    say: Say
    prompts: PromptSource
    first: Sequence[Prompt]
    folder: Path | None


class Workers(Protocol):
    """The workers of a run, wherever they are.

    Attributes:
        executors: of the learner, the generators and the model scorers, by role.
        scorers: the model scorers' places, in the order in which the schedule gets them.
        ready: the learner's message.
        channel: name of the channel of its weights; empty where all share them.
        devices: of each role, by its name in traces; none where all share one.
        groups: processes, the learner's first; none where all are threads.
        meeting: host and backend of transfers between processes; ``None`` without those.
    """

    @property
    def executors(self) -> Mapping[str, Executor]: ...
    @property
    def scorers(self) -> Sequence[Seat]: ...
    @property
    def ready(self) -> Ready: ...
    @property
    def channel(self) -> str: ...
    @property
    def devices(self) -> Mapping[str, str]: ...
    @property
    def groups(self) -> Sequence[ServiceGroup]: ...
    @property
    def meeting(self) -> tuple[str, Backend] | None: ...

    def thread_of(self, function: str) -> WorkerThread:
        """Return the thread of this process that waits for a reward function."""
        ...

    def close_followers(self) -> None:
        """End all work but the learner's, where that can be."""
        ...

    def close(self) -> None:
        """End all workers, and break off their calls."""
        ...


@dataclass(frozen=True)
class Run:
    """A run that has been put together; :mod:`stretto.runs` takes its steps.

    Attributes:
        prompts: the source of its prompts.
        tokenizer: the actor's.
        lags: whether followers may work with older weights than the learner's.
        schedule: takes its steps.
        spans: the records of what worked on what, and when.
    """

    given: Overrides
    prompts: PromptSource
    workers: Workers
    functions: Sequence[FunctionScorer]
    sync: WeightSync
    memory: MemoryWatch | None
    lags: bool
    schedule: Schedule
    spans: Spans

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The actor's tokenizer."""
        return self.prompts.tokenizer

    @property
    def learner(self) -> Executor:
        """The learner's executor."""
        return self.workers.executors[LEARNER]

    async def stage(self, *, copy: bool = True) -> Staged:
        """Take all that changes during the run, in the form of :mod:`stretto.runtime.state`.

        To be called between two steps, while the schedule's ``weights_lock`` is held. What is
        returned writes it while this event loop runs.

        Args:
            copy: what training changes, so that it may go on while files are written; there is no
                copy where memory is short.
        """
        prompts, schedule = copied(self.prompts.state_dict()), copied(self.schedule.state_dict())
        held, pending = (self.schedule.held, self.schedule.pending) if self.lags else ({}, {})
        kept = (await self.learner.call("kept", [*held.values(), *pending.values()])).value
        followers = dict(zip(held, kept, strict=False))
        offered = dict(zip(pending.items(), kept[len(held) :], strict=True))

        live, size = (await self.learner.call("stage", copy)).value

        def write_driver(file: Path) -> None:
            weights = {
                "followers": {model: _on_host(tensors) for model, tensors in followers.items()},
                "offered": {m: {ref.version: _on_host(t)} for (m, ref), t in offered.items()},
            }
            write(file, {"prompts": prompts, "schedule": schedule, "weights": weights})

        def write_learner(folder: Path) -> None:
            files.leave_room(folder, size)
            folder.mkdir()
            self.learner.aside_on_all("write", folder.absolute(), timeout_s=SAVE_S)

        return Staged({DRIVER: write_driver, LEARNER_FOLDER: write_learner}, live)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state that :meth:`stage` wrote, maybe on another runtime.

        Args:
            state: what is in ``driver.pt``, and the path of the learner's, by their names.
        """
        driver = state[DRIVER]
        self.prompts.load_state_dict(driver["prompts"])
        channel = self.workers.channel
        self.schedule.load_state_dict(driver["schedule"], self.prompts.prompt_by_id, channel)
        held, weights = self.schedule.held, driver["weights"]
        kept = [(held[model], tensors) for model, tensors in weights["followers"].items()]
        for model, ref in self.schedule.pending.items() if weights["offered"] else ():
            kept.append((ref, weights["offered"][model][ref.version]))
        newest = (await self.learner.call("load", state[LEARNER_FOLDER].absolute(), kept)).value
        self.sync.load_all(held if weights["followers"] else newest)

    def metrics(self) -> Mapping[str, float]:
        """Return the runtime's own metrics, as they are after a step."""
        return {**self.sync.metrics, **(self.memory.metrics() if self.memory else {})}

    def stacks(self) -> str:
        """Return what every thread of every process of the run is doing, for people."""
        return "\n\n".join(g.ranks.stacks() for g in self.workers.groups) or stacks()

    def save(self, folder: Path) -> None:
        """Write the trained model, whole or not at all."""
        # On the side, as the learner may be in the midst of a step that comes to nothing.
        self.learner.aside_on_all("save", folder.absolute(), timeout_s=SAVE_S)
        brought = {"actor": self.given.actor, "critic": self.given.critic}
        own = {name: model for name, model in brought.items() if model is not None}
        if own and self.workers.groups:  # the caller's models are trained, as if in place
            trained = self.learner.aside("trained", timeout_s=SAVE_S).value
            for name, model in own.items():
                copy_into(model, trained[name])

    def halt(self) -> bool:
        """End all work, after an error; return whether the actor's weights are whole."""
        self.workers.close_followers()
        for function in self.functions:  # a thread that waits for one cannot be interrupted
            function.close()
        self.sync.close()
        try:
            return all(self.learner.aside_on_all("end_updates", timeout_s=PATIENCE_S))
        except RankError:
            return False
        finally:
            self.workers.close()


def start(
    config: Config,
    stack: ExitStack,
    say: Say,
    given: Overrides = NO_OVERRIDES,
    folder: Path | None = None,
) -> Run:
    """Put a run together on the runtime that the settings name.

    Args:
        say: called with a line about whatever takes time.
        given: what the caller brings instead of names.
        folder: of the run, for the logs of its processes; without it they print where this one
            does.

    Raises:
        StrettoError: a setting, a model, a dataset or a reward source is at fault.
    """
    prepare_torch(config.seed, config.threads)
    prompts = open_prompts(config, given, say)
    with working(say, "starting the reward functions"):
        functions = open_functions(config, prompts, stack, given)
    first = look_at_prompts(prompts, say)
    workers = _open(Opening(config, given, stack, say, prompts, first, folder))
    spans = Spans(RealClock(), workers.devices)
    meeting = None
    if workers.meeting:
        # Two tries, and finding out what hangs, come before the schedule gives up.
        patience_s = min(config.cluster.handover_timeout_s, config.schedule.deadline_s / 4)
        meeting = _meeting(workers.meeting, patience_s, stack)
    dtype = pick_dtype(config.model.dtype, pick_device(config.model.device))
    tolerance = config.cluster.probe_tolerance
    allowed = LIMITS[is_coarse(dtype)] if tolerance == "auto" else tolerance
    sync = WeightSync(workers.executors[LEARNER], meeting, allowed, spans)
    stack.callback(sync.close)
    kv_router = KVRouter(meeting) if meeting else None
    generators = _generators(config.rollout.engines, workers, sync, kv_router, spans)
    replicas = [
        ScorerReplica(_function(f, workers.thread_of(f.info.name), spans)) for f in functions
    ]
    replicas += [_replica(seat, workers, sync, given, say, spans) for seat in workers.scorers]
    memory = None
    if workers.groups:
        with working(say, "handing over the first weights"):
            sync.load_all(workers.ready.refs)
        memory = MemoryWatch(workers.groups, RealClock())
        stack.callback(memory.close)
    knobs, engines = config.schedule.knobs, config.rollout.engines
    migrating = _migrating(config, workers, kv_router) if knobs.migrates(engines) else None
    schedule = Schedule(
        prompts.next,
        generators,
        replicas,
        learner_client(LEARNER, workers.executors[LEARNER], spans),
        controls_of(config, migrating, restarts=config.cluster.restarts if workers.groups else 0),
        RealClock(),
        spans,
        workers.ready.refs,
        sync.begin,
    )
    lags = knobs.copies_weights
    return Run(given, prompts, workers, functions, sync, memory, lags, schedule, spans)


def _open(opening: Opening) -> Workers:
    if opening.config.runtime == "inline":
        from stretto.runtime.threads import Threads

        return Threads(opening)
    from stretto.runtime.processes import Processes

    return Processes(opening)


def _generators(
    engines: int, workers: Workers, sync: WeightSync, kv_router: KVRouter | None, spans: Spans
) -> list[Generator]:
    found = []
    for name in generator_names(engines):
        executor = workers.executors[name]
        ways: dict[str, Callable[..., Any]] = {"load": sync.follow(name, executor, "actor")}
        if kv_router:
            ways["accept"] = kv_router.serve(name, executor)
        found.append(generator_client(name, executor, spans, ways))
    return found


def _function(function: FunctionScorer, thread: WorkerThread, spans: Spans) -> Any:
    service = ScorerService(function)
    return scorer_client(service.info(), ThreadExecutor(service, thread), spans)


def _replica(
    seat: Seat, workers: Workers, sync: WeightSync, given: Overrides, say: Say, spans: Spans
) -> ScorerReplica:
    """Return a model scorer, once it has proved that it is the right one."""
    executor = workers.executors[seat.role]
    info, said = executor.ask("ready")
    for line in said:
        say(line)
    ways = {"load": sync.follow(seat.role, executor, info.follows)} if info.follows else {}
    if not workers.groups:  # replicas share a model, and a name in traces
        return ScorerReplica(scorer_client(info, executor, spans, ways=ways), seat.host)
    if seat.scorer == "reference" and given.reference is None:
        executor.ask("require", workers.ready)
    client = scorer_client(info, executor, spans, seat.role, ways)
    return ScorerReplica(client, seat.host, short_name(seat.role))


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _meeting(at: tuple[str, Backend], timeout_s: float, stack: ExitStack) -> Meeting:
    """Open the store on which the groups of transfers meet."""
    host, backend = at
    store, port = open_store(host)
    stack.callback(lambda: store)  # which ends when nothing holds it
    return Meeting(host, port, backend, timeout_s)


def _migrating(config: Config, workers: Workers, kv_router: KVRouter | None) -> Migrating:
    """Return the facts for moving stragglers, with measured speeds of reading and of moving."""
    one, other, *_ = generator_names(config.rollout.engines)
    rates: Rates = workers.executors[one].ask("rates")
    moving: float | None = COPY_GAIN * rates.prefill_tokens_per_s
    if kv_router:
        moving = kv_router.bytes_per_s(one, other) / rates.kv_bytes if rates.kv_bytes else None
    return migrating_of(
        config,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        transfer_tokens_per_s=moving,
    )
