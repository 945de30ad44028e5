"""Offloading: tensors that are in the host's memory while their owner is not at work.

A :class:`CopyStream` copies between device and host beside the work, in order. The tensors of an
:class:`OffloadedTensors` come and go together. What others hold stays as it is: the tensors
themselves, ties, hooks, optimizer states; only their data are changed (``tensor.data``). While data
are away, a tensor keeps its shape, and reads as NaN, which shows when it is read too early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import is_
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from stretto.models.backend import backend_of
from stretto.protocols import Clock, RealClock
from stretto.types import Work

BUCKET = 64 << 20
"""Bytes of tensors that share a buffer on the device; a larger tensor has its own. Also bytes of a
buffer on the host, as torch rounds what it pins up to a power of two."""

ALIGNED = 256
"""Bytes to a multiple of which tensors begin in a buffer."""

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of tensors, of which each second one is copied into the first."""


class CopyStream:
    """A side thread that copies between a device and the host, one job at a time, in order.

    On a GPU it copies on a stream of its own, from and to pinned memory. On a CPU the same code
    copies from one buffer to another.

    Args:
        device: that tensors work on.
        clock: for the time of copies.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self.device, self._backend = device, backend_of(device)
        self._clock = clock or RealClock()
        self._pool = ThreadPoolExecutor(1, "swaps")
        self._stream = self._backend.new_stream()
        self._works: list[Work] = []
        self._adding = Lock()

    def buffer(self, size: int) -> Tensor:
        """Return bytes of the host, pinned where the device is a GPU."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._backend.pinned)

    def copy(self, copies: Copies, owner: str, direction: Literal["in", "out"]) -> Future[None]:
        """Copy after all that was asked for before, and after what the device has begun."""
        return self._pool.submit(self._copy, copies, self._backend.begun(), owner, direction)

    def drain(self) -> None:
        """Wait for all copies that were asked for."""
        self._pool.submit(lambda: None).result()

    def wait(self, copies: Iterable[Future[None]], owner: str) -> None:
        """Wait for copies; that is noted where it takes time."""
        left = list(copies)
        waits, start_s = not all(copy.done() for copy in left), self._clock.now()
        for copy in left:
            copy.result()
        if waits:
            self._note(Work("wait", start_s, self._clock.now(), {"cause": "swap", "owner": owner}))

    def take(self) -> list[Work]:
        """Take out what was noted of copies that have ended, and of waiting for them."""
        with self._adding:
            works, self._works = self._works, []
        return works

    def _copy(self, copies: Copies, begun: Any, owner: str, direction: str) -> None:
        start_s = self._clock.now()
        self._backend.copy(copies, self._stream, begun)
        about = {"owner": owner, "bytes": sum(t.nbytes for t, _ in copies), "direction": direction}
        self._note(Work("swap", start_s, self._clock.now(), about, beside=True))

    def _note(self, work: Work) -> None:
        with self._adding:
            self._works.append(work)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Tensors that share a buffer.

    Attributes:
        tensors: in their order.
        starts: of each in the buffer, in bytes.
        size: of the buffer, in bytes.
        strides: of each tensor, in elements, as it lies in the buffer.
        host: the buffer on the host, in parts.
    """

    tensors: Sequence[Tensor]
    starts: Sequence[int]
    size: int
    strides: Sequence[tuple[int, ...]]
    host: Sequence[Tensor]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return what each tensor's data are in a buffer of the device."""
        return [
            buffer[start : start + t.numel() * t.itemsize]
            .view(t.dtype)
            .as_strided(t.shape, stride, start // t.itemsize)
            for t, start, stride in zip(self.tensors, self.starts, self.strides, strict=True)
        ]

    def pairs(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the parts of the host's buffer, and of one on the device."""
        return list(zip(self.host, buffer.split(BUCKET), strict=True))


class OffloadedTensors:
    """Tensors that are on the device, or on their way there, or away in the host's memory.

    Called from one thread. Tensors are at work from :meth:`wait` to :meth:`offload`.

    Args:
        owner: their role, for notes.
        find: returns the tensors, each once; asked each time they are put away, as an optimizer
            makes its states late, and others when a run is resumed.
        copies: copies them; those of one process share it.

    Attributes:
        copies: as given.
        changed: whether the host's copy is old: set it before tensors at work are changed.
    """

    def __init__(
        self, owner: str, find: Callable[[], Iterable[Tensor]], copies: CopyStream
    ) -> None:
        self.copies, self._owner, self._find = copies, owner, find
        self._buckets: list[_Bucket] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Future[None]] = []
        self._state: Literal["here", "coming", "away"] = "here"
        self.changed = True

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the device; 0 while the tensors are away."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def load(self, *, early: bool = False) -> None:
        """Begin to bring the tensors, if they are away.

        Args:
            early: others are at work: where there is no room on the device, leave it.

        Raises:
            OutOfMemoryError: there is no room, even when all others are put away.
        """
        if self._state != "away":
            return
        try:
            self._buffers = self._room()
        except torch.OutOfMemoryError:
            if early:
                return
            self.copies.drain()  # what is put away has room until it is copied
            self._buffers = self._room()
        copies = [
            (buffer, host)
            for bucket, buffer in zip(self._buckets, self._buffers, strict=True)
            for host, buffer in bucket.pairs(buffer)
        ]
        if copies:
            self._copies.append(self.copies.copy(copies, self._owner, "in"))
        self._state = "coming"

    def wait(self) -> None:
        """Wait until the tensors are on the device; without :meth:`load`, bring them."""
        self.load()
        if self._state != "coming":
            return
        self.copies.wait(self._copies, self._owner)
        self._copies.clear()
        for bucket, buffer in zip(self._buckets, self._buffers, strict=True):
            for tensor, view in zip(bucket.tensors, bucket.views(buffer), strict=True):
                tensor.data = view
        self._state = "here"

    def offload(self) -> None:
        """Free the device's copies; what was changed is copied to the host before, on the side."""
        if self._state == "away":
            return
        if self._state == "here":
            self._pack()
            if self.changed:
                self._write_back()
            for bucket in self._buckets:
                for tensor in bucket.tensors:
                    tensor.data = _stand_in(tensor)
        self._buffers, self._state = [], "away"  # a copy under way holds on to its own

    def _write_back(self) -> None:
        copies = [
            pair
            for bucket, buffer in zip(self._buckets, self._buffers, strict=True)
            for pair in bucket.pairs(buffer)
        ]
        if copies:
            self._copies.append(self.copies.copy(copies, self._owner, "out"))
        self.changed = False

    def _room(self) -> list[Tensor]:
        device = self.copies.device
        return [torch.empty(b.size, dtype=torch.uint8, device=device) for b in self._buckets]

    def _pack(self) -> None:
        """Move tensors that are not in these buffers into some, bucket by bucket."""
        tensors = [tensor for tensor in self._find() if tensor.numel()]
        held = [tensor for bucket in self._buckets for tensor in bucket.tensors]
        if len(held) == len(tensors) and all(map(is_, held, tensors)) and self._in_place():
            return
        self._buckets, self._buffers, self.changed = [], [], True
        for group in _grouped(tensors):
            bucket = self._bucket(group)
            buffer = torch.empty(bucket.size, dtype=torch.uint8, device=self.copies.device)
            for tensor, view in zip(group, bucket.views(buffer), strict=True):
                tensor.data = view.copy_(tensor.detach())
            self._buckets.append(bucket)
            self._buffers.append(buffer)

    def _in_place(self) -> bool:
        return all(
            tensor.data_ptr() == buffer.data_ptr() + start
            for bucket, buffer in zip(self._buckets, self._buffers, strict=True)
            for tensor, start in zip(bucket.tensors, bucket.starts, strict=True)
        )

    def _bucket(self, tensors: Sequence[Tensor]) -> _Bucket:
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += _room_of(tensor)
        parts = [min(BUCKET, size - start) for start in range(0, size, BUCKET)]
        strides = [torch.empty_like(t, device="meta").stride() for t in tensors]
        host = [self.copies.buffer(part) for part in parts]
        return _Bucket(tensors, starts, size, strides, host)


def _grouped(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups, in order, each of a bucket's size at most unless it is one."""
    groups: list[list[Tensor]] = []
    left = 0
    for tensor in tensors:
        size = _room_of(tensor)
        if not groups or size > left:
            groups.append([])
            left = BUCKET
        groups[-1].append(tensor)
        left -= size
    return groups


def _room_of(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.itemsize / ALIGNED) * ALIGNED


def _stand_in(tensor: Tensor) -> Tensor:
    """Return data of the same shape for a tensor whose own are away: one element, NaN."""
    fill = math.nan if tensor.is_floating_point() else 0
    one = torch.full((), fill, dtype=tensor.dtype, device=tensor.device)
    return one.expand(tensor.shape)
