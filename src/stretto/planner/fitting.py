"""The memory that a run's settings ask for: tables of it, and the refusal of what cannot fit.

Two views of :mod:`stretto.planner.memory`. A plan of the models (:class:`MemoryPlan`) needs nothing
but numbers of parameters, and counts weights, gradients and optimizer states; ``P`` stands for the
parameters of one model. The memory of each device in each phase (:func:`planned`) needs the shapes
of the models, and counts what comes on top.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import psutil

from stretto.config import Config, ModelConfig
from stretto.config.cluster import LEARNER
from stretto.config.training import token_budget
from stretto.errors import ConfigError, ModelError
from stretto.machine import free_memory, usable_gpus
from stretto.models.info import described, measure
from stretto.models.shapes import Shape
from stretto.planner.layout import Mesh
from stretto.planner.memory import (
    CACHE,
    PHASES,
    PUBLISHED,
    STATE,
    DeviceMemory,
    Follows,
    Trains,
    device_memory,
)
from stretto.runtime.placement import PROCESS_BYTES, ProcessPlacement, places, published
from stretto.saying import format_count, format_size

Role = Literal["actor", "critic", "reference", "reward", "model"]
"""Models of a run; ``model`` is the only one in supervised training."""
ROLES: tuple[Role, ...] = ("actor", "critic", "reference", "reward")
TRAINED_ROLES: frozenset[Role] = frozenset({"actor", "critic", "model"})

GPU_BYTES = 80 * 10**9


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes of one model: weights, and gradients and both moments of Adam where it is trained."""

    role: Role
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Counting:
    """The plan under one way of counting."""

    roles: tuple[RoleMemory, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all models."""
        return sum(role.total_bytes for role in self.roles)

    def gpus(self) -> int:
        """Fewest GPUs of 80 GB whose memory together holds all models."""
        return math.ceil(self.total_bytes / GPU_BYTES)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of actor, critic, reference and reward model.

    Attributes:
        parameters: P, of each model.
        trained: trained parameters of actor and critic each; P unless LoRA is on.
        sixteen_bit: everything at 16 bits and no gradients kept, as systems papers count:
            weights 2P, Adam 4P, so 6P a trained model, 2P a frozen one, 16P in all.
        mixed: mixed precision, what Stretto's learner keeps: fp32 master weights, gradients and
            Adam moments (16 bytes a trained parameter), frozen weights at the compute type's width.
    """

    parameters: int
    trained: int
    sixteen_bit: Counting
    mixed: Counting


def memory_plan(
    parameters: int,
    *,
    trained: int | None = None,
    roles: Sequence[Role] = ROLES,
    frozen_bytes: int = 2,
    reward: int | None = None,
) -> MemoryPlan:
    """Count the memory of a run.

    Args:
        parameters: P, of each model.
        trained: trained parameters of actor and critic each, where these are adapters added to
            frozen weights (LoRA); ``None`` trains all P.
        frozen_bytes: bytes of a frozen weight in the mixed counting: 2 (bf16) or 4 (fp32).
        reward: parameters of the reward models, all together, where they are not P.

    Raises:
        ConfigError: a count below 1.
    """
    for count in (parameters, trained, reward):
        if count is not None and count < 1:
            raise ConfigError(f"a number of parameters is 1 or more; got {count}")
    frozen, learned = (0, parameters) if trained is None else (parameters, trained)

    def of(width: int, state: int) -> Counting:
        sizes = []
        for role in roles:
            size = width * frozen + state * learned
            if role not in TRAINED_ROLES:
                size = width * (reward if role == "reward" and reward else parameters)
            sizes.append(RoleMemory(role, size))
        return Counting(tuple(sizes))

    return MemoryPlan(parameters, learned, of(2, 6), of(frozen_bytes, STATE))


def plan_for(config: Config) -> MemoryPlan:
    """The plan of a run: with the models that it has, its adapters and its compute type.

    Raises:
        ModelError: the actor's architecture cannot be read.
    """
    parameters, trained = measure(config.model)
    roles: list[Role] = ["actor"]
    if config.algorithm.definition.critic:
        roles.append("critic")
    if (
        config.algorithm.has_reference and not config.model.lora_rank
    ):  # else the actor, adapters off
        roles.append("reference")
    rewards = [source.model for source in config.reward.models]
    if rewards:
        roles.append("reward")
    return memory_plan(
        parameters,
        trained=trained,
        roles=roles,
        frozen_bytes=width(config.model),
        reward=sum(_size_of_reward_model(n, parameters) for n in rewards) or None,
    )


def _size_of_reward_model(name: str, otherwise: int) -> int:
    try:
        return described(name).parameters
    except ModelError:
        return otherwise


def plan_for_one(config: ModelConfig) -> MemoryPlan:
    """The plan of supervised training: one model, with its adapters and its compute type.

    Raises:
        ModelError: the architecture cannot be read.
    """
    parameters, trained = measure(config)
    return memory_plan(parameters, trained=trained, roles=["model"], frozen_bytes=width(config))


def width(config: ModelConfig) -> int:
    """Bytes of a weight in the compute type; where that is to be measured, the wider one's."""
    on_gpu = config.device != "cpu" and usable_gpus() > 0
    return 2 if config.dtype == "bfloat16" or (config.dtype == "auto" and on_gpu) else 4


def format_plan(plan: MemoryPlan) -> str:
    """The plan as a table, both countings side by side, with what each of them means."""
    parameters, trained = format_count(plan.parameters), f"{format_count(plan.trained)} trained"
    if plan.trained == plan.parameters:
        trained = "all trained"
    learned = " and ".join(r.role for r in plan.mixed.roles if r.role in TRAINED_ROLES)
    where = "" if learned == "model" else f" in {learned}"
    lines = [
        f"Memory for weights, gradients and Adam states; {parameters} parameters a model "
        f"({trained}{where})",
        f"  {'model':<10} {'16-bit':>10}   {'mixed precision':>15}",
    ]
    pairs = zip(plan.sixteen_bit.roles, plan.mixed.roles, strict=True)
    for low, mixed in pairs:
        sixteen, own = format_size(low.total_bytes), format_size(mixed.total_bytes)
        lines.append(f"  {low.role:<10} {sixteen:>10}   {own:>15}")
    low_total, mixed_total = plan.sixteen_bit.total_bytes, plan.mixed.total_bytes
    lines += [
        f"  {'total':<10} {format_size(low_total):>10}   {format_size(mixed_total):>15}",
        f"  {'80 GB GPUs':<10} {f'>= {plan.sixteen_bit.gpus()}':>10}   "
        f"{f'>= {plan.mixed.gpus()}':>15}",
        "  16-bit: weights 2 bytes and Adam 4 bytes a parameter, as systems papers count.",
        "  mixed precision: fp32 master weights, gradients and Adam states, 16 bytes a trained "
        "parameter. This is what Stretto uses.",
        "  On top come activations, the KV cache, and the 2 bytes of a trained weight's bfloat16 "
        "copy, where that is computed with.",
    ]
    return "\n".join(lines)


_FILLED = 0.9
"""Share of a device that can be filled: libraries and fragmentation take the rest."""


@dataclass(frozen=True, slots=True)
class Load(DeviceMemory):
    """The memory of one device, of all processes on it.

    Attributes:
        device: as torch names it; ``cpu`` stands for the machine's memory.
        at_once: whether phases go on side by side.
    """

    device: str = ""
    at_once: bool = False

    def phase(self, name: str) -> Counter[str]:
        """Return what takes memory in a phase, and how many bytes."""
        return self.during(*(PHASES if self.at_once else (name,)))

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
        rewards = {source.name: _valued(source.model) for source in config.reward.models}
        known = {source: shape for source, shape in rewards.items() if shape}
        if init == "actor":
            return cls(actor, actor.valued(), known, adapters)
        first = next(iter(rewards.values()), None)
        return cls(actor, first if init == "reward" else _valued(init), known, adapters)

    def scorer(self, name: str) -> Shape | None:
        """Return the shape of a scorer that is a model."""
        return {"reference": self.actor, "critic": self.critic, **self.rewards}.get(name)


def _valued(name: str) -> Shape | None:
    """Return the shape of a model with a scalar head by name, if it can be told."""
    try:
        return described(name).shape.valued()
    except (ModelError, ConfigError):
        return None


def loads(
    config: Config, found: Sequence[ProcessPlacement], shapes: Shapes, width: int
) -> list[Load]:
    """Return the memory of each device.

    Args:
        width: bytes of a weight in the type that is computed in.
    """
    at_once = config.schedule.knobs.overlaps(config.rollout.engines)
    by_device: dict[str, Load] = {}
    for place in found:
        holds = device_memory(_parts(config, found, place, shapes, width))
        holds.held["processes"] += PROCESS_BYTES
        for device in place.devices:
            load = by_device.setdefault(device, Load(device=device, at_once=at_once))
            load.add(holds)
    return list(by_device.values())


def _parts(
    config: Config,
    found: Sequence[ProcessPlacement],
    place: ProcessPlacement,
    shapes: Shapes,
    width: int,
) -> Iterator[Trains | Follows]:
    """Yield what the roles of a process hold on each of its devices."""
    process, bucket = config.cluster.process_of(LEARNER), config.cluster.bucket_mb << 20
    mesh, rests = Mesh(process.fsdp, process.tp), place.offload and place.device != "cpu"
    tokens = token_budget(config.training.microbatch_tokens, place.device)
    at_once = config.schedule.knobs.overlaps(config.rollout.engines)
    for seat in place.roles:
        if seat.role == LEARNER:
            critic = shapes.critic if config.algorithm.definition.critic else None
            models = (shapes.actor, critic) if critic else (shapes.actor,)
            yield Trains(
                models,
                mesh,
                tokens,
                models,
                checkpointing=config.model.gradient_checkpointing,
                width=width,
                adapters=shapes.adapters,
                bucket=bucket,
                versions=published(config, found),
                copies=process.ranks == 1,
                # Moments, and masters that are not the weights.
                moments=(("training",) if at_once else ("scoring", "training")) if rests else (),
            )
        elif model := shapes.scorer(seat.scorer) if seat.scorer else shapes.actor:
            generates = not seat.scorer
            rows = -(-config.most_in_flight // config.rollout.engines)
            yield Follows(
                f"{seat.role}'s weights",
                model,
                len(place.devices),
                config.rollout.prefill_tokens if generates else tokens,
                mesh if generates or seat.scorer == "critic" else None,
                rows=config.rollout.slots or rows if generates else None,
                positions=config.task.max_prompt_tokens + config.rollout.max_new_tokens,
                logits=seat.scorer == "reference",
                width=width,
                adapters=shapes.adapters,
                bucket=bucket,
                rests=rests and not generates,
            )


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


def planned(config: Config, found: Sequence[ProcessPlacement], width: int) -> list[Load]:
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


def check_here(config: Config) -> None:
    """Refuse a run in this process whose models do not fit into the memory that is free.

    Raises:
        ConfigError: they do not.
    """
    if config.runtime == "inline" and (config.model.device == "cpu" or not usable_gpus()):
        require(config, free_memory(), "this machine")


def check_devices(config: Config) -> list[str]:
    """Refuse a run whose models do not fit on its devices, before it starts; torch is imported.

    Returns:
        Remarks on what might not fit.

    Raises:
        ConfigError: weights and states do not fit.
    """
    import torch

    from stretto.models.backend import pick_device, pick_dtype

    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    if config.runtime == "inline":
        if on_gpu:
            require(config, torch.cuda.mem_get_info()[0], torch.cuda.get_device_name())
        return []
    if config.cluster.address:  # devices of other machines
        return []
    width = pick_dtype(config.model.dtype, pick_device(config.model.device)).itemsize
    gpus = torch.cuda.device_count() if on_gpu else 0
    found = places(config, config.threads or torch.get_num_threads(), gpus)
    return list(check(planned(config, found, width), capacity))


def require(config: Config, free: int, where: str) -> None:
    """Refuse a run whose weights, gradients and optimizer states exceed what is free.

    Args:
        free: bytes.
        where: they are free, as it stands in a message.

    Raises:
        ConfigError: see above; the message says what would take less, and how much that takes.
    """
    try:
        plan = plan_for(config)
    except ModelError:  # its files are not here to be counted
        return
    needed = plan.mixed.total_bytes
    if needed > free:
        parts = ", ".join(f"{r.role} {format_size(r.total_bytes)}" for r in plan.mixed.roles)
        raise ConfigError(
            f"'{config.model.name}' takes {format_size(needed)} for weights, gradients and "
            f"optimizer states ({parts}), and {where} has {format_size(free)} free. "
            f"Choose {_remedies(config)}"
        )


def _remedies(config: Config) -> str:
    """Return what takes less memory, and how much it takes."""
    lora = {"model": config.model.model_copy(update={"lora_rank": 16})}
    rloo = {"algorithm": config.algorithm.model_copy(update={"name": "rloo"})}
    found = ["a smaller model"]
    if not config.model.lora_rank:
        found.append(f"LoRA (--model.lora-rank 16: {_size(config.model_copy(update=lora))})")
    if config.algorithm.definition.critic:
        found.append(
            "an algorithm without a critic (--algorithm.name rloo --rollout.samples-per-prompt 2: "
            f"{_size(config.model_copy(update=rloo))})"
        )
    return ", or ".join(found)


def _size(config: Config) -> str:
    return format_size(plan_for(config).mixed.total_bytes)
