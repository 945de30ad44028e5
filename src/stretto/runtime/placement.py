"""The placement of roles on processes: which stand together, on what, with how many threads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.assembly.controls import CoreShares, share_cores
from stretto.config import ClusterConfig, Config
from stretto.config.cluster import LEARNER, ProcessConfig, generator_names
from stretto.errors import ConfigError, nearest
from stretto.saying import format_size

if TYPE_CHECKING:
    from stretto.models.pieces import Layout

PROCESS_BYTES = 400 << 20
"""Memory of a process with torch and transformers, before any model (measured: about 350 MB)."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A role, and where in the schedule it sits.

    Attributes:
        role: unique name.
        scorer: name of the scorer, which replicas share; empty for other roles.
        host: the generator in whose process it sits, by number; ``None`` for none.
    """

    role: str
    scorer: str = ""
    host: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A process, or several ranks that hold its roles together.

    Attributes:
        name: for messages and files.
        seats: its roles.
        threads: of torch, in each rank; 0 leaves its choice.
        devices: of each rank, as torch names it.
        offload: whether roles leave tensors in the host's memory while others of them work.
        python: interpreter of the ranks; empty for this one.
    """

    name: str
    seats: tuple[Seat, ...]
    threads: int
    devices: tuple[str, ...]
    offload: bool = False
    python: str = ""

    @property
    def device(self) -> str:
        """The device of its first rank."""
        return self.devices[0]


def learner_layout(cluster: ClusterConfig) -> Layout:
    """Return the layout of the learner's ranks."""
    from stretto.models.pieces import Layout

    process = cluster.process_of(LEARNER)
    return Layout(process.fsdp, process.tp)


def lends(config: Config, found: Sequence[Place]) -> bool:
    """Return whether all who follow the learner are in its process, and never behind it."""
    elsewhere = [seat for place in found[1:] for seat in place.seats]
    followers = [s for s in elsewhere if not s.scorer or s.scorer == "critic"]
    return not followers and not config.schedule.knobs.lag


def model_scorers(config: Config, brought: Collection[str] = ()) -> list[str]:
    """Return the names of all scorers that are models, in the order of the schedule's replicas.

    Args:
        brought: sources that are models which the caller brings.
    """
    names = [s.name for s in config.reward.parsed if s.kind == "model" or s.name in brought]
    if config.algorithm.has_reference:
        names.append("reference")
    if config.algorithm.definition.critic:
        names.append("critic")
    return names


def places(config: Config, cores: int, gpus: int, brought: Collection[str] = ()) -> list[Place]:
    """Place all roles of a run on processes, the learner's first.

    Args:
        gpus: of the machine; 0 places all on the CPU.
        brought: see :func:`model_scorers`.

    Raises:
        ConfigError: the settings place a role that the run has not, or on a GPU that is not there.
    """
    models = model_scorers(config, brought)
    named = {
        _scorer_of(role, models) or role
        for process in config.cluster.processes
        for role in process.roles
    }
    knobs, engines, rule = config.schedule.knobs, config.rollout.engines, config.cluster.scorers
    if rule == "auto":
        rule = "generators" if knobs.hosts_scorers(engines) else "apart"
    free = [name for name in models if name not in named]
    hosted = _hosted(engines, free) if rule == "generators" else [()] * engines
    groups = _by_hand(config.cluster, models, hosted)
    by_rule = (seats for seats in _by_rule(rule, named, free, hosted) if seats)
    groups += [(seats, ProcessConfig(roles=(seats[0].role,))) for seats in by_rule]
    groups.sort(key=lambda group: all(seat.role != LEARNER for seat in group[0]))
    overlap = knobs.overlaps(engines)
    shares = share_cores(config.schedule, engines, cores) if overlap else None
    found: list[Place] = []
    for seats, process in groups:
        ranks, threads = process.ranks, process.threads
        if not threads and shares:
            threads = _threads({_kind(seat) for seat in seats}, shares)
        if not threads and ranks > 1:
            threads = config.threads or cores
        name = "+".join(seat.role.replace("/", "_") for seat in seats)
        first = sum(len(place.devices) for place in found)
        found.append(
            Place(
                name,
                seats,
                max(threads // ranks, 1) if threads else config.threads,
                tuple(_device(process.device, rank, first + rank, gpus) for rank in range(ranks)),
                process.offload,
                process.python,
            )
        )
    _check_devices(found, gpus)
    if knobs.migrates(engines):
        _check_generators(engines, found)
    return found


def remarks(config: Config, found: Sequence[Place], cores: int, gpus: int) -> list[str]:
    """Return remarks on a placement that is possible, and wasteful."""
    said = []
    busy = sum(
        (place.threads or cores) * len(place.devices) for place in found if place.device == "cpu"
    )
    overlap = config.schedule.knobs.overlaps(config.rollout.engines)
    if overlap and busy > 2 * cores:
        said.append(
            f"{busy} threads of {len(found)} processes share {cores} cores: put scorers together "
            "(cluster.scorers = 'together'), or give processes fewer (cluster.processes)"
        )
    for place in found:
        if place.offload and place.device == "cpu":
            said.append(
                f"offload: the roles of '{place.name}' work on the CPU, and gain nothing from "
                "copies in the same memory; leave it out, or give them GPUs"
            )
        elif place.offload and config.schedule.knobs.score_on != "batch":
            said.append(
                f"offload: with score_on = '{config.schedule.knobs.score_on}' the roles of "
                f"'{place.name}' take turns many times a step, and each waits for its weights; set "
                "score_on = 'batch'"
            )
    used = {device for place in found for device in place.devices if device != "cpu"}
    if 0 < len(used) < gpus:
        said.append(f"{gpus - len(used)} of {gpus} GPUs have no role")
    return said


def memory(place: Place, role_bytes: Mapping[str, int]) -> int:
    """Return about how many bytes of weights, gradients and optimizer states a rank holds.

    Args:
        role_bytes: of ``learner`` (actor and critic as they are trained), and of a frozen copy of
            each model: ``actor``, ``critic``, ``reference``, ``reward``.
    """
    total = 0
    for seat in place.seats:
        name = seat.scorer.split(":")[0] if seat.scorer else seat.role.split()[0]
        model = {"generator": "actor", "model": "reward"}.get(name, name)
        total += role_bytes.get(model, 0)
    return -(-total // len(place.devices))


def published(config: Config, found: Sequence[Place]) -> int:
    """Return how many versions of the trained weights the learner keeps copies of."""
    return 0 if lends(config, found) else config.schedule.knobs.lag + 2


def table(config: Config, found: Sequence[Place], role_bytes: Mapping[str, int]) -> str:
    """Return the placement as a table, with the memory of each process."""
    wide = max(len("roles"), *(len(roles) for place in found for roles in _ranks(place)))
    lines = [f"  {'roles':<{wide}}  {'device':<8} {'threads':>7}  {'weights and states':>18}"]
    for place in found:
        size, threads = format_size(memory(place, role_bytes)), place.threads or "all"
        for roles, device in zip(_ranks(place), place.devices, strict=True):
            lines.append(f"  {roles:<{wide}}  {device:<8} {threads:>7}  {size:>18}")
    copies = published(config, found)
    on_their_way = f", and for the learner {copies} copies of the trained weights on their way"
    lines.append(
        f"  On top come {PROCESS_BYTES >> 20} MiB a process, activations, the KV cache"
        f"{on_their_way if copies else ''}."
    )
    return "\n".join(lines)


def _ranks(place: Place) -> list[str]:
    roles, ranks = ", ".join(seat.role for seat in place.seats), len(place.devices)
    return [f"{roles}, rank {i}" for i in range(ranks)] if ranks > 1 else [roles]


def _threads(kinds: set[str], shares: CoreShares) -> int:
    if "generating" in kinds:
        return shares.generating
    return max(shares.training if kind == "training" else shares.scoring for kind in kinds)


def _kind(seat: Seat) -> str:
    if seat.role == LEARNER:
        return "training"
    return "scoring" if seat.scorer else "generating"


def _hosted(engines: int, scorers: Sequence[str]) -> list[tuple[Seat, ...]]:
    """Return the copies of scorers that each generator hosts."""
    return [
        tuple(Seat(f"{name} {i}" if engines > 1 else name, name, i) for name in scorers)
        for i in range(engines)
    ]


def _by_hand(
    cluster: ClusterConfig, models: Sequence[str], hosted: Sequence[tuple[Seat, ...]]
) -> list[tuple[tuple[Seat, ...], ProcessConfig]]:
    """Return the processes that the settings list, with their seats."""
    generators = generator_names(len(hosted))
    known = [LEARNER, *generators, *models]
    groups = []
    for process in cluster.processes:
        host = next((generators.index(r) for r in process.roles if r in generators), None)
        seats = []
        for role in process.roles:
            scorer = _scorer_of(role, models)
            if not scorer and role not in known:
                raise ConfigError(
                    f"cluster.processes names the role '{role}', which this run has not. "
                    f"{nearest(role, known)}"
                )
            seats.append(Seat(role, scorer, host) if scorer else Seat(role))
        seats.sort(key=lambda seat: seat.role != LEARNER)  # others look for what it leaves them
        groups.append(((*seats, *(hosted[host] if host is not None else ())), process))
    _check_copies([seat for seats, _ in groups for seat in seats if seat.scorer])
    return groups


def _scorer_of(role: str, models: Collection[str]) -> str:
    name, _, number = role.rpartition(" ")
    if role in models:
        return role
    return name if name in models and number.isdecimal() else ""


def _check_copies(seats: Sequence[Seat]) -> None:
    """Refuse copies of a scorer that are not numbered from 0, or stand beside one without."""
    roles: dict[str, list[str]] = {}
    for seat in seats:
        roles.setdefault(seat.scorer, []).append(seat.role)
    for scorer, found in roles.items():
        wanted = [f"{scorer} {i}" for i in range(len(found))]
        if sorted(found) != sorted(wanted) and found != [scorer]:
            raise ConfigError(
                f"cluster.processes places {', '.join(sorted(found))}: name one '{scorer}', or "
                f"copies from '{scorer} 0' on, each once"
            )


def _by_rule(
    rule: str, placed: set[str], scorers: Sequence[str], hosted: Sequence[tuple[Seat, ...]]
) -> Iterator[tuple[Seat, ...]]:
    """Yield the processes of all roles that are not placed yet."""
    if LEARNER not in placed:
        yield (Seat(LEARNER),)
    for generator, copies in zip(generator_names(len(hosted)), hosted, strict=True):
        if generator not in placed:
            yield Seat(generator), *copies
    if rule == "together":
        yield tuple(Seat(name, name) for name in scorers)
    if rule == "apart":
        for name in scorers:
            yield (Seat(name, name),)


def _device(given: str, rank: int, i: int, gpus: int) -> str:
    if given.startswith("cuda"):
        return f"cuda:{int(given[5:] or 0) + rank}"
    return given or (f"cuda:{i % gpus}" if gpus else "cpu")


def _check_generators(engines: int, found: Sequence[Place]) -> None:
    """Refuse generators of different cuts, as rollouts move between them with keys and values."""
    names = generator_names(engines)
    cuts = {s.role: len(p.devices) for p in found for s in p.seats if s.role in names}
    if len(set(cuts.values())) > 1:
        said = ", ".join(f"{name}: {cuts[name]}" for name in names)
        raise ConfigError(
            f"cluster.processes cuts generators into different numbers of slices ({said}), and "
            "rollouts move between them with their keys and values; give all the same tp, or set "
            "schedule.migrate = 'off'"
        )


def _check_devices(found: Sequence[Place], gpus: int) -> None:
    for place in found:
        if place.device != "cpu" and len(set(place.devices)) < len(place.devices):
            raise ConfigError(
                f"'{place.name}' has {len(place.devices)} ranks, and there are {gpus} GPUs; lower "
                "fsdp or tp in cluster.processes, or set model.device = 'cpu'"
            )
        for device in place.devices:
            kind, _, number = device.partition(":")
            if kind == "cuda" and int(number or 0) >= gpus:
                raise ConfigError(
                    f"cluster.processes places '{place.name}' on {device}, and this machine has "
                    f"{gpus} GPUs; name another device"
                )
