"""Clusters out of layouts: the schedule on meshes of GPUs, with costs by formula.

A layout says which GPUs hold which role and how each model is divided
(:mod:`stretto.planner.layout`). Here it becomes a cluster whose costs are numbers, which the
simulator runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.config import ScheduleConfig
from stretto.models.shapes import Shape
from stretto.planner import memory
from stretto.planner.formulas import (
    TrainingPasses,
    broadcast_bytes,
    generator_cost,
    prefill_cost,
    reshard_bytes,
    train_cost,
)
from stretto.planner.hardware import Hardware
from stretto.planner.layout import Layout, Mesh, ModelShapes
from stretto.runtime.sim.cluster import (
    Cluster,
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
class PlanSpec:
    """What a plan is for: models, work and GPUs.

    Attributes:
        epochs: passes over a batch.
        updates: optimizer updates a step, in all passes.
        functions: costs of reward functions, by name; they have CPUs of their own.
    """

    models: ModelShapes
    workload: Workload
    hardware: Hardware
    epochs: int = 1
    updates: int = 1
    functions: Mapping[str, SampleCost] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of a response at its limit, and of a long prompt."""
        w = self.workload
        return max(int(w.prompt_tokens.quantile(0.95, 0)), 1) + w.max_new_tokens

    def in_flight(self, schedule: ScheduleConfig) -> int:
        """Return how many responses are in flight at most."""
        w = self.workload
        return schedule.most_in_flight(w.batch, w.samples_per_prompt)


def cluster_of(
    spec: PlanSpec,
    layout: Layout,
    schedule: ScheduleConfig,
    *,
    engines: int = 1,
    bubble: float | None = None,
) -> Cluster:
    """Make the cluster of a layout.

    Raises ConfigError if there is no room for keys and values, or the schedule does not fit.

    Args:
        engines: generators, of which each has a share of the copies. Few, with several copies each,
            are quicker to simulate; stragglers move between generators only.
        bubble: see :class:`~stretto.planner.formulas.TrainingPasses`.
    """
    devices, slots = layout.devices, slots_of(spec, layout, schedule)
    cost, each = cost_of_generator(spec, layout), layout.generator.devices // engines
    return Cluster(
        call_s=MESSAGE_S,
        generators=tuple(
            GeneratorRole(
                devices=devices["generators"][i * each : (i + 1) * each],
                tensor_parallel=layout.generator.tensor,
                cost=cost,
                slots=slots,
            )
            for i in range(engines)
        ),
        scorers=(
            *scorers_of(spec, layout, engines),
            *(ScorerRole(name=name, cost=cost) for name, cost in spec.functions.items()),
        ),
        learner=LearnerRole(
            devices=devices["learner"],
            trains=("actor", "critic") if spec.models.critic else ("actor",),
            cost=cost_of_learner(spec, layout, bubble),
        ),
        workload=spec.workload,
        schedule=schedule,
    )


def slots_of(spec: PlanSpec, layout: Layout, schedule: ScheduleConfig) -> int:
    """Return how many responses a copy of the generator decodes together; 0 for all in flight.

    Where not all fit, as many as have room at full length.
    """
    fit = cost_of_generator(spec, layout).cache_tokens // spec.longest
    return 0 if fit * layout.generator.data >= spec.in_flight(schedule) else max(fit, 1)


def cost_of_generator(spec: PlanSpec, layout: Layout) -> GeneratorCost:
    """Return the cost of a copy of the generator; ConfigError if keys and values have no room."""
    models, learner, generator = spec.models, layout.learner, layout.generator
    cost = generator_cost(
        models.actor,
        generator.tensor,
        spec.hardware,
        length=spec.workload.prompt_tokens.quantile(0.5, 0),
        free_bytes=memory.cache_room_bytes(models, layout, spec.hardware),
    )
    sync_s = _reshard_s if layout.colocated else _broadcast_s
    load_s = sync_s(models.actor, learner, generator, spec.hardware)
    return cost.model_copy(update={"load_s": load_s})


def cost_of_learner(spec: PlanSpec, layout: Layout, bubble: float | None = None) -> TrainCost:
    """Return the learner's cost, with what is swapped where roles are offloaded."""
    w = spec.workload
    passes = TrainingPasses(
        tokens=w.batch * w.mean_tokens,
        length=w.mean_tokens,
        epochs=spec.epochs,
        updates=spec.updates,
        micro_tokens=layout.micro_tokens,
        checkpointing=layout.checkpointing,
        bubble=bubble,
    )
    cost = train_cost(spec.models.trained, layout.learner, spec.hardware, passes)
    return cost.model_copy(update={"step_s": cost.step_s + swap_s(spec, layout)})


def scorers_of(spec: PlanSpec, layout: Layout, engines: int = 1) -> list[ScorerRole]:
    """Return the scorers that are models; on generators' devices each generator has copies."""
    models, devices = spec.models, layout.devices["scorers"]
    hosted = layout.sharing in ("all", "generators")
    named: list[tuple[str, ScoreKind, Shape | None]] = [
        ("reward", "reward", models.reward),
        ("reference", "logprobs", models.reference),
        ("critic", "values", models.critic),
    ]
    count = engines if hosted else 1
    each = len(devices) // count
    mesh = Mesh(max(layout.scorer.data // count, 1), layout.scorer.tensor)
    length = spec.workload.mean_tokens
    return [
        ScorerRole(
            name=name,
            kind=kind,
            devices=devices[i * each : (i + 1) * each],
            cost=prefill_cost(shape, mesh, spec.hardware, length=length),
            follows="critic" if name == "critic" else "",
            load_s=_critic_load_s(shape, layout, spec.hardware) if name == "critic" else 0.0,
            host=i if hosted else None,
        )
        for name, kind, shape in named
        if shape is not None
        for i in range(count)
    ]


def swap_s(spec: PlanSpec, layout: Layout) -> float:
    """Seconds of a step in which offloaded states are brought back and written back.

    States out after the weight sync and in before training; frozen models only in, as the host
    keeps its copy. None of it is taken to be hidden behind other work.
    """
    if not layout.offload:
        return 0.0
    on, models = spec.hardware, spec.models
    moved = 2 * memory.kept_bytes(models, layout.learner) + memory.frozen_bytes(models, layout)
    return moved / (on.links.host_bytes_per_s * on.assumed.link)


def _critic_load_s(critic: Shape, layout: Layout, on: Hardware) -> float:
    """Seconds in which scorers take over the critic's; colocated it is the learner's own."""
    if layout.colocated:
        return 0.0
    sync_s = _reshard_s if layout.sharing == "learner" else _broadcast_s
    return sync_s(critic, layout.learner, layout.scorer, on)


def _reshard_s(shape: Shape, learner: Mesh, to: Mesh, on: Hardware) -> float:
    size = reshard_bytes(shape, learner, to)
    speed = to.data_bytes_per_s(on.links)  # those with the same slice exchange their shards
    return max(size, 0.0) / (speed * on.assumed.link)


def _broadcast_s(shape: Shape, learner: Mesh, to: Mesh, on: Hardware) -> float:
    """Seconds of a broadcast of all shards, one after another, as Stretto's ranks send them.

    Between nodes a shard goes through the adapter of its rank, within one over NVLink.
    """
    speed = on.links.within_bytes_per_s
    if learner.devices + to.devices > on.links.gpus_per_node:
        speed = min(speed, on.links.between_bytes_per_s)
    return broadcast_bytes(shape) / (speed * on.assumed.link)
