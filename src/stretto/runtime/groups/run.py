"""A run whose roles work in processes of their own, behind a schedule in this one."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stretto.assembly.checks import look_at_prompts
from stretto.assembly.controls import Migrating, controls_of, migrating_of
from stretto.assembly.models import NOTHING, Given, Say, prepare_torch
from stretto.assembly.parts import open_task
from stretto.assembly.scorers import open_functions
from stretto.clock import RealClock
from stretto.config import Config
from stretto.errors import ConfigError
from stretto.models.load import pick_device, pick_dtype
from stretto.observe.spans import Spans
from stretto.runtime.clients import GeneratorClient, LearnerClient, ScorerClient, generator_names
from stretto.runtime.groups import services
from stretto.runtime.groups.handover import TOLERANCE, Handover
from stretto.runtime.groups.migration import Couriers
from stretto.runtime.groups.placement import LEARNER, Place, Seat, places, remarks
from stretto.runtime.state import DRIVER, Staged, copied, write
from stretto.runtime.state import LEARNER as LEARNER_FILE
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.scoring.functions import FunctionScorer
from stretto.tasks.prompts import PromptSource
from stretto.types import IntArray, Prompt, WeightsRef
from stretto.weights.broadcast import Outbox
from stretto.weights.transfer import Meeting, open_store
from stretto.workers.executor import ThreadExecutor
from stretto.workers.group import GroupExecutor, Host, ServiceGroup
from stretto.workers.preflight import Facts, check
from stretto.workers.ranks import Ranks
from stretto.workers.services import ScorerService
from stretto.workers.threads import WorkerThread

LOOK_S = 0.1
"""Seconds between two looks whether the learner's process has written its file."""

PATIENCE_S = 30.0
"""Seconds that the end of a run waits for the learner to come to the end of a call."""


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
    schedule: Schedule
    spans: Spans
    lags: bool

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
        live = (await self.learner.call("stage", copy)).value
        loop = asyncio.get_running_loop()

        def write_learner(file: Path) -> None:
            asyncio.run_coroutine_threadsafe(self._write_learner(file), loop).result()

        return Staged({DRIVER: partial(write, state=driver), LEARNER_FILE: write_learner}, live)

    async def _write_learner(self, file: Path) -> None:
        """Have the learner's process write its state, and look now and then whether it has."""
        await self.learner.call("write", file.absolute())
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
        newest = (await self.learner.call("load_state_dict", state[LEARNER_FILE], kept)).value
        hand_over(self.handover, self.followers, held if weights["followers"] else newest)

    def save(self, folder: Path) -> None:
        self.learner.ask("save", folder.absolute())

    def metrics(self) -> Mapping[str, float]:
        used = {g.name: sum(g.ranks.used_bytes()) for g in self.groups}
        memory = {f"memory/{name}_gb": n / 1e9 for name, n in used.items() if n}
        return {**self.handover.metrics, **memory}

    def stacks(self) -> str:
        return "\n\n".join(group.ranks.stacks() for group in self.groups)

    def halt(self) -> bool:
        learner, *others = self.groups
        for group in others:
            group.close()
        for function in self.functions:
            function.close()
        self.handover.close()
        return learner.settle(PATIENCE_S)


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
    _check(config)
    prepare_torch(config)
    tokenizer, task, prompts = open_task(config, given, say)
    functions = open_functions(config, task.row(0).data.keys(), tokenizer, stack, given)
    first = look_at_prompts(prompts, say)
    placing = _Placing(config, given, stack, say, folder, services.probe_of(first), first)
    groups, executors = placing.opened()
    spans = Spans(RealClock())
    device = pick_device(config.model.device)
    coarse = pick_dtype(config.model.dtype, device).itemsize < 4
    tolerance = config.cluster.probe_tolerance
    store, port = open_store("127.0.0.1")
    stack.callback(lambda: store)  # which ends when nobody holds it
    meeting = Meeting("127.0.0.1", port, "gloo", config.cluster.handover_timeout_s)
    couriers = Couriers(meeting)
    handover = Handover(
        executors[LEARNER],
        meeting,
        TOLERANCE[coarse] if tolerance == "auto" else tolerance,
        spans,
    )
    stack.callback(handover.close)
    names = generator_names(config.rollout.engines)
    followers = {name: (executors[name], "actor") for name in names}
    following = {name: handover.follow(name, executors[name]) for name in names}
    generators = [
        GeneratorClient(name, couriers.serve(name, executors[name], executor), spans)
        for name, executor in following.items()
    ]
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
        client = ScorerClient(info, handover.follow(seat.role, executor), spans)
        replicas.append(ScorerReplica(client, seat.host))
    hand_over(handover, followers, placing.ready.refs)
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
        tokenizer,
        prompts,
        executors[LEARNER],
        groups,
        followers,
        functions,
        handover,
        schedule,
        spans,
        config.schedule.knobs.copies_weights,
    )


class _Placing:
    """The processes of a run, opened one after another: the learner's, then all others at once.

    Attributes:
        places: of all processes, the learner's first.
        ready: the message of the learner's process; only once that is open.
    """

    ready: services.Ready

    def __init__(
        self,
        config: Config,
        given: Given,
        stack: ExitStack,
        say: Say,
        folder: Path | None,
        probe: IntArray,
        first: Sequence[Prompt],
    ) -> None:
        self._config, self._stack, self._say = config, stack, say
        self._logs = folder / "logs" if folder else None
        self._probe, self._first = probe, first
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-")))
        self._given = replace(
            given, functions={}, warmup=given.warmup or scratch / "warmup.safetensors"
        )
        on_gpus = pick_device(config.model.device).type == "cuda"
        gpus = torch.cuda.device_count() if on_gpus else 0
        self.places = places(config, config.threads or torch.get_num_threads(), gpus)
        for line in remarks(config, self.places, os.cpu_count() or 1, gpus):
            say(line)
        self._facts: dict[str, Facts] = {}
        self._looking = Lock()

    @property
    def scorers(self) -> list[Seat]:
        """The model scorers' seats, in the order in which the schedule gets them."""
        seats = [seat for place in self.places for seat in place.seats if seat.scorer]
        return sorted(seats, key=lambda seat: seat.host or 0)

    def opened(self) -> tuple[list[ServiceGroup], dict[str, GroupExecutor]]:
        """Open all processes; return them, and an executor for each role."""
        with ThreadPoolExecutor(len(self.places)) as pool:
            opening = [pool.submit(self._open, self.places[0])]
            if self._config.warmup_examples:  # others read its outcome
                wait(opening)
            opening += [pool.submit(self._open, place) for place in self.places[1:]]
        groups = [future.result() for future in opening]
        executors = {
            seat.role: GroupExecutor(group, seat.role)
            for place, group in zip(self.places, groups, strict=True)
            for seat in place.seats
        }
        self.ready = executors[LEARNER].ask("ready")
        for line in self.ready.said:
            self._say(line)
        return groups, executors

    def _open(self, place: Place) -> ServiceGroup:
        group = ServiceGroup(place.name, partial(self._launch, place))
        self._stack.callback(group.close)
        return group

    def _launch(self, place: Place) -> Ranks:
        model = self._config.model.model_copy(update={"device": place.device})
        config = self._config.model_copy(update={"model": model})
        setting = services.Setting(config, self._given, place.threads)
        makes = {seat.role: self._make(seat, setting) for seat in place.seats}
        logs = [self._logs / f"{place.name}.log"] if self._logs else []
        return Ranks(
            1,
            Host,
            (makes,),
            threads=place.threads,
            role=place.name,
            devices=[place.device],
            timeout_s=self._config.cluster.start_timeout_s,
            logs=logs,
            say=lambda line: self._say(f"{place.name}: {line}"),
            check=lambda facts: self._check_facts(place, facts),
        )

    def _make(
        self, seat: Seat, setting: services.Setting
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if seat.role == LEARNER:
            return services.learner, (setting, self._probe)
        if not seat.scorer:
            return services.generator, (setting, seat.role, self._probe)
        if seat.scorer == "reference":
            return services.reference, (setting,)
        if seat.scorer == "critic":
            return services.critic, (setting,)
        return services.reward_model, (setting, seat.scorer, self._first)

    def _check_facts(self, place: Place, facts: Sequence[Facts]) -> None:
        with self._looking:
            self._facts[place.name] = facts[0]
            self._compare()

    def _compare(self) -> None:
        """Compare what all processes so far have found at their places."""
        threads = {p.name: p.threads for p in self.places if p.threads and p.name in self._facts}
        on: dict[str, set[str]] = {}
        for p in self.places:
            on.setdefault(p.device, set()).add(p.name)
        check(self._facts, threads, [frozenset(names) for names in on.values()])


def hand_over(
    handover: Handover,
    followers: Mapping[str, tuple[GroupExecutor, str]],
    refs: Mapping[str, WeightsRef],
) -> None:
    """Hand weights over to all followers of each model, before or between steps.

    Raises:
        StrettoError: one of them has not got them.
    """
    for model, ref in refs.items():
        members = {n: executor for n, (executor, follows) in followers.items() if follows == model}
        for outcome in handover.transfer(ref, members).values() if members else ():
            if isinstance(outcome, Exception):
                raise outcome


def _migrating(
    config: Config, rates: services.Rates, couriers: Couriers, names: Sequence[str]
) -> Migrating:
    """Return the facts for moving stragglers, with the measured speed of the way between two."""
    bytes_per_s = couriers.bytes_per_s(names[0], names[1])
    return migrating_of(
        config,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        transfer_tokens_per_s=bytes_per_s / rates.kv_bytes,
    )


def _check(config: Config) -> None:
    if config.pipeline.ranks:
        raise ConfigError(
            f"runtime = '{config.runtime}' has one process for the learner, and pipeline.ranks = "
            f"{config.pipeline.ranks} asks for several; set one of them back"
        )


def _function(function: FunctionScorer, stack: ExitStack, spans: Spans) -> ScorerClient:
    """Make the scorer of a reward function: it has its process already, a thread waits for it."""
    service, worker = ScorerService(function), WorkerThread(function.name, 1)
    stack.callback(worker.stop)
    return ScorerClient(service.info(), ThreadExecutor(service, worker), spans)
