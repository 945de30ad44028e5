"""Candidates: the layouts of a run on so many GPUs, each with the variants of the schedule.

What ``stretto train`` can run comes first. *On paper* there is more: several copies of generators
and scorers in the learner's processes, all states offloaded, and learners with pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Literal

from stretto.config import ScheduleConfig
from stretto.planner import memory
from stretto.planner.clusters import PlanSpec, cost_of_learner, memory_of
from stretto.planner.layout import Layout, Mesh
from stretto.planner.memory import Parts

MICRO_TOKENS = (4096, 8192, 16_384, 32_768)
"""Tokens of a learner's micro-batches."""
SPLITS = 64
"""Most sizes of a role that are tried; with more GPUs, roles get whole nodes."""
STAGES = (1, 2, 4, 8, 16)
"""Pipeline stages of a learner, on paper."""
BASELINE = ("all", "sync")
"""The kind that is always searched, on paper too: all roles on all GPUs, one after another."""
Pipelining = Literal["1f1b", "interleaved", "fused"]
"""Schedules of a learner's pipelines: models one after the other, each by 1F1B or with two chunks
of layers a stage (interleaved), or both at once in opposite directions (fused; RLHFuse, section 5).
"""


def bubble(pipelining: Pipelining, stages: int) -> float:
    """Return how long a stage is idle in an update, in micro-batches, for each model.

    It does not depend on the number of micro-batches, if there are twice as many as stages. Two
    chunks of layers a stage halve the bubble. Fused schedules are of two models of one size, at the
    lower bound of latency, which the solver of :mod:`stretto.pipelines` reaches for them.
    """
    match pipelining:
        case "1f1b":
            return stages - 1.0
        case "interleaved":
            return (stages - 1) / 2
        case "fused":
            return ((stages + 1) // 2 - 1) / 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with a variant of the schedule.

    Attributes:
        engines: generators; more than one where stragglers move between them.
        pipelining: schedule of the learner's pipeline stages, if it has some.
    """

    layout: Layout
    variant: str
    schedule: ScheduleConfig
    engines: int = 1
    pipelining: Pipelining = "1f1b"

    @property
    def bubble(self) -> float:
        """Micro-batches' worth of time that a pipeline stage is idle in an update, for a model."""
        return bubble(self.pipelining, self.layout.learner.stages)

    @property
    def kind(self) -> tuple[str, str]:
        """Which roles share GPUs, and the schedule; candidates of a kind differ in numbers."""
        return self.layout.sharing, self.variant

    @property
    def on_paper(self) -> str:
        """Why ``stretto train`` cannot run it; empty if it can."""
        layout = self.layout
        if layout.offload:
            return "shards of the learner and weights of a generator are not offloaded"
        if layout.gpus == 1:
            return ""
        if layout.learner.stages > 1:
            return "a learner's processes have no pipeline stages"
        if layout.colocated and layout.generator.data > 1:
            return "a learner's processes hold one generator"
        if layout.scorer.data > 1 and layout.sharing in ("all", "learner"):
            return "a learner's processes hold one copy of a scorer"
        return ""


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched.

    Attributes:
        gpus: how many there are; a plan uses all of them.
        variants: settings of the schedule, by name.
        on_paper: also what ``stretto train`` cannot run.
    """

    gpus: int
    variants: Mapping[str, ScheduleConfig]
    on_paper: bool = False


def candidates(spec: PlanSpec, space: Space) -> Iterator[Candidate]:
    """Yield all candidates of a space, whether they fit into memory or not (see :func:`fits`)."""
    for layout in _Layouts(spec, space).all():
        for variant, schedule in space.variants.items():
            candidate = Candidate(layout, variant, schedule)
            if _pointless(candidate):
                continue
            if schedule.knobs.migrates(2) and not schedule.knobs.streams:
                candidate = replace(candidate, engines=layout.generator.data)
            if space.on_paper or not candidate.on_paper or candidate.kind == BASELINE:
                for pipelining in _pipelinings(spec, layout):
                    yield replace(candidate, pipelining=pipelining)


def fits(spec: PlanSpec, candidate: Candidate) -> bool:
    """Return whether all phases fit into a GPU, with room for a response at full length."""
    phases = memory_by_phase(spec, candidate).values()
    return all(sum(parts.values()) <= spec.hardware.usable_bytes for parts in phases)


def memory_by_phase(spec: PlanSpec, candidate: Candidate) -> dict[str, Parts]:
    """Return the memory of a GPU by phase, and by what takes it, in bytes."""
    stages = candidate.layout.learner.stages
    found = memory_of(spec, candidate.layout, candidate.schedule)
    more = {
        "1f1b": 0.0,
        # Two chunks of layers a stage: Narayanan et al. 2021, section 2.2.
        "interleaved": (stages - 1) / (2 * stages),
        "fused": 1.0,  # micro-batches of both models are under way: at most
    }[candidate.pipelining]
    if more:
        more *= found["training"]["activations"]
        found["training"] = {**found["training"], "activations of more micro-batches": more}
    return found


def _pipelinings(spec: PlanSpec, layout: Layout) -> Iterator[Pipelining]:
    """Yield schedules of pipelines that a learner's models allow."""
    stages = layout.learner.stages
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
    if knobs.migrates(2) and not knobs.streams:  # the freed generators score
        return layout.sharing != "generators" or layout.generator.data == 1
    return False


class _Layouts:
    """Lists layouts, with the quickest passes that fit into the learner's memory."""

    def __init__(self, spec: PlanSpec, space: Space) -> None:
        self._spec, self._space = spec, space
        models = spec.models
        self._scored = models.scoring
        self._shapes = {
            "learner": models.trained,
            "generators": (models.actor,),
            "scorers": self._scored or (models.actor,),
        }
        self._meshes = cache(self._listed)
        self._passes = cache(self._quickest)

    def all(self) -> Iterator[Layout]:
        """Yield all layouts."""
        gpus = self._space.gpus
        for meshes in self._products(gpus, gpus, gpus):
            for offload in (False, True):
                yield from self._with_passes(Layout(*meshes, "all", offload))
        for learners in self._sizes:
            yield from self._in_two(learners, gpus - learners)
            for scorers in self._scorer_sizes if self._scored else ():
                if learners + scorers < gpus:
                    sizes = learners, gpus - learners - scorers, scorers
                    for meshes in self._products(*sizes):
                        yield from self._with_passes(Layout(*meshes, "none"))

    def _products(self, *sizes: int) -> Iterator[tuple[Mesh, Mesh, Mesh]]:
        """Yield meshes of learner, generators and scorers on so many GPUs."""
        learners, generators, scorers = map(self._meshes, sizes, self._shapes)
        return product(learners, generators, scorers)

    def _in_two(self, learners: int, generators: int) -> Iterator[Layout]:
        """Yield layouts whose scorers share the generators' GPUs, or the learner's."""
        roles = (self._meshes(learners, "learner"), self._meshes(generators, "generators"))
        for learner, generator in product(*roles):
            if generator.tensor in self._tensors["scorers"]:  # a copy with each generator
                yield from self._with_passes(Layout(learner, generator, generator, "generators"))
            for scorer in self._meshes(learners, "scorers") if self._scored else ():
                if scorer.data == 1 or self._space.on_paper:
                    yield from self._with_passes(Layout(learner, generator, scorer, "learner"))

    @cached_property
    def _tensors(self) -> dict[str, list[int]]:
        """Numbers of slices that a role's models can be cut into, within a node."""
        node = self._spec.hardware.links.gpus_per_node
        return {
            role: [
                t
                for t in range(1, node + 1)
                if all(shape.heads % t == shape.kv_heads % t == 0 for shape in shapes)
                and (node % t == 0 or self._space.gpus <= node)  # none lies across two nodes
            ]
            for role, shapes in self._shapes.items()
        }

    @cached_property
    def _sizes(self) -> range:
        gpus, node = self._space.gpus, self._spec.hardware.links.gpus_per_node
        if gpus <= SPLITS:
            return range(1, gpus)
        return range(node, gpus, node * -(-gpus // (node * SPLITS)))

    @cached_property
    def _scorer_sizes(self) -> list[int]:
        powers = [2**k for k in range(self._space.gpus.bit_length())]
        half = self._space.gpus // 2
        return [n for n in sorted({*powers, *(3 * n for n in powers)}) if n <= half]

    def _listed(self, devices: int, role: str) -> tuple[Mesh, ...]:
        several = role == "learner" and self._space.on_paper
        return tuple(
            Mesh(devices // (t * p), t, p)
            for t in self._tensors[role]
            for p in (STAGES if several else (1,))
            if devices % (t * p) == 0 and p <= min(shape.layers for shape in self._shapes[role])
        )

    def _with_passes(self, layout: Layout) -> Iterator[Layout]:
        # Of the other roles, the learner's memory depends on those alone that share its GPUs.
        seen = layout
        if layout.sharing in ("none", "generators"):
            seen = replace(layout, sharing="none", generator=Mesh(1), scorer=Mesh(1))
        elif layout.sharing == "learner":
            seen = replace(layout, generator=Mesh(1))
        if found := self._passes(seen):
            micro_tokens, checkpointing = found
            yield replace(layout, micro_tokens=micro_tokens, checkpointing=checkpointing)

    def _quickest(self, layout: Layout) -> tuple[int, bool] | None:
        spec, w = self._spec, self._spec.workload
        ways = [
            replace(layout, micro_tokens=max(tokens, spec.longest), checkpointing=again)
            for tokens, again in product(MICRO_TOKENS, (False, True))
        ]
        tokens = int(w.batch * w.mean_tokens)
        ways.sort(key=lambda way: cost_of_learner(spec, way).seconds(tokens))
        for way in ways:
            if memory.learner_bytes(spec.models, way) <= spec.hardware.usable_bytes:
                return way.micro_tokens, way.checkpointing
        return None
