"""Operations of passes over tokens, and what a decode step reads."""

from __future__ import annotations

from stretto.models.shapes import Shape
from stretto.planner.layout import Mesh
from stretto.planner.memory import HALF, cache_bytes

OPTIMIZER = 32
"""Bytes moved per parameter by AdamW in mixed precision.

The fp32 gradient is read and cleared; master weight and two moments are read and written.
"""


def forward_flops(shape: Shape, tokens: float, length: float, tensor: int) -> float:
    """Return a device's operations in a forward pass: 2 P a token, and attention's.

    Kaplan et al. 2020, section 2.1, with P what a tensor-parallel device holds besides the
    embedding, which is looked up, and attention's 2 x layers x length x h divided among them.
    Attention is causal: on average a token sees half of the others.

    Args:
        length: of each sequence.
    """
    attention = 2 * shape.layers * length * shape.hidden
    return tokens * (2 * shape.multiplied(tensor) + attention / tensor)


def training_flops(
    shape: Shape, tokens: float, length: float, tensor: int, *, checkpointing: bool
) -> float:
    """Return a device's operations in a forward and a backward pass: 6 P a token.

    That is three forward passes'; with checkpointing it is four (8 P), as the forward pass is
    computed twice (Narayanan et al. 2021).
    """
    return (4 if checkpointing else 3) * forward_flops(shape, tokens, length, tensor)


def decode_flops(shape: Shape, rows: float, context: float, tensor: int) -> float:
    """Return a device's operations in a decode step: 2 P a row, and attention over its context.

    Args:
        context: tokens of each so far.
    """
    attention = 4 * shape.layers * context * shape.hidden
    return rows * (2 * shape.multiplied(tensor) + attention / tensor)


def decode_read_bytes(shape: Shape, rows: float, context: float, tensor: int) -> float:
    """Return what a device reads in a decode step: its weights once, and all its keys and values.

    Pope et al. 2022. Of the embedding next to nothing is read.
    """
    return HALF * shape.multiplied(tensor) + rows * context * cache_bytes(shape, tensor)


def optimizer_bytes(shape: Shape, mesh: Mesh) -> float:
    """Return what a device moves in an update of its shard."""
    return OPTIMIZER * shape.stage(mesh.stages).held(mesh.tensor) / mesh.data
