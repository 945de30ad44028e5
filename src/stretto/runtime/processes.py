"""Starts a run's processes by its placement, on this machine or on a Ray cluster."""

from __future__ import annotations

import math
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from stretto import outside
from stretto.assembly.run_models import Device, Overrides
from stretto.config import ClusterConfig, Config
from stretto.config.cluster_config import LEARNER
from stretto.errors import ConfigError, ModelError, first_line
from stretto.machine import usable_cores
from stretto.models.backend import pick_device
from stretto.protocols import Clock
from stretto.rollout.engine_registry import engine_of
from stretto.runtime import learner_service, role_services, scorer_roles
from stretto.runtime.placement import (
    ProcessPlacement,
    RolePlacement,
    places,
    remarks,
    shares_weights,
)
from stretto.runtime.process_messages import RoleSetup, probe_of
from stretto.saying import Say, working
from stretto.schedules.controls import Tuner
from stretto.types import Prompt, short_name
from stretto.weights.broadcast import WeightSender
from stretto.workers.forkserver import ForkedProcesses, server_of
from stretto.workers.group import Launched, RankGroup
from stretto.workers.group_executor import GroupExecutor, ServiceGroup
from stretto.workers.rank import Facts, GroupSpec, check, used_bytes
from stretto.workers.threads import WorkerThread

if TYPE_CHECKING:
    from stretto.workers.ray_cluster import RayCluster


class ProcessWorkers:
    """Workers of a run in processes, started concurrently. A warm-up comes first."""

    channel = WeightSender.name
    thread_scaling = (0.0, 0.0)  # roles in processes have locks of their own
    tuner: Tuner | None = None  # processes keep the CPU threads that they start with

    def __init__(
        self,
        config: Config,
        overrides: Overrides,
        stack: ExitStack,
        say: Say,
        first: Sequence[Prompt],  # some of the run's prompts
        folder: Path | None,  # the run's folder
    ) -> None:
        _check(config, overrides)
        algorithm = outside.absolute(config.algorithm.name)  # Ray's processes have other folders
        self._config = config.changed_in("algorithm", name=algorithm)
        self._stack = stack
        self._say = say
        self._first = first
        self._logs = folder / "logs" if folder else None
        if (warmup := overrides.warmup) is None:  # otherwise in the run's folder
            # Other machines see the run's folder, but no temporary folder of this machine.
            where = folder if config.runtime_kind.several_machines else None
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="start-", dir=where))
            warmup = Path(scratch).absolute() / "warmup.safetensors"
        self._overrides = replace(
            overrides,
            functions={},
            environment={},
            looks_at=None,
            exports=None,
            opened=None,
            warmup=warmup,
        )
        self._launcher = LAUNCHERS[config.runtime](config.cluster, config.model.device, say)
        cores, gpus = config.threads or torch.get_num_threads(), self._launcher.gpus
        self._processes = places(config, cores, gpus, overrides.reward_models)
        for line in remarks(
            config.schedule.knobs, config.rollout.engines, self._processes, usable_cores(), gpus
        ):
            say(line)
        ours = [r.role for p in self._processes if not p.python for r in p.roles]
        local = not config.runtime_kind.several_machines
        if local and any(role.startswith("generator") for role in ours):
            engine_of(config.rollout).check()
        self._launcher.prepare(self._processes, stack)
        self._facts: dict[str, Facts] = {}
        self._checking = Lock()
        self.groups = [self._group(process) for process in self._processes]
        count = sum(len(process.devices) for process in self._processes)
        first_of_all = f"; first the learner warms up on {config.warmup_examples} examples"
        with working(say, f"starting {count} processes{first_of_all if self._warms_up else ''}"):
            self._start_all()
        self.executors = {
            placed.role: GroupExecutor(group, placed.role)
            for process, group in zip(self._processes, self.groups, strict=True)
            for placed in process.roles
        }
        self.ready = self.executors[LEARNER].ask(learner_service.LearnerService.ready)
        for line in self.ready.notes:
            say(line)

    def thread_of(self, function: str) -> WorkerThread:
        thread = WorkerThread(function, 1)
        self._stack.callback(thread.stop)
        return thread

    def close_followers(self) -> None:
        for group in self.groups[1:]:
            group.close()

    def close(self) -> None:
        """Do nothing, because the learner's process ends with the run's stack."""

    @property
    def scorers(self) -> list[RolePlacement]:
        """Model scorers in the schedule's order."""
        placements = [
            placed for process in self._processes for placed in process.roles if placed.scorer
        ]
        return sorted(placements, key=lambda placed: placed.host or 0)

    @property
    def devices(self) -> dict[str, str]:
        """Device by role (its name in traces): the GPU's id, or the process on a CPU."""
        ids = {name: facts.device_id for name, facts in self._facts.items()}
        return {role: ids.get(name) or name for role, name in self.processes.items()}

    @property
    def processes(self) -> dict[str, str]:
        """Process by role (its name in traces)."""
        return {
            short_name(placed.role): process.name
            for process in self._processes
            for placed in process.roles
        }

    @property
    def meeting(self) -> str:
        return self._launcher.host

    @property
    def _warms_up(self) -> bool:
        file = self._overrides.warmup
        return self._config.warmup_examples > 0 and not (file and file.exists())

    def _start_all(self) -> None:
        pool = ThreadPoolExecutor(len(self.groups))
        starting: dict[str, Future[None]] = {}
        pairs = list(zip(self._processes, self.groups, strict=True))
        try:
            pairs.sort(key=lambda pair: pair[0].takes_share(self._config.rollout))
            for process, group in pairs:
                before = self._before(process, starting)
                starting[process.name] = pool.submit(self._start, group, before)
                if len(starting) == 1 and self._warms_up:  # the remaining ones read its outcome
                    starting[process.name].result()
            for future in as_completed(starting.values()):
                future.result()
        except BaseException:
            for group in self.groups:
                group.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _before(
        self, process: ProcessPlacement, starting: Mapping[str, Future[None]]
    ) -> list[Future[None]]:
        """Return the processes to wait for: for an engine that measures free memory, all earlier
        ones on its GPUs, because none may take or free memory meanwhile.
        """
        if not process.takes_share(self._config.rollout):
            return []
        gpu_sharers = [p for p in self._processes if set(p.devices) & set(process.devices)]
        return [starting[other.name] for other in gpu_sharers if other.name in starting]

    def _start(self, group: RankGroup, before: Sequence[Future[None]]) -> None:
        for other in before:
            other.result()
        try:
            group.start(self._config.cluster.restarts, patient=self._warms_up)
        except pickle.PicklingError as error:
            raise ConfigError(
                f"what the caller brings cannot be sent to other processes: {first_line(error)}. "
                "Define its classes at the top of a module, name folders instead of objects, or "
                f"{_one_process(self._config)}",
                "cannot-be-pickled",
            ) from error

    def _group(self, process: ProcessPlacement) -> ServiceGroup:
        cluster = self._config.cluster
        setup = RoleSetup(
            self._config,
            self._overrides,
            process.threads,
            self._launcher.devices(process),
            shares_weights=shares_weights(self._config.schedule.knobs, self._processes),
            offload=process.offload,
            alone=len(process.roles) == 1,
            shares_gpus=self._shares_gpus(process),
        )
        names, is_group = _rank_names(process), len(process.devices) > 1
        spec = GroupSpec(
            len(process.devices),
            backend="cpu:gloo,cuda:nccl" if is_group and process.device != "cpu" else "gloo",
            threads=process.threads,
            devices=setup.devices,
            interface=self._launcher.interface,
            timeout_s=cluster.start_timeout_s,
            logs=[self._logs / f"{name}.log" for name in names] if self._logs else [],
        )
        group = ServiceGroup(
            spec,
            {placed.role: self._make(placed, setup) for placed in process.roles},
            {placed.role: placed.ranks for placed in process.roles},
            launch=partial(self._launcher.launch, process),
            name=process.name,
            say=self._say,
            check=partial(self._compare, names),
            replaceable=all(placed.role != LEARNER for placed in process.roles),
        )
        if self._config.observe.checkpoints and not group.replaceable:
            group.remedy = "resume from the last checkpoint, if one was written"
        self._stack.callback(group.close)
        return group

    def _shares_gpus(self, process: ProcessPlacement) -> bool:
        gpus = set(process.devices) - {"cpu"}
        return any(gpus & set(other.devices) for other in self._processes if other is not process)

    def _make(
        self, placed: RolePlacement, setup: RoleSetup
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        teachers = setup.run_config.algorithm.teacher_models
        overrides = _needed(placed, setup.overrides, teachers)
        setup = replace(setup, overrides=overrides, ranks=placed.ranks, layout=placed.layout)
        if placed.role == LEARNER:
            return learner_service.learner, (setup, probe_of(self._first))
        match placed.scorer:
            case "":
                return role_services.generator, (setup, placed.role, probe_of(self._first))
            case "reference":
                return scorer_roles.reference, (setup,)
            case "critic":
                return scorer_roles.critic, (setup,)
            case name if name in teachers:
                return scorer_roles.teacher, (setup, name, self._first)
            case source:
                return scorer_roles.reward_model, (setup, source, self._first)

    def _compare(self, ranks: Sequence[str], facts: Sequence[Facts]) -> None:
        """Compare these ranks with the ranks of all processes that have joined their groups."""
        threads = dict[str, int]()
        devices = dict[str, str]()
        custom_python_names = set[str]()
        for process in self._processes:
            names = _rank_names(process)
            devices |= zip(names, process.devices, strict=True)
            threads |= dict.fromkeys(names if process.threads else (), process.threads)
            custom_python_names.update(names if process.python else ())
        with self._checking:
            self._facts |= zip(ranks, facts, strict=True)
            check(self._facts, threads, devices, custom_python_names)


class Launcher:
    """A launcher of a run's processes on this machine."""

    interface = ""  # network interface of the process groups ("": the host's)
    host = "127.0.0.1"  # address of this process, known after prepare()

    def __init__(self, config: ClusterConfig, device: Device, say: Say) -> None:
        self._config, self._say = config, say
        self.gpus = self._count_gpus(device)  # 0: all roles on CPUs

    def prepare(self, processes: Sequence[ProcessPlacement], stack: ExitStack) -> None:
        """Start to import the processes' libraries in the background."""
        for python in {process.python for process in processes}:
            if python and shutil.which(python) is None:
                raise ConfigError(
                    f"cluster.processes: python = '{python}' is no program that can be run here; "
                    "name the interpreter of an environment, such as .venv-vllm/bin/python",
                    "no-such-interpreter",
                )
            server_of(python).start()

    def devices(self, process: ProcessPlacement) -> Sequence[str]:
        """Return the device of each rank as the rank sees it. Here every rank sees all GPUs."""
        return process.devices

    def launch(self, process: ProcessPlacement, spec: GroupSpec) -> Launched:
        return ForkedProcesses(spec, python=process.python)

    def _count_gpus(self, device: Device) -> int:
        return torch.cuda.device_count() if pick_device(device).type == "cuda" else 0


class RayLauncher(Launcher):
    """A launcher on a Ray cluster, in one placement group. Each rank has a bundle, or ranks that
    shard layers share one, because a bundle is on one node. If processes share GPUs, each GPU is a
    bundle, divided evenly among its ranks.
    """

    def __init__(self, config: ClusterConfig, device: Device, say: Say) -> None:
        super().__init__(config, device, say)
        self.interface = config.interface
        self._cluster: RayCluster | None = None
        self._positions: dict[str, list[int]] = {}
        self._sharing = 1  # maximum number of ranks on a GPU

    def prepare(self, processes: Sequence[ProcessPlacement], stack: ExitStack) -> None:
        from stretto.workers.ray_cluster import Bundle, RayCluster

        on = Counter(d for process in processes for d in process.devices if d != "cpu")
        self._sharing = max(on.values(), default=1)
        bundles, places = list[Bundle](), dict[object, int]()
        for process in processes:
            positions = self._positions[process.name] = list[int]()
            for rank, device in enumerate(process.devices):
                shares = self._sharing > 1 and device != "cpu"
                key = device if shares else (process.name, rank // process.close_ranks)
                positions.append(place := places.setdefault(key, len(bundles)))
                cpus, gpus = bundles[place] if place < len(bundles) else (0.0, 0.0)
                more = float(device != "cpu" and not (shares and gpus))
                bundles[place : place + 1] = [Bundle(cpus + max(process.threads, 1), gpus + more)]
        starts_cluster = not self._config.address
        self._cluster = cluster = RayCluster(
            bundles,
            address=self._config.address,
            cpus=math.ceil(sum(b.cpus for b in bundles)) if starts_cluster else None,
            gpus=self.gpus if starts_cluster else None,
            timeout_s=self._config.start_timeout_s,
            also=self._config.forward,
            say=self._say,
        )
        stack.callback(cluster.close)
        self.host = cluster.host

    def devices(self, process: ProcessPlacement) -> Sequence[str]:
        # Ray shows each rank only its own GPU.
        return ["cuda:0" if device.startswith("cuda") else "cpu" for device in process.devices]

    def launch(self, process: ProcessPlacement, spec: GroupSpec) -> Launched:
        from stretto.workers.ray_cluster import ActorProcesses

        assert self._cluster is not None
        shares = self._sharing > 1 and process.device != "cpu"
        share = 1 / (self._sharing if shares else process.close_ranks)
        places = self._positions[process.name]
        return ActorProcesses(spec, self._cluster, places, share, process.python)

    def _count_gpus(self, device: Device) -> int:
        """Count the cluster's GPUs, because the driver's machine may have none."""
        if not self._config.address or device == "cpu":
            return super()._count_gpus(device)
        from stretto.workers.ray_cluster import find

        cluster = find()
        return int(cluster.gpus) if cluster else 0


LAUNCHERS: Mapping[str, type[Launcher]] = {
    "inline": Launcher,  # of a learner with pipeline stages
    "local": Launcher,
    "ray": RayLauncher,
}
"""Launchers by runtime."""


class MemoryWatch:
    """Measures memory of all processes, or of this one on a GPU, on a separate thread."""

    EVERY_S = 1.0  # minimum time between two measurements

    def __init__(self, groups: Sequence[RankGroup], clock: Clock, here: str = "") -> None:
        self._groups = groups
        self._clock = clock
        self._here = here
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._look: Future[Mapping[str, float]] = self._pool.submit(self._used)
        self._since_s = clock.now()
        self._metrics: Mapping[str, float] = {}

    def metrics(self) -> Mapping[str, float]:
        """Return gigabytes by process from the last finished measurement."""
        if self._look.done():
            self._metrics = self._look.result()
            if self._clock.now() - self._since_s >= self.EVERY_S:
                self._since_s = self._clock.now()
                self._look = self._pool.submit(self._used)
        return self._metrics

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _used(self) -> Mapping[str, float]:
        memory_by_process = {group.name: group.used_bytes() for group in self._groups}
        if self._here:
            memory_by_process["stretto"] = [used_bytes(self._here)]
        metrics = dict[str, float]()
        for process, ranks in memory_by_process.items():
            metrics[f"memory/{process}_gb"] = sum(rank.get("", 0) for rank in ranks) / 1e9
            for kind in ("allocated", "reserved", "peak"):  # of the rank whose GPU is fullest
                size = max((rank.get(kind, 0) for rank in ranks), default=0)
                metrics[f"memory/{process}/{kind}_gb"] = size / 1e9
        return {name: size for name, size in metrics.items() if size}


def _check(config: Config, overrides: Overrides) -> None:
    layout, stages = config.cluster.learner_layout, config.pipeline.ranks
    by_object = overrides.actor is not None or overrides.critic is not None
    if layout.ranks > 1 and not stages and by_object:
        raise ConfigError(
            f"cluster.processes: layout.learner = {layout} trains shards in other processes, and a "
            "model that the caller brings as an object is trained in place; name its folder, or "
            "set ranks = 1",
            "object-in-shards",
        )
    if config.model.lora_rank and overrides.actor is not None:
        setting = f"pipeline.ranks = {stages}" if stages else f"runtime = '{config.runtime}'"
        raise ConfigError(
            f"{setting} trains adapters in another process, and cannot merge "
            "them into a model that the caller brings as an object; name its folder, or "
            f"{_one_process(config)}",
            "adapters-of-object",
        )
    rewards = {f"reward model '{n}'": model for n, (model, _) in overrides.reward_models.items()}
    models = {"actor": overrides.actor, "critic": overrides.critic, **rewards}
    named_models = ((name, model) for name, model in models.items() if model is not None)
    for name, model in named_models:
        for path, module in model.named_modules():
            module_class = type(module)
            if module_class.__module__ == "__main__":
                raise ModelError(
                    f"'{path}' of the {name} is of the class '{module_class.__qualname__}', which "
                    "is defined in the script that runs; other processes cannot import it. Move "
                    f"its classes to a module, or {_one_process(config)}",
                    "class-in-script",
                )


def _one_process(config: Config) -> str:
    """Return the remedy for objects that other processes cannot have."""
    settings = [] if config.runtime == "inline" else ["runtime = 'inline'"]
    settings += ["pipeline.ranks = 0"] if config.pipeline.ranks else []
    return f"set {' and '.join(settings)}"


def _rank_names(process: ProcessPlacement) -> list[str]:
    name, other_ranks = process.name, range(1, len(process.devices))
    return [name, *(f"{name}, rank {i}" for i in other_ranks)]


def _needed(placed: RolePlacement, overrides: Overrides, teachers: Collection[str]) -> Overrides:
    # The learner also has the critic, which may start from a reward model.
    has_own_model = placed.scorer in overrides.reward_models or placed.scorer in teachers
    trains = placed.role == LEARNER or placed.scorer == "critic"
    return replace(
        overrides,
        actor=None if has_own_model else overrides.actor,
        reference=overrides.reference if placed.scorer == "reference" else None,
        critic=overrides.critic if trains else None,
        reward_models={
            source: model
            for source, model in overrides.reward_models.items()
            if source == placed.scorer or trains
        },
    )
