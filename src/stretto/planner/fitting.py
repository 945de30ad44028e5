"""The memory that a run's settings need: tables of it, and refusal of runs that cannot fit.
:class:`MemoryPlan` counts weights, gradients and optimizer states by numbers of parameters.
:class:`RunMemory` counts all memory of each device, phase by phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import psutil

from stretto.config import AlgorithmConfig, Config, ModelConfig, RewardConfig
from stretto.config.cluster_config import LEARNER
from stretto.config.training_config import token_budget
from stretto.errors import ConfigError, ModelError
from stretto.layout import Layout
from stretto.machine import free_memory, usable_gpus
from stretto.models.info import described, measure
from stretto.models.shapes import Shape
from stretto.planner.memory_model import (
    CACHE,
    COMMUNICATOR,
    CONTEXT,
    NF4,
    PHASES,
    PUBLISHED,
    SHARE,
    STATE,
    Adapters,
    DeviceMemory,
    trained_bytes,
)
from stretto.runtime.placement import (
    PROCESS_BYTES,
    ProcessPlacement,
    RolePlacement,
    places,
    published,
)
from stretto.saying import format_count, format_size

ROLES = ("actor", "critic", "reference", "reward")
TRAINED_ROLES = frozenset({"actor", "critic", "model"})
"""Models that are trained. ``model`` is the only one in supervised training."""
GPU_BYTES = 80 * 10**9
FILLED = 0.9  # Share of a device that can be filled. Libraries and fragmentation take the rest.


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of weights, and of the gradients and Adam states of trained models, by model."""

    parameters: int  # P, of each model
    trained: int  # of actor and critic each: P unless LoRA is on
    # Everything at 16 bits without gradients, as systems papers count: weights 2P, Adam 4P, so 6P a
    # trained model, 2P a frozen one, 16P in total.
    sixteen_bit: Counter[str]
    # Mixed precision, as in Stretto's learner: fp32 master weights, gradients and Adam moments (16
    # bytes a trained parameter), frozen weights at the compute type's width.
    mixed: Counter[str]


def memory_plan(
    parameters: int,
    adapters: int | None = None,
    *,
    models: Mapping[str, int] = {},
    frozen_bytes: int = 2,
    in_4bit: int = 0,
) -> MemoryPlan:
    """Count the memory of a run. Raises ConfigError for a count below 1.

    Args:
        adapters: LoRA parameters of actor and critic each, both on the actor's weights; ``None``
            trains all.
        models: parameters by model; if empty, ``parameters`` for each of four.
        frozen_bytes: bytes of a frozen weight in the mixed counting: 2 (bf16) or 4 (fp32).
        in_4bit: parameters in 4 bits, without adapters.
    """
    models = models or dict.fromkeys(ROLES, parameters)
    for count in (parameters, *([] if adapters is None else [adapters]), *models.values()):
        if count < 1:
            raise ConfigError(f"a number of parameters is 1 or more; got {count}", "no-parameters")

    def counted(width: int, state: int) -> Counter[str]:
        states, frozen = map(round, trained_bytes(parameters, adapters, 1, width, state))
        frozen -= round((width - NF4) * in_4bit)
        trained = dict.fromkeys(TRAINED_ROLES, states + frozen) | {"critic": states}
        return Counter({role: trained.get(role, width * size) for role, size in models.items()})

    mixed = counted(frozen_bytes, STATE)
    return MemoryPlan(parameters, adapters or parameters, counted(2, 6), mixed)


def plan_for(
    model: ModelConfig, algorithm: AlgorithmConfig | None = None, reward: RewardConfig | None = None
) -> MemoryPlan:
    """Return a run's plan (supervised without an algorithm). Raises ModelError if it is unknown."""
    parameters, adapters = measure(model)
    models = {"actor" if algorithm else "model": parameters}
    if algorithm and algorithm.definition.critic:
        models["critic"] = parameters
    # With adapters, the reference is the actor with its adapters switched off.
    if algorithm and algorithm.has_reference and not model.lora_rank:
        models["reference"] = parameters
    teachers = algorithm.teacher_models if algorithm else {}
    models |= {name: _parameters(teacher, parameters) for name, teacher in teachers.items()}
    if reward and reward.models:
        models["reward"] = sum(_parameters(source.model, parameters) for source in reward.models)
    matrices = described(model.name).adapted(("all-linear",)) if model.load_in_4bit else ()
    return memory_plan(
        parameters,
        adapters,
        models=models,
        frozen_bytes=width(model),
        in_4bit=sum(map(math.prod, matrices or ())),
    )


def _parameters(name: str, otherwise: int) -> int:
    try:
        return described(name).parameters
    except ModelError:
        return otherwise


def width(config: ModelConfig) -> int:
    """Bytes of a weight in the compute type. If the type is still open, the wider one counts."""
    on_gpu = config.device != "cpu" and usable_gpus() > 0
    return 2 if config.dtype == "bfloat16" or (config.dtype == "auto" and on_gpu) else 4


def fewest_gpus(counted: Counter[str]) -> int:
    return math.ceil(counted.total() / GPU_BYTES)


def format_plan(plan: MemoryPlan) -> str:
    """Return the plan as a table of both countings, with their meanings."""
    parameters, trained = format_count(plan.parameters), f"{format_count(plan.trained)} trained"
    if plan.trained == plan.parameters:
        trained = "all trained"
    learned = " and ".join(role for role in plan.mixed if role in TRAINED_ROLES)
    where = "" if learned == "model" else f" in {learned}"
    low, mixed = plan.sixteen_bit, plan.mixed
    rows = [("model", "16-bit", "mixed precision")]
    rows += [(role, format_size(low[role]), format_size(mixed[role])) for role in mixed]
    rows += [
        ("total", format_size(low.total()), format_size(mixed.total())),
        ("80 GB GPUs", f">= {fewest_gpus(low)}", f">= {fewest_gpus(mixed)}"),
    ]
    return "\n".join(
        [
            f"Memory for weights, gradients and Adam states; {parameters} parameters a model "
            f"({trained}{where})",
            *(
                f"  {role:<10} {sixteen:>10}   {mixed_size:>15}"
                for role, sixteen, mixed_size in rows
            ),
            "  16-bit: weights 2 bytes and Adam 4 bytes a parameter, as systems papers count.",
            "  mixed precision: fp32 master weights, gradients and Adam states, 16 bytes a trained "
            "parameter. This is what Stretto uses.",
            "  On top come activations, the KV cache, and the 2 bytes of a trained weight's "
            "bfloat16 copy, where that is computed with.",
        ]
    )


@dataclass(frozen=True, slots=True)
class Load(DeviceMemory):
    """The memory of one device, of all its processes, whose phases may overlap (``at_once``)."""

    device: str = ""
    at_once: bool = False

    def phase(self, name: str) -> Counter[str]:
        return self.during(*(PHASES if self.at_once else (name,)))

    def fits(self, name: str, there: int) -> bool:
        parts = self.phase(name)
        share = parts[SHARE]
        return parts.total() - share <= FILLED * (there - share)

    @property
    def fullest(self) -> str:
        return max(PHASES, key=lambda name: self.phase(name).total())

    @property
    def certain(self) -> Counter[str]:
        """Bytes by part, without the parts that depend on the lengths of responses."""
        if self.device == "cpu":  # frozen weights may be memory-mapped files
            return Counter({w: n for w, n in self.held.items() if "learner" in w or w == PUBLISHED})
        return Counter({what: size for what, size in self.held.items() if what != CACHE})


def known_shapes(config: Config) -> tuple[dict[str, Shape], Adapters | None]:
    """Return known shapes by role or reward source, and a trained model's LoRA adapters. Raises
    ModelError if the actor's shape or the number of the adapters' parameters is unknown."""
    actor, adapters = model_shape(config.model), lora_adapters(config.model)
    rewards = {source.name: _valued(source.model) for source in config.reward.models}
    starts = {"actor": actor.valued(), "reward": next(iter(rewards.values()), None)}
    init = config.critic.init
    valued = starts[init] if init in starts else _valued(init)
    draft = config.rollout.speculative_model
    shapes = {"actor": actor, "reference": actor, "critic": valued, **rewards}
    shapes["draft"] = _known(draft) if draft else None
    shapes |= {name: _known(model) for name, model in config.algorithm.teacher_models.items()}
    return {role: shape for role, shape in shapes.items() if shape}, adapters


def model_shape(model: ModelConfig) -> Shape:
    return replace(described(model.name).shape, in_4bit=model.load_in_4bit)


def lora_adapters(model: ModelConfig) -> Adapters | None:
    """Return a model's LoRA adapters, if any. Raises ModelError if they cannot be counted."""
    if not model.lora_rank:
        return None
    adapted = described(model.name).adapted(model.lora_targets)
    if adapted is None:
        raise ModelError(f"the layers of '{model.name}' are not known by name")
    inputs = sum(math.prod(shape[1:]) for shape in adapted)
    return Adapters(model.lora_rank * sum(map(sum, adapted)), inputs)


def _valued(name: str) -> Shape | None:
    shape = _known(name)
    return shape and shape.valued()


def _known(name: str) -> Shape | None:
    try:
        return described(name).shape
    except (ModelError, ConfigError):
        return None


def check(found: Sequence[Load], capacity: Callable[[str], int]) -> Iterator[str]:
    """Yield remarks on phases that might not fit. Raises ConfigError if the states do not."""
    for load in found:
        device_bytes = capacity(load.device)
        name = load.fullest
        certain = load.certain
        takes = format_size(load.phase(name).total())
        where = "this machine" if load.device == "cpu" else load.device
        where = f"{where}, which has {format_size(device_bytes)}"
        if certain.total() > device_bytes:
            raise ConfigError(
                f"weights and states take {format_size(certain.total())} of {where}, in every "
                f"phase ({_most(certain)}); {name} would take {takes}. Give roles more processes "
                "on other devices (cluster.processes: ranks), a smaller model, or LoRA",
                "memory-exceeded",
            )
        if not load.fits(name, device_bytes):
            yield (
                f"{name} may take {takes} of {where} ({_most(load.phase(name))}); lower "
                "rollout.slots or training.microbatch_tokens if it runs out of memory"
            )


def _most(parts: Counter[str]) -> str:
    return ", ".join(f"{what} {format_size(size)}" for what, size in parts.most_common(3))


def capacity(device: str) -> int:
    """Return the bytes of a device, for ``cpu`` those of this machine."""
    if device == "cpu":
        return int(psutil.virtual_memory().total)
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def table(found: Sequence[Load]) -> str:
    """Return the memory of each device by phase, as a table."""
    lines = [f"  {'device':<8}" + "".join(f"  {name:>11}" for name in PHASES) + "  most of it"]
    for load in found:
        cells = "".join(f"  {format_size(load.phase(name).total()):>11}" for name in PHASES)
        ((largest_part, _),) = load.phase(load.fullest).most_common(1)
        lines.append(f"  {load.device:<8}{cells}  {largest_part}")
    return "\n".join(lines)


@dataclass(frozen=True)
class RunMemory:
    """The memory that a reinforcement learning run needs."""

    config: Config

    def planned(self, found: Sequence[ProcessPlacement], width: int) -> list[Load]:
        """Return the memory of each device, or nothing for unknown models or a remote cluster."""
        c = self.config
        if c.cluster.address:
            return []
        try:
            shapes, adapters = known_shapes(c)
        except ModelError:
            return []
        return self.loads(found, shapes, width, adapters)

    @property
    def at_once(self) -> bool:
        return self.config.schedule.knobs.overlaps(1)

    def loads(
        self,
        found: Sequence[ProcessPlacement],
        shapes: Mapping[str, Shape],
        width: int,
        adapters: Adapters | None = None,
        room: Callable[[str], int] | None = None,
    ) -> list[Load]:
        """Return the memory of each device, with ``width`` bytes a weight. An engine that sizes its
        cache takes a share of the bytes that ``room`` (default: :func:`capacity`) returns."""
        c, versions = self.config, published(self.config.schedule.knobs, found)
        bucket = c.cluster.bucket_mb << 20
        by_device: dict[str, Load] = {}
        for place in found:
            holds = DeviceMemory(width=width, bucket=bucket, adapters=adapters)
            if place.device == "cpu":
                holds.put("processes", PROCESS_BYTES)
            else:
                holds.put("contexts", CONTEXT)
                holds.put("communicators", COMMUNICATOR * self._communicators(place, found))
            self._put_roles(holds, place, shapes, versions, room or capacity)
            for device in place.devices:
                by_device.setdefault(device, Load(device=device, at_once=self.at_once)).add(holds)
        return list(by_device.values())

    def _communicators(
        self, place: ProcessPlacement, placements: Sequence[ProcessPlacement]
    ) -> int:
        learner = self.config.learner_layout
        trains = any(seat.role == LEARNER for seat in place.roles)
        groups = learner.groups if trains else len(place.devices) > 1
        follows = any(seat.scorer in ("", "critic") for seat in place.roles)
        return groups + (follows and len(placements) > 1)

    def _put_roles(
        self,
        holds: DeviceMemory,
        place: ProcessPlacement,
        shapes: Mapping[str, Shape],
        versions: int,
        room: Callable[[str], int],
    ) -> None:
        c, layout = self.config, self.config.learner_layout
        rests = place.offload and place.device != "cpu"
        inline = not c.runtime_kind.has_processes
        copies = layout.ranks == 1 or c.pipeline.ranks > 0
        reads: Literal["", "frozen", "all"] = ""
        if inline:
            reads = "frozen" if c.schedule.knobs.copies_weights else "all"
        tokens = self._pass_tokens(place.device)
        for seat in place.roles:
            if 0 not in seat.ranks:  # a copy like the one on the first rank
                continue
            if seat.role == LEARNER:
                trained = ("actor", "critic") if c.algorithm.definition.critic else ("actor",)
                models = [shapes[role] for role in trained if role in shapes]
                # Phases that need moments, and masters separate from the weights, on the device.
                moments = ("training",) if self.at_once else ("scoring", "training")
                side_by_side = copies and place.device == "cpu" and not c.pipeline.ranks
                holds.put_learner(
                    models,
                    layout,
                    self._pass_tokens(place.device, len(models) if side_by_side else 1),
                    () if inline else models,
                    checkpointing=c.model.gradient_checkpointing == "on",
                    versions=versions,
                    copies=copies,
                    shared=models[1:] if copies and c.critic.init == "actor" else (),
                    moments=moments if rests else (),
                    side_by_side=side_by_side,
                    fused=c.pipeline.ranks > 0 and c.pipeline.schedule == "fused",
                    further_gradients=2 if c.algorithm.has_optimal_baseline else 0,
                )
            elif model := shapes.get(seat.scorer or "actor"):
                generates, follows = not seat.scorer, seat.scorer in ("", "critic")
                seat_reads = reads if follows else ""
                # Engines of one process share a copy.
                another = inline and generates and seat.role not in ("generator", "generator 0")
                borrows = self._borrows(seat, place, model, versions)
                if another or borrows:
                    seat_reads = "all"
                share = None
                if generates and place.takes_share(c.rollout):
                    share = c.rollout.memory_share * room(place.device)
                holds.put_inference(
                    f"{seat.role}'s weights",
                    model,
                    layout if borrows else seat.layout or Layout.independent(len(seat.ranks)),
                    c.rollout.prefill_tokens if generates else tokens,
                    layout if follows and not (inline or borrows) else None,
                    rows=c.cached_rows if generates else None,
                    positions=c.longest,
                    logits=seat.scorer in ("reference", *c.algorithm.teacher_models),
                    rests=(share is not None and c.rollout.sleeps) if generates else rests,
                    reads=seat_reads,
                    share=share,
                )
                fuses = generates and share is None and self._fuses(seat, place.device)
                if fuses and holds.adapters:
                    holds.put("fused adapters", holds.width * holds.adapter_parameters)
                if generates and share is None and (draft := shapes.get("draft")):
                    holds.put_inference(
                        "speculative model's weights",
                        draft,
                        Layout(),
                        c.rollout.prefill_tokens,
                        rows=c.rollout.speculative_rows,
                        positions=c.longest,
                    )

    def _borrows(
        self,
        seat: RolePlacement,
        place: ProcessPlacement,
        model: Shape,
        versions: int,
    ) -> bool:
        """Whether a scorer runs the learner's weights, as in ``runtime/scorer_roles.py``."""
        trains = any(other.role == LEARNER for other in place.roles)
        can = trains and self.config.uses_learner(seat.scorer, seat.layout)
        if seat.scorer != "critic":
            return can
        return can and bool(not versions or seat.layout or not model.cuts_into(len(seat.ranks)))

    def _fuses(self, seat: RolePlacement, device: str) -> bool:
        """Whether Stretto's engine there has copies of LoRA's adapters (models/lora.py)."""
        model, on_one_gpu = self.config.model, device != "cpu" and len(seat.ranks) == 1
        return on_one_gpu and not model.load_in_4bit and model.lora_kind != "dora"

    def _pass_tokens(self, device: str, passes: int = 1) -> int:
        """Return the most tokens of a pass: at least one response, at most a full update."""
        c = self.config
        tokens = token_budget(c.training.microbatch_tokens, device, passes)
        return max(c.longest, min(tokens, c.rollout.batch // c.training.minibatches * c.longest))

    def check_here(self) -> None:
        """Raise ConfigError for a run in this process whose models exceed the free memory."""
        c = self.config
        if not c.runtime_kind.has_processes and (c.model.device == "cpu" or not usable_gpus()):
            self.require(free_memory(), "this machine")

    def check_devices(self) -> list[str]:
        """Return remarks on phases that might not fit. Raises ConfigError as :func:`check` does."""
        import torch

        from stretto.models.backend import pick_device, pick_dtype

        c = self.config
        on_gpu = c.model.device != "cpu" and torch.cuda.is_available()
        inline = not c.runtime_kind.has_processes
        if inline and on_gpu:
            self.require(torch.cuda.mem_get_info()[0], torch.cuda.get_device_name())
        if c.cluster.address or (inline and not on_gpu):  # or elsewhere
            return []
        width = pick_dtype(c.model.dtype, pick_device(c.model.device)).itemsize
        gpus = torch.cuda.device_count() if on_gpu else 0
        placements = places(c, c.threads or torch.get_num_threads(), gpus)
        return list(check(self.planned(placements, width), capacity))

    def require(self, free: int, where: str) -> None:
        """Raise ConfigError if weights, gradients and optimizer states exceed ``free`` bytes."""
        sections = self.config.model, self.config.algorithm, self.config.reward
        try:
            plan = plan_for(*sections)
        except ModelError:  # its files are not here, so it cannot be counted
            return
        if plan.mixed.total() > free:
            parts = ", ".join(f"{role} {format_size(size)}" for role, size in plan.mixed.items())
            raise ConfigError(
                f"'{self.config.model.name}' takes {format_size(plan.mixed.total())} for weights, "
                f"gradients and optimizer states ({parts}), and {where} has {format_size(free)} "
                f"free. Choose {_remedies(*sections)}",
                "memory-exceeded",
            )


def _remedies(model: ModelConfig, algorithm: AlgorithmConfig, reward: RewardConfig) -> str:
    def size(model: ModelConfig, algorithm: AlgorithmConfig) -> str:
        return format_size(plan_for(model, algorithm, reward).mixed.total())

    remedies = ["a smaller model"]
    if not model.lora_rank:
        lora = model.model_copy(update={"lora_rank": 16})
        remedies.append(f"LoRA (`model.lora_rank = 16`: {size(lora, algorithm)})")
    if algorithm.definition.critic:
        rloo = algorithm.model_copy(update={"name": "rloo"})
        remedies.append(
            "no critic (`algorithm.name = rloo`, `rollout.samples_per_prompt = 2`: "
            f"{size(model, rloo)})"
        )
    return ", or ".join(remedies)
