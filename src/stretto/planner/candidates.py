"""Candidates: the layouts of a run on a number of GPUs, each with the schedule's variants. They are
layouts that ``stretto train`` can start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, islice, product

from stretto.bounds import ceil_div
from stretto.config import ScheduleConfig
from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.planner import formulas, memory_model
from stretto.planner.hardware import Hardware
from stretto.planner.memory_model import Parts
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.runtime.sim.cluster import (
    Cluster,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
    divided_prompts,
)
from stretto.runtime.sim.costs import GeneratorCost, PrefillCost, SampleCost, TrainCost
from stretto.types import ScoreKind

MESSAGE_S = 0.001  # seconds to deliver a call of a role and its answer (assumed)


@dataclass(frozen=True)  # no slots, as a mean is cached
class PlanSpec:
    """The input of a plan: models and work, GPUs, and variants of the schedule. ``functions`` are
    costs of reward functions by name, which have CPUs of their own."""

    models: ModelShapes
    workload: Workload
    hardware: Hardware
    gpus: int = 1  # available; a plan uses all of them
    variants: Mapping[str, ScheduleConfig] = field(default_factory=dict)
    sleeping: bool = False  # engines have weights of their own, and sleep on shared GPUs
    pipelines: bool = False  # whether the models may be cut into pipeline stages
    epochs: int = 1
    updates: int = 1  # optimizer updates a step, over all epochs
    functions: Mapping[str, SampleCost] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        w = self.workload
        return max(int(w.prompt_tokens.quantile(0.95, 0)), 1) + w.max_new_tokens

    @cached_property
    def mean_tokens(self) -> float:
        """Tokens of a response, prompt included. The workload draws many lengths at each access."""
        return self.workload.mean_tokens

    def in_flight(self, schedule: ScheduleConfig) -> int:
        return schedule.most_in_flight(self.workload.batch, self.workload.samples_per_prompt)


MICRO_TOKENS = (4096, 8192, 16_384, 32_768)  # tokens of a learner's micro-batches
SPLITS = 64  # Most sizes of a role to try. With more GPUs, roles get full nodes.
STAGES = (2, 4, 8, 16)  # of a learner's pipelines
STAGE_TOKENS = (1024, 2048, *MICRO_TOKENS)  # of their micro-batches, as many fill them better
Kind = tuple[str, str]  # the sharing of GPUs, and the schedule
BASELINE = ("all", "sync")
"""The kind that is always searched: all roles on all GPUs, one after another."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with a variant of the schedule, and several engines if stragglers migrate."""

    layout: RunLayout
    variant: str
    schedule: ScheduleConfig
    engines: int = 1

    @property
    def kind(self) -> Kind:
        return self.layout.sharing, self.variant


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
            layout = replace(
                plain,
                micro_tokens=way.micro_tokens,
                checkpointing=way.checkpointing,
                fused=way.fused,
            )
            for variant, schedule in spec.variants.items():
                candidate = Candidate(layout, variant, schedule)
                if _pointless(candidate):
                    continue
                if schedule.knobs.migrates(2) and not schedule.knobs.streams:
                    candidate = replace(candidate, engines=layout.generator.dp)
                yield candidate


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
        tokens = rows * spec.mean_tokens / copies
        readers = [(shape, 1.0) for shape in models.scoring]
        readers += [(teacher.shape, teacher.share - 1.0) for teacher in models.teachers]
        streams = tokens * sum(
            share * memory_model.cache_bytes(shape, tensor) for shape, share in readers
        )
        phases["scoring"] = {**phases["scoring"], "responses that stream": streams}
    return phases


def _pointless(candidate: Candidate) -> bool:
    """Return whether the layout leaves the schedule nothing to overlap, or too much to swap."""
    layout, knobs = candidate.layout, candidate.schedule.knobs
    if knobs.streams and layout.sharing not in ("none", "learner"):
        return True  # scorers would wait until nothing is left to decode
    if knobs.streams and layout.scorer.fsdp > 1:
        return True  # the ranks that hold shards run all passes together, of ended responses
    if knobs.lag and layout.colocated:
        return True  # no GPU is free to train while others decode
    if layout.offload and knobs.score_on != "batch":
        return True
    if knobs.migrates(2) and not knobs.streams:  # freed generators score
        return layout.sharing != "generators" or layout.generator.dp == 1
    return False


@dataclass(frozen=True, slots=True)
class _Divisions:
    """Ways to divide the models of each role among ranks."""

    models: ModelShapes
    gpus: int
    gpus_per_node: int
    most_pipelines: int  # of a model; 0 if it may not be cut into stages

    def learner(self, ranks: int) -> list[Layout]:
        slices = self._slices(ranks, self.models.trained)
        return [Layout(fsdp=ranks // tp, tp=tp) for tp in slices]

    def pipelines(self, ranks: int) -> list[Layout]:
        """Return layouts that the pipelines of both models have."""
        if self.models.critic is None:
            return []
        layers = min(shape.layers for shape in self.models.trained)
        ways = product(STAGES, self._slices(ranks, self.models.trained))
        return [
            Layout(dp=ranks // (pp * tp), pp=pp, tp=tp)
            for pp, tp in ways
            if pp <= layers and ranks % (pp * tp) == 0
            if ranks <= pp * tp * self.most_pipelines
        ]

    def generator(self, ranks: int) -> list[Layout]:
        return self._copies(ranks, (self.models.actor,))

    def scorer(self, ranks: int) -> list[Layout]:
        return self._copies(ranks, self.models.scoring or (self.models.actor,))

    def scorer_in_learner(self, ranks: int, critic: Layout | None) -> list[Layout]:
        """Scorers may also be shards, next to a critic of the given layout. ``None`` is a critic
        that uses the learner's weights.
        """
        copied = self.models.trained[1:] if critic else ()
        if not (self.models.frozen or copied):
            return [Layout(dp=ranks)]  # of nothing
        ways = self._copies(ranks, (*self.models.frozen, *copied))
        divided = not copied or critic in self._copies(ranks, copied)
        if ranks > 1 and self.models.frozen and divided:
            ways.append(Layout(fsdp=ranks))
        return ways

    def _copies(self, ranks: int, shapes: Sequence[Shape]) -> list[Layout]:
        return [Layout(dp=ranks // tp, tp=tp) for tp in self._slices(ranks, shapes)]

    def _slices(self, ranks: int, shapes: Sequence[Shape]) -> list[int]:
        """Return numbers of slices that divide the ranks and the heads. None spans two nodes."""
        node = self.gpus_per_node
        within = [n for n in range(1, node + 1) if node % n == 0 or self.gpus <= node]
        cuts = [n for n in within if all(shape.cuts_into(n) for shape in shapes)]
        return [n for n in cuts if ranks % n == 0]


def _layouts(spec: PlanSpec) -> Iterator[RunLayout]:
    """Yield layouts without passes (see :func:`_quickest_passes`)."""
    responses = spec.workload.batch * spec.epochs // spec.updates  # of a mini-batch
    by = _Divisions(
        spec.models,
        spec.gpus,
        spec.hardware.links.gpus_per_node,
        responses if spec.pipelines else 0,
    )
    return chain(_colocated(spec, by), _apart(spec, by))


def _colocated(spec: PlanSpec, by: _Divisions) -> Iterator[RunLayout]:
    gpus, sleeping = spec.gpus, spec.sleeping
    if gpus > by.gpus_per_node and sleeping:  # Ray shares no GPU among processes
        return
    learners = by.learner(gpus) if sleeping else by.learner(gpus) + by.pipelines(gpus)
    for learner, generator in product(learners, by.generator(gpus)):
        critic = generator if learner.has_stages else None
        for scorer in by.scorer_in_learner(gpus, Layout(tp=gpus) if sleeping else critic):
            layout = RunLayout(learner, generator, scorer, "all", sleeping=sleeping)
            yield layout
            if gpus > 1 and scorer.fsdp == 1 and (spec.models.scoring or not sleeping):
                yield replace(layout, offload=True)


def _apart(spec: PlanSpec, by: _Divisions) -> Iterator[RunLayout]:
    gpus, node = spec.gpus, by.gpus_per_node
    step = node * ceil_div(gpus, node * SPLITS)
    shares = range(1, gpus) if gpus <= SPLITS else range(node, gpus, step)
    for learners in shares:
        rest = gpus - learners
        ways = by.learner(learners)
        unshared = ways + by.pipelines(learners)
        for learner, generator in product(unshared, by.generator(rest)):
            if generator in by.scorer(rest):  # a copy with each generator
                yield RunLayout(learner, generator, generator, "generators")
        if not spec.models.scoring:
            continue
        scorers_there = by.scorer_in_learner(learners, Layout(tp=learners))
        for learner, generator, scorer in product(ways, by.generator(rest), scorers_there):
            yield RunLayout(learner, generator, scorer, "learner")
        powers = [2**k for k in range(gpus.bit_length())]
        for scorers in sorted({*powers, *(3 * n for n in powers)}):
            if scorers <= gpus // 2 and learners + scorers < gpus:
                other_ways = by.generator(rest - scorers), by.scorer(scorers)
                for learner, generator, scorer in product(unshared, *other_ways):
                    yield RunLayout(learner, generator, scorer, "none")


def _quickest_passes(spec: PlanSpec, layout: RunLayout) -> list[RunLayout]:
    in_stages = layout.learner.has_stages
    sizes = STAGE_TOKENS if in_stages else MICRO_TOKENS
    budgets = sorted({max(size, spec.longest) for size in sizes})
    ways = [
        replace(layout, micro_tokens=tokens, checkpointing=checkpointing, fused=fused)
        for tokens, checkpointing, fused in product(budgets, (False, True), (False, True))
        if in_stages or not fused
    ]
    tokens = int(spec.workload.batch * spec.mean_tokens)
    ways.sort(key=lambda way: cost_of_learner(spec, way).seconds(tokens))
    usable = spec.hardware.usable_bytes
    fits = (way for way in ways if memory_model.learner_bytes(spec.models, way) <= usable)
    if layout.in_place:  # passes that leave the most room for keys and values
        size = spec.workload.batch, spec.longest, spec.hardware
        rounds = {way: memory_model.rows_in_flight(spec.models, way, *size)[1] for way in fits}
        return sorted(rounds, key=lambda way: rounds[way])[:1]
    return [*islice(fits, 1)]


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
            cost=cost_of_learner(spec, layout),
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
    sync_s = _reshard_s if layout.in_place else _broadcast_s
    load_s = sync_s(actor, layout.learner, generator, spec.hardware)
    return cost.model_copy(update={"load_s": load_s})


def cost_of_learner(spec: PlanSpec, layout: RunLayout) -> TrainCost:
    """Return the learner's cost, including the swaps of offloaded roles."""
    w = spec.workload
    passes = formulas.TrainingPasses(
        tokens=w.batch * spec.mean_tokens,
        length=spec.mean_tokens,
        epochs=spec.epochs,
        updates=spec.updates,
        micro_tokens=layout.micro_tokens,
        checkpointing=layout.checkpointing,
        fused=layout.fused,
    )
    cost = formulas.train_cost(spec.models.trained, layout.learner, spec.hardware, passes)
    return cost.model_copy(update={"step_s": cost.step_s + swap_s(spec, layout)})


def scorers_of(spec: PlanSpec, layout: RunLayout, engines: int = 1) -> list[ScorerRole]:
    """Return the scoring models. Each generator on shared devices has its own copies."""
    models, devices = spec.models, layout.devices["scorers"]
    hosted = layout.sharing in ("all", "generators")
    prompts = divided_prompts({teacher.name: teacher.share for teacher in models.teachers})
    roles: list[tuple[str, ScoreKind, Shape | None, Layout]] = [
        ("reward", "reward", models.reward, layout.scorer),
        ("reference", "logprobs", models.reference, layout.scorer),
        ("critic", "values", models.critic, layout.critic),
        *((t.name, "logprobs", t.shape, layout.scorer) for t in models.teachers),
    ]
    count = engines if hosted else 1
    per_copy = len(devices) // count
    critic_load_s = 0.0
    if models.critic and not layout.lends_critic:
        sync_s = _broadcast_s if layout.sharing in ("none", "generators") else _reshard_s
        critic_load_s = sync_s(models.critic, layout.learner, layout.critic, spec.hardware)

    def cost(shape: Shape, layout: Layout) -> PrefillCost:
        share = replace(layout, dp=max(layout.dp // count, 1))
        length = spec.mean_tokens
        return formulas.prefill_cost(shape, share, spec.hardware, length=length)

    return [
        ScorerRole(
            name=name,
            kind=kind,
            devices=devices[i * per_copy : (i + 1) * per_copy],
            cost=cost(shape, on),
            follows="critic" if name == "critic" else "",
            load_s=critic_load_s if name == "critic" else 0.0,
            host=i if hosted else None,
            prompts=prompts.get(name, (0.0, 1.0)),
        )
        for name, kind, shape, on in roles
        if shape is not None
        for i in range(count)
    ]


def swap_s(spec: PlanSpec, layout: RunLayout) -> float:
    """Return the seconds per step to swap offloaded moments out and in, and frozen models in."""
    if not layout.offload:
        return 0.0
    on, models = spec.hardware, spec.models
    moments = memory_model.moments_bytes(models, layout.learner)
    size = 2 * moments + memory_model.frozen_bytes(models, layout)
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
