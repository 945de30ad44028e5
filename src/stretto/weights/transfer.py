"""Transfers of weights from the learner to its followers, bucket by bucket.

A transfer has its own process group, separate from the default groups. Its members are the sources,
which are the learner's ranks, and the ranks of each follower. All control messages come first: each
side has confirmed holding the same plan. Code in this file therefore waits for nothing
outside the group, and every wait has a deadline.

On a GPU a source packs and sends on its own stream. That stream waits for the work that produced
the tensors, and no other work waits for it, so that training continues while a follower is late.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock, Thread
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
"""A transport: gloo through host memory, NCCL between GPUs, or CUDA's inter-process memory. With
``ipc`` a follower reads buckets in the memory of the learner's rank on its own GPU.
"""

CONNECTS = 5
"""How often gloo tries to connect to a silent peer, each time up to its timeout."""

SHORTEST_S, LONGEST_S = 2e-4, 0.02  # pauses between polls

BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_MAKING = Lock()  # held while that variable is set


class RankDevice(Protocol):
    """A rank's device: a GPU, or a CPU if its UUID is empty."""

    @property
    def device_id(self) -> str:
        """The UUID of the GPU."""


def choose_wires(
    sources: Sequence[RankDevice], followers: Mapping[str, Sequence[RankDevice]]
) -> dict[str, tuple[Wire, str]]:
    """Choose each follower's transport, with the reason. One NCCL communicator serves all followers
    that have GPUs of their own, as it must not contain a GPU twice.
    """
    source_ids = [place.device_id for place in sources]
    in_use, wires = set(source_ids), dict[str, tuple[Wire, str]]()
    distinct = "" not in source_ids and len(in_use) == len(source_ids)
    for name, places in followers.items():
        ids = [place.device_id for place in places]
        if "" in ids or "" in source_ids:
            wires[name] = "gloo", "it works on a CPU" if "" in ids else "the learner is on a CPU"
        elif distinct and set(ids) <= set(source_ids):
            wires[name] = "ipc", "it shares the learner's GPUs"
        elif distinct and in_use.isdisjoint(ids) and len(set(ids)) == len(ids):
            in_use.update(ids)
            wires[name] = "nccl", "it has GPUs of its own"
        else:
            wires[name] = "gloo", "it shares a GPU with another that gets weights"
    return wires


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address of the rendezvous store of groups, and the time limits of a transfer in seconds.
    ``timeout_s`` comes from the settings. ``most_s`` is the limit for transfers of many bytes.
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
        """Return each member's route to a channel's group of an epoch, sources first."""
        limit_s = timeout_s or self.timeout_s
        return [
            Route(self.host, self.port, channel, epoch, rank, size, wire, sources, limit_s)
            for rank in range(size)
        ]


@dataclass(frozen=True, slots=True)
class Route:
    """A member's route to a transfer's group. The first ranks are the sources. ``channel`` is the
    purpose of the group, for example the weights of one model. ``epoch`` is the number of the
    channel's group and never repeats.
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
    beside: tuple[int, ...] = ()  # sources on the GPUs of followers' ranks, or on this rank's

    @property
    def prefix(self) -> str:
        return f"{self.channel}/{self.epoch}"

    @property
    def sends(self) -> bool:
        return self.rank < self.sources


class Transfers:
    """One process's side of all transfers. Keeps the last group of each channel. Groups are kept
    because making one takes longer than transferring a small model. Transfers of different channels
    may run at the same time, on different threads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, backend_of(device)
        self._stream = self._backend.new_stream()
        self._groups: dict[str, _TransferGroup] = {}  # by channel
        self._buffers: dict[str, list[Tensor]] = {}

    def begun(self) -> Any:
        return self._backend.begun()

    def send(
        self,
        route: Route,
        plan: BucketPlan,
        tensor_of: Callable[[PackedTensor], Tensor],
        begun: Any,
    ) -> str:
        """Send this source's parts of a plan and return their mark. TransferError if late."""

        def read(part: PackedTensor) -> Tensor:
            return self._backend.read_on(self._stream, tensor_of(part))

        sums, works_by_bucket = list[Tensor](), dict[int, list[Any]]()
        with self._group(route) as group, self._backend.on(self._stream, begun):
            buffers = group.buffers(plan.largest)
            for i, bucket in enumerate(plan.buckets):
                group.wait(works_by_bucket.pop(i - 2, []))
                flat = buffers[i % 2][: size_of(bucket)]
                if segment := segments(bucket).get(route.rank):
                    pack(tuple(p for p in bucket if p.source == route.rank), read, flat)
                    sums.append(checksum(flat[segment]))
                works_by_bucket[i] = group.exchange(flat, bucket)
            for works in works_by_bucket.values():
                group.wait(works)
            group.finish()
            return combined(sums)

    def receive(
        self, route: Route, plan: BucketPlan, sums: Sequence[list[Tensor]] = ()
    ) -> Iterator[tuple[PackedTensor, Tensor]]:
        """Receive a plan's parts. Each part is valid until the next one is requested. ``sums``
        collects the checksums of each source's buckets. Raises TransferError if late.
        """
        with self._group(route) as group:
            buffers = group.buffers(plan.largest)
            works_by_bucket = dict[int, list[Any]]()

            def ask(i: int) -> None:
                if i < len(plan.buckets) and i not in works_by_bucket:
                    flat = buffers[i % 2][: size_of(plan.buckets[i])]
                    works_by_bucket[i] = group.exchange(flat, plan.buckets[i])

            for i, bucket in enumerate(plan.buckets):
                ask(i)
                group.wait(works_by_bucket.pop(i))
                if group.reads_ahead:
                    ask(i + 1)  # into the other buffer, which has been read
                flat = buffers[i % 2][: size_of(bucket)]
                if sums:
                    for source, place in segments(bucket).items():
                        sums[source].append(checksum(flat[place]))
                for part in bucket:
                    yield part, part.of(flat)
            group.finish()

    def abort(self) -> None:
        for group in list(self._groups.values()):
            self._leave(group)

    def _leave(self, group: _TransferGroup) -> None:
        if self._groups.get(group.route.channel) is group:
            del self._groups[group.route.channel]
        group.abort()

    @contextmanager
    def _group(self, route: Route) -> Iterator[_TransferGroup]:
        """Use the route's group for one transfer. On failure, abort the group and report it."""
        group = self._groups.get(route.channel)
        if group is None or group.route.epoch != route.epoch:
            if group is not None:
                self._leave(group)
            kind = _IpcGroup if route.wire == "ipc" else _TransferGroup
            group = kind(route, self._device, self._buffers.setdefault(route.channel, []))
            self._groups[route.channel] = group
        try:
            group.begin(time.monotonic() + route.timeout_s)
            yield group
        except RuntimeError as error:  # raised by torch's groups
            self._leave(group)
            raise TransferError(
                f"the transfer '{route.prefix}' by {route.wire}, which may take "
                f"{route.timeout_s:g} s, was broken off: {first_line(error)}",
                "transfer-broken-off",
            ) from error
        except BaseException:
            self._leave(group)
            raise


class _TransferGroup:
    """A gloo or NCCL group over which each source sends its segments of buckets. A turn is one
    transfer. ``buffers`` are reused from the channel's earlier groups.
    """

    reads_ahead = True  # whether a bucket may arrive while the one before is read

    def __init__(self, route: Route, device: torch.device, buffers: list[Tensor]) -> None:
        self.route = route
        self._device = device
        self._buffers = buffers
        self._store: Any = None
        self._joined: Any = None  # torch's process group
        self._broken = False
        self._until_s = 0.0
        self._turns = 0
        self._exchanges = 0

    def begin(self, until_s: float) -> None:
        """Start a turn with a deadline. A source waits until all receivers have started. Otherwise
        its kernels would wait for them on its GPU, and block everything that waits for the device.
        """
        route = self.route
        self._until_s = until_s
        self._turns += 1
        if self._joined is None:
            self._store = _store(route, _left(until_s))
            self._store.set(f"here/{route.rank}", "")
            # Wait for late members here rather than in gloo, see CONNECTS.
            self._await([f"here/{rank}" for rank in range(route.size)])
            self._join()
        if route.sends:
            receive = range(route.sources, route.size)
            self._await([f"begun/{self._turns}/{rank}" for rank in receive])
        else:
            self._store.set(f"begun/{self._turns}/{route.rank}", "")
            self._store.delete_key(f"begun/{self._turns - 1}/{route.rank}")

    def buffers(self, size: int) -> list[Tensor]:
        """Return two buffers [bytes] of at least this size."""
        on_gpu = self.route.wire != "gloo"
        if not self._buffers or len(self._buffers[0]) < size:
            device = self._device if on_gpu else torch.device("cpu")
            self._buffers[:] = (
                torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)
            )
        return self._buffers

    def exchange(self, flat: Tensor, bucket: Bucket) -> list[Any]:
        self._exchanges += 1
        if self.route.wire == "gloo" and self.route.sources > 1:
            return self._sent(flat, bucket)
        return _broadcasts(self._joined, flat, bucket, _left(self._until_s))

    def wait(self, works: Sequence[Any]) -> None:
        """Wait, and let the current stream wait. Raises RuntimeError if late."""
        for work in works:
            if self._device.type == "cpu" or self.route.wire == "gloo":
                work.wait(_left(self._until_s))
            else:
                self._poll(work.is_completed)
                work.wait()  # for the stream
        if self._broken:  # an aborted NCCL work counts as completed
            raise RuntimeError("it was given up")

    def finish(self) -> None:
        """Return when the buffers may be reused."""

    def abort(self) -> None:
        self._broken = True
        with suppress(Exception):  # the group may be broken or missing
            self._joined.abort()

    def _join(self) -> None:
        route = self.route
        if route.wire == "nccl":
            self._joined = self._nccl(self._store, route.size)
        else:
            timeout = _left(self._until_s) / CONNECTS
            self._joined = dist.ProcessGroupGloo(self._store, route.rank, route.size, timeout)
            self._joined._set_sequence_number_for_group()

    def _nccl(self, store: Any, size: int) -> Any:
        """Make an NCCL communicator. Raises RuntimeError if other members are late."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)
        with _without_watchdog():
            group: Any = dist.ProcessGroupNCCL(store, self.route.rank, size, options)
        thread = Thread(target=_connect, args=(group, self._device), daemon=True)
        thread.start()  # in a thread, because it cannot be interrupted
        self._poll(lambda: not thread.is_alive())
        group._set_sequence_number_for_group()
        return group

    def _sent(self, flat: Tensor, bucket: Bucket) -> list[Any]:
        route, group = self.route, self._joined
        tag, places = self._exchanges, segments(bucket)
        if not route.sends:
            return [group.recv([flat[place]], source, tag) for source, place in places.items()]
        receive = range(route.sources, route.size) if route.rank in places else ()
        return [group.send([flat[places[route.rank]]], rank, tag) for rank in receive]

    def _await(self, keys: list[str]) -> None:
        self._poll(lambda: self._store.check(keys))

    def _poll(self, is_done: Callable[[], bool]) -> None:
        pause_s = SHORTEST_S
        while not is_done():
            if self._broken or time.monotonic() > self._until_s:
                raise RuntimeError("it was given up" if self._broken else "not all came in time")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)


class _IpcGroup(_TransferGroup):
    """A group whose followers read buckets in the memory of the sources on their GPUs. The sources
    broadcast to one another. Barriers over gloo mark each bucket as complete and as read.
    """

    reads_ahead = False

    def __init__(self, route: Route, device: torch.device, buffers: list[Tensor]) -> None:
        super().__init__(route, device, buffers)
        self._backend = backend_of(device)
        self._sources: Any = None  # their NCCL group
        self._opened: list[Tensor] = []

    def buffers(self, size: int) -> list[Tensor]:
        if self._opened and len(self._opened[0]) >= size:
            return self._opened
        if self.route.sends:
            self._opened = super().buffers(size)
            for i, buffer in enumerate(
                self._opened if self.route.rank in self.route.beside else ()
            ):
                self._store.set(f"memory/{self.route.rank}/{size}/{i}", exported(buffer))
            return self._opened
        (source,) = self.route.beside
        keys = [f"memory/{source}/{size}/{i}" for i in range(2)]
        self._await(keys)
        try:
            self._opened = [opened(self._store.get(key), self._device) for key in keys]
        except RuntimeError as error:
            raise TransferError(
                f"memory of the learner's GPU cannot be opened here: {first_line(error)}",
                "memory-not-shared",
            ) from error
        return self._opened

    def exchange(self, flat: Tensor, bucket: Bucket) -> list[Any]:
        if self._sources is not None:
            self.wait(_broadcasts(self._sources, flat, bucket, _left(self._until_s)))
        self.finish()
        return []

    def finish(self) -> None:
        """Wait until all members have filled or read the bucket."""
        self._backend.synchronize()
        options = dist.BarrierOptions()
        options.timeout = _left(self._until_s)
        self._joined.barrier(options).wait(_left(self._until_s))

    def abort(self) -> None:
        super().abort()
        with suppress(Exception):
            self._sources.abort()

    def _join(self) -> None:
        super()._join()
        if self.route.sends and self.route.sources > 1:
            self._sources = self._nccl(_prefixed("sources", self._store), self.route.sources)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make groups without NCCL's watchdog, which would end the process when a peer has gone or an
    operation is slow. Each wait here has its own deadline instead. Read when a group is made.
    """
    with _MAKING:
        before = os.environ.get(BLOCKING)
        os.environ[BLOCKING] = "1"
        try:
            yield
        finally:
            del os.environ[BLOCKING]
            if before is not None:
                os.environ[BLOCKING] = before


def _connect(group: Any, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # per thread
    group.eager_connect_single_device(device)


def exported(tensor: Tensor) -> str:
    ticket = tensor.untyped_storage()._share_cuda_()
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in ticket])


def opened(ticket: bytes, device: torch.device) -> Tensor:
    """Map another process's memory, on the GPU that this process knows as ``device``."""
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
    """Open a rendezvous store for groups. Return it and its port. It ends with this process."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists it nowhere
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _store(route: Route, timeout: timedelta) -> Any:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        route.host, route.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return _prefixed(route.prefix, store)


def _prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _broadcasts(group: Any, flat: Tensor, bucket: Bucket, timeout: timedelta) -> list[Any]:
    works = []
    for source, place in segments(bucket).items():
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = source, timeout
        works.append(group.broadcast([flat[place]], options))
    return works


def _left(until_s: float) -> timedelta:
    return timedelta(seconds=max(until_s - time.monotonic(), 0.001))
