"""Placement of roles in processes, with devices and threads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stretto.assembly.controllers import CoreShares, share_cores
from stretto.config import AlgorithmConfig, ClusterConfig, Config, RewardConfig, RolloutConfig
from stretto.config.cluster_config import GENERATOR, LEARNER, ProcessConfig, generator_names
from stretto.config.knobs import Knobs
from stretto.errors import ConfigError, nearest
from stretto.layout import Layout
from stretto.saying import format_size

PROCESS_BYTES = 400 << 20
"""Memory of a process with torch and transformers, before any model (measured: about 350 MB)."""


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """A role's place in a process."""

    role: str  # unique name
    scorer: str = ""  # name of the scorer, shared by its replicas
    host: int | None = None  # number of the generator in the same process
    ranks: Sequence[int] = (0,)  # of the process's, that hold it
    layout: Layout | None = None  # in these ranks (None: a scorer's, by what divides its heads)


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """A process, or several ranks that share its roles."""

    name: str  # in messages and file names
    roles: tuple[RolePlacement, ...]
    threads: int  # of torch in each rank (0: torch's default)
    devices: tuple[str, ...]  # torch device of each rank
    offload: bool = False  # idle roles keep their tensors in host memory
    python: str = ""  # interpreter of the ranks ("": this one)

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def close_ranks(self) -> int:
        """The most neighbouring ranks of a role that must be on one machine."""
        return max(seat.layout.close_ranks if seat.layout else 1 for seat in self.roles)

    @property
    def generates(self) -> bool:
        return any(not seat.scorer and seat.role != LEARNER for seat in self.roles)

    def takes_share(self, rollout: RolloutConfig) -> bool:
        """Return whether an engine takes a share of a GPU's memory, which it measures first."""
        return self.generates and self.device != "cpu" and rollout.capabilities.sizes_cache


def shares_weights(knobs: Knobs, found: Sequence[ProcessPlacement]) -> bool:
    """Return whether all followers are in the learner's process and use its weights."""
    elsewhere = [placed for process in found[1:] for placed in process.roles]
    followers = [placed for placed in elsewhere if placed.scorer in ("", "critic")]
    return not followers and not knobs.copies_weights


def model_scorers(
    algorithm: AlgorithmConfig, reward: RewardConfig, brought: Collection[str] = ()
) -> list[str]:
    """Return the names of model scorers in order, including models passed in (``brought``)."""
    names = [s.name for s in reward.parsed if s.kind.is_model or s.name in brought]
    names += algorithm.teacher_models
    if algorithm.has_reference:
        names.append("reference")
    if algorithm.definition.critic:
        names.append("critic")
    return names


def places(
    config: Config, cores: int, gpus: int, brought: Collection[str] = ()
) -> list[ProcessPlacement]:
    """Place all roles, the learner's process first. Raises ConfigError if that is impossible."""
    models = model_scorers(config.algorithm, config.reward, brought)
    knobs, engines = config.schedule.knobs, config.rollout.engines
    if not config.runtime_kind.has_processes:
        role_names = (LEARNER, *generator_names(engines), *models)
        seats = tuple(RolePlacement(role, role if role in models else "") for role in role_names)
        only_device = _device("", 0, 0, min(gpus, 1))
        return [ProcessPlacement("stretto", seats, config.threads, (only_device,))]
    overlaps = knobs.overlaps(engines)
    in_turns = config.has_stages_inline and not overlaps
    hosted = knobs.hosts_scorers(engines) or in_turns
    shares = share_cores(config.schedule, engines, cores) if overlaps else None
    placements: list[ProcessPlacement] = []
    for process in _processes(_with_stages(config), engines, models, hosted=hosted):
        roles = _roles(process, engines, models)
        ranks, threads = process.ranks, process.threads
        if not threads and shares:
            threads = _threads(roles, shares)
        if not threads and ranks > 1:
            threads = config.threads or cores
        assigned = process.device == "cuda" and config.runtime_kind.assigns_gpus
        device_name = "" if assigned else process.device
        first = sum(device != "cpu" for other in placements for device in other.devices)
        placements.append(
            ProcessPlacement(
                "+".join(role.replace("/", "_") for role in _in_order(process)),
                roles,
                max(threads // ranks, 1) if threads else config.threads,
                tuple(_device(device_name, rank, first + rank, gpus) for rank in range(ranks)),
                process.offload,
                process.python,
            )
        )
    _check_devices(placements, gpus)
    if knobs.migrates(engines):
        _check_generators(engines, placements)
    return placements


def _with_stages(config: Config) -> ClusterConfig:
    """Return the processes by hand, with as many ranks of the learner as its pipelines have."""
    cluster, stages = config.cluster, config.pipeline.ranks
    if not stages:
        return cluster
    learner = cluster.process_of(LEARNER)
    other_processes = [process for process in cluster.processes if process is not learner]
    layouts = {**learner.layout, LEARNER: config.learner_layout}
    staged = learner.model_copy(update={"ranks": stages, "layout": layouts})
    return cluster.model_copy(update={"processes": (staged, *other_processes)})


def _processes(
    cluster: ClusterConfig, engines: int, models: Sequence[str], *, hosted: bool
) -> list[ProcessConfig]:
    rule = cluster.scorers
    if rule == "auto":
        rule = "generators" if hosted else "apart"
    fixed_roles = (LEARNER, *generator_names(engines))
    seats = [seat for process in cluster.processes for seat in _seats(process, engines, models)]
    roles = [seat.role for seat in seats]
    _check_listed(roles, fixed_roles, models)
    placed_roles = {_scorer_of(role, models) or role for role in roles}
    free = [name for name in models if name not in placed_roles]
    processes = list(cluster.processes)
    processes += [ProcessConfig(roles=(role,)) for role in fixed_roles if role not in placed_roles]
    if rule == "apart":
        processes += [ProcessConfig(roles=(name,)) for name in free]
    if rule == "together" and free:
        processes.append(ProcessConfig(roles=tuple(free)))
    if rule == "generators":
        processes = [_hosting(process, engines, free) for process in processes]
    return sorted(processes, key=lambda process: LEARNER not in process.roles)


def _hosting(process: ProcessConfig, engines: int, free: Sequence[str]) -> ProcessConfig:
    """Return the process with a copy of each free scorer for each of its engines."""
    layouts = process.layout
    hosted: Sequence[str] = free
    if GENERATOR in process.roles and engines > 1:
        layout = process.layout_of(GENERATOR, engines) or Layout()
        layouts = {**layouts, **dict.fromkeys(free, layout)}
    elif engines > 1:
        numbers = [role.rpartition(" ")[2] for role in process.roles if role.startswith(GENERATOR)]
        hosted = [f"{name} {number}" for number in numbers for name in free]
    elif not process.generates:
        hosted = []
    return process.model_copy(update={"roles": (*process.roles, *hosted), "layout": layouts})


def _in_order(process: ProcessConfig) -> list[str]:
    return sorted(process.roles, key=lambda role: role != LEARNER)  # sets RoleSetup.shared


def _seats(process: ProcessConfig, engines: int, models: Collection[str]) -> list[RolePlacement]:
    """Return the seats of a process. Copies are roles of their own, in equal parts of the ranks."""
    seats = list[RolePlacement]()
    for role in _in_order(process):
        names, layout = [role], process.layout_of(role, engines if role == GENERATOR else 1)
        if role == GENERATOR:
            names = generator_names(engines)
            _check_engines(process, layout, engines)
        elif layout and layout.dp > 1 and role in models:
            names = [f"{role} {i}" for i in range(layout.dp)]
        size = process.ranks // len(names)
        of_copy = layout.per_copy if layout else None
        for i, name in enumerate(names):
            ranks = range(i * size, (i + 1) * size)
            seats.append(RolePlacement(name, _scorer_of(name, models), None, ranks, of_copy))
    return seats


def _check_engines(process: ProcessConfig, layout: Layout | None, engines: int) -> None:
    if layout is None or layout.ranks != process.ranks:
        raise ConfigError(
            f"cluster.processes: {engines} engines do not divide the {process.ranks} ranks of "
            f"'{', '.join(process.roles)}' evenly; set rollout.engines to a divisor",
            "engines-not-divisor",
        )
    if layout.dp != engines:
        raise ConfigError(
            f"cluster.processes: layout.generator = {layout} has {layout.dp} engines (dp), and "
            f"rollout.engines = {engines}; set both to one number",
            "engines-of-layout",
        )


def _roles(
    process: ProcessConfig, engines: int, models: Collection[str]
) -> tuple[RolePlacement, ...]:
    seats = _seats(process, engines, models)
    names = generator_names(engines)
    generators = [seat for seat in seats if seat.role in names]

    def host(seat: RolePlacement) -> int | None:
        beside = (other for other in generators if set(other.ranks) & set(seat.ranks))
        return next((names.index(generator.role) for generator in beside), None)

    return tuple(replace(seat, host=host(seat)) if seat.scorer else seat for seat in seats)


def _scorer_of(role: str, models: Collection[str]) -> str:
    name, _, number = role.rpartition(" ")
    if role in models:
        return role
    return name if name in models and number.isdecimal() else ""


def _threads(roles: Sequence[RolePlacement], shares: CoreShares) -> int:
    if any(placed.role != LEARNER and not placed.scorer for placed in roles):
        return shares.generating
    return max(shares.training if r.role == LEARNER else shares.scoring for r in roles)


def _device(device: str, rank: int, i: int, gpus: int) -> str:
    if device.startswith("cuda"):
        return f"cuda:{int(device[5:] or 0) + rank}"
    return device or (f"cuda:{i % gpus}" if gpus else "cpu")


def _check_listed(roles: Sequence[str], fixed_roles: Sequence[str], models: Sequence[str]) -> None:
    copies: dict[str, list[str]] = {}
    for role in roles:
        if scorer := _scorer_of(role, models):
            copies.setdefault(scorer, []).append(role)
        elif role not in fixed_roles:
            raise ConfigError(
                f"cluster.processes names the role '{role}', which this run has not. "
                f"{nearest(role, [*fixed_roles, *models])}",
                "unknown-role",
            )
    for scorer, names in copies.items():
        if names != [scorer] and {*names} != {f"{scorer} {i}" for i in range(len(names))}:
            raise ConfigError(
                f"cluster.processes places {', '.join(sorted(names))}: name one '{scorer}', or "
                f"copies from '{scorer} 0' on, each once",
                "copies-not-numbered",
            )


def remarks(
    knobs: Knobs, engines: int, found: Sequence[ProcessPlacement], cores: int, gpus: int
) -> list[str]:
    """Return warnings about a valid but wasteful placement."""
    notes = []
    busy = sum((p.threads or cores) * len(p.devices) for p in found if p.device == "cpu")
    if knobs.overlaps(engines) and busy > 2 * cores:
        ranks = sum(len(p.devices) for p in found)
        apart = sum(all(seat.scorer for seat in p.roles) for p in found) > 1
        remedy = "put scorers together (cluster.scorers = 'together'), or " if apart else ""
        notes.append(
            f"{busy} threads of {ranks} processes share {cores} cores: {remedy}give processes "
            "fewer (cluster.processes)"
        )
    for process in found:
        if process.offload and process.device == "cpu":
            notes.append(
                f"offload: the roles of '{process.name}' work on the CPU, and gain nothing from "
                "copies in the same memory; leave it out, or give them GPUs"
            )
        elif process.offload and knobs.score_on != "batch":
            notes.append(
                f"offload: with schedule.score_on = '{knobs.score_on}' the roles of "
                f"'{process.name}' take turns many times a step, and each waits for its weights; "
                "set schedule.score_on = 'batch'"
            )
    gpus_in_use = {device for process in found for device in process.devices if device != "cpu"}
    if 0 < len(gpus_in_use) < gpus:
        notes.append(f"{gpus - len(gpus_in_use)} of {gpus} GPUs have no role")
    return notes


def memory(process: ProcessPlacement, role_bytes: Mapping[str, int]) -> int:
    """Return the bytes of weights and states on each of the process's ranks."""
    size = Fraction()
    for seat in process.roles:
        name = seat.scorer.split(":")[0] or seat.role.split()[0]
        model = {"generator": "actor", "model": "reward"}.get(name, name)
        if 0 in seat.ranks:
            size += Fraction(role_bytes.get(model, 0), len(seat.ranks))
    return math.ceil(size)


def published(knobs: Knobs, found: Sequence[ProcessPlacement]) -> int:
    return 0 if shares_weights(knobs, found) else knobs.lag + 2


def table(knobs: Knobs, found: Sequence[ProcessPlacement], role_bytes: Mapping[str, int]) -> str:
    """Format the placement as a table with the memory of each process."""
    wide = max(len("roles"), *(len(roles) for process in found for roles in _ranks(process)))
    lines = [f"  {'roles':<{wide}}  {'device':<8} {'threads':>7}  {'weights and states':>18}"]
    for process in found:
        size, threads = format_size(memory(process, role_bytes)), process.threads or "all"
        for roles, device in zip(_ranks(process), process.devices, strict=True):
            lines.append(f"  {roles:<{wide}}  {device:<8} {threads:>7}  {size:>18}")
    copies = published(knobs, found)
    on_their_way = f", and for the learner {copies} copies of the trained weights on their way"
    lines.append(
        f"  On top come {PROCESS_BYTES >> 20} MiB a process, activations, the KV cache"
        f"{on_their_way if copies else ''}."
    )
    return "\n".join(lines)


def _ranks(process: ProcessPlacement) -> list[str]:
    ranks = range(len(process.devices))
    roles = [", ".join(seat.role for seat in process.roles if i in seat.ranks) for i in ranks]
    return [f"{roles[i]}, rank {i}" for i in ranks] if len(ranks) > 1 else roles


def _check_generators(engines: int, placements: Sequence[ProcessPlacement]) -> None:
    """Refuse generators of different layouts, because rollouts move between them with KV caches."""
    names = generator_names(engines)
    cuts = {r.role: len(r.ranks) for p in placements for r in p.roles if r.role in names}
    if len(set(cuts.values())) > 1:
        slices = ", ".join(f"{name}: {cuts[name]}" for name in names)
        raise ConfigError(
            f"cluster.processes cuts generators into different numbers of slices ({slices}), and "
            "rollouts move between them with their keys and values; give all the same number, or "
            "set schedule.migrate = 'off'",
            "generators-cut-differently",
        )


def _check_devices(placements: Sequence[ProcessPlacement], gpus: int) -> None:
    for process in placements:
        if process.device != "cpu" and len(set(process.devices)) < len(process.devices):
            raise ConfigError(
                f"'{process.name}' has {len(process.devices)} ranks, and there are {gpus} GPUs; "
                "lower ranks in cluster.processes, or pipeline.ranks, or set model.device = 'cpu'",
                "too-few-gpus",
            )
        for device in process.devices:
            kind, _, number = device.partition(":")
            if kind == "cuda" and int(number or 0) >= gpus:
                raise ConfigError(
                    f"cluster.processes places '{process.name}' on {device}, and this machine has "
                    f"{gpus} GPUs; name another device",
                    "no-such-gpu",
                )
