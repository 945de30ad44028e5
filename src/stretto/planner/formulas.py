"""Costs from public figures: operations, bytes over links, and their seconds. A roofline of
decoding, scoring and training on layouts of GPUs, linear in tokens and rows. Real systems reach an
assumed share of the peaks. Bytes over links are those that a GPU receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from stretto.config import Section
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import Shape, shape_of
from stretto.planner.hardware import Hardware
from stretto.planner.memory_model import HALF, SINGLE, cache_bytes, weight_bytes
from stretto.runtime.sim import costs
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole

R = TypeVar("R", GeneratorRole, ScorerRole, LearnerRole)

GRADIENT, OPTIMIZER = 8, 32
"""Bytes per parameter that AdamW moves in mixed precision: it reads and clears the fp32 gradient;
and with this, it reads and writes the master weight and two moments."""
FORWARD = 2
TRAINED = 4
CHECKPOINTED = 6
"""A layer's tensor-parallel all-reduces: forward, with backward, with recomputation too."""


def forward_flops(shape: Shape, tokens: float, length: float, tensor: int) -> float:
    """Return a device's operations in a forward pass: 2 P a token, plus attention. Kaplan et al.
    2020, section 2.1. P are a tensor-parallel device's parameters without the embedding. A token
    attends on average to half of the tokens in its sequence of ``length``."""
    attention = 2 * shape.layers * length * shape.hidden
    return tokens * (2 * shape.multiplied(tensor) + attention / tensor)


def training_flops(
    shape: Shape, tokens: float, length: float, tensor: int, *, checkpointing: bool
) -> float:
    """Return 6 P a token, or 8 P with the forward pass computed twice (Narayanan et al. 2021)."""
    return (4 if checkpointing else 3) * forward_flops(shape, tokens, length, tensor)


def decode_flops(shape: Shape, rows: float, context: float, tensor: int) -> float:
    """Return a device's operations in a decode step: 2 P a row, plus attention over its context."""
    attention = 4 * shape.layers * context * shape.hidden
    return rows * (2 * shape.multiplied(tensor) + attention / tensor)


def decode_read_bytes(shape: Shape, rows: float, context: float, tensor: int) -> float:
    """Return the bytes that a decode step reads: weights, keys and values (Pope et al. 2022)."""
    return HALF * shape.multiplied(tensor) + rows * context * cache_bytes(shape, tensor)


def optimizer_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes that a device moves in an update. Copies have all gradients, and share the
    update among themselves (ZeRO stage 1, Rajbhandari et al. 2020)."""
    shard = shape.stage(layout.pp).held(layout.tp) / layout.fsdp
    return shard * (GRADIENT + (OPTIMIZER - GRADIENT) / layout.dp)


def gather_bytes(total: float, members: int) -> float:
    """Return bytes of an all-gather or reduce-scatter (Thakur et al. 2005), half an all-reduce."""
    return total * (members - 1) / members


def fsdp_training_bytes(shape: Shape, layout: Layout, passes: int) -> float:
    """Return bytes of FSDP2 for a shard's micro-batches: each pass gathers layers twice, the root
    once, and reduces float32 gradients (``training/sharded.py``, Zhao et al. 2023)."""
    shape = shape.stage(layout.pp)
    layers = shape.layers * shape.layer_parameters / layout.tp
    weights = HALF * (2 * layers + shape.root_parameters)
    gradients = SINGLE * shape.held(layout.tp)
    return passes * gather_bytes(weights + gradients, layout.fsdp)


def tensor_bytes(shape: Shape, tokens: float, tensor: int, reductions: int) -> float:
    """Return bytes of all-reduces of tokens' hidden states (Shoeybi et al. 2019, section 3)."""
    return shape.layers * reductions * 2 * gather_bytes(HALF * shape.hidden * tokens, tensor)


def broadcast_bytes(shape: Shape) -> float:
    """Return all bytes of a model: a role receives the broadcast shards of every learner rank."""
    return HALF * shape.parameters


def reshard_bytes(shape: Shape, learner: Layout, generator: Layout) -> float:
    """Return bytes of making generators' weights out of the learner's shards on the same devices. 2
    P (1/t - 1/n), as a GPU already has its shard: HybridFlow (Sheng et al. 2024)."""
    return HALF * (shape.held(generator.tp) - shape.parameters / learner.ranks)


@dataclass(frozen=True, slots=True)
class TrainingPasses:
    """A learner's passes over the responses of a step."""

    tokens: float  # of all responses, prompts included
    length: float = 0.0  # mean tokens of a response, prompt included
    epochs: int = 1
    updates: int = 1  # optimizer updates a step, over all epochs
    micro_tokens: int = 8192  # of a micro-batch of one shard
    checkpointing: bool = False
    fused: bool = False  # pipelines of actor and critic run at once, in opposite directions

    def shard_tokens(self, data_parallel: int) -> float:
        return max(self.tokens * self.epochs / self.updates / data_parallel, 1.0)

    def micro(self, data_parallel: int) -> float:
        """Return the tokens of a micro-batch: at most a shard's tokens in an update."""
        return min(self.micro_tokens, self.shard_tokens(data_parallel))


def generator_cost(
    shape: Shape, tensor: int, on: Hardware, *, length: float = 0.0, free_bytes: float | None = None
) -> costs.GeneratorCost:
    """Return the cost of one copy of a generator, whose rows share decode steps.

    New weights cost nothing here. Raises ConfigError if keys and values have no room.

    Args:
        tensor: devices over which it is split.
        length: mean prompt tokens, which a prefilled token attends to.
        free_bytes: of a device, for keys and values; ``None``: all but the weights.
    """
    gpu, assumed = on.gpu, on.assumed
    weights, cache = weight_bytes(shape, tensor), cache_bytes(shape, tensor)
    free = on.usable_bytes - weights if free_bytes is None else free_bytes
    if free < cache:
        note = "" if free_bytes is None else " and of what others keep there"
        raise ConfigError(
            f"{tensor} x {gpu.memory_bytes / 1e9:.0f} GB have no room for keys and values beside "
            f"{tensor * weights / 1e9:.0f} GB of weights{note}; raise tensor_parallel, or give "
            "more devices",
            "no-cache-room",
        )
    read = gpu.memory_bytes_per_s * assumed.memory
    work = gpu.flops * assumed.prefill
    token_s, pass_s = _reduced(shape, tensor, on, FORWARD)
    product = decode_flops(shape, 1, 0, tensor)
    return costs.GeneratorCost(
        decode=costs.DecodeCost(
            step_s=assumed.step_s + pass_s,
            row_s=token_s,
            weights_s=decode_read_bytes(shape, 0, 0, tensor) / read,
            cache_s=cache / read,
            product_s=product / work,
            attention_s=(decode_flops(shape, 1, 1, tensor) - product) / work,
        ),
        prefill=costs.PrefillCost(
            call_s=assumed.call_s + pass_s,
            token_s=forward_flops(shape, 1, length, tensor) / work + token_s,
        ),
        transfer=costs.TransferCost(
            latency_s=1e-4, bytes_per_s=tensor * gpu.link_bytes_per_s * assumed.link
        ),
        offload=costs.TransferCost(
            latency_s=1e-4, bytes_per_s=tensor * gpu.host_bytes_per_s * assumed.link
        ),
        cache_bytes=cache_bytes(shape, 1),
        cache_tokens=int(free / cache),
    )


def prefill_cost(
    shape: Shape, layout: Layout, on: Hardware, *, length: float = 0.0, pass_tokens: int = 8192
) -> costs.PrefillCost:
    """Return the cost of scoring by a model, whose copies or shards share a call's tokens evenly.

    Shards gather all weights for each pass of ``pass_tokens``. The first pass of a call waits for
    them, the others gather during the pass before.
    """
    token_s, pass_s = _reduced(shape, layout.tp, on, FORWARD)
    work = on.gpu.flops * on.assumed.prefill
    gathered = gather_bytes(HALF * shape.held(layout.tp), layout.fsdp)
    gather_s = gathered / (on.links.data_bytes_per_s(layout) * on.assumed.link)
    work_s = max(forward_flops(shape, 1, length, layout.tp) / work, gather_s / pass_tokens)
    return costs.PrefillCost(
        call_s=on.assumed.call_s + pass_s + gather_s,
        token_s=(work_s + token_s) / layout.data_parallel,
    )


def train_cost(
    shapes: Sequence[Shape], layout: Layout, on: Hardware, passes: TrainingPasses
) -> costs.TrainCost:
    """Return the cost of training the actor, and the critic if there is one. Once an update, copies
    of a stage reduce its float32 gradients, and exchange their parts of its new weights.
    """
    memory_speed = on.gpu.memory_bytes_per_s * on.assumed.optimizer
    link_speed = on.links.data_bytes_per_s(layout) * on.assumed.link
    stage_token_s = [_trained_token_s(shape, layout, on, passes) for shape in shapes]
    update_s = 0.0
    for shape in shapes:
        moved_s = optimizer_bytes(shape, layout) / memory_speed
        exchanged = (SINGLE + HALF) * shape.stage(layout.pp).held(layout.tp)
        update_s += moved_s + gather_bytes(exchanged, layout.dp) / link_speed
    if layout.pp > 1:
        tokens = passes.shard_tokens(layout.data_parallel)
        count = ceil(tokens / passes.micro_tokens)
        micro_s = [tokens / count * seconds for seconds in stage_token_s]
        update_s += pipeline_waits_s(micro_s, layout.pp, count, fused=passes.fused)
    token_s = passes.epochs * sum(stage_token_s) / layout.data_parallel
    return costs.TrainCost(step_s=passes.updates * update_s, token_s=token_s)


def pipeline_waits_s(
    micro_s: Sequence[float], stages: int, micro_batches: int, *, fused: bool
) -> float:
    """Return a stage's idle seconds in an update.

    Under 1F1B, that is the time of ``stages - 1`` micro-batches of each model (Narayanan et al.
    2021). Fused schedules of two models are at the lower bound of RLHFuse, section 7.3, which the
    solver of :mod:`stretto.pipelines` reaches unless there are few micro-batches: one model may
    take longer alone, or a device waits for the first micro-batch of either model, and for the last
    one to drain.

    Args:
        micro_s: of each model, seconds of a micro-batch on a stage, forward and backward.
        micro_batches: of each pipeline.
    """
    if not fused:
        return (stages - 1) * sum(micro_s)
    actor_s, critic_s = micro_s
    alone_s = (micro_batches + stages - 1) * max(micro_s) - micro_batches * sum(micro_s)
    return max(alone_s, *(min(i * actor_s, (stages - 1 - i) * critic_s) for i in range(stages)))


def _trained_token_s(shape: Shape, layout: Layout, on: Hardware, passes: TrainingPasses) -> float:
    """Return a stage's seconds for one of its tokens, forward and backward."""
    stage, micro = shape.stage(layout.pp), passes.micro(layout.data_parallel)
    checkpointing, length = passes.checkpointing, passes.length
    flops = training_flops(stage, 1, length, layout.tp, checkpointing=checkpointing)
    work_s = flops / (on.gpu.flops * on.assumed.training)
    gathered = fsdp_training_bytes(shape, layout, 1) / micro
    gather_s = gathered / (on.links.data_bytes_per_s(layout) * on.assumed.link)
    reductions = CHECKPOINTED if checkpointing else TRAINED
    reduced_s, pass_s = _reduced(stage, layout.tp, on, reductions)
    sent_s = 0.0
    if layout.pp > 1:  # hidden states to the next stage, their gradients back, on each slice
        sent_s = 2 * HALF * shape.hidden / (on.links.between_bytes_per_s * on.assumed.link)
    return max(work_s, gather_s) + reduced_s + pass_s / micro + sent_s  # FSDP overlaps


def _reduced(shape: Shape, tensor: int, on: Hardware, reductions: int) -> tuple[float, float]:
    """Return the seconds of all-reduces per token and per pass."""
    if tensor == 1:
        return 0.0, 0.0
    size = tensor_bytes(shape, 1, tensor, reductions)
    speed = on.links.within_bytes_per_s * on.assumed.link
    return size / speed, shape.layers * reductions * on.assumed.reduce_s


def priced(cluster: Cluster) -> Cluster:
    """Return a cluster with numeric costs. Raises ConfigError for a model unknown or too large."""
    w, on = cluster.workload, Hardware.of(cluster.gpu, cluster.efficiency)

    def generator(role: GeneratorRole) -> costs.GeneratorCost:
        shape, length = shape_of(role.model), w.prompt_tokens.quantile(0.5, 0)
        try:
            cost = generator_cost(shape, role.tensor_parallel, on, length=length)
        except ConfigError as error:
            raise ConfigError(f"{role.model}: {error}", error.code) from None
        size = broadcast_bytes(shape) / role.tensor_parallel
        return cost.model_copy(update={"load_s": cost.transfer.seconds(size)})

    def scorer(role: ScorerRole) -> costs.PrefillCost:
        shape = shape_of(role.model)
        shape = shape if role.kind == "logprobs" else shape.valued()
        return prefill_cost(shape, layout_of(role), on, length=w.mean_tokens)

    def learner(role: LearnerRole) -> costs.TrainCost:
        actor, *critics = map(shape_of, role.models)
        passes = TrainingPasses(w.batch * w.mean_tokens, w.mean_tokens, role.epochs, role.updates)
        cost = train_cost((actor, *(c.valued() for c in critics)), layout_of(role), on, passes)
        link = on.gpu.link_bytes_per_s * on.assumed.link
        return cost.model_copy(update={"publish_s": broadcast_bytes(actor) / link})

    def layout_of(role: ScorerRole | LearnerRole) -> Layout:
        data = len(role.devices) // role.tensor_parallel
        if isinstance(role, LearnerRole):
            return Layout(fsdp=data, tp=role.tensor_parallel)
        return Layout(dp=data, tp=role.tensor_parallel)

    def put(role: R, cost: Callable[[R], Section]) -> R:
        if role.cost is not None:
            return role
        none = {"models": ()} if isinstance(role, LearnerRole) else {"model": ""}
        return role.model_copy(update={"cost": cost(role), **none})

    return cluster.model_copy(
        update={
            "generators": tuple(put(role, generator) for role in cluster.generators),
            "scorers": tuple(put(role, scorer) for role in cluster.scorers),
            "learner": put(cluster.learner, learner),
        }
    )
