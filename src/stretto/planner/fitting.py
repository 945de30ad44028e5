"""The memory of each device in each phase of a step, on paper, before anything is loaded.

Formulas are those of :mod:`stretto.planner.memory`, for this run's placement, types and lengths.
What is certain (weights, states) is refused where it cannot fit; of what depends on how long
responses become (keys and values, activations) only a remark is made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from stretto.assembly.controls import most_in_flight
from stretto.config import Config
from stretto.config.cluster import LEARNER
from stretto.config.sections import MODEL
from stretto.config.training import token_budget
from stretto.errors import ConfigError, ModelError
from stretto.models.info import described, measure
from stretto.models.shapes import Shape
from stretto.planner import memory
from stretto.planner.layout import Mesh
from stretto.runtime.placement import PROCESS_BYTES, Place, Seat, published
from stretto.saying import format_size

PHASES = ("generation", "scoring", "training", "hand-over")
CACHE, PUBLISHED, FROZEN = "keys and values", "published weights", "frozen weights"
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
    def certain(self) -> Counter[str]:
        """What is there whatever the lengths of responses, and its bytes.

        On a CPU frozen weights may be pages of their files, which take no memory of their own.
        """
        of_learner = {w: n for w, n in self.held.items() if "learner" in w or w == PUBLISHED}
        if self.device == "cpu":
            return Counter(of_learner)
        return Counter({what: size for what, size in self.held.items() if what != CACHE})


@dataclass(frozen=True)
class Shapes:
    """The shapes of a run's models. One that is not known beforehand is not counted.

    Attributes:
        actor: of the actor and the reference.
        critic: of the critic; ``None`` where it starts from another model that is not known.
        rewards: of reward models, by source.
        adapters: parameters of the LoRA adapters of actor and critic each; ``None`` where all
            weights are trained.
    """

    actor: Shape
    critic: Shape | None
    rewards: Mapping[str, Shape] = field(default_factory=dict)
    adapters: int | None = None

    @classmethod
    def of(cls, config: Config) -> Shapes:
        """Read the shapes of the models that the settings name.

        Raises:
            ModelError: the actor's cannot be told, or how many parameters adapters have.
        """
        actor, init = described(config.model.name).shape, config.critic.init
        _, adapters = measure(config.model)
        if config.model.lora_rank and adapters is None:
            raise ModelError(f"the layers of '{config.model.name}' are not known by name")
        rewards = {
            s: _valued(s.removeprefix(MODEL)) for s in config.reward.sources if s.startswith(MODEL)
        }
        known = {source: shape for source, shape in rewards.items() if shape}
        if init == "actor":
            return cls(actor, actor.valued(), known, adapters)
        first = next(iter(rewards.values()), None)
        return cls(actor, first if init == "reward" else _valued(init), known, adapters)

    def scorer(self, name: str) -> Shape | None:
        """Return the shape of a scorer that is a model."""
        return {"reference": self.actor, "critic": self.critic, **self.rewards}.get(name)

    def travelling_bytes(self, held: float, width: int) -> float:
        """Return the bytes of a model's trained weights, which are handed over.

        Args:
            width: bytes of each; adapters are float32.
        """
        return width * held if self.adapters is None else memory.SINGLE * self.adapters


def _valued(name: str) -> Shape | None:
    """Return the shape of a model with a scalar head by name, if it can be told."""
    try:
        return described(name).shape.valued()
    except (ModelError, ConfigError):
        return None


def loads(config: Config, found: Sequence[Place], shapes: Shapes, width: int) -> list[Load]:
    """Return the memory of each device.

    Args:
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
                    _add_learner(load, config, found, shapes, width)
                elif model := shapes.scorer(seat.scorer) if seat.scorer else shapes.actor:
                    _add_follower(load, config, seat, place, model, shapes, width)
    return list(by_device.values())


def _add_learner(
    load: Load, config: Config, found: Sequence[Place], shapes: Shapes, width: int
) -> None:
    process = config.cluster.process_of(LEARNER)
    mesh = Mesh(process.fsdp, process.tp)
    models = [shapes.actor]
    if config.algorithm.definition.critic and shapes.critic:
        models.append(shapes.critic)
    tokens = token_budget(config.training.microbatch_tokens, load.device)
    copies = published(config, found)
    for model in models:
        held = model.held(mesh.tensor)
        travelling = shapes.travelling_bytes(held, width)
        if shapes.adapters is None:
            states = memory.state_bytes(model, mesh)
            apart = process.ranks == 1 and width < memory.SINGLE
        else:  # which are their own masters, and few: counted as if shared out like all else
            states, apart = memory.STATE * shapes.adapters / mesh.data, False
            load.held[FROZEN] += round(width * held / mesh.data)
        if apart:
            load.held["learner's weights"] += round(width * held)
        if _rests(load, found[0]):  # moments, and masters that are not the weights
            resting = round(states * (2 + apart) / 4)
            load.held["learner's states"] += round(states) - resting
            for phase in ("training",) if load.at_once else ("scoring", "training"):
                load.work[phase]["learner's moments"] += resting
        else:
            load.held["learner's states"] += round(states)
        load.held[PUBLISHED] += round(copies * travelling / mesh.data)
        load.work["hand-over"]["buckets"] += _buckets(config, travelling)
    recomputed, passes = config.model.gradient_checkpointing, list[dict[str, int]]()
    for model in models:
        kept = memory.activation_bytes(model, tokens, mesh.tensor, checkpointing=recomputed)
        logits = memory.logits_bytes(model, tokens, gradients=True)
        taken = {"activations": round(kept * width / memory.HALF), "logits": round(logits)}
        if process.ranks > 1:
            all_trained = shapes.adapters is None
            taken["gathered"] = round(memory.gathered_bytes(model, mesh, gradients=all_trained))
        passes.append(taken)
    load.work["training"].update(max(passes, key=lambda taken: sum(taken.values())))


def _add_follower(
    load: Load,
    config: Config,
    seat: Seat,
    place: Place,
    model: Shape,
    shapes: Shapes,
    width: int,
) -> None:
    ranks = len(place.devices)
    rests = seat.scorer and _rests(load, place)
    weights = load.work["scoring"] if rests else load.held
    weights[f"{seat.role}'s weights"] += round(width * model.held(ranks))
    follows = not seat.scorer or seat.scorer == "critic"
    travelling = shapes.travelling_bytes(model.held(ranks), width)
    if follows and shapes.adapters is not None:
        weights[f"{seat.role}'s weights"] += round(travelling)
    if not seat.scorer:
        rows = -(-most_in_flight(config) // config.rollout.engines)
        positions = config.task.max_prompt_tokens + config.rollout.max_new_tokens
        token = memory.cache_bytes(model, ranks) * width / memory.HALF
        load.held[CACHE] += round((config.rollout.slots or rows) * positions * token)
    if follows:
        load.work["hand-over"]["buckets"] += _buckets(config, travelling)


def _rests(load: Load, place: Place) -> bool:
    return place.offload and load.device != "cpu"


def _buckets(config: Config, size: float) -> int:
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
        where = "this machine" if load.device == "cpu" else load.device
        if load.certain.total() > there:
            raise ConfigError(
                f"weights and states take {format_size(load.certain.total())} of {where}, which "
                f"has {format_size(there)}, in every phase ({_most(load.certain)}); {name} would "
                f"take {format_size(totals[name])}. Give roles more processes on other devices "
                "(fsdp, tp), a smaller model, or LoRA"
            )
        if totals[name] > _FILLED * there:
            yield (
                f"{name} may take {format_size(totals[name])} of {where}, which has "
                f"{format_size(there)} ({_most(load.phase(name))}); lower rollout.slots or "
                "training.microbatch_tokens if it runs out of memory"
            )


def _most(parts: Counter[str]) -> str:
    return ", ".join(f"{what} {format_size(size)}" for what, size in parts.most_common(3))


def capacity(device: str) -> int:
    """Return the bytes of a device; for ``cpu`` those of this machine."""
    if device == "cpu":
        return int(psutil.virtual_memory().total)
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def planned(config: Config, found: Sequence[Place], width: int) -> list[Load]:
    """Return the memory of each device; nothing where it cannot be told beforehand.

    That is for architectures that are not built like a Llama or GPT-NeoX, and where processes may
    be on other machines.
    """
    if config.cluster.address:
        return []
    try:
        return loads(config, found, Shapes.of(config), width)
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
