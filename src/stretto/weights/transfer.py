"""Transfers: weights that travel from the learner to its followers, bucket by bucket.

A transfer has a process group of its own, which is none of the default groups. Its members are the
ranks of the learner, which are its sources, and those of each follower. All control comes before:
each side has said that it holds the same plan. So nothing in here waits for anything outside the
group, and every wait has a deadline.

On a GPU a source packs and sends on a stream of its own. That waits for the work which made the
tensors, and no other work ever waits for it: training goes on while a follower is late.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import TransferError, first_line
from stretto.models.backend import backend_of
from stretto.weights.buckets import (
    Bucket,
    BucketPlan,
    PackedTensor,
    checksum,
    combined,
    pack,
    segments,
    size_of,
)

Wire = Literal["gloo", "nccl", "ipc"]
"""A way for tensors: gloo through the hosts' memory, NCCL between GPUs, or CUDA's inter-process
memory, where a follower reads a bucket from the learner's rank on its own GPU."""

CONNECTS = 5
"""How often gloo tries to connect to a peer that does not answer, each time up to its timeout."""

_POLL_S = 2e-4  # between two looks whether NCCL is done


class Place(Protocol):
    """Where a rank is: on a GPU, or, where its UUID is empty, on a CPU."""

    @property
    def device_id(self) -> str:
        """The UUID of the GPU."""


def choose_wires(
    sources: Sequence[Place], followers: Mapping[str, Sequence[Place]]
) -> dict[str, tuple[Wire, str]]:
    """Return the wire to each follower's ranks, and the reason.

    One communicator of NCCL serves all that have GPUs of their own; no GPU is in it twice.
    """
    here = [place.device_id for place in sources]
    taken, found = set(here), dict[str, tuple[Wire, str]]()
    alone = "" not in here and len(taken) == len(here)
    for name, places in followers.items():
        there = [place.device_id for place in places]
        if "" in there or "" in here:
            found[name] = "gloo", "it works on a CPU" if "" in there else "the learner is on a CPU"
        elif alone and set(there) <= set(here):
            found[name] = "ipc", "it shares the learner's GPUs"
        elif alone and taken.isdisjoint(there) and len(set(there)) == len(there):
            taken.update(there)
            found[name] = "nccl", "it has GPUs of its own"
        else:
            found[name] = "gloo", "it shares a GPU with another that gets weights"
    return found


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store where groups meet, and the seconds that a transfer may take: those of the settings,
    and the most, where many bytes take longer.
    """

    host: str
    port: int
    timeout_s: float
    most_s: float = 0.0

    def routes(
        self,
        channel: str,
        epoch: int,
        size: int,
        wire: Wire = "gloo",
        sources: int = 1,
        timeout_s: float = 0.0,
    ) -> list[Route]:
        """Return each member's way to a channel's group of an epoch, the sources' first."""
        limit_s = timeout_s or self.timeout_s
        return [
            Route(self.host, self.port, channel, epoch, rank, size, wire, sources, limit_s)
            for rank in range(size)
        ]


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a transfer's group, of a rank and a size; its first ranks are the sources.

    The channel is the purpose of the group, such as the weights of one model, the epoch the number
    of the channel's group, another one for every group that ever was.
    """

    host: str
    port: int
    channel: str
    epoch: int
    rank: int
    size: int
    wire: Wire
    sources: int
    timeout_s: float
    beside: tuple[int, ...] = ()  # sources on the GPUs of a follower's ranks

    @property
    def prefix(self) -> str:
        """The beginning of the group's keys in the store."""
        return f"{self.channel}/{self.epoch}"

    @property
    def sends(self) -> bool:
        """Whether this rank is a source."""
        return self.rank < self.sources


class Transfers:
    """A side of all transfers of one process; it keeps the last group of each channel.

    Groups take longer to make than small models take to travel. Transfers of different channels
    may be under way at the same time, on different threads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, backend_of(device)
        self._stream = self._backend.new_stream()
        self._groups: dict[str, tuple[int, _Group]] = {}  # epoch and group, by channel

    def begun(self) -> Any:
        """Mark the work that the device has begun, for :meth:`send` to wait for."""
        return self._backend.begun()

    def send(
        self,
        route: Route,
        plan: BucketPlan,
        tensor_of: Callable[[PackedTensor], Tensor],
        begun: Any,
    ) -> str:
        """Send this source's parts of a plan; return the mark of what was sent. Raises
        TransferError if they have not been taken in time.
        """

        def read(part: PackedTensor) -> Tensor:
            return self._backend.read_on(self._stream, tensor_of(part))

        until_s = time.monotonic() + route.timeout_s
        sums, under_way = list[Tensor](), dict[int, list[Any]]()
        with self._broken_off(route), self._backend.on(self._stream, begun):
            group = self._joined(route, until_s)
            buffers = group.buffers(plan.largest, until_s)
            for i, bucket in enumerate(plan.buckets):
                for work in under_way.pop(i - 2, ()):
                    group.wait(work, until_s)
                flat = buffers[i % 2][: size_of(bucket)]
                if own := segments(bucket).get(route.rank):
                    pack(tuple(p for p in bucket if p.source == route.rank), read, flat)
                    sums.append(checksum(flat[own]))
                under_way[i] = group.exchange(flat, bucket, until_s)
            for work in (work for works in under_way.values() for work in works):
                group.wait(work, until_s)
            group.finish(until_s)
            return combined(sums)

    def receive(
        self, route: Route, plan: BucketPlan, sums: Sequence[list[Tensor]] = ()
    ) -> Iterator[tuple[PackedTensor, Tensor]]:
        """Receive parts by their plan; each is good until the next is asked for. Those of each
        source get the checksums of its buckets. Raises TransferError if they have not come in time.
        """
        until_s = time.monotonic() + route.timeout_s
        with self._broken_off(route):
            group = self._joined(route, until_s)
            buffers = group.buffers(plan.largest, until_s)
            coming = dict[int, list[Any]]()

            def ask(i: int) -> None:
                if i < len(plan.buckets) and i not in coming:
                    flat = buffers[i % 2][: size_of(plan.buckets[i])]
                    coming[i] = group.exchange(flat, plan.buckets[i], until_s)

            for i, bucket in enumerate(plan.buckets):
                ask(i)
                for work in coming[i]:
                    group.wait(work, until_s)
                if group.reads_ahead:
                    ask(i + 1)  # into the other buffer, which has been read
                flat = buffers[i % 2][: size_of(bucket)]
                for source, place in segments(bucket).items() if sums else ():
                    sums[source].append(checksum(flat[place]))
                for part in bucket:
                    yield part, part.of(flat)
            group.finish(until_s)

    def abort(self) -> None:
        """Break off the transfers that may be under way; from any thread."""
        for channel in list(self._groups):
            self._leave(channel)

    def _leave(self, channel: str) -> None:
        _, group = self._groups.pop(channel, (0, None))
        if group is not None:
            group.abort()

    @contextmanager
    def _broken_off(self, route: Route) -> Iterator[None]:
        """Break the group off when its transfer fails, and say so."""
        try:
            yield
        except RuntimeError as error:  # which is what torch's groups raise
            self._leave(route.channel)
            raise TransferError(
                f"the transfer '{route.prefix}' by {route.wire}, which may take "
                f"{route.timeout_s:g} s, was broken off: {first_line(error)}",
                "transfer-broken-off",
            ) from error
        except BaseException:
            self._leave(route.channel)
            raise

    def _joined(self, route: Route, until_s: float) -> _Group:
        """Return the route's group; the channel's last one, if it is that."""
        if self._groups.get(route.channel, (None, None))[0] != route.epoch:
            self._leave(route.channel)
            make = _IpcGroup if route.wire == "ipc" else _Group
            self._groups[route.channel] = route.epoch, make(route, self._device, until_s)
        return self._groups[route.channel][1]


class _Group:
    """A group over which each source broadcasts its segment of a bucket, by gloo or NCCL."""

    reads_ahead = True  # a bucket may come while the one before is read

    def __init__(self, route: Route, device: torch.device, until_s: float) -> None:
        self._device = device if route.wire == "nccl" else torch.device("cpu")
        self._group = _join(route.wire, _store(route, until_s), route, device, until_s)
        self._buffers = [torch.empty(0)] * 2

    def buffers(self, size: int, until_s: float) -> list[Tensor]:
        """Return two buffers [bytes] of at least this size."""
        if len(self._buffers[0]) < size:
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)
            ]
        return self._buffers

    def exchange(self, flat: Tensor, bucket: Bucket, until_s: float) -> list[Any]:
        """Begin to exchange a bucket; return what is to be waited for."""
        return _broadcasts(self._group, flat, bucket, until_s)

    def wait(self, work: Any, until_s: float) -> None:
        """Wait, and have the current stream wait; raises RuntimeError if it is not done in time."""
        if self._device.type == "cpu":
            work.wait(_left(until_s))
            return
        # NCCL's own wait is for the stream alone, and its watchdog ends the process.
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise RuntimeError("NCCL was not done in time")
            time.sleep(_POLL_S)
        work.wait()

    def finish(self, until_s: float) -> None:
        """Return when the buffers may be used again."""

    def abort(self) -> None:
        with suppress(Exception):  # of a group that is broken already
            self._group.abort()


class _IpcGroup(_Group):
    """A group whose followers read buckets in the memory of the sources on their GPUs. The sources
    fill it up among themselves; members tell each other by gloo that a bucket is there, and read.
    """

    reads_ahead = False

    def __init__(self, route: Route, device: torch.device, until_s: float) -> None:
        self._route, self._device = route, device
        self._store, self._backend = _store(route, until_s), backend_of(device)
        self._group = _join("gloo", self._store, route, device, until_s)
        self._sources: Any = None
        if route.sends and route.sources > 1:
            beside = _prefixed("sources", self._store)
            self._sources = _join("nccl", beside, route, device, until_s, route.sources)
        self._buffers, self._size = [torch.empty(0)] * 2, 0

    def buffers(self, size: int, until_s: float) -> list[Tensor]:
        if self._size >= size:
            return self._buffers
        self._size = size
        if self._route.sends:
            self._buffers = super().buffers(size, until_s)
            for i, buffer in enumerate(self._buffers):
                self._store.set(f"memory/{self._route.rank}/{size}/{i}", exported(buffer))
        else:
            (beside,) = self._route.beside
            keys = [f"memory/{beside}/{size}/{i}" for i in range(2)]
            self._store.wait(keys, _left(until_s))
            self._buffers = [opened(self._store.get(key), self._device) for key in keys]
        return self._buffers

    def exchange(self, flat: Tensor, bucket: Bucket, until_s: float) -> list[Any]:
        if self._sources is not None:
            for work in _broadcasts(self._sources, flat, bucket, until_s):
                self.wait(work, until_s)
        self.finish(until_s)
        return []

    def finish(self, until_s: float) -> None:
        """Wait until all have filled or read what they were to."""
        self._backend.synchronize()
        options = dist.BarrierOptions()
        options.timeout = _left(until_s)
        self._group.barrier(options).wait(_left(until_s))

    def abort(self) -> None:
        super().abort()
        if self._sources is not None:
            with suppress(Exception):
                self._sources.abort()


def exported(tensor: Tensor) -> str:
    """Return a ticket by which another process opens a GPU's memory [bytes]."""
    ticket = tensor.untyped_storage()._share_cuda_()
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in ticket])


def opened(ticket: bytes, device: torch.device) -> Tensor:
    """Return another process's memory, on the GPU that this one knows as ``device``."""
    _, handle, size, offset, counter, counter_offset, event, waits = json.loads(ticket)
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        bytes.fromhex(handle),
        size,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        waits,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def open_store(host: str) -> tuple[Any, int]:
    """Open a store on which groups meet; return it with its port. It ends with this process."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists it nowhere
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _store(route: Route, until_s: float) -> Any:
    """Return the route's part of the store, once all members are there."""
    store = _prefixed(
        route.prefix,
        dist.TCPStore(  # type: ignore[attr-defined]
            route.host,
            route.port,
            is_master=False,
            wait_for_workers=False,
            timeout=_left(until_s),
        ),
    )
    # Late members are waited for here, and not by gloo: see CONNECTS.
    store.set(f"here/{route.rank}", "")
    store.wait([f"here/{rank}" for rank in range(route.size)], _left(until_s))
    return store


def _prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _join(
    wire: Wire, store: Any, route: Route, device: torch.device, until_s: float, size: int = 0
) -> Any:
    """Make this member's side of a group that is none of the default ones."""
    group: Any
    if wire == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=2 * route.timeout_s)  # after this side's own
        group = dist.ProcessGroupNCCL(store, route.rank, size or route.size, options)
        group.eager_connect_single_device(device)
    else:
        group = dist.ProcessGroupGloo(
            store, route.rank, size or route.size, _left(until_s) / CONNECTS
        )
    group._set_sequence_number_for_group()
    return group


def _broadcasts(group: Any, flat: Tensor, bucket: Bucket, until_s: float) -> list[Any]:
    works = []
    for source, place in segments(bucket).items():
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = source, _left(until_s)
        works.append(group.broadcast([flat[place]], options))
    return works


def _left(until_s: float) -> timedelta:
    return timedelta(seconds=max(until_s - time.monotonic(), 0.001))
