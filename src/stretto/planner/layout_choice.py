"""Fills layouts of generators and scorers that the user left open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stretto.config import Config
from stretto.config.cluster_config import GENERATOR, LEARNER, ProcessConfig
from stretto.errors import ModelError
from stretto.layout import Layout
from stretto.machine import usable_gpus
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.shapes import Shape
from stretto.planner.choices import BESIDE_SLOTS
from stretto.planner.fitting import RunMemory, capacity, known_shapes
from stretto.runtime.placement import places


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
