"""Buckets: the packing of a model's tensors for transfer, a pure function of names and shapes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.bounds import ceil_div
from stretto.layout import Bounds, full_bounds
from stretto.models.shards import shape

ALIGNMENT = 16
"""Offsets are rounded up to this many bytes, so that a tensor can be viewed as any type."""

_BLOCK = 4096
"""Words that a checksum sums up before it weighs the sums by position."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A part of a parameter sent by one of several sources, and its bytes in a bucket."""

    name: str
    bounds: Bounds  # in the parameter
    dtype: torch.dtype
    source: int = 0
    start: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(shape(self.bounds)) * self.dtype.itemsize

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.end].view(self.dtype).view(shape(self.bounds))


Bucket = tuple[PackedTensor, ...]
"""The parts that travel together, grouped by source."""


def size_of(bucket: Bucket) -> int:
    """Return a bucket's bytes, a multiple of :data:`ALIGNMENT`."""
    return _aligned(bucket[-1].end) if bucket else 0


def segments(bucket: Bucket) -> dict[int, slice]:
    """Return the byte range in a bucket of each source that sends any."""
    ranges: dict[int, slice] = {}
    for part in bucket:
        first = ranges.get(part.source, slice(part.start, 0))
        ranges[part.source] = slice(first.start, _aligned(part.end))
    return {source: place for source, place in ranges.items() if place.start < place.stop}


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of a model, in the order of transfer."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> BucketPlan:
        """Put tensors, in order, into buckets of at most ``bucket_bytes``. Reads only shapes and
        types. No tensor is cut: a larger one has its own bucket.
        """
        return cls(
            _filled(
                (PackedTensor(n, full_bounds(t.shape), t.dtype) for n, t in tensors), bucket_bytes
            )
        )

    @classmethod
    def of_sources(
        cls,
        sources: Sequence[Mapping[str, Bounds]],
        dtypes: Mapping[str, torch.dtype],
        bucket_bytes: int,
    ) -> BucketPlan:
        """Put the parts that each source sends into buckets, in the parameter order of ``dtypes``.
        A receiver thus has a full parameter before most of the next arrive. Parts larger than a
        bucket are cut by rows.
        """
        parts = (
            piece
            for name, dtype in dtypes.items()
            for source, bounds in enumerate(sources)
            if name in bounds
            for piece in _by_rows(PackedTensor(name, bounds[name], dtype, source), bucket_bytes)
        )
        return cls(_filled(parts, bucket_bytes))

    @property
    def size(self) -> int:
        return sum(map(size_of, self.buckets))

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket, which each of two buffers must hold."""
        return max(map(size_of, self.buckets), default=0)

    @property
    def mark(self) -> str:
        """A short hash of all names, positions and types, equal for equal plans."""
        return _short_hash(self.buckets)


def _filled(parts: Iterable[PackedTensor], bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[list[PackedTensor]] = []
    end = 0
    for part in parts:
        if not buckets or end + part.nbytes > bucket_bytes:
            buckets.append([])
            end = 0
        buckets[-1].append(part)
        end = _aligned(end + part.nbytes)
    return tuple(map(_placed, buckets))


def _placed(parts: list[PackedTensor]) -> Bucket:
    bucket: list[PackedTensor] = []
    for part in sorted(parts, key=lambda part: part.source):
        start = _aligned(bucket[-1].end) if bucket else 0
        bucket.append(replace(part, start=start, end=start + part.nbytes))
    return tuple(bucket)


def _by_rows(part: PackedTensor, bucket_bytes: int) -> Iterator[PackedTensor]:
    if part.nbytes <= bucket_bytes:
        yield part
        return
    (first, last), *rest = part.bounds
    rows = max(bucket_bytes * (last - first) // part.nbytes, 1)
    for start in range(first, last, rows):
        yield replace(part, bounds=((start, min(start + rows, last)), *rest))


def _aligned(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


@torch.no_grad()
def pack(bucket: Bucket, tensor_of: Callable[[PackedTensor], Tensor], flat: Tensor) -> None:
    """Copy a source's parts of a bucket to their offsets in ``flat`` [bytes]. Gaps become zero."""
    for part in bucket:
        flat[part.end : _aligned(part.end)].zero_()
        part.of(flat).copy_(tensor_of(part))


def checksum(flat: Tensor) -> Tensor:
    """Return a number [] that distinguishes bytes [n] from almost all others, at memory speed."""
    words = flat.view(torch.int64)
    full_size = len(words) // _BLOCK * _BLOCK
    sums = torch.cat([words[:full_size].view(-1, _BLOCK).sum(1), words[full_size:].sum().view(1)])
    places = torch.arange(1, 2 * len(sums), 2, device=flat.device)  # odd, so that no bit is lost
    return (sums * places).sum()


def combined(checksums: Sequence[Tensor]) -> str:
    return _short_hash(torch.stack(list(checksums)).tolist()) if checksums else ""


def _short_hash(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]
