"""The processes of a run, started as its placement says."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from stretto.assembly.models import Overrides
from stretto.config import Config
from stretto.config.cluster import LEARNER
from stretto.errors import ConfigError, RankError, first_line
from stretto.machine import usable_cores
from stretto.rollout.registry import ENGINES
from stretto.runtime import learner, services
from stretto.runtime.launchers import launcher_of
from stretto.runtime.messages import Ready, Setting, probe_of
from stretto.runtime.placement import Place, Seat, learner_layout, lends, places, remarks
from stretto.runtime.run import Opening
from stretto.saying import working
from stretto.types import short_name
from stretto.weights.broadcast import WeightSender
from stretto.weights.transfer import Backend
from stretto.workers.group import GroupExecutor, ServiceGroup
from stretto.workers.preflight import Facts, check
from stretto.workers.ranks import Ranks
from stretto.workers.threads import WorkerThread


class Processes:
    """Processes, opened side by side; where there is a warm-up, the learner's first.

    See :class:`~stretto.runtime.run.Workers`.
    """

    channel = WeightSender.name

    def __init__(self, opening: Opening) -> None:
        config, given, say, stack = opening.config, opening.given, opening.say, opening.stack
        _check(config, given)
        self._config, self._stack, self._say = config, stack, say
        self._logs = opening.folder / "logs" if opening.folder else None
        self._probe, self._first = probe_of(opening.first), opening.first
        # Processes on other machines see the run's folder, and not this machine's temporary one.
        where = opening.folder if config.runtime == "ray" else None
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="start-", dir=where))
        ).absolute()
        self._given = replace(
            given,
            functions={},
            looks_at=None,
            opened=None,
            warmup=given.warmup or scratch / "warmup.safetensors",
        )
        self._launcher = launcher_of(config, say)
        cores, gpus = config.threads or torch.get_num_threads(), self._launcher.gpus
        self._places = places(config, cores, gpus, given.reward_models)
        for line in remarks(config, self._places, usable_cores(), gpus):
            say(line)
        if config.runtime == "local":
            _require_engine(config, self._places)
        self._launcher.prepare(self._places, stack)
        self._facts: dict[str, Facts] = {}
        self._looking = Lock()
        self._starting: list[Ranks] = []
        self._given_up = False
        with working(say, self._opening):
            self.groups = self._open_all()
        self.executors = {
            seat.role: GroupExecutor(group, seat.role)
            for place, group in zip(self._places, self.groups, strict=True)
            for seat in place.seats
        }
        self.ready: Ready = self.executors[LEARNER].ask("ready")
        for line in self.ready.said:
            say(line)

    def thread_of(self, function: str) -> WorkerThread:
        """Return a thread of its own for each reward function."""
        thread = WorkerThread(function, 1)
        self._stack.callback(thread.stop)
        return thread

    def close_followers(self) -> None:
        """End all processes but the learner's."""
        for group in self.groups[1:]:
            group.close()

    def close(self) -> None:
        """Do nothing: the learner's process ends with the run's stack."""

    @property
    def _warms_up(self) -> bool:
        file = self._given.warmup
        return self._config.warmup_examples > 0 and not (file and file.exists())

    @property
    def scorers(self) -> list[Seat]:
        """The model scorers' seats, in the order in which the schedule gets them."""
        seats = [seat for place in self._places for seat in place.seats if seat.scorer]
        return sorted(seats, key=lambda seat: seat.host or 0)

    @property
    def _opening(self) -> str:
        """What is done while they are opened, for people."""
        count = sum(len(place.devices) for place in self._places)
        first = f"; first the learner warms up on {self._config.warmup_examples} examples"
        return f"starting {count} processes{first if self._warms_up else ''}"

    @property
    def devices(self) -> dict[str, str]:
        """The device of each role, by the role's name in traces: a GPU, or a process on CPUs."""
        ids = {name: facts.device_id for name, facts in self._facts.items()}
        return {
            short_name(seat.role): ids.get(place.name) or place.name
            for place in self._places
            for seat in place.seats
        }

    def _open_all(self) -> list[ServiceGroup]:
        """Open all processes. When one cannot be opened, or on Ctrl-C, the others are ended."""
        pool = ThreadPoolExecutor(len(self._places))
        try:
            opening = [pool.submit(self._open, self._places[0])]
            if self._warms_up:  # others read its outcome
                opening[0].result()
            opening += [pool.submit(self._open, place) for place in self._places[1:]]
            for future in as_completed(opening):
                future.result()
        except BaseException:
            self._give_up()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self._starting.clear()
        return [future.result() for future in opening]

    def _begun(self, ranks: Ranks) -> None:
        """Take note of a process that starts.

        Raises:
            RankError: no more are wanted.
        """
        with self._looking:
            if self._given_up:
                raise RankError("the run has ended while its processes started; start it again")
            self._starting.append(ranks)

    def _give_up(self) -> None:
        with self._looking:
            self._given_up = True
        for ranks in self._starting:
            ranks.close()

    def _open(self, place: Place) -> ServiceGroup:
        trains = any(seat.role == LEARNER for seat in place.seats)
        group = ServiceGroup(place.name, partial(self._launch, place), replaceable=not trains)
        self._stack.callback(group.close)
        return group

    @property
    def meeting(self) -> tuple[str, Backend]:
        """Where transfers meet, and how they go: NCCL where every process has a GPU of its own."""
        devices = [device for place in self._places for device in place.devices]
        apart = len(set(devices)) == len(devices) and "cpu" not in devices
        return self._launcher.host, "nccl" if apart else "gloo"

    def _launch(self, place: Place) -> Ranks:
        setting = Setting(
            self._config,
            self._given,
            place.threads,
            self._launcher.devices(place),
            lends=lends(self._config, self._places),
            offload=place.offload,
        )
        makes = {seat.role: self._make(seat, setting) for seat in place.seats}
        names = _rank_names(place)
        logs = [self._logs / f"{name}.log" for name in names] if self._logs else []
        try:
            return self._launcher.launch(
                place, makes, logs, lambda facts: self._check_facts(place, facts), self._begun
            )
        except pickle.PicklingError as error:
            raise ConfigError(
                f"what the caller brings cannot be sent to other processes: {first_line(error)}. "
                "Define its classes at the top of a module, name folders instead of objects, or "
                "set runtime = 'inline'"
            ) from error

    def _make(self, seat: Seat, setting: Setting) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how a role's service is made; with what it needs of what the caller brings."""
        setting = replace(setting, given=_needed(seat, setting.given))
        if seat.role == LEARNER:
            return learner.learner, (setting, self._probe)
        if not seat.scorer:
            return services.generator, (setting, seat.role, self._probe)
        if seat.scorer == "reference":
            return services.reference, (setting,)
        if seat.scorer == "critic":
            return services.critic, (setting,)
        return services.reward_model, (setting, seat.scorer, self._first)

    def _check_facts(self, place: Place, facts: Sequence[Facts]) -> None:
        with self._looking:
            self._facts |= zip(_rank_names(place), facts, strict=True)
            self._compare()

    def _compare(self) -> None:
        """Compare what all processes so far have found at their places."""
        ranks = [
            (name, p.threads, device)
            for p in self._places
            for name, device in zip(_rank_names(p), p.devices, strict=True)
        ]
        threads = {name: count for name, count, _ in ranks if count and name in self._facts}
        on: dict[str, set[str]] = {}
        for name, _, device in ranks:
            alone = self._launcher.gpus >= len(ranks)
            on.setdefault(device if alone else "", set()).add(name)
        apart = {name for p in self._places if p.python for name in _rank_names(p)}
        check(self._facts, threads, [frozenset(names) for names in on.values()], apart)


def _check(config: Config, given: Overrides) -> None:
    """Refuse what only a run in one process can do."""
    layout = learner_layout(config.cluster)
    if layout.ranks > 1 and config.pipeline.ranks:
        raise ConfigError(
            f"pipeline.ranks = {config.pipeline.ranks} trains through stages, and "
            f"cluster.processes divides the learner by fsdp = {layout.fsdp} and tp = {layout.tp}; "
            "set one or the other"
        )
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


def _require_engine(config: Config, found: Sequence[Place]) -> None:
    """See that the engine's library is installed, where generators have this interpreter.

    Raises:
        MissingExtraError, ConfigError: it is not, or is too old.
    """
    seats = [seat for place in found if not place.python for seat in place.seats]
    if any(seat.role.startswith("generator") for seat in seats):
        ENGINES[config.rollout.engine].check()


def _rank_names(place: Place) -> list[str]:
    return [place.name, *(f"{place.name}, rank {i}" for i in range(1, len(place.devices)))]


def _needed(seat: Seat, given: Overrides) -> Overrides:
    """Return what a role needs of what the caller brings: models may be large."""
    wanted = {"reference": {"reference"}, "critic": {"critic"}, LEARNER: {"critic"}}
    keep = wanted.get(seat.scorer or seat.role, set())
    return replace(
        given,
        actor=None if seat.scorer in given.reward_models else given.actor,
        reference=given.reference if "reference" in keep else None,
        critic=given.critic if "critic" in keep else None,
        reward_models={
            source: model
            for source, model in given.reward_models.items()
            if source == seat.scorer or "critic" in keep  # which may start from it
        },
    )
