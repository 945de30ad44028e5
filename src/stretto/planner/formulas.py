"""Costs from public figures: a roofline of decoding, scoring and training on meshes of GPUs.

Operations, bytes and memory are those of :mod:`stretto.planner`, which names the source of each
formula; here they become terms that are linear in tokens and rows. The share of the peaks that a
real system reaches is assumed, and so a setting of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from stretto.config import Section
from stretto.errors import ConfigError
from stretto.models.shapes import Shape, shape_of
from stretto.planner import memory, wire
from stretto.planner import work as compute
from stretto.planner.hardware import Hardware
from stretto.planner.layout import Mesh
from stretto.planner.wire import CHECKPOINTED, FORWARD, TRAINED
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole
from stretto.runtime.sim.costs import (
    DecodeCost,
    GeneratorCost,
    PrefillCost,
    TrainCost,
    TransferCost,
)

R = TypeVar("R", GeneratorRole, ScorerRole, LearnerRole)


@dataclass(frozen=True, slots=True)
class Passes:
    """How a learner makes its passes.

    Attributes:
        tokens: of all responses of a step, prompts included.
        length: of each on average.
        epochs: passes over them.
        updates: optimizer updates a step, in all passes.
        micro_tokens: tokens of a micro-batch of one shard.
        checkpointing: layers are computed again in the backward pass.
        bubble: micro-batches' worth of time that a pipeline stage stands idle in an update, for
            each of the models; ``None`` takes 1F1B's, stages - 1 (Narayanan et al. 2021).
        zero: stage of ZeRO (Rajbhandari et al. 2020). 3 gathers weights for every pass, as FSDP
            does. 1 keeps them, and once an update reduces gradients and gathers new weights.
    """

    tokens: float
    length: float = 0.0
    epochs: int = 1
    updates: int = 1
    micro_tokens: int = 8192
    checkpointing: bool = False
    bubble: float | None = None
    zero: Literal[1, 3] = 3

    def micro(self, data: int) -> float:
        """Return the tokens of a micro-batch: no more than a shard has in an update."""
        each = self.tokens * self.epochs / self.updates / data
        return min(self.micro_tokens, max(each, 1.0))


def generator_cost(
    shape: Shape, tensor: int, on: Hardware, *, length: float = 0.0, free_bytes: float | None = None
) -> GeneratorCost:
    """Return the cost of one copy of a generator: rows of different copies do not share a step.

    A decode step reads the weights once, and keys and values of its rows (Pope et al. 2022), while
    it computes: it takes the longer of the two, as in :class:``. New
    weights cost nothing here, see the hand-overs of ``layouts.py``.

    Args:
        tensor: devices that it is split over.
        length: of prompts, on average: what a prefilled token attends to.
        free_bytes: of a device, for keys and values; ``None`` takes all beside the weights.

    Raises:
        ConfigError: there is no memory for keys and values.
    """
    gpu, assumed = on.gpu, on.assumed
    weights, cache = memory.weight_bytes(shape, tensor), memory.cache_bytes(shape, tensor)
    free = on.usable_bytes - weights if free_bytes is None else free_bytes
    if free < cache:
        beside = "" if free_bytes is None else " and of what others keep there"
        raise ConfigError(
            f"{tensor} x {gpu.memory_bytes / 1e9:.0f} GB have no room for keys and values beside "
            f"{tensor * weights / 1e9:.0f} GB of weights{beside}; raise tensor_parallel, or give "
            "more devices"
        )
    read = gpu.memory_bytes_per_s * assumed.memory
    work = gpu.flops * assumed.prefill
    token_s, pass_s = _reduced(shape, tensor, on, FORWARD)
    product = compute.decode_flops(shape, 1, 0, tensor)
    return GeneratorCost(
        decode=DecodeCost(
            step_s=assumed.step_s + pass_s,
            row_s=token_s,
            weights_s=compute.decode_read_bytes(shape, 0, 0, tensor) / read,
            cache_s=cache / read,
            product_s=product / work,
            attention_s=(compute.decode_flops(shape, 1, 1, tensor) - product) / work,
        ),
        prefill=PrefillCost(
            call_s=assumed.call_s + pass_s,
            token_s=compute.forward_flops(shape, 1, length, tensor) / work + token_s,
        ),
        transfer=TransferCost(
            latency_s=1e-4, bytes_per_s=tensor * gpu.link_bytes_per_s * assumed.link
        ),
        cache_bytes=memory.cache_bytes(shape, 1),
        cache_tokens=int(free / cache),
    )


def prefill_cost(shape: Shape, mesh: Mesh, on: Hardware, *, length: float = 0.0) -> PrefillCost:
    """Return the cost of scoring by a model; its copies share a call's tokens evenly.

    Args:
        mesh: copies, and the devices that each is split over.
    """
    token_s, pass_s = _reduced(shape, mesh.tensor, on, FORWARD)
    work = on.gpu.flops * on.assumed.prefill
    token_s += compute.forward_flops(shape, 1, length, mesh.tensor) / work
    return PrefillCost(call_s=on.assumed.call_s + pass_s, token_s=token_s / mesh.data)


def train_cost(shapes: Sequence[Shape], mesh: Mesh, on: Hardware, passes: Passes) -> TrainCost:
    """Return the cost of training models one after the other, in shards.

    Passes take their operations, or as long as FSDP takes to gather weights and to reduce
    gradients meanwhile, whichever is longer. Tensor-parallel layers wait for their all-reduces,
    pipeline stages for each other, and updates for what is exchanged once in each.

    Args:
        shapes: of the actor, and of the critic if there is one.
    """
    token_s = step_s = 0.0
    for shape in shapes:
        each_s = _trained_token_s(shape, mesh, on, passes)
        bubble = mesh.stages - 1 if passes.bubble is None else passes.bubble
        moved_s = compute.optimizer_bytes(shape, mesh) / (
            on.gpu.memory_bytes_per_s * on.assumed.optimizer
        )
        if passes.zero == 1:
            moved_s += exchange_s(shape, mesh, on)
        token_s += passes.epochs * each_s / mesh.data
        step_s += passes.updates * (moved_s + bubble * passes.micro(mesh.data) * each_s)
    return TrainCost(step_s=step_s, token_s=token_s)


def priced(cluster: Cluster) -> Cluster:
    """Return a cluster whose roles' costs are numbers, where they followed from models.

    Raises:
        ConfigError: a model or the GPU is unknown, or a model does not fit.
    """
    w, on = cluster.workload, Hardware.of(cluster.gpu, cluster.efficiency)

    def generator(role: GeneratorRole) -> GeneratorCost:
        shape = shape_of(role.model)
        try:
            cost = generator_cost(
                shape, role.tensor_parallel, on, length=w.prompt_tokens.quantile(0.5, 0)
            )
        except ConfigError as error:
            raise ConfigError(f"{role.model}: {error}") from None
        size = wire.broadcast_bytes(shape) / role.tensor_parallel
        return cost.model_copy(update={"load_s": cost.transfer.seconds(size)})

    def scorer(role: ScorerRole) -> PrefillCost:
        shape, split = shape_of(role.model), role.tensor_parallel
        mesh = Mesh(len(role.devices) // split, split)
        shape = shape if role.kind == "logprobs" else shape.valued()
        return prefill_cost(shape, mesh, on, length=w.mean_tokens)

    def learner(role: LearnerRole) -> TrainCost:
        actor, *critics = map(shape_of, role.models)
        tokens, split = w.mean_tokens, role.tensor_parallel
        passes = Passes(w.batch * tokens, tokens, epochs=role.epochs, updates=role.updates)
        mesh = Mesh(len(role.devices) // split, split)
        cost = train_cost((actor, *(c.valued() for c in critics)), mesh, on, passes)
        link = on.gpu.link_bytes_per_s * on.assumed.link
        return cost.model_copy(update={"publish_s": wire.broadcast_bytes(actor) / link})

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


def _trained_token_s(shape: Shape, mesh: Mesh, on: Hardware, passes: Passes) -> float:
    """Seconds that a stage takes a token of its own, forward and backward."""
    stage, micro = shape.stage(mesh.stages), passes.micro(mesh.data)
    flops = compute.training_flops(
        stage, 1, passes.length, mesh.tensor, checkpointing=passes.checkpointing
    )
    work_s = flops / (on.gpu.flops * on.assumed.training)
    gathered = wire.fsdp_training_bytes(shape, mesh, 1) / micro if passes.zero == 3 else 0.0
    beside_s = gathered / (mesh.data_bytes_per_s(on.links) * on.assumed.link)
    reductions = CHECKPOINTED if passes.checkpointing else TRAINED
    reduced_s, pass_s = _reduced(stage, mesh.tensor, on, reductions)
    sent_s = 0.0
    if mesh.stages > 1:  # hidden states to the next stage, their gradients back
        sent_s = 2 * memory.HALF * shape.hidden / mesh.tensor
        sent_s /= on.links.between_bytes_per_s * on.assumed.link
    return max(work_s, beside_s) + reduced_s + pass_s / micro + sent_s


def exchange_s(shape: Shape, mesh: Mesh, on: Hardware) -> float:
    """Return the seconds of an update's exchange under ZeRO stage 1.

    Gradients are reduced in float32, and new weights gathered in bfloat16.
    """
    held = shape.stage(mesh.stages).held(mesh.tensor)
    size = wire.gather_bytes((memory.SINGLE + memory.HALF) * held, mesh.data)
    return size / (mesh.data_bytes_per_s(on.links) * on.assumed.link)


def _reduced(shape: Shape, tensor: int, on: Hardware, reductions: int) -> tuple[float, float]:
    if tensor == 1:
        return 0.0, 0.0
    size = wire.tensor_bytes(shape, 1, tensor, reductions)
    speed = on.links.within_bytes_per_s * on.assumed.link
    return size / speed, shape.layers * reductions * on.assumed.reduce_s
