"""Candidates: the layouts of a run on so many GPUs, each with the variants of the schedule.

What ``stretto train`` can run comes first. *On paper* there is more: several copies of generators
and scorers in the learner's processes, all states offloaded, and learners with pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal

from stretto.config import ScheduleConfig
from stretto.planner import memory
from stretto.planner.clusters import PlanSpec, cost_of_learner
from stretto.planner.layout import Layout, Mesh
from stretto.planner.memory import Parts

MICRO_TOKENS = (4096, 8192, 16_384, 32_768)
"""Tokens of a learner's micro-batches."""
SPLITS = 64
"""Most sizes of a role that are tried; with more GPUs, roles get whole nodes."""
STAGES = (1, 2, 4, 8, 16)
"""Pipeline stages of a learner, on paper."""
Kind = tuple[str, str, bool]
"""Which roles share GPUs, the schedule, and whether it is on paper."""
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
    def kind(self) -> Kind:
        """What it has in common with others, which differ in numbers."""
        return self.layout.sharing, self.variant, bool(self.on_paper)

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
    """What is searched: plans that use all GPUs, and variants of the schedule by name."""

    gpus: int
    variants: Mapping[str, ScheduleConfig]
    on_paper: bool = False


def candidates(spec: PlanSpec, space: Space) -> Iterator[Candidate]:
    """Yield all candidates of a space, whether they fit into memory or not (see :func:`fits`)."""
    quickest = cache(lambda layout: _quickest_passes(spec, layout))
    for plain in _layouts(spec, space):
        # Of the other roles, the learner's memory depends on those alone that share its GPUs.
        seen = plain
        if plain.sharing in ("none", "generators"):
            seen = replace(plain, sharing="none", generator=Mesh(1), scorer=Mesh(1))
        elif plain.sharing == "learner":
            seen = replace(plain, generator=Mesh(1))
        for layout in (replace(plain, **passes) for passes in quickest(seen)):
            for variant, schedule in space.variants.items():
                candidate = Candidate(layout, variant, schedule)
                if _pointless(candidate):
                    continue
                if schedule.knobs.migrates(2) and not schedule.knobs.streams:
                    candidate = replace(candidate, engines=layout.generator.data)
                if space.on_paper or not candidate.on_paper or candidate.kind[:2] == BASELINE:
                    for pipelining in _pipelinings(spec, layout):
                        yield replace(candidate, pipelining=pipelining)


def fits(spec: PlanSpec, candidate: Candidate) -> bool:
    """Return whether all phases fit into a GPU, with room for a response at full length."""
    phases = memory_by_phase(spec, candidate).values()
    return all(sum(parts.values()) <= spec.hardware.usable_bytes for parts in phases)


def memory_by_phase(spec: PlanSpec, candidate: Candidate) -> dict[str, Parts]:
    """Return the memory of a GPU by phase, and by what takes it, in bytes.

    Scorers that prefill responses while these are decoded keep keys and values of all in flight, at
    their average length.
    """
    models, layout, rows = spec.models, candidate.layout, spec.in_flight(candidate.schedule)
    found = memory.phases_of(models, layout, rows, spec.longest, spec.hardware)
    if candidate.schedule.knobs.streams:
        tensor, copies = layout.scorer.tensor, layout.scorer.data
        tokens = rows * spec.workload.mean_tokens / copies
        streams = tokens * sum(memory.cache_bytes(shape, tensor) for shape in models.scoring)
        found["scoring"] = {**found["scoring"], "responses that stream": streams}
    stages = layout.learner.stages
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


def _layouts(spec: PlanSpec, space: Space) -> Iterator[Layout]:
    """Yield all layouts, without the passes of their learners."""
    gpus, node, scored = space.gpus, spec.hardware.links.gpus_per_node, spec.models.scoring
    shapes = {
        "learner": spec.models.trained,
        "generators": (spec.models.actor,),
        "scorers": scored or (spec.models.actor,),
    }

    @cache
    def meshes(devices: int, role: str) -> list[Mesh]:
        """Return ways to divide a role's models among devices, slices of one within a node."""
        stages = STAGES if role == "learner" and space.on_paper else (1,)
        return [
            Mesh(devices // (t * p), t, p)
            for t in range(1, node + 1)
            if all(shape.heads % t == shape.kv_heads % t == 0 for shape in shapes[role])
            and (node % t == 0 or gpus <= node)  # none lies across two nodes
            for p in stages
            if devices % (t * p) == 0 and p <= min(shape.layers for shape in shapes[role])
        ]

    for each in product(*(meshes(gpus, role) for role in shapes)):
        for offload in (False, True):
            yield Layout(*each, "all", offload)
    step = node * -(-gpus // (node * SPLITS))
    for learners in range(1, gpus) if gpus <= SPLITS else range(node, gpus, step):
        rest = gpus - learners
        for learner, generator in product(meshes(learners, "learner"), meshes(rest, "generators")):
            if generator in meshes(rest, "scorers"):  # a copy with each generator
                yield Layout(learner, generator, generator, "generators")
            for scorer in meshes(learners, "scorers") if scored else ():
                if scorer.data == 1 or space.on_paper:
                    yield Layout(learner, generator, scorer, "learner")
        for scorers in _scorer_sizes(gpus) if scored else ():
            if learners + scorers < gpus:
                sizes = (learners, rest - scorers, scorers)
                for each in product(*map(meshes, sizes, shapes)):
                    yield Layout(*each, "none")


def _scorer_sizes(gpus: int) -> list[int]:
    powers = [2**k for k in range(gpus.bit_length())]
    return [n for n in sorted({*powers, *(3 * n for n in powers)}) if n <= gpus // 2]


def _quickest_passes(spec: PlanSpec, layout: Layout) -> list[Mapping[str, int]]:
    """Return the quickest passes that fit into the learner's memory, if there are some."""
    ways = [
        {"micro_tokens": max(tokens, spec.longest), "checkpointing": again}
        for tokens, again in product(MICRO_TOKENS, (False, True))
    ]
    tokens = int(spec.workload.batch * spec.workload.mean_tokens)
    ways.sort(key=lambda way: cost_of_learner(spec, replace(layout, **way)).seconds(tokens))
    for way in ways:
        if memory.learner_bytes(spec.models, replace(layout, **way)) <= spec.hardware.usable_bytes:
            return [way]
    return []
