"""Buckets: how the tensors of a model travel, as a pure function of their names and shapes."""

from __future__ import annotations

import hashlib
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
class PackedTensor:
    """The place of a tensor in a bucket, from one byte to another."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor's view of the bucket's bytes [bytes]."""
        return flat[self.start : self.end].view(self.dtype).view(self.shape)


Bucket = tuple[PackedTensor, ...]
"""The tensors that travel together."""


def size_of(bucket: Bucket) -> int:
    """Return a bucket's bytes, a multiple of :data:`ALIGNMENT`."""
    return -(-bucket[-1].end // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of a model, in the order in which they travel."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> BucketPlan:
        """Put tensors, of which only shapes and types are looked at, into buckets of at most so
        many bytes, in their order. No tensor is cut: a larger one has its own bucket.
        """
        buckets: list[Bucket] = []
        for name, tensor in tensors:
            start = size_of(buckets[-1]) if buckets else 0
            if not buckets or start + tensor.nbytes > bucket_bytes:
                buckets.append(())
                start = 0
            end = start + tensor.nbytes
            buckets[-1] += (PackedTensor(name, tuple(tensor.shape), tensor.dtype, start, end),)
        return cls(tuple(buckets))

    @classmethod
    def of_boxes(
        cls, boxes: Mapping[str, Bounds], dtypes: Mapping[str, torch.dtype], bucket_bytes: int
    ) -> BucketPlan:
        """Put parts of tensors into buckets."""
        tensors = (
            (name, torch.empty(shape(box), dtype=dtypes[name], device="meta"))
            for name, box in boxes.items()
        )
        return cls.of(tensors, bucket_bytes)

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return sum(map(size_of, self.buckets))

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket, which each of two buffers must hold."""
        return max(map(size_of, self.buckets), default=0)

    @property
    def mark(self) -> str:
        """A short hash of all names, shapes, types and places: equal plans have equal ones."""
        return _short_hash(self.buckets)


@torch.no_grad()
def pack(bucket: Bucket, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
    """Copy a bucket's tensors to their places in ``flat`` [bytes]; gaps become zero."""
    end = 0
    for place in bucket:
        flat[end : place.start].zero_()
        place.of(flat).copy_(tensors[place.name])
        end = place.end
    flat[end:].zero_()


def checksum(flat: Tensor) -> int:
    """Return a number that tells bytes [n] from almost all others, at memory's speed."""
    words = flat.view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    sums = torch.cat([words[:whole].view(-1, _BLOCK).sum(1), words[whole:].sum().view(1)])
    places = torch.arange(1, 2 * len(sums), 2, device=flat.device)  # odd: none loses a bit
    return int((sums * places).sum().item())


def combined(checksums: Sequence[int]) -> str:
    """Return one short mark of all buckets' checksums, in order."""
    return _short_hash(list(checksums))


def _short_hash(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]
