"""A run whose roles work in processes of their own, behind a schedule in this one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from stretto import files
from stretto.assembly.checks import look_at_prompts
from stretto.assembly.controls import Migrating, controls_of, migrating_of
from stretto.assembly.models import NOTHING, Given, prepare_torch
from stretto.assembly.parts import STARTING_FUNCTIONS, open_task
from stretto.assembly.scorers import open_functions
from stretto.clock import RealClock
from stretto.config import Config
from stretto.config.cluster import LEARNER, generator_names
from stretto.errors import ConfigError, RankError
from stretto.models.load import pick_device, pick_dtype
from stretto.models.weights import copy_into
from stretto.observe.spans import Spans
from stretto.runtime.clients import GeneratorClient, LearnerClient, ScorerClient
from stretto.runtime.groups.handover import Handover, hand_over
from stretto.runtime.groups.memory import MemoryWatch
from stretto.runtime.groups.messages import Rates, probe_of
from stretto.runtime.groups.migration import Couriers
from stretto.runtime.groups.placement import learner_layout
from stretto.runtime.groups.processes import Processes
from stretto.runtime.state import DRIVER, Staged, copied, write
from stretto.runtime.state import LEARNER as LEARNER_FOLDER
from stretto.saying import Say, working
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.scoring.functions import FunctionScorer
from stretto.tasks.prompts import PromptSource
from stretto.training.agreement import LIMITS, is_coarse
from stretto.types import short_name
from stretto.weights.broadcast import Outbox
from stretto.weights.transfer import Backend, Meeting, open_store
from stretto.workers.executor import ThreadExecutor
from stretto.workers.group import GroupExecutor, ServiceGroup
from stretto.workers.services import ScorerService
from stretto.workers.threads import WorkerThread

LOOK_S = 0.1
"""Seconds between two looks whether the learner's processes have written their files."""

PATIENCE_S = 60.0
"""Seconds that the end of a run waits for the learner to end an update of its weights."""

SAVE_S = 3600.0
"""Seconds in which the model must have been written."""


@dataclass(frozen=True)
class GroupRun:
    """A run over processes; see :class:`~stretto.runtime.base.Running`.

    Attributes:
        learner: its executor.
        groups: all processes, the learner's first.
        followers: roles that receive weights, by name, with the model that each follows.
        lags: whether they may work with older weights than the learner's.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    learner: GroupExecutor
    groups: Sequence[ServiceGroup]
    followers: Mapping[str, tuple[GroupExecutor, str]]
    functions: Sequence[FunctionScorer]
    handover: Handover
    memory: MemoryWatch
    schedule: Schedule
    spans: Spans
    lags: bool
    given: Given

    async def stage(self, *, copy: bool = True) -> Staged:
        prompts, schedule = copied(self.prompts.state_dict()), copied(self.schedule.state_dict())
        held, pending = ({}, {}) if not self.lags else (self.schedule.held, self.schedule.pending)
        kept = (await self.learner.call("kept", [*held.values(), *pending.values()])).value
        weights = {
            "followers": dict(zip(held, kept[: len(held)], strict=True)),
            "offered": {
                model: {ref.version: tensors}
                for (model, ref), tensors in zip(pending.items(), kept[len(held) :], strict=True)
            },
        }
        driver = {"prompts": prompts, "schedule": schedule, "weights": weights}
        live, size = (await self.learner.call("stage", copy)).value
        loop = asyncio.get_running_loop()

        def write_learner(folder: Path) -> None:
            files.leave_room(folder, size)
            folder.mkdir()
            asyncio.run_coroutine_threadsafe(self._write_learner(folder), loop).result()

        return Staged({DRIVER: partial(write, state=driver), LEARNER_FOLDER: write_learner}, live)

    async def _write_learner(self, folder: Path) -> None:
        await self.learner.call("write", folder.absolute())
        while not (await self.learner.call("written")).value:
            await asyncio.sleep(LOOK_S)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        driver = state[DRIVER]
        self.prompts.load_state_dict(driver["prompts"])
        self.schedule.load_state_dict(driver["schedule"], self.prompts.prompt_by_id, Outbox.name)
        held, weights = self.schedule.held, driver["weights"]
        kept = [(held[model], tensors) for model, tensors in weights["followers"].items()]
        for model, ref in self.schedule.pending.items() if weights["offered"] else ():
            kept.append((ref, weights["offered"][model][ref.version]))
        newest = (await self.learner.call("load", state[LEARNER_FOLDER].absolute(), kept)).value
        hand_over(self.handover, self.followers, held if weights["followers"] else newest)

    def save(self, folder: Path) -> None:
        # On the side, as the learner may be in the midst of a step that comes to nothing.
        self.learner.aside_on_all("save", folder.absolute(), timeout_s=SAVE_S)
        brought = {"actor": self.given.actor, "critic": self.given.critic}
        own = {name: model for name, model in brought.items() if model is not None}
        if own:  # the caller's models are trained, as if in place
            trained = self.learner.aside("trained", timeout_s=SAVE_S).value
            for name, model in own.items():
                copy_into(model, trained[name])

    def metrics(self) -> Mapping[str, float]:
        return {**self.handover.metrics, **self.memory.metrics()}

    def stacks(self) -> str:
        return "\n\n".join(group.ranks.stacks() for group in self.groups)

    def halt(self) -> bool:
        for group in self.groups[1:]:
            group.close()
        for function in self.functions:
            function.close()
        self.handover.close()
        try:
            return all(self.learner.aside_on_all("end_updates", timeout_s=PATIENCE_S))
        except RankError:
            return False


def start(
    config: Config,
    stack: ExitStack,
    say: Say,
    given: Given = NOTHING,
    folder: Path | None = None,
) -> GroupRun:
    """Put a run together; arguments as those of :func:`~stretto.runtime.start.start`.

    Raises:
        ConfigError: a placement is impossible, or training is to go through pipelines.
    """
    _check(config, given)
    prepare_torch(config)
    tokenizer, task, prompts = open_task(config, given, say)
    with working(say, STARTING_FUNCTIONS):
        functions = open_functions(config, task.row(0).data.keys(), tokenizer, stack, given)
    first = look_at_prompts(prompts, say)
    placing = Processes(config, given, stack, say, folder, probe_of(first), first)
    with working(say, placing.opening):
        groups, executors = placing.opened()
    spans = Spans(RealClock(), placing.devices)
    meeting = _meeting(config, placing.meeting, stack)
    handover = Handover(executors[LEARNER], meeting, _tolerance(config), spans)
    stack.callback(handover.close)
    couriers = Couriers(meeting)
    names = generator_names(config.rollout.engines)
    generators = _generators({name: executors[name] for name in names}, couriers, handover, spans)
    followers = {name: (executors[name], "actor") for name in names}
    replicas = [ScorerReplica(_function(f, stack, spans)) for f in functions]
    for seat in placing.scorers:
        executor = executors[seat.role]
        info, said = executor.ask("ready")
        for line in said:
            say(line)
        if seat.scorer == "reference" and given.reference is None:
            executor.ask("require", placing.ready)
        if info.follows:
            followers[seat.role] = executor, info.follows
        role = short_name(seat.role)
        client = ScorerClient(info, handover.follow(seat.role, executor), spans, role)
        replicas.append(ScorerReplica(client, seat.host, role))
    with working(say, "handing over the first weights"):
        hand_over(handover, followers, placing.ready.refs)
    memory = MemoryWatch(groups, RealClock())
    stack.callback(memory.close)
    migrating = None
    if config.schedule.knobs.migrates(len(names)):
        migrating = _migrating(config, executors[names[0]].ask("rates"), couriers, names)
    schedule = Schedule(
        prompts.next,
        generators,
        replicas,
        LearnerClient(LEARNER, executors[LEARNER], spans),
        controls_of(config, migrating, restarts=config.cluster.restarts),
        RealClock(),
        spans,
        placing.ready.refs,
    )
    return GroupRun(
        tokenizer=tokenizer,
        prompts=prompts,
        learner=executors[LEARNER],
        groups=groups,
        followers=followers,
        functions=functions,
        handover=handover,
        memory=memory,
        schedule=schedule,
        spans=spans,
        lags=config.schedule.knobs.copies_weights,
        given=given,
    )


def _generators(
    executors: Mapping[str, GroupExecutor], couriers: Couriers, handover: Handover, spans: Spans
) -> list[GeneratorClient]:
    """Return the schedule's side of each generator, which follows the actor."""
    return [
        GeneratorClient(
            name, couriers.serve(name, executor, handover.follow(name, executor)), spans
        )
        for name, executor in executors.items()
    ]


def _meeting(config: Config, at: tuple[str, Backend], stack: ExitStack) -> Meeting:
    """Open the store on which the groups of transfers meet."""
    host, backend = at
    store, port = open_store(host)
    stack.callback(lambda: store)  # which ends when nobody holds it
    # Two tries, and finding out who hangs, come before the schedule gives up all who take part.
    timeout_s = min(config.cluster.handover_timeout_s, config.schedule.deadline_s / 4)
    return Meeting(host, port, backend, timeout_s)


def _tolerance(config: Config) -> float:
    if config.cluster.probe_tolerance != "auto":
        return config.cluster.probe_tolerance
    dtype = pick_dtype(config.model.dtype, pick_device(config.model.device))
    return LIMITS[is_coarse(dtype)]


def _migrating(config: Config, rates: Rates, couriers: Couriers, names: Sequence[str]) -> Migrating:
    """Return the facts for moving stragglers, with the measured speed of the way between two."""
    moving = couriers.bytes_per_s(names[0], names[1]) / rates.kv_bytes if rates.kv_bytes else None
    return migrating_of(
        config,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        transfer_tokens_per_s=moving,
    )


def _check(config: Config, given: Given) -> None:
    if config.pipeline.ranks:
        raise ConfigError(
            f"pipeline.ranks = {config.pipeline.ranks} trains through stages, which are for "
            f"runtime = 'inline'; with '{config.runtime}' divide the learner by fsdp and tp in "
            "cluster.processes, and set pipeline.ranks = 0"
        )
    layout = learner_layout(config)
    if layout.ranks > 1 and (given.actor is not None or given.critic is not None):
        raise ConfigError(
            f"cluster.processes: fsdp = {layout.fsdp} and tp = {layout.tp} train shards in other "
            "processes, and a model that the caller brings as an object is trained in place; name "
            "its folder, or set both to 1"
        )
    if config.model.lora_rank and given.actor is not None:
        raise ConfigError(
            f"runtime = '{config.runtime}' trains adapters in another process, and cannot merge "
            "them into a model that the caller brings as an object; name its folder, or set "
            "runtime = 'inline'"
        )


def _function(function: FunctionScorer, stack: ExitStack, spans: Spans) -> ScorerClient:
    service, worker = ScorerService(function), WorkerThread(function.name, 1)
    stack.callback(worker.stop)
    return ScorerClient(service.info(), ThreadExecutor(service, worker), spans)
