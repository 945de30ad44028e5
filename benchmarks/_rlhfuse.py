"""RLHFuse's settings in virtual time: layouts, costs, and the systems it is compared with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import exp, log
from statistics import NormalDist, fmean
from typing import Any, Literal

from _estimate import fsdp_forward_bytes
from _papers import EAGER_S_A_LAYER, scheduled
from _table3 import ROWS, Row
from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.pipelines.solve import solve
from stretto.planner import memory_model
from stretto.planner.formulas import (
    TrainingPasses,
    gather_bytes,
    generator_cost,
    optimizer_bytes,
    prefill_cost,
    reshard_bytes,
    train_cost,
)
from stretto.planner.hardware import Hardware
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import Efficiency, GeneratorCost, PrefillCost, TrainCost
from stretto.runtime.sim.lengths import Lengths, Lognormal, Uniform
from stretto.types import ScoreKind


def _llama(layers: int, hidden: int, heads: int) -> Shape:
    return Shape(layers, hidden, 4 * hidden, heads, heads, 32_000, 32_000, gated=False)


SHAPES: Mapping[str, Shape] = {
    "13B": _llama(40, 5120, 40),
    "33B": _llama(60, 6656, 52),
    "65B": _llama(80, 8192, 64),
}
"""As the paper's table has them: an MLP without a gate, four times as wide as the hidden state."""
GPUS, NODE, BATCH, MINI_BATCH = 256, 8, 512, 64
STAGES: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("33B", "13B"): {"33B": 8, "13B": 4},
    ("65B", "33B"): {"65B": 16, "33B": 8},
}
"""Pipeline stages of each pair of sizes in the paper's Table 3, on nodes that hold a stage each."""
PAIRS = (("13B", "33B"), ("33B", "13B"), ("33B", "65B"), ("65B", "33B"))
"""Actor and critic: the pairs of Table 3, and the other way round. The reference has the actor's
size, the reward model the critic's."""
LIMITS = (512, 1024, 2048)
"""Tokens of a response, at most."""
TAIL = 10
"""The 99.9th percentile of the lengths, in medians. It is at the limit."""
SIGMA = log(TAIL) / NormalDist().inv_cdf(0.999)
PROMPTS = Uniform(low=32, high=384)
STEPS = 2 if "--smoke" in sys.argv else 4
ENOUGH = 1e9
"""Memory that is always enough: the search stops at the bound."""
RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is assumed, and whose system it is.

    Attributes:
        system: ``pipelined`` for RLHFuse and its base; ``unbalanced`` for mini-batches that are
            dealt out whatever their lengths, as ReaLHF's; ``zero`` for ZeRO stage 3 with padding
            and eager decoding, as DeepSpeed-Chat's.
        scoring, training: shares of the GPUs' peak.
        median: of the lengths, as a share of the limit.
        step_s: of a decode step beside the GPUs' own work.
        exchanging: updates wait for the exchange of gradients; else it is behind other work.
        layer_s: of each layer of a step instead, where ``zero`` launches kernels from Python.
    """

    system: Literal["pipelined", "unbalanced", "zero"] = "pipelined"
    scoring: float = 0.5
    training: float = 0.4
    median: float = 1 / TAIL
    step_s: float = 0.002
    exchanging: bool = True
    layer_s: float = EAGER_S_A_LAYER


PLAIN = Assumed()
CHUNK = 64
"""Tokens between two looks at what has ended."""
VARIANTS: Mapping[str, Assumed] = {
    "as assumed": PLAIN,
    "median a quarter of the limit": replace(PLAIN, median=0.25),
    "decode step 0.5 ms beside the GPU's work": replace(PLAIN, step_s=0.0005),
    "scoring at a tenth of the peak": replace(PLAIN, scoring=0.1),
    "scoring at a twentieth": replace(PLAIN, scoring=0.05),
    "gradients exchanged behind other work": replace(PLAIN, exchanging=False),
    "the same, and training at a tenth": replace(PLAIN, exchanging=False, training=0.1),
    "the same, and scoring at a twentieth": Assumed(scoring=0.05, exchanging=False, training=0.1),
}
SWEPT = ("as assumed", "scoring at a tenth of the peak", "scoring at a twentieth")
"""Variants of which the ratio of migration is varied."""
SYSTEMS: Mapping[str, tuple[Assumed, tuple[float, float]]] = {
    "its base": (PLAIN, (1.2, 1.4)),
    "as ReaLHF": (Assumed("unbalanced"), (1.4, 2.4)),
    "as DeepSpeed-Chat": (Assumed("zero"), (2.5, 3.7)),
    "the same, 0.25 ms a layer": (Assumed("zero", layer_s=0.00025), (2.5, 3.7)),
}
"""What RLHFuse is compared with, and how many times its throughput it is reported to have."""


@dataclass(frozen=True)
class Run:
    """A pair of models at a limit, under some assumptions.

    Attributes:
        actor, critic: sizes.
        limit: tokens of a response.
        assumed: whose system it is, and how fast.
        fused: actor and critic train by a fused schedule.
    """

    actor: str
    critic: str
    limit: int
    assumed: Assumed = PLAIN
    fused: bool = False

    @property
    def on(self) -> Hardware:
        """The GPUs."""
        a = self.assumed
        step_s = a.layer_s * SHAPES[self.actor].layers if a.system == "zero" else a.step_s
        return Hardware.of("h100", Efficiency(training=a.training, step_s=step_s))

    @property
    def workload(self) -> Workload:
        """Prompts and responses."""
        median = self.assumed.median * self.limit
        return Workload(
            batch=BATCH,
            steps=STEPS,
            max_new_tokens=self.limit,
            prompt_tokens=PROMPTS,
            response_tokens=Lognormal(median=median, p95=median * exp(1.6449 * SIGMA)),
        )

    def layout(self, size: str) -> Layout:
        """Return how a trained model is divided."""
        if self.assumed.system == "zero":
            return Layout(fsdp=GPUS)
        larger, smaller = sorted((self.actor, self.critic), reverse=True)
        stages = STAGES[larger, smaller][size]
        return Layout(fsdp=GPUS // NODE // stages, tp=NODE, pp=stages)

    @property
    def trained_bytes(self) -> float:
        """Bytes of a GPU that hold weights, gradients and states of actor and critic."""
        held = 0.0
        for size in (self.actor, self.critic):
            layout, shape = self.layout(size), SHAPES[size]
            each = mean_stage(shape, layout).held(layout.tp)
            if self.assumed.system == "zero":
                held += memory_model.STATE * each / layout.fsdp
            else:
                held += each * (
                    memory_model.HALF + memory_model.SINGLE + memory_model.KEPT / layout.fsdp
                )
        return held

    @cached_property
    def cluster(self) -> Cluster:
        """All roles on all GPUs, a generator and the frozen models on each node."""
        nodes = [tuple(range(i, i + NODE)) for i in range(0, GPUS, NODE)]
        generator, tensor = self.generator
        padded = self.assumed.system == "zero"
        models: list[tuple[str, ScoreKind, str]] = [
            ("reward", "reward", self.critic),
            ("reference", "logprobs", self.actor),
            ("critic", "values", self.critic),
        ]
        return Cluster(
            call_s=0.001,
            generators=tuple(
                GeneratorRole(devices=node, tensor_parallel=tensor, cost=generator)
                for node in nodes
            ),
            scorers=tuple(
                ScorerRole(
                    name=name,
                    kind=kind,
                    devices=node,
                    cost=self.scorer(SHAPES[size].valued() if kind != "logprobs" else SHAPES[size]),
                    follows="critic" if name == "critic" else "",
                    host=i,
                    padded=MINI_BATCH if padded else 0,
                )
                for name, kind, size in models
                for i, node in enumerate(nodes)
            ),
            learner=LearnerRole(
                devices=tuple(range(GPUS)),
                trains=("actor", "critic"),
                cost=self.learner,
                padded=padded,
            ),
            workload=self.workload,
        )

    @property
    def generator(self) -> tuple[GeneratorCost, int]:
        """The quickest tensor-parallel copy of the actor that fits, and its GPUs."""
        shape, on, found = SHAPES[self.actor], self.on, []
        for tensor in (1, 2, 4, 8):
            free = on.usable_bytes - memory_model.weight_bytes(shape, tensor) - self.trained_bytes
            if free < self.limit * memory_model.cache_bytes(shape, tensor) * BATCH * tensor / GPUS:
                continue
            cost = generator_cost(shape, tensor, on, length=208, free_bytes=free)
            rows = BATCH * tensor / GPUS
            found.append((cost.decode.seconds(rows, 0, 1), tensor, cost))
        _, tensor, cost = min(found, key=lambda each: each[0])
        copies = Layout(dp=GPUS // tensor, tp=tensor)
        size = max(reshard_bytes(shape, self.layout(self.actor), copies), 0.0)
        speed = on.links.data_bytes_per_s(copies) * on.assumed.link
        return cost.model_copy(update={"load_s": size / speed}), tensor

    def scorer(self, shape: Shape) -> PrefillCost:
        """Return the cost of a frozen model on a node, divided in the quickest way that fits."""
        length = self.workload.mean_tokens
        on = replace(
            self.on,
            assumed=self.on.assumed.model_copy(update={"prefill": self.assumed.scoring}),
        )
        room = on.usable_bytes - self.trained_bytes
        if self.assumed.system == "zero":
            cost = prefill_cost(shape, Layout(dp=NODE), on, length=length)
            shards = Layout(fsdp=GPUS)
            gathered = fsdp_forward_bytes(shape, shards, 1)
            speed = on.links.data_bytes_per_s(shards) * on.assumed.link
            return cost.model_copy(update={"call_s": cost.call_s + gathered / speed})
        fitting = [t for t in (1, 2, 4, 8) if memory_model.weight_bytes(shape, t) < room / 2]
        layouts = [Layout(dp=NODE // t, tp=t) for t in fitting]
        costs = [prefill_cost(shape, layout, on, length=length) for layout in layouts]
        return min(costs, key=lambda cost: cost.token_s)

    @property
    def learner(self) -> TrainCost:
        """Actor and critic, one after the other or fused."""
        mean, zero = self.workload.mean_tokens, self.assumed.system == "zero"
        # ZeRO has a response for each GPU in 256, and none of fewer.
        updates = BATCH // GPUS if zero else BATCH // MINI_BATCH
        passes = TrainingPasses(
            tokens=BATCH * mean,
            length=mean,
            updates=updates,
            micro_tokens=int(mean),
            checkpointing=zero,
        )
        bubble = fused_bubble(self.actor, self.critic) if self.fused else None
        token_s = step_s = 0.0
        for size, shape in (
            (self.actor, SHAPES[self.actor]),
            (self.critic, SHAPES[self.critic].valued()),
        ):
            layout = self.layout(size)
            if zero:
                cost = train_cost([shape], layout, self.on, passes)
            else:
                cost = kept_cost([shape], layout, self.on, passes, bubble)
            uneven = 1.0
            if self.assumed.system == "unbalanced":
                uneven = unevenness(self.workload, layout.fsdp)
            token_s += cost.token_s * uneven
            step_s += cost.step_s
            if not self.assumed.exchanging:
                step_s -= updates * exchange_s(shape, layout, self.on)
        return TrainCost(token_s=token_s, step_s=step_s)


def kept_cost(
    shapes: Sequence[Shape],
    layout: Layout,
    on: Hardware,
    passes: TrainingPasses,
    bubble: float | None = None,
) -> TrainCost:
    """Return the cost of training under ZeRO stage 1 (Rajbhandari et al. 2020).

    Weights are kept, and once an update gradients are reduced and new weights gathered. ``bubble``
    is a stage's idle time in an update, in micro-batches of each model (default: that of 1F1B).
    """
    token_s = step_s = 0.0
    for shape in shapes:
        # One shard with as many tokens gathers nothing.
        alone = replace(passes, tokens=passes.tokens / layout.fsdp)
        stage, slices = mean_stage(shape, layout), Layout(tp=layout.tp)
        each_s = train_cost([stage], slices, on, alone).token_s
        if layout.pp > 1:  # slices of hidden states to the next stage, their gradients back
            sent = 2 * memory_model.HALF * shape.hidden / layout.tp
            each_s += passes.epochs * sent / (on.links.between_bytes_per_s * on.assumed.link)
        idle = layout.pp - 1 if bubble is None else bubble
        waits_s = idle * passes.micro(layout.fsdp) * each_s / passes.epochs
        moved_s = optimizer_bytes(stage, Layout(fsdp=layout.fsdp, tp=layout.tp)) / (
            on.gpu.memory_bytes_per_s * on.assumed.optimizer
        )
        token_s += each_s / layout.fsdp
        step_s += passes.updates * (moved_s + exchange_s(shape, layout, on) + waits_s)
    return TrainCost(token_s=token_s, step_s=step_s)


def mean_stage(shape: Shape, layout: Layout) -> Shape:
    """Return a stage of average size. The paper does not report which stages have more layers."""
    return replace(shape, layers=shape.layers / layout.pp)


def exchange_s(shape: Shape, layout: Layout, on: Hardware) -> float:
    """Return the seconds of an update's exchange: gradients in float32, weights in bfloat16."""
    held = mean_stage(shape, layout).held(layout.tp)
    size = gather_bytes((memory_model.SINGLE + memory_model.HALF) * held, layout.fsdp)
    return size / (on.links.data_bytes_per_s(layout) * on.assumed.link)


def unevenness(workload: Workload, ranks: int) -> float:
    """Return how much longer the fullest rank takes than the mean, of random mini-batches."""
    lengths, prompts = Lengths(workload.response_tokens, 1), Lengths(workload.prompt_tokens, 2)
    each = MINI_BATCH // ranks
    found = []
    for start in range(0, 64 * MINI_BATCH, MINI_BATCH):
        tokens = [
            min(lengths(i), workload.max_new_tokens) + prompts(i)
            for i in range(start, start + MINI_BATCH)
        ]
        sums = [sum(tokens[r * each : (r + 1) * each]) for r in range(ranks)]
        found.append(max(sums) / fmean(sums))
    return fmean(found)


# -- what is simulated -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stages:
    """Mean seconds of a step, by stage; scoring is what of it comes after generation."""

    generating_s: float
    scoring_s: float
    training_s: float
    handover_s: float

    @property
    def before_s(self) -> float:
        """Seconds of generation and inference."""
        return self.generating_s + self.scoring_s

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.before_s + self.training_s + self.handover_s


@cache
def stages(run: Run, ratio: float | Literal["auto"] | None = None) -> Stages:
    """Run it for a few steps, and take the last ones apart.

    Args:
        run: what is run.
        ratio: share of the batch at which stragglers are gathered, 0 for never: a node then scores
            once it has nothing left to decode. ``None`` scores when all responses have ended.
    """
    settings: dict[str, Any] = {}
    if ratio is not None:
        settings = {"score_on": "rollout", "migrate": ratio, "chunk_tokens": CHUNK}
    result = scheduled(run.cluster, **settings)
    updates = [s for s in result.spans if s.name == "update"]
    found, began_s = [], 0.0
    for update in updates:
        within = [s for s in result.spans if began_s <= s.start_s and s.end_s <= update.start_s]
        first = min(s.start_s for s in within if s.name == "gen")
        last = max(s.end_s for s in within if s.name == "gen")
        found.append(
            (last - first, update.start_s - last, update.end_s - update.start_s, first - began_s)
        )
        began_s = update.end_s
    return Stages(*map(fmean, zip(*found[1:] or found, strict=True)))


def fuse(run: Run) -> Stages:
    """Return the stages with both kinds of fusion; the ratio is chosen by simulation, as there."""
    return stages(replace(run, fused=True), "auto")


@cache
def row_of(actor: str, critic: str) -> Row:
    """Return the problem of Table 3 with these sizes, and micro-batches of one response."""
    larger, smaller = sorted((actor, critic), reverse=True)
    stages = STAGES[larger, smaller]
    micro_batches = MINI_BATCH // (GPUS // NODE // stages[larger])
    wanted = f"{larger}/{smaller}", (stages[larger], stages[smaller]), micro_batches
    return next(r for r in ROWS if (r.models, r.stages, r.global_batch) == wanted)


@cache
def latency(row: int) -> int:
    """Return the latency of a fused schedule of a row of Table 3, in its ticks."""
    return solve(ROWS[row].problem, seconds=5, memory=ENOUGH).makespan


def fused_bubble(actor: str, critic: str) -> float:
    """Return the idle time of a fused schedule, in micro-batches of both models."""
    problem = row_of(actor, critic).problem
    each = [side.forward[0] + side.backward[0] for side in problem.models]
    work = sum(t * side.micro_batches for t, side in zip(each, problem.models, strict=True))
    fused = latency(ROWS.index(row_of(actor, critic)))
    return (fused - work) / sum(each)
