"""Offloading: tensors that stay in host memory while their owner does not work.

Tensors, ties, hooks and optimizer states keep their identity, and only their data change. An
offloaded tensor keeps its shape and reads as NaN, which reveals premature reads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from stretto.models.backend import backend_of
from stretto.protocols import RealClock
from stretto.types import Work

BUFFER_BYTES = 64 << 20
"""Bytes of tensors that share a device buffer. A larger tensor has its own. Also the size of one
part of a host buffer, because torch rounds pinned memory up to a power of two.
"""

ALIGNED = 256
"""Alignment of tensors in a buffer, in bytes."""

_AWAY = torch.empty(0, dtype=torch.uint8)

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of (target, source) tensors."""


class CopyStream:
    """A side thread that copies between a device and the host, one job at a time, in order."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._backend = device, backend_of(device)
        self._clock = RealClock()
        self._pool = ThreadPoolExecutor(1, "swaps")
        self._stream = self._backend.new_stream()
        self._works: deque[Work] = deque()  # two threads append to it

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._backend.pinned)

    def copy(self, copies: Copies, owner: str, direction: Literal["in", "out"]) -> Future[None]:
        """Copy after all earlier jobs and after the device work submitted so far."""
        return self._pool.submit(self._copy, copies, self._backend.begun(), owner, direction)

    def drain(self) -> None:
        self._pool.submit(lambda: None).result()

    def wait(self, copies: Iterable[Future[None]], owner: str) -> None:
        """Wait for copies, and record the wait if they were not done."""
        pending = list(copies)
        waits, start_s = not all(copy.done() for copy in pending), self._clock.now()
        for copy in pending:
            copy.result()
        if waits:
            about = {"cause": "swap", "owner": owner}
            self._works.append(Work("wait", start_s, self._clock.now(), about))

    def take(self) -> list[Work]:
        return [self._works.popleft() for _ in range(len(self._works))]

    def _copy(self, copies: Copies, begun: Any, owner: str, direction: str) -> None:
        start_s = self._clock.now()
        self._backend.copy(copies, self._stream, begun)
        about = {"owner": owner, "bytes": sum(t.nbytes for t, _ in copies), "direction": direction}
        self._works.append(Work("swap", start_s, self._clock.now(), about, beside=True))


@dataclass(slots=True)
class _SharedBuffer:
    """Tensors that share a device buffer, empty while they are offloaded, and a host buffer.
    ``starts`` are byte offsets of tensors in the buffer. ``host`` is split into parts.
    """

    tensors: Sequence[Tensor]
    starts: Sequence[int]
    size: int
    strides: Sequence[tuple[int, ...]]
    host: Sequence[Tensor]
    device: Tensor

    def views(self) -> Iterator[tuple[Tensor, Tensor]]:
        for t, start, stride in zip(self.tensors, self.starts, self.strides, strict=True):
            region = self.device[start : start + t.numel() * t.itemsize].view(t.dtype)
            yield t, region.as_strided(t.shape, stride, start // t.itemsize)

    def in_place(self) -> bool:
        where = self.device.data_ptr()
        pairs = zip(self.tensors, self.starts, strict=True)
        return all(tensor.data_ptr() == where + start for tensor, start in pairs)


class OffloadedTensors:
    """Tensors of a role that move between device and host together, called from one thread.

    They are usable from :meth:`wait` to :meth:`offload`.

    Args:
        find: returns the tensors, each once. Called at each offload, because an optimizer creates
            its states late, and new ones when a run is resumed.

    Attributes:
        changed: whether the host's copy is outdated. Set it before changing loaded tensors.
    """

    def __init__(
        self, owner: str, find: Callable[[], Iterable[Tensor]], copies: CopyStream
    ) -> None:
        self.copies = copies
        self._owner = owner
        self._find = find
        self._buffers: list[_SharedBuffer] = []
        self._copies: list[Future[None]] = []
        self._state: Literal["here", "coming", "away"] = "here"
        self.changed = True

    def load(self, *, early: bool = False) -> None:
        """Start loading the tensors if they are offloaded. If ``early``, only into free memory.
        Raises OutOfMemoryError if there is no room even after earlier copies have finished.
        """
        if self._state != "away":
            return
        try:
            self._allocate()
        except torch.OutOfMemoryError:
            if early:
                return
            self.copies.drain()  # buffers being offloaded are freed after their copy
            self._allocate()
        self._copy("in")
        self._state = "coming"

    def wait(self) -> None:
        """Wait until the tensors are on the device, loading them if needed."""
        self.load()
        if self._state != "coming":
            return
        self.copies.wait(self._copies, self._owner)
        self._copies.clear()
        for buffer in self._buffers:
            for tensor, view in buffer.views():
                tensor.data = view
        self._state = "here"

    def offload(self) -> None:
        """Free the device's copies. A background thread first copies changed ones out."""
        if self._state == "away":
            return
        if self._state == "here":
            self._pack()
            if self.changed:
                self._copy("out")
            self.changed = False
            for buffer in self._buffers:
                for tensor in buffer.tensors:
                    tensor.data = _stand_in(tensor)
        for buffer in self._buffers:
            buffer.device = _AWAY  # a running copy keeps its reference
        self._state = "away"

    def _allocate(self) -> None:
        device = self.copies.device
        rooms = [torch.empty(b.size, dtype=torch.uint8, device=device) for b in self._buffers]
        for buffer, room in zip(self._buffers, rooms, strict=True):
            buffer.device = room

    def _copy(self, direction: Literal["in", "out"]) -> None:
        pairs = [
            (device, host) if direction == "in" else (host, device)
            for buffer in self._buffers
            for device, host in zip(buffer.device.split(BUFFER_BYTES), buffer.host, strict=True)
        ]
        if pairs:
            self._copies.append(self.copies.copy(pairs, self._owner, direction))

    def _pack(self) -> None:
        tensors = [tensor for tensor in self._find() if tensor.numel()]
        buffer_tensors = [tensor for buffer in self._buffers for tensor in buffer.tensors]
        same = len(buffer_tensors) == len(tensors) and all(map(is_, buffer_tensors, tensors))
        if same and all(buffer.in_place() for buffer in self._buffers):
            return
        self._buffers, self.changed = [], True
        for group in _grouped(tensors):
            *starts, size = accumulate(map(_room_of, group), initial=0)
            parts = [min(BUFFER_BYTES, size - start) for start in range(0, size, BUFFER_BYTES)]
            strides = [torch.empty_like(t, device="meta").stride() for t in group]
            host = [self.copies.buffer(part) for part in parts]
            room = torch.empty(size, dtype=torch.uint8, device=self.copies.device)
            buffer = _SharedBuffer(group, starts, size, strides, host, room)
            for tensor, view in buffer.views():
                tensor.data = view.copy_(tensor.detach())
            self._buffers.append(buffer)


def _grouped(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors in order. A group fits into a buffer unless it is a single tensor."""
    groups: list[list[Tensor]] = []
    free_bytes = 0
    for tensor in tensors:
        size = _room_of(tensor)
        if not groups or size > free_bytes:
            groups.append([])
            free_bytes = BUFFER_BYTES
        groups[-1].append(tensor)
        free_bytes -= size
    return groups


def _room_of(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.itemsize / ALIGNED) * ALIGNED


def _stand_in(tensor: Tensor) -> Tensor:
    fill = math.nan if tensor.is_floating_point() else 0
    one = torch.full((), fill, dtype=tensor.dtype, device=tensor.device)
    return one.expand(tensor.shape)
