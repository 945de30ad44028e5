"""Operations of passes over tokens, and what a decode step reads."""

from __future__ import annotations

from stretto.planning.memory import cache_bytes, weight_bytes
from stretto.planning.shapes import Shape

OPTIMIZER = 32
"""Bytes moved per parameter by AdamW in mixed precision.

The fp32 gradient is read and cleared; master weight and two moments are read and written.
"""


def forward_flops(shape: Shape, tokens: float, length: float) -> float:
    """Return operations of a forward pass: 2 P a token, and attention's 2 x layers x length x h.

    Kaplan et al. 2020, section 2.1. Attention is causal: on average a token sees half of
    the others.

    Args:
        shape: of the model.
        tokens: of all sequences.
        length: of each sequence.
    """
    return tokens * (2 * shape.parameters + 2 * shape.layers * length * shape.hidden)


def training_flops(shape: Shape, tokens: float, length: float, *, checkpointing: bool) -> float:
    """Return operations of a forward and a backward pass: three forward passes' (6 P a token).

    Four (8 P) with checkpointing, which computes the forward pass twice (Narayanan et al.
    2021).
    """
    return (4 if checkpointing else 3) * forward_flops(shape, tokens, length)


def decode_flops(shape: Shape, rows: float, context: float, tensor: int) -> float:
    """Return a device's operations in a decode step: 2 P a row, and attention over its context.

    Args:
        shape: of the model.
        rows: responses in flight.
        context: tokens of each so far.
        tensor: tensor-parallel devices.
    """
    return rows * (2 * shape.parameters + 4 * shape.layers * context * shape.hidden) / tensor


def decode_read_bytes(shape: Shape, rows: float, context: float, tensor: int) -> float:
    """Return what a device reads in a decode step: all weights once, and all keys and values.

    Pope et al. 2022.
    """
    return weight_bytes(shape, tensor) + rows * context * cache_bytes(shape, tensor)


def optimizer_bytes(shape: Shape, devices: int) -> float:
    """Return what a device moves in an update of its shard."""
    return OPTIMIZER * shape.parameters / devices
