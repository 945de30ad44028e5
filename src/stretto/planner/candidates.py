"""Candidates: the layouts of a run on a number of GPUs, each with the schedule's variants.
Candidates *on paper* cannot be run by ``stretto train``: several copies of generators and scorers
in the learner's processes, all states offloaded, and learners with pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, product
from typing import Literal

from stretto.bounds import ceil_div
from stretto.config import ScheduleConfig
from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.planner import formulas, memory_model
from stretto.planner.hardware import Hardware
from stretto.planner.memory_model import Parts
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import GeneratorCost, SampleCost, TrainCost
from stretto.types import ScoreKind

MESSAGE_S = 0.001  # seconds to deliver a call of a role and its answer (assumed)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """The input of a plan: models and work, GPUs, and variants of the schedule. ``functions`` are
    costs of reward functions by name, which have CPUs of their own."""

    models: ModelShapes
    workload: Workload
    hardware: Hardware
    gpus: int = 1  # available; a plan uses all of them
    variants: Mapping[str, ScheduleConfig] = field(default_factory=dict)
    on_paper: bool = False  # also plans that ``stretto train`` cannot run
    epochs: int = 1
    updates: int = 1  # optimizer updates a step, over all epochs
    functions: Mapping[str, SampleCost] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        w = self.workload
        return max(int(w.prompt_tokens.quantile(0.95, 0)), 1) + w.max_new_tokens

    def in_flight(self, schedule: ScheduleConfig) -> int:
        return schedule.most_in_flight(self.workload.batch, self.workload.samples_per_prompt)


MICRO_TOKENS = (4096, 8192, 16_384, 32_768)  # tokens of a learner's micro-batches
SPLITS = 64  # Most sizes of a role to try. With more GPUs, roles get full nodes.
STAGES = (1, 2, 4, 8, 16)  # pipeline stages of a learner, on paper
Kind = tuple[str, str, bool]  # the sharing of GPUs, the schedule, and whether it is on paper
BASELINE = ("all", "sync")
"""The kind that is always searched, on paper too: all roles on all GPUs, one after another."""
Pipelining = Literal["1f1b", "interleaved", "fused"]
"""Schedules of a learner's pipelines: one model after the other, by 1F1B or with two chunks of
layers a stage (interleaved), or both at once in opposite directions (fused; RLHFuse, section 5)."""


def bubble(pipelining: Pipelining, stages: int) -> float:
    """Return a stage's idle time in an update, in micro-batches, for each model.

    It is the same for any number of micro-batches from twice the stages on. Two chunks of layers a
    stage halve it. A fused schedule is of two equal models, at the lower bound of latency, which
    the solver of :mod:`stretto.pipelines` reaches for them.
    """
    fused = ((stages + 1) // 2 - 1) / 2
    return {"1f1b": stages - 1.0, "interleaved": (stages - 1) / 2, "fused": fused}[pipelining]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with a variant of the schedule, and several engines if stragglers migrate."""

    layout: RunLayout
    variant: str
    schedule: ScheduleConfig
    engines: int = 1
    pipelining: Pipelining = "1f1b"

    @property
    def bubble(self) -> float:
        """A stage's idle time in an update, in micro-batches, for a model."""
        return bubble(self.pipelining, self.layout.learner.pp)

    @property
    def kind(self) -> Kind:
        return self.layout.sharing, self.variant, bool(self.on_paper)

    @property
    def on_paper(self) -> str:
        """The reason why ``stretto train`` cannot run it, empty if it can."""
        layout = self.layout
        if layout.offload:
            return "shards of the learner and weights of a generator are not offloaded"
        if layout.gpus == 1:
            return ""
        if layout.learner.pp > 1:
            return "a learner's processes have no pipeline stages"
        if layout.colocated and layout.generator.dp > 1:
            return "a learner's processes hold one generator"
        if layout.scorer.dp > 1 and layout.sharing in ("all", "learner"):
            return "a learner's processes hold one copy of a scorer"
        return ""


def candidates(spec: PlanSpec) -> Iterator[Candidate]:
    """Yield all candidates, including those that do not fit into memory (see :func:`fits`)."""
    quickest = cache(lambda layout: _quickest_passes(spec, layout))
    for plain in _layouts(spec):
        # The learner's memory depends only on the roles that share its GPUs.
        seen = plain
        if plain.sharing in ("none", "generators"):
            seen = replace(plain, sharing="none", generator=Layout(), scorer=Layout())
        elif plain.sharing == "learner":
            seen = replace(plain, generator=Layout())
        for way in quickest(seen):
            layout = replace(plain, micro_tokens=way.micro_tokens, checkpointing=way.checkpointing)
            for variant, schedule in spec.variants.items():
                candidate = Candidate(layout, variant, schedule)
                if _pointless(candidate):
                    continue
                if schedule.knobs.migrates(2) and not schedule.knobs.streams:
                    candidate = replace(candidate, engines=layout.generator.dp)
                if spec.on_paper or not candidate.on_paper or candidate.kind[:2] == BASELINE:
                    for pipelining in _pipelinings(spec, layout):
                        yield replace(candidate, pipelining=pipelining)


def fits(spec: PlanSpec, candidate: Candidate) -> bool:
    """Return whether all phases fit into a GPU, with room for a response at full length."""
    phases = memory_by_phase(spec, candidate).values()
    return all(sum(parts.values()) <= spec.hardware.usable_bytes for parts in phases)


def memory_by_phase(spec: PlanSpec, candidate: Candidate) -> dict[str, Parts]:
    """Return the bytes of a GPU by phase and part. Scorers that prefill streamed responses keep the
    keys and values of all responses in flight, at their average length."""
    models = spec.models
    layout = candidate.layout
    rows = spec.in_flight(candidate.schedule)
    phases = memory_model.phases_of(models, layout, rows, spec.longest, spec.hardware)
    if candidate.schedule.knobs.streams:
        tensor, copies = layout.scorer.tp, layout.scorer.dp
        tokens = rows * spec.workload.mean_tokens / copies
        streams = tokens * sum(memory_model.cache_bytes(shape, tensor) for shape in models.scoring)
        phases["scoring"] = {**phases["scoring"], "responses that stream": streams}
    stages = layout.learner.pp
    more = {
        "1f1b": 0.0,
        # Two chunks of layers a stage: Narayanan et al. 2021, section 2.2.
        "interleaved": (stages - 1) / (2 * stages),
        "fused": 1.0,  # at most: micro-batches of both models are in flight
    }[candidate.pipelining]
    if more:
        more *= phases["training"]["activations"]
        phases["training"] = {**phases["training"], "activations of more micro-batches": more}
    return phases


def _pipelinings(spec: PlanSpec, layout: RunLayout) -> Iterator[Pipelining]:
    stages = layout.learner.pp
    yield "1f1b"
    if stages > 1 and all(shape.layers >= 2 * stages for shape in spec.models.trained):
        yield "interleaved"
    if stages > 1 and spec.models.critic:
        yield "fused"


def _pointless(candidate: Candidate) -> bool:
    """Return whether the layout leaves the schedule nothing to overlap, or too much to swap."""
    layout, knobs = candidate.layout, candidate.schedule.knobs
    if knobs.streams and layout.sharing not in ("none", "learner"):
        return True  # scorers would wait until nothing is left to decode
    if knobs.lag and layout.colocated:
        return True  # no GPU is free to train while others decode
    if layout.offload and knobs.score_on != "batch":
        return True
    if knobs.migrates(2) and not knobs.streams:  # freed generators score
        return layout.sharing != "generators" or layout.generator.dp == 1
    return False


def _layouts(spec: PlanSpec) -> Iterator[RunLayout]:
    gpus = spec.gpus
    node = spec.hardware.links.gpus_per_node
    scored = spec.models.scoring
    shapes = {
        "learner": spec.models.trained,
        "generators": (spec.models.actor,),
        "scorers": scored or (spec.models.actor,),
    }

    @cache
    def layouts(ranks: int, role: str) -> list[Layout]:
        """Return ways to divide a role's models among ranks, tensor-parallel within a node."""
        stages = STAGES if role == "learner" and spec.on_paper else (1,)
        return [
            Layout(fsdp=ranks // (t * p), tp=t, pp=p)
            if role == "learner"
            else Layout(dp=ranks // t, tp=t)
            for t in range(1, node + 1)
            if all(shape.cuts_into(t) for shape in shapes[role])
            and (node % t == 0 or gpus <= node)  # none spans two nodes
            for p in stages
            if ranks % (t * p) == 0 and p <= min(shape.layers for shape in shapes[role])
        ]

    for learner, generator, scorer in product(*(layouts(gpus, role) for role in shapes)):
        for offload in (False, True):
            yield RunLayout(learner, generator, scorer, "all", offload)
    step = node * ceil_div(gpus, node * SPLITS)
    shares = range(1, gpus) if gpus <= SPLITS else range(node, gpus, step)
    for learners in shares:
        rest = gpus - learners
        for learner, generator in product(
            layouts(learners, "learner"), layouts(rest, "generators")
        ):
            if generator in layouts(rest, "scorers"):  # a copy with each generator
                yield RunLayout(learner, generator, generator, "generators")
            scorers_there = layouts(learners, "scorers") if scored else []
            for scorer in scorers_there:
                if scorer.dp == 1 or spec.on_paper:
                    yield RunLayout(learner, generator, scorer, "learner")
        powers = [2**k for k in range(gpus.bit_length())] if scored else []
        for scorers in sorted({*powers, *(3 * n for n in powers)}):
            if scorers <= gpus // 2 and learners + scorers < gpus:
                sizes = (learners, rest - scorers, scorers)
                for learner, generator, scorer in product(*map(layouts, sizes, shapes)):
                    yield RunLayout(learner, generator, scorer, "none")


def _quickest_passes(spec: PlanSpec, layout: RunLayout) -> list[RunLayout]:
    ways = [
        replace(layout, micro_tokens=max(tokens, spec.longest), checkpointing=checkpointing)
        for tokens, checkpointing in product(MICRO_TOKENS, (False, True))
    ]
    tokens = int(spec.workload.batch * spec.workload.mean_tokens)
    ways.sort(key=lambda way: cost_of_learner(spec, way).seconds(tokens))
    usable = spec.hardware.usable_bytes
    fitting = (way for way in ways if memory_model.learner_bytes(spec.models, way) <= usable)
    return list(islice(fitting, 1))


def cluster_of(spec: PlanSpec, candidate: Candidate) -> Cluster:
    """Make the cluster of a candidate. Raises ConfigError if keys and values have no room."""
    layout = candidate.layout
    engines = candidate.engines
    slots = slots_of(spec, candidate)
    devices, generators = layout.devices, layout.devices["generators"]
    cost, per_engine = cost_of_generator(spec, layout), len(generators) // engines
    return Cluster(
        call_s=MESSAGE_S,
        generators=tuple(
            GeneratorRole(
                devices=generators[i * per_engine : (i + 1) * per_engine],
                tensor_parallel=layout.generator.tp,
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
            cost=cost_of_learner(spec, layout, candidate.bubble),
        ),
        workload=spec.workload,
        schedule=candidate.schedule,
    )


def slots_of(spec: PlanSpec, candidate: Candidate) -> int:
    fit = cost_of_generator(spec, candidate.layout).cache_tokens // spec.longest
    copies, in_flight = candidate.layout.generator.dp, spec.in_flight(candidate.schedule)
    return 0 if fit * copies >= in_flight else max(fit, 1)


def cost_of_generator(spec: PlanSpec, layout: RunLayout) -> GeneratorCost:
    """Return the cost of a copy of the generator. Raises ConfigError without room for its cache."""
    actor, generator = spec.models.actor, layout.generator
    cost = formulas.generator_cost(
        actor,
        generator.tp,
        spec.hardware,
        length=spec.workload.prompt_tokens.quantile(0.5, 0),
        free_bytes=memory_model.cache_room_bytes(spec.models, layout, spec.hardware),
    )
    sync_s = _reshard_s if layout.colocated else _broadcast_s
    load_s = sync_s(actor, layout.learner, generator, spec.hardware)
    return cost.model_copy(update={"load_s": load_s})


def cost_of_learner(spec: PlanSpec, layout: RunLayout, bubble: float | None = None) -> TrainCost:
    """Return the learner's cost, including the swaps of offloaded roles."""
    w = spec.workload
    passes = formulas.TrainingPasses(
        tokens=w.batch * w.mean_tokens,
        length=w.mean_tokens,
        epochs=spec.epochs,
        updates=spec.updates,
        micro_tokens=layout.micro_tokens,
        checkpointing=layout.checkpointing,
        bubble=bubble,
    )
    cost = formulas.train_cost(spec.models.trained, layout.learner, spec.hardware, passes)
    return cost.model_copy(update={"step_s": cost.step_s + swap_s(spec, layout)})


def scorers_of(spec: PlanSpec, layout: RunLayout, engines: int = 1) -> list[ScorerRole]:
    """Return the scoring models. Each generator on shared devices has its own copies."""
    models, devices = spec.models, layout.devices["scorers"]
    hosted = layout.sharing in ("all", "generators")
    roles: list[tuple[str, ScoreKind, Shape | None]] = [
        ("reward", "reward", models.reward),
        ("reference", "logprobs", models.reference),
        ("critic", "values", models.critic),
    ]
    count = engines if hosted else 1
    per_copy = len(devices) // count
    copies = Layout(dp=max(layout.scorer.dp // count, 1), tp=layout.scorer.tp)
    length = spec.workload.mean_tokens
    critic_load_s = 0.0
    if models.critic and not layout.colocated:
        sync_s = _reshard_s if layout.sharing == "learner" else _broadcast_s
        critic_load_s = sync_s(models.critic, layout.learner, layout.scorer, spec.hardware)
    return [
        ScorerRole(
            name=name,
            kind=kind,
            devices=devices[i * per_copy : (i + 1) * per_copy],
            cost=formulas.prefill_cost(shape, copies, spec.hardware, length=length),
            follows="critic" if name == "critic" else "",
            load_s=critic_load_s if name == "critic" else 0.0,
            host=i if hosted else None,
        )
        for name, kind, shape in roles
        if shape is not None
        for i in range(count)
    ]


def swap_s(spec: PlanSpec, layout: RunLayout) -> float:
    """Return the seconds per step to swap offloaded states out and in, and frozen models in."""
    if not layout.offload:
        return 0.0
    on, models = spec.hardware, spec.models
    kept = memory_model.kept_bytes(models, layout.learner)
    size = 2 * kept + memory_model.frozen_bytes(models, layout)
    return size / (on.links.host_bytes_per_s * on.assumed.link)


def _reshard_s(shape: Shape, learner: Layout, to: Layout, on: Hardware) -> float:
    size = formulas.reshard_bytes(shape, learner, to)
    speed = on.links.data_bytes_per_s(to)  # ranks with the same slice exchange their shards
    return max(size, 0.0) / (speed * on.assumed.link)


def _broadcast_s(shape: Shape, learner: Layout, to: Layout, on: Hardware) -> float:
    """Return the seconds to broadcast all shards one after another, as Stretto's ranks do."""
    speed = on.links.within_bytes_per_s
    if learner.ranks + to.ranks > on.links.gpus_per_node:  # by the adapter of a shard's rank
        speed = min(speed, on.links.between_bytes_per_s)
    return formulas.broadcast_bytes(shape) / (speed * on.assumed.link)
