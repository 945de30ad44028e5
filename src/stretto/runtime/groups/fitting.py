"""The memory of each device in each phase of a step, on paper, before anything is loaded.

Formulas are those of :mod:`stretto.planning.memory`, for this run's placement, types and lengths.
What is certain (weights, states) is refused where it cannot fit; of what depends on how long
responses become (keys and values, activations) only a remark is made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch

from stretto.assembly.controls import most_in_flight
from stretto.config import Config
from stretto.config.cluster import LEARNER
from stretto.errors import ConfigError, ModelError
from stretto.models.forward import token_budget
from stretto.models.memory import format_size, measure_shape
from stretto.planning import memory
from stretto.planning.layout import Mesh
from stretto.planning.shapes import Shape
from stretto.runtime.groups.placement import PROCESS_BYTES, Place, Seat, lends

PHASES = ("generation", "scoring", "training", "hand-over")
CACHE = "keys and values"
_FILLED = 0.9
"""Share of a device that can be filled: libraries and fragmentation take the rest."""


@dataclass(frozen=True)
class Load:
    """The memory of one device.

    Attributes:
        device: as torch names it; ``cpu`` stands for the machine's memory.
        held: bytes that are there all the time, by what takes them.
        work: bytes that come on top in each phase.
        at_once: whether phases go on side by side.
    """

    device: str
    held: Counter[str] = field(default_factory=Counter)
    work: Mapping[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    at_once: bool = False

    def phase(self, name: str) -> Counter[str]:
        """Return what takes memory in a phase, and how many bytes."""
        names = PHASES if self.at_once else (name,)
        return sum((self.work[phase] for phase in names), self.held)

    @property
    def certain(self) -> int:
        """Bytes that are there whatever the lengths of responses."""
        return sum(self.held.values()) - self.held[CACHE]


def loads(config: Config, found: Sequence[Place], shape: Shape, width: int) -> list[Load]:
    """Return the memory of each device.

    Args:
        config: of the run.
        found: its places.
        shape: of the actor; critic, reference and reward models are taken to be like it.
        width: bytes of a weight in the type that is computed in.
    """
    at_once = config.schedule.knobs.overlaps(config.rollout.engines)
    by_device: dict[str, Load] = {}
    for place in found:
        for device in place.devices:
            load = by_device.setdefault(device, Load(device, at_once=at_once))
            load.held["processes"] += PROCESS_BYTES
            for seat in place.seats:
                if seat.role == LEARNER:
                    _add_learner(load, config, found, shape, width)
                else:
                    _add_follower(load, config, seat, len(place.devices), shape, width)
    return list(by_device.values())


def _add_learner(
    load: Load, config: Config, found: Sequence[Place], shape: Shape, width: int
) -> None:
    process = config.cluster.process_of(LEARNER)
    mesh = Mesh(process.fsdp, process.tp)
    models = [shape, shape.valued()] if config.algorithm.definition.critic else [shape]
    tokens = token_budget(config.training.microbatch_tokens, torch.device(load.device))
    copies = 0 if lends(config, found) else config.schedule.knobs.lag + 2
    for model in models:
        held = model.held(mesh.tensor)
        load.held["learner's states"] += round(memory.state_bytes(model, mesh))
        if process.ranks == 1 and width < memory.SINGLE:
            load.held["learner's weights"] += round(width * held)
        load.held["published weights"] += round(copies * width * held / mesh.data)
        load.work["hand-over"]["buckets"] += _buckets(config, width * held)
    recomputed, passes = config.model.gradient_checkpointing, list[dict[str, int]]()
    for model in models:
        kept = memory.activation_bytes(model, tokens, mesh.tensor, checkpointing=recomputed)
        logits = memory.logits_bytes(model, tokens, gradients=True)
        taken = {"activations": round(kept * width / memory.HALF), "logits": round(logits)}
        if process.ranks > 1:
            taken["gathered"] = round(memory.gathered_bytes(model, mesh, gradients=True))
        passes.append(taken)
    load.work["training"].update(max(passes, key=lambda taken: sum(taken.values())))


def _add_follower(
    load: Load, config: Config, seat: Seat, ranks: int, shape: Shape, width: int
) -> None:
    actor_like = not seat.scorer or seat.scorer == "reference"
    model = shape if actor_like else shape.valued()
    load.held[f"{seat.role}'s weights"] += round(width * model.held(ranks))
    if not seat.scorer:
        rows = -(-most_in_flight(config) // config.rollout.engines)
        positions = config.task.max_prompt_tokens + config.rollout.max_new_tokens
        token = memory.cache_bytes(model, ranks) * width / memory.HALF
        load.held[CACHE] += round((config.rollout.slots or rows) * positions * token)
    if not seat.scorer or seat.scorer == "critic":
        load.work["hand-over"]["buckets"] += _buckets(config, width * model.held(ranks))


def _buckets(config: Config, size: float) -> int:
    """Return the bytes of two buckets for weights of a size."""
    return 2 * min(config.cluster.bucket_mb << 20, round(size))


def check(found: Sequence[Load], capacity: Callable[[str], int]) -> Iterator[str]:
    """Yield remarks on what might not fit.

    Args:
        found: the memory of each device.
        capacity: gives a device's bytes.

    Raises:
        ConfigError: weights and states alone do not fit, in a phase that is named.
    """
    for load in found:
        there = capacity(load.device)
        totals = {name: load.phase(name).total() for name in PHASES}
        name = max(totals, key=lambda phase: totals[phase])
        parts = load.phase(name).most_common(2)
        most = " and ".join(f"{what} {format_size(size)}" for what, size in parts)
        where = "this machine" if load.device == "cpu" else load.device
        if load.certain > there:
            raise ConfigError(
                f"{name} takes {format_size(totals[name])} of {where}, which has "
                f"{format_size(there)} (most of it: {most}); weights and states alone take "
                f"{format_size(load.certain)}. Give roles more processes on other devices (fsdp, "
                "tp), a smaller model, or LoRA"
            )
        if totals[name] > _FILLED * there:
            yield (
                f"{name} may take {format_size(totals[name])} of {where}, which has "
                f"{format_size(there)} (most of it: {most}); lower rollout.slots or "
                "training.microbatch_tokens if it runs out of memory"
            )


def capacity(device: str) -> int:
    """Return the bytes of a device; for ``cpu`` those of this machine."""
    if device == "cpu":
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(device).total_memory)


def planned(config: Config, found: Sequence[Place], width: int) -> list[Load]:
    """Return the memory of each device; nothing where it cannot be told beforehand.

    That is under LoRA, for architectures that are not built like a Llama or GPT-NeoX, and where
    processes may be on other machines.
    """
    if config.model.lora_rank or config.cluster.address:
        return []
    try:
        return loads(config, found, measure_shape(config.model), width)
    except ModelError:
        return []


def table(found: Sequence[Load]) -> str:
    """Return the memory of each device by phase, as a table."""
    lines = [f"  {'device':<8}" + "".join(f"  {name:>10}" for name in PHASES) + "  most of it"]
    for load in found:
        totals = {name: load.phase(name).total() for name in PHASES}
        name = max(totals, key=lambda phase: totals[phase])
        ((most, _),) = load.phase(name).most_common(1)
        cells = "".join(f"  {format_size(size):>10}" for size in totals.values())
        lines.append(f"  {load.device:<8}{cells}  {most}")
    return "\n".join(lines)
