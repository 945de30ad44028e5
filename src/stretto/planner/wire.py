"""Bytes that a GPU takes in over links, of each kind of exchange."""

from __future__ import annotations

from stretto.models.shapes import Shape
from stretto.planner.layout import Mesh
from stretto.planner.memory import HALF, SINGLE

FORWARD, TRAINED, CHECKPOINTED = 2, 4, 6
"""All-reduces of a tensor-parallel layer: forward, with a backward, and computed twice."""
TOKEN = 8
"""Bytes of a token on its way to a scorer: its id and its log-probability."""


def gather_bytes(total: float, members: int) -> float:
    """Return bytes of an all-gather or a reduce-scatter of ``total`` bytes: (n-1)/n of them.

    Thakur et al. 2005, by rings; no algorithm takes fewer.
    """
    return total * (members - 1) / members


def reduce_bytes(total: float, members: int) -> float:
    """Return bytes of an all-reduce: a reduce-scatter and an all-gather (Thakur et al. 2005)."""
    return 2 * gather_bytes(total, members)


def fsdp_training_bytes(shape: Shape, mesh: Mesh, passes: int) -> float:
    """Return bytes of FSDP2 in forward and backward passes of a shard's micro-batches.

    A layer's weights are gathered for the forward pass and again for the backward pass, the root's
    once; gradients are reduced in float32 after each backward pass (``training/sharded.py``; Zhao
    et al. 2023).
    """
    shape = shape.stage(mesh.stages)
    layers = shape.layers * shape.layer_parameters / mesh.tensor
    weights = HALF * (2 * layers + shape.root_parameters)
    gradients = SINGLE * shape.held(mesh.tensor)
    return passes * gather_bytes(weights + gradients, mesh.data)


def fsdp_forward_bytes(shape: Shape, mesh: Mesh, passes: int) -> float:
    """Return bytes of FSDP2 in forward passes alone: all weights, once a pass."""
    return passes * gather_bytes(HALF * shape.stage(mesh.stages).held(mesh.tensor), mesh.data)


def tensor_bytes(shape: Shape, tokens: float, tensor: int, reductions: int) -> float:
    """Return bytes of tensor parallelism: all-reduces of the hidden states of tokens.

    Shoeybi et al. 2019, section 3: a layer has two in the forward pass and two in the backward
    pass; what checkpointing computes again has two more.

    Args:
        tokens: that this device computes.
    """
    return shape.layers * reductions * reduce_bytes(HALF * shape.hidden * tokens, tensor)


def broadcast_bytes(shape: Shape) -> float:
    """Return bytes that a follower takes in where each rank of a learner broadcasts its shard.

    All weights, in bfloat16: a follower takes what it needs of each shard. Each rank of the learner
    sends its shard once: 2 P / (n t).
    """
    return HALF * shape.parameters


def gathered_first_bytes(shape: Shape, mesh: Mesh) -> float:
    """Return bytes through the first rank's link where it gathers weights, then broadcasts them.

    In, what the others have; and then out, all.
    """
    whole = HALF * shape.parameters
    return gather_bytes(whole, mesh.devices) + whole


def reshard_bytes(shape: Shape, learner: Mesh, generator: Mesh) -> float:
    """Return bytes of making generators' weights out of the learner's shards on the same devices.

    A GPU has its shard of them already, where ranks are numbered to that end: about
    2 P (1/t - 1/n), as in HybridFlow (Sheng et al. 2024).
    """
    return HALF * (shape.held(generator.tensor) - shape.parameters / learner.devices)


def chunk_bytes(tokens: int, scorers: int) -> int:
    """Return bytes of responses' tokens to all scorers of a step."""
    return TOKEN * tokens * scorers
