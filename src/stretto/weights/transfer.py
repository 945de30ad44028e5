"""Transfers: weights that travel from the learner to its followers, bucket by bucket.

A transfer has a process group of its own, which is none of the default groups: its members are one
rank of the learner (rank 0) and one of each follower. All control comes before: each side has said
that it holds the same plan. So nothing in here waits for anybody outside the group, and every wait
has a deadline.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import TransferError, first_line
from stretto.weights.buckets import Plan, checksum, combined, pack

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a transfer's group.

    Attributes:
        host, port: of the store.
        prefix: of the group's keys there; another one for every group that ever was.
        rank, size: of this member, and of the group; the sender is rank 0.
        backend: of the group.
        timeout_s: in which all must have arrived.
    """

    host: str
    port: int
    prefix: str
    rank: int
    size: int
    backend: Backend
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place where groups meet, and how they work.

    Attributes:
        host, port: of the store.
        backend: of the groups.
        timeout_s: of a transfer.
    """

    host: str
    port: int
    backend: Backend
    timeout_s: float

    def routes(self, prefix: str, size: int) -> list[Route]:
        """Return each member's way to a group that has never been, the sender's first."""
        return [
            Route(self.host, self.port, prefix, rank, size, self.backend, self.timeout_s)
            for rank in range(size)
        ]


class Transfers:
    """A side of all transfers of one process; it keeps the group of the last one.

    Args:
        device: that the tensors are on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._prefix, self._group = "", None
        self._buffers: list[Tensor] = []

    def send(self, route: Route, what: Plan, tensors: Mapping[str, Tensor]) -> str:
        """Send tensors by their plan; return the mark of what was sent.

        Raises:
            TransferError: they have not been taken in time.
        """
        until_s = time.monotonic() + route.timeout_s
        sums, works = [], [None, None]
        with self._broken_off(route):
            group, buffers = self._joined(route), self._two_buffers(route, what)
            for i, bucket in enumerate(what.buckets):
                _wait(works[i % 2], until_s)
                flat = buffers[i % 2][: bucket.size]
                pack(bucket, tensors, flat)
                sums.append(checksum(flat))
                works[i % 2] = group.broadcast([flat], _from_first())
            for work in works:
                _wait(work, until_s)
        return combined(sums)

    def receive(self, route: Route, what: Plan, sums: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Receive tensors by their plan; each is good until the next is asked for.

        Args:
            route: to the group.
            what: the plan.
            sums: gets the checksum of each bucket.

        Raises:
            TransferError: they have not come in time.
        """
        until_s = time.monotonic() + route.timeout_s
        with self._broken_off(route):
            group, buffers = self._joined(route), self._two_buffers(route, what)

            def posted(i: int) -> Any:
                if i == len(what.buckets):
                    return None
                return group.broadcast([buffers[i % 2][: what.buckets[i].size]], _from_first())

            coming = posted(0)
            for i, bucket in enumerate(what.buckets):
                _wait(coming, until_s)
                coming = posted(i + 1)  # into the other buffer, which has been read
                flat = buffers[i % 2][: bucket.size]
                sums.append(checksum(flat))
                for place in bucket.slices:
                    yield place.name, place.of(flat)

    def abort(self) -> None:
        """Break off a transfer that may be under way; from any thread."""
        group, self._group, self._prefix = self._group, None, ""
        if group is not None:
            with suppress(Exception):  # of a group that is broken already
                group.abort()

    @contextmanager
    def _broken_off(self, route: Route) -> Iterator[None]:
        """Break the group off when its transfer fails, and say so."""
        try:
            yield
        except RuntimeError as error:  # which is what torch's groups raise
            self.abort()
            raise TransferError(
                f"the transfer '{route.prefix}', which may take {route.timeout_s:g} s, was broken "
                f"off: {first_line(error)}"
            ) from error
        except BaseException:
            self.abort()
            raise

    def _joined(self, route: Route) -> Any:
        """Return the route's group; the last one, if it is that."""
        if self._prefix != route.prefix:
            self.abort()
            self._group = _join(route, self._device)
            self._prefix = route.prefix
        return self._group

    def _two_buffers(self, route: Route, what: Plan) -> list[Tensor]:
        device = self._device if route.backend == "nccl" else torch.device("cpu")
        if not self._buffers or len(self._buffers[0]) < what.largest:
            self._buffers = [
                torch.empty(what.largest, dtype=torch.uint8, device=device) for _ in range(2)
            ]
        return self._buffers


def open_store(host: str) -> tuple[Any, int]:
    """Open a store on which groups meet; return it with its port. It ends with this process.

    Args:
        host: the address on which it listens.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists it nowhere
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _join(route: Route, device: torch.device) -> Any:
    """Make this member's side of a group that is none of the default ones."""
    timeout = timedelta(seconds=route.timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        route.host, route.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    own = dist.PrefixStore(route.prefix, store)  # type: ignore[attr-defined]
    group: Any
    if route.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(own, route.rank, route.size, options)
        group.eager_connect_single_device(device)
    else:
        group = dist.ProcessGroupGloo(own, route.rank, route.size, timeout)
    group._set_sequence_number_for_group()
    return group


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _wait(work: Any, until_s: float) -> None:
    if work is not None:
        work.wait(timedelta(seconds=max(until_s - time.monotonic(), 0.001)))
