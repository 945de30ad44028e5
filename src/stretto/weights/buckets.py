"""Buckets: how the tensors of a model travel, as a pure function of their names and shapes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.models.shards import Bounds, shape

ALIGNMENT = 16
"""Bytes to which a tensor's place is rounded up, so that it can be viewed as any type."""

_BLOCK = 4096
"""Words that a checksum adds up before their place counts."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The place of a tensor in a bucket.

    Attributes:
        name: of the parameter.
        shape, dtype: of the tensor.
        start, end: bytes in the bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor's view of the bucket's bytes [bytes]."""
        return flat[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together.

    Attributes:
        slices: their places, in order.
        size: bytes of the bucket, a multiple of :data:`ALIGNMENT`.
    """

    slices: tuple[Slice, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All buckets of a model, in the order in which they travel."""

    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket, which each of two buffers must hold."""
        return max((bucket.size for bucket in self.buckets), default=0)

    @property
    def mark(self) -> str:
        """A short hash of all names, shapes, types and places: equal plans have equal ones."""
        text = repr([(s, b.size) for b in self.buckets for s in b.slices])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Plan:
    """Cut tensors into buckets, in their order. No tensor is cut: a larger one has its own bucket.

    Args:
        tensors: by name; only shapes and types are looked at.
        bucket_bytes: size of a bucket, at most, but for such tensors.
    """
    buckets: list[Bucket] = []
    slices: list[Slice] = []
    end = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if slices and end + size > bucket_bytes:
            buckets.append(Bucket(tuple(slices), end))
            slices, end = [], 0
        slices.append(Slice(name, tuple(tensor.shape), tensor.dtype, end, end + size))
        end += math.ceil(size / ALIGNMENT) * ALIGNMENT
    if slices:
        buckets.append(Bucket(tuple(slices), end))
    return Plan(tuple(buckets))


def plan_of_boxes(
    boxes: Mapping[str, Bounds], dtypes: Mapping[str, torch.dtype], bucket_bytes: int
) -> Plan:
    """Cut parts of tensors into buckets; see :func:`plan`."""
    tensors = (
        (name, torch.empty(shape(box), dtype=dtypes[name], device="meta"))
        for name, box in boxes.items()
    )
    return plan(tensors, bucket_bytes)


@torch.no_grad()
def pack(bucket: Bucket, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
    """Copy a bucket's tensors to their places in ``flat`` [bytes]; gaps become zero."""
    end = 0
    for place in bucket.slices:
        flat[end : place.start].zero_()
        place.of(flat).copy_(tensors[place.name])
        end = place.end
    flat[end:].zero_()


def checksum(flat: Tensor) -> int:
    """A number that tells the bytes [a multiple of 8] from almost all others, at memory's speed."""
    words = flat.view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    sums = torch.cat([words[:whole].view(-1, _BLOCK).sum(1), words[whole:].sum().view(1)])
    places = torch.arange(1, 2 * len(sums), 2, device=flat.device)  # odd: none loses a bit
    return int((sums * places).sum().item())


def combined(checksums: Sequence[int]) -> str:
    """One short mark of all buckets' checksums, in order."""
    return hashlib.sha256(repr(list(checksums)).encode()).hexdigest()[:16]
