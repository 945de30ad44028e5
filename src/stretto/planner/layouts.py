"""Clusters out of layouts: the schedule on meshes of GPUs, with costs by formula.

A layout says which GPUs hold which role and how each model is divided
(:mod:`stretto.planner.layout`). Here it becomes a cluster whose costs are numbers, which the
simulator runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.config import ScheduleConfig
from stretto.models.shapes import Shape
from stretto.planner import memory, wire
from stretto.planner.formulas import Passes, generator_cost, prefill_cost, train_cost
from stretto.planner.hardware import Hardware
from stretto.planner.layout import Layout, Mesh, Models
from stretto.planner.layout import Workload as Sizes
from stretto.planner.memory import Parts
from stretto.runtime.sim.cluster import (
    Cluster,
    Devices,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
)
from stretto.runtime.sim.costs import GeneratorCost, SampleCost, TrainCost
from stretto.types import ScoreKind

MESSAGE_S = 0.001
"""Seconds that a call of a role and its answer are on their way (assumed)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a plan is for: models, work and GPUs.

    Attributes:
        models: of the run.
        workload: prompts, responses and rewards.
        hardware: the GPUs and their links.
        epochs: passes over a batch.
        updates: optimizer updates a step, in all passes.
        functions: costs of reward functions, by name; they have CPUs of their own.
        at_once: all ranks of a learner broadcast their shards at the same time; else one after
            another, as Stretto's do.
        paged: a generator's rows take memory as they grow, as vLLM's do; else each has room for a
            response at full length, as Stretto's do.
    """

    models: Models
    workload: Workload
    hardware: Hardware
    epochs: int = 1
    updates: int = 1
    functions: dict[str, SampleCost] = field(default_factory=dict)
    at_once: bool = False
    paged: bool = False

    def sizes(self, schedule: ScheduleConfig | None = None) -> Sizes:
        """Sizes of a step for memory: responses in flight, at their limit.

        Args:
            schedule: how many are in flight; ``None``: a batch.
        """
        w = self.workload
        rows = schedule.most_in_flight(w.batch, w.samples_per_prompt) if schedule else w.batch
        prompt = max(int(w.prompt_tokens.quantile(0.95, 0)), 1)
        return Sizes(rows, prompt, w.max_new_tokens, self.epochs)


def cluster_of(
    setting: Setting,
    layout: Layout,
    schedule: ScheduleConfig,
    *,
    engines: int = 1,
    bubble: float | None = None,
) -> Cluster:
    """Make the cluster of a layout.

    Args:
        layout: where.
        schedule: in which order.
        engines: generators, of which each has a share of the copies. Few, with several copies each,
            are quicker to simulate; stragglers move between generators only.
        bubble: see :class:`~stretto.planner.formulas.Passes`.

    Raises:
        ConfigError: there is no room for keys and values, or the schedule does not fit.
    """
    learner, generators, _ = devices_of(layout)
    cost, slots = cost_of_generator(setting, layout), slots_of(setting, layout, schedule)
    each = len(generators) // engines
    return Cluster(
        call_s=MESSAGE_S,
        generators=tuple(
            GeneratorRole(
                devices=generators[i * each : (i + 1) * each],
                tensor_parallel=layout.generator.tensor,
                cost=cost,
                slots=slots,
            )
            for i in range(engines)
        ),
        scorers=(
            *scorers_of(setting, layout, engines),
            *(ScorerRole(name=name, cost=of) for name, of in setting.functions.items()),
        ),
        learner=LearnerRole(
            devices=learner,
            trains=("actor", "critic") if setting.models.critic else ("actor",),
            cost=cost_of_learner(setting, layout, bubble),
        ),
        workload=setting.workload,
        schedule=schedule,
    )


def devices_of(layout: Layout) -> tuple[Devices, Devices, Devices]:
    """Return the devices of learner, generators and scorers, by number."""
    learner = tuple(range(layout.learner.devices))
    if layout.sharing == "all":
        return learner, learner, learner
    at = len(learner)
    generators = tuple(range(at, at + layout.generator.devices))
    at += len(generators)
    apart = tuple(range(at, at + layout.scorer.devices))
    return (
        learner,
        generators,
        {"learner": learner, "generators": generators}.get(layout.sharing, apart),
    )


def slots_of(setting: Setting, layout: Layout, schedule: ScheduleConfig) -> int:
    """Return how many responses a copy of the generator decodes together; 0 for all in flight.

    Where not all fit, as many as have room at full length.

    Raises:
        ConfigError: there is no room for keys and values.
    """
    if setting.paged:
        return 0
    sizes = setting.sizes(schedule)
    fit = cost_of_generator(setting, layout).cache_tokens // sizes.length
    return 0 if fit * layout.generator.data >= sizes.responses else max(fit, 1)


def memory_of(setting: Setting, layout: Layout, schedule: ScheduleConfig) -> dict[str, Parts]:
    """Return the memory of a GPU by phase, and by what takes it, in bytes.

    Scorers that prefill responses while these are decoded keep keys and values of all in flight, at
    their average length.

    Args:
        layout: where.
        schedule: in which order.
    """
    models, sizes, on = setting.models, setting.sizes(schedule), setting.hardware
    found = memory.phases_of(models, layout, sizes, on)
    if schedule.knobs.streams:
        tensor, copies = layout.scorer.tensor, layout.scorer.data
        tokens = sizes.responses * setting.workload.mean_tokens / copies
        streams = tokens * sum(memory.cache_bytes(shape, tensor) for shape in models.scoring)
        found["scoring"] = {**found["scoring"], "responses that stream": streams}
    return found


def cost_of_generator(setting: Setting, layout: Layout) -> GeneratorCost:
    """Return the cost of a copy of the generator.

    Raises:
        ConfigError: there is no room for keys and values.
    """
    on, models, w = setting.hardware, setting.models, setting.workload
    room = memory.cache_room_bytes(models, layout, on)
    cost = generator_cost(
        models.actor,
        layout.generator.tensor,
        on,
        length=w.prompt_tokens.quantile(0.5, 0),
        free_bytes=room,
    )
    return cost.model_copy(update={"load_s": _load_s(setting, layout)})


def cost_of_learner(setting: Setting, layout: Layout, bubble: float | None = None) -> TrainCost:
    """Return the learner's cost, with what is swapped where roles are offloaded."""
    w, on = setting.workload, setting.hardware
    passes = Passes(
        tokens=w.batch * w.mean_tokens,
        length=w.mean_tokens,
        epochs=setting.epochs,
        updates=setting.updates,
        micro_tokens=layout.micro_tokens,
        checkpointing=layout.checkpointing,
        bubble=bubble,
    )
    cost = train_cost(setting.models.trained, layout.learner, on, passes)
    return cost.model_copy(update={"step_s": cost.step_s + swap_s(setting, layout)})


def scorers_of(setting: Setting, layout: Layout, engines: int = 1) -> list[ScorerRole]:
    """Return the scorers that are models; on generators' devices each generator has copies."""
    models, devices = setting.models, devices_of(layout)[2]
    hosted = layout.sharing in ("all", "generators")
    named: list[tuple[str, ScoreKind, Shape | None]] = [
        ("reward", "reward", models.reward),
        ("reference", "logprobs", models.reference),
        ("critic", "values", models.critic),
    ]
    count = engines if hosted else 1
    each = len(devices) // count
    mesh = Mesh(max(layout.scorer.data // count, 1), layout.scorer.tensor)
    roles = []
    for name, kind, shape in named:
        if shape is None:
            continue
        cost = prefill_cost(shape, mesh, setting.hardware, length=setting.workload.mean_tokens)
        follows = "critic" if name == "critic" else ""
        for i in range(count):
            roles.append(
                ScorerRole(
                    name=name,
                    kind=kind,
                    devices=devices[i * each : (i + 1) * each],
                    cost=cost,
                    follows=follows,
                    load_s=_critic_load_s(setting, layout) if follows else 0.0,
                    host=i if hosted else None,
                )
            )
    return roles


def swap_s(setting: Setting, layout: Layout) -> float:
    """Seconds of a step in which offloaded states are brought back and written back.

    States out after the hand-over and in before training; frozen models only in, as the host keeps
    its copy. None of it is taken to be hidden behind other work.
    """
    if not layout.offload:
        return 0.0
    on, models = setting.hardware, setting.models
    moved = 2 * memory.kept_bytes(models, layout.learner) + memory.frozen_bytes(models, layout)
    return moved / (on.links.host_bytes_per_s * on.assumed.link)


def _load_s(setting: Setting, layout: Layout) -> float:
    actor, on = setting.models.actor, setting.hardware
    if layout.colocated:
        return _reshard_s(actor, layout.learner, layout.generator, on)
    return _broadcast_s(actor, layout.learner, layout.generator, setting)


def _critic_load_s(setting: Setting, layout: Layout) -> float:
    """Seconds in which scorers take over the critic's; colocated it is the learner's own."""
    critic, on = setting.models.critic, setting.hardware
    if critic is None or layout.colocated:
        return 0.0
    if layout.sharing == "learner":
        return _reshard_s(critic, layout.learner, layout.scorer, on)
    return _broadcast_s(critic, layout.learner, layout.scorer, setting)


def _reshard_s(shape: Shape, learner: Mesh, to: Mesh, on: Hardware) -> float:
    size = wire.reshard_bytes(shape, learner, to)
    speed = to.data_bytes_per_s(on.links)  # those who hold the same slice exchange their shards
    return max(size, 0.0) / (speed * on.assumed.link)


def _broadcast_s(shape: Shape, learner: Mesh, to: Mesh, setting: Setting) -> float:
    """Seconds of a broadcast of all shards (``wire.broadcast_bytes``).

    Between nodes a shard goes through the adapter of its rank, within one over NVLink.
    """
    on = setting.hardware
    node = on.links.gpus_per_node
    speed = on.links.within_bytes_per_s
    if learner.devices + to.devices > node:
        adapters = min(node, learner.devices) if setting.at_once else 1
        speed = min(speed, adapters * on.links.between_bytes_per_s)
    return wire.broadcast_bytes(shape) / (speed * on.assumed.link)
