"""Fills settings and layouts that the user left open with values that fit the GPUs' memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeVar

from stretto.config import Config, RewardModelConfig, SftConfig
from stretto.config.cluster_config import GENERATOR, LEARNER, ProcessConfig
from stretto.errors import ConfigError, ModelError
from stretto.layout import Layout
from stretto.machine import usable_gpus
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.info import load_config, model_info
from stretto.models.resolve import is_known, resolve
from stretto.models.shapes import Shape
from stretto.planner.fitting import (
    FILLED,
    Load,
    RunMemory,
    capacity,
    known_shapes,
    lora_adapters,
    model_shape,
)
from stretto.planner.memory_model import CONTEXT, PHASES, SYNC, Adapters, DeviceMemory
from stretto.runtime.placement import ProcessPlacement, places
from stretto.saying import format_size

Fitted = TypeVar("Fitted", Config, SftConfig, RewardModelConfig)

PASSES = (
    *((tokens, "off") for tokens in (16_384, 8_192, 4_096)),
    *((tokens, "on") for tokens in (16_384, 8_192, 4_096, 2_048, 1_024)),
)
"""Tokens of a pass and recomputation, in the order in which they are tried on a GPU. Fewer tokens
cost little down to a few thousand, recomputation a third of the time."""
BESIDE_SLOTS = 4_096  # tokens of a recomputed pass that must fit next to the slots' keys and values


def fitted(
    config: Fitted, say: Callable[[str], object], unseen: int = 0, cluster_gpus: int | None = None
) -> Fitted:
    """Fill the settings that the user left open by the memory plan, and report them to ``say``.

    On GPUs these are passes (:func:`with_passes`), slots and vLLM's share. If the model is not
    here, its config is fetched. A CPU or a model of unknown shape changes nothing. A cluster's GPUs
    are assumed to be like this machine's, or, if it has none, to have ``unseen`` bytes.
    """
    import torch

    m = config.model
    device = pick_device("cpu" if unseen else m.device)
    if device.type == "cpu" and not unseen:
        return config
    gpu_bytes = unseen or capacity(str(device))
    width = pick_dtype(m.dtype, device).itemsize
    try:
        if not is_known(m.name) and model_info(m.name) is None:
            load_config(resolve(m.name), m.trust_remote_code)
        if isinstance(config, Config):
            shapes, adapters = known_shapes(config)
            elsewhere = bool(config.cluster.address)
            gpus = torch.cuda.device_count() if cluster_gpus is None else cluster_gpus
            fits: Fitted = fitted_run(
                config,
                places(config, config.threads or torch.get_num_threads(), gpus),
                shapes,
                width,
                adapters,
                lambda name: gpu_bytes if elsewhere else capacity(name),
            )
        else:
            fits = with_passes(
                config, lambda candidate: supervised_fits(candidate, width, gpu_bytes)
            )
    except ModelError as error:
        say(f"passes are not fitted to the GPU's memory, as the model's is not known: {error}")
        return config
    names = ["training.microbatch_tokens", "model.gradient_checkpointing"]
    if isinstance(config, Config):
        names += ["rollout.slots", "rollout.engine_args"]
    settings = [
        f"{name} = {value}"
        for name in names
        if (value := attrgetter(name)(fits)) != attrgetter(name)(config)
    ]
    if settings:
        wording = "taken to have" if unseen else "of"
        say(
            f"by the memory plan of a GPU {wording} {format_size(gpu_bytes)}: {', '.join(settings)}"
        )
    return fits


def fitted_run(
    config: Config,
    found: Sequence[ProcessPlacement],
    shapes: Mapping[str, Shape],
    width: int,
    adapters: Adapters | None,
    room: Callable[[str], int],
) -> Config:
    """Return the settings with passes, slots and vLLM's memory share that fit the GPUs."""

    def loads(config: Config) -> list[Load]:
        all_loads = RunMemory(config).loads(found, shapes, width, adapters, room)
        return [load for load in all_loads if load.device != "cpu"]

    def fits(config: Config, phases: Sequence[str] = ("scoring", "training")) -> bool:
        return all(load.fits(name, room(load.device)) for load in loads(config) for name in phases)

    able = config.rollout.capabilities
    share, sleep = able.share_argument, able.sleep_argument
    counts = Counter(device for place in found for device in place.devices)
    shared = (place for place in found if any(counts[device] > 1 for device in place.devices))
    place = next((place for place in shared if place.takes_share(config.rollout)), None)
    if not place:  # no engine that sizes its cache is on a GPU with other roles
        return with_passes(_with_slots(config, partial(fits, phases=PHASES)), fits)
    engine_args = {sleep: not RunMemory(config).at_once, **config.rollout.engine_args}
    left_open = share not in engine_args
    size = room(place.device)
    least = width * shapes["actor"].held(len(place.devices)) / size
    if left_open:
        engine_args[share] = 2 * least  # as much for keys and values as for weights
    config = with_passes(config.changed_in("rollout", engine_args=engine_args), fits)
    if not left_open:
        return config
    awake = ("generation", SYNC) if engine_args[sleep] else PHASES
    none = config.changed_in("rollout", engine_args={**engine_args, share: 0.0})
    other_share = max(
        load.phase(name).total() / room(load.device) for load in loads(none) for name in awake
    )
    if FILLED - other_share < least:
        raise ConfigError(
            f"{able.title}'s weights take {format_size(round(least * size))} of {place.device}, "
            f"and other roles leave {format_size(max(round((FILLED - other_share) * size), 0))} of "
            f"{format_size(size)}. Give them other GPUs (cluster.processes), or more of them "
            "(ranks), or take LoRA",
            "memory-exceeded",
        )
    # The engine refuses to start unless this share is free.
    engine_args = {**engine_args, share: math.floor(100 * (FILLED - other_share)) / 100}
    return config.changed_in("rollout", engine_args=engine_args)


def _with_slots(config: Config, fits: Callable[[Config], bool]) -> Config:
    """Halve an unset ``rollout.slots`` until passes of few tokens fit too, unless the engine sizes
    its cache itself."""

    def few(candidate: Config) -> bool:
        checkpointing = candidate.model.gradient_checkpointing == "on"
        return checkpointing and candidate.training.microbatch_tokens <= BESIDE_SLOTS

    passes, slots = with_passes(config, few), config.engine_rows
    if config.rollout.slots or config.rollout.capabilities.sizes_cache or fits(passes):
        return config
    while slots := slots // 2:
        if fits(passes.changed_in("rollout", slots=slots)):
            return config.changed_in("rollout", slots=slots)
    return config


def with_passes(config: Fitted, fits: Callable[[Fitted], bool]) -> Fitted:
    """Fill open pass tokens and checkpointing by the first fitting, or the last, :data:`PASSES`."""
    model, training = config.model, config.training
    candidate = config
    for tokens, checkpointing in PASSES:
        if model.gradient_checkpointing == "auto":
            candidate = candidate.changed_in("model", gradient_checkpointing=checkpointing)
        if not training.microbatch_tokens:
            candidate = candidate.changed_in("training", microbatch_tokens=tokens)
        if fits(candidate):
            break
    return candidate


def supervised_fits(config: SftConfig | RewardModelConfig, width: int, room: int) -> bool:
    """Return whether supervised training fits one GPU. Raises as :func:`known_shapes` does."""
    m, sides = config.model, 1 if isinstance(config, SftConfig) else 2
    shape = model_shape(m)
    memory = DeviceMemory(width=width, adapters=lora_adapters(m))
    memory.put("contexts", CONTEXT)
    memory.put_learner(
        [shape if sides == 1 else shape.valued()],
        Layout(),
        max(config.training.microbatch_tokens, sides * config.data.max_tokens),
        (),
        checkpointing=m.gradient_checkpointing == "on",
        versions=0,
        copies=True,
    )
    return memory.during("training").total() <= FILLED * room


def with_layouts(
    config: Config,
    say: Callable[[str], object],
    unseen: int = 0,
    cluster_gpus: int | None = None,
) -> Config:
    """Fill open layouts of generators and scorers in several ranks, and report them to ``say``.

    Each takes the least slicing that divides the model's heads and fits the memory plan: copies,
    then slices, then shards (of scorers; instead of slices if they do not stream). A generator's
    copies are ``rollout.engines``. Devices have ``unseen`` bytes, or those of this machine's. A
    model of unknown shape changes nothing.
    """
    m = config.model
    device = pick_device("cpu" if unseen else m.device)
    width = pick_dtype(m.dtype, device).itemsize
    gpus = usable_gpus() if device.type == "cuda" else 0
    gpus = gpus if cluster_gpus is None else cluster_gpus
    try:
        shapes, adapters = known_shapes(config)
    except ModelError:
        return config

    def room(device: str) -> int:
        return unseen or capacity(device)

    def fits(config: Config) -> bool:
        """Return whether a layout fits with small passes, which are chosen after it."""
        if not config.training.microbatch_tokens:
            config = config.changed_in("training", microbatch_tokens=BESIDE_SLOTS)
        if config.model.gradient_checkpointing == "auto":
            config = config.changed_in("model", gradient_checkpointing="on")
        placements = places(config, config.threads or 1, gpus)
        loads = RunMemory(config).loads(placements, shapes, width, adapters, room)
        phases = ("generation", "scoring", "training")
        return all(load.fits(phase, room(load.device)) for load in loads for phase in phases)

    for i, process in enumerate(config.cluster.processes):
        for role in _open_roles(config, process):
            shape = shapes.get("actor" if role == GENERATOR else role)
            candidates = [
                _with_layout(config, i, role, layout)
                for layout in _layouts(config, process, role, shape)
            ]
            if not candidates:
                continue
            config = next(filter(fits, candidates), candidates[-1])
            layout = config.cluster.processes[i].layout[role]
            engines = f" and rollout.engines = {layout.dp}" if role == GENERATOR else ""
            say(f"cluster.processes: layout.{role} = auto takes {layout}{engines}")
    return config


def _open_roles(config: Config, process: ProcessConfig) -> Iterator[str]:
    if process.ranks == 1:
        return
    for role in process.roles:
        numbered = role.rpartition(" ")[2].isdecimal()
        if role in process.layout or numbered or role == LEARNER:
            continue
        if LEARNER in process.roles and config.uses_learner(role, None):
            continue
        if role != GENERATOR or config.open_engines:
            yield role


def _layouts(
    config: Config, process: ProcessConfig, role: str, shape: Shape | None
) -> Iterator[Layout]:
    """Yield possible layouts of a role, the least slicing first."""
    if shape is None:
        return
    ranks, streams = process.ranks, config.schedule.knobs.streams
    heads = shape.heads, shape.kv_heads
    ways = [layout for layout in Layout.all_independent(ranks) if layout.divides(*heads)]
    has_shards = role not in (GENERATOR, "critic")  # a critic of its own follows the learner's
    if has_shards and not streams:
        ways = ways[:1]  # shards are as small as slices, and divide any model
    yield from ways
    if has_shards:
        yield Layout.sharded(ranks)


def _with_layout(config: Config, number: int, role: str, layout: Layout) -> Config:
    processes = [*config.cluster.processes]
    process = processes[number]
    layouts = {**process.layout, role: layout}
    processes[number] = process.model_copy(update={"layout": layouts})
    config = config.changed_in("cluster", processes=tuple(processes))
    return config.changed_in("rollout", engines=layout.dp) if role == GENERATOR else config
