"""Transfers: weights that travel from the learner to its followers, bucket by bucket.

A transfer has a process group of its own, which is none of the default groups: its members are one
rank of the learner (rank 0) and one of each follower. All control comes before: each side has said
that it holds the same plan. So nothing in here waits for anything outside the group, and every wait
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
from stretto.weights.buckets import BucketPlan, checksum, combined, pack, size_of

Backend = Literal["gloo", "nccl"]

CONNECTS = 5
"""How often gloo tries to connect to a peer that does not answer, each time up to its timeout."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store where groups meet, their backend, and the timeout of a transfer."""

    host: str
    port: int
    backend: Backend
    timeout_s: float

    def routes(self, channel: str, epoch: int, size: int) -> list[Route]:
        """Return each member's way to a channel's group of an epoch, the sender's first."""
        return [Route(self, channel, epoch, rank, size) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a transfer's group, of a rank and a size; the sender is rank 0.

    The channel is the purpose of the group, such as the weights of one model, the epoch the number
    of the channel's group, another one for every group that ever was.
    """

    meeting: Meeting
    channel: str
    epoch: int
    rank: int
    size: int

    @property
    def prefix(self) -> str:
        """The beginning of the group's keys in the store."""
        return f"{self.channel}/{self.epoch}"


class Transfers:
    """A side of all transfers of one process; it keeps the last group of each channel.

    Groups take longer to make than small models take to travel. Transfers of different channels
    may be under way at the same time, on different threads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, tuple[int, Any]] = {}  # epoch and group, by channel
        self._buffers: dict[str, list[Tensor]] = {}

    def send(self, route: Route, plan: BucketPlan, tensors: Mapping[str, Tensor]) -> str:
        """Send tensors by their plan; return the mark of what was sent. Raises TransferError if
        they have not been taken in time.
        """
        until_s = time.monotonic() + route.meeting.timeout_s
        sums, works = [], [None, None]
        with self._broken_off(route):
            group, buffers = self._joined(route, until_s), self._two_buffers(route, plan)
            for i, bucket in enumerate(plan.buckets):
                _wait(works[i % 2], until_s)
                flat = buffers[i % 2][: size_of(bucket)]
                pack(bucket, tensors, flat)
                sums.append(checksum(flat))
                works[i % 2] = group.broadcast([flat], _from_first(until_s))
            for work in works:
                _wait(work, until_s)
        return combined(sums)

    def receive(
        self, route: Route, plan: BucketPlan, sums: list[int]
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive tensors by their plan; each is good until the next is asked for. ``sums`` gets
        the checksum of each bucket. Raises TransferError if they have not come in time.
        """
        until_s = time.monotonic() + route.meeting.timeout_s
        with self._broken_off(route):
            group, buffers = self._joined(route, until_s), self._two_buffers(route, plan)

            def posted(i: int) -> Any:
                if i == len(plan.buckets):
                    return None
                flat = buffers[i % 2][: size_of(plan.buckets[i])]
                return group.broadcast([flat], _from_first(until_s))

            coming = posted(0)
            for i, bucket in enumerate(plan.buckets):
                _wait(coming, until_s)
                coming = posted(i + 1)  # into the other buffer, which has been read
                flat = buffers[i % 2][: size_of(bucket)]
                sums.append(checksum(flat))
                for place in bucket:
                    yield place.name, place.of(flat)

    def abort(self) -> None:
        """Break off the transfers that may be under way; from any thread."""
        for channel in list(self._groups):
            self._leave(channel)

    def _leave(self, channel: str) -> None:
        _, group = self._groups.pop(channel, (0, None))
        if group is not None:
            with suppress(Exception):  # of a group that is broken already
                group.abort()

    @contextmanager
    def _broken_off(self, route: Route) -> Iterator[None]:
        """Break the group off when its transfer fails, and say so."""
        try:
            yield
        except RuntimeError as error:  # which is what torch's groups raise
            self._leave(route.channel)
            raise TransferError(
                f"the transfer '{route.prefix}', which may take {route.meeting.timeout_s:g} s, was "
                f"broken off: {first_line(error)}",
                "transfer-broken-off",
            ) from error
        except BaseException:
            self._leave(route.channel)
            raise

    def _joined(self, route: Route, until_s: float) -> Any:
        """Return the route's group; the channel's last one, if it is that."""
        if self._groups.get(route.channel, (None, None))[0] != route.epoch:
            self._leave(route.channel)
            self._groups[route.channel] = route.epoch, _join(route, self._device, until_s)
        return self._groups[route.channel][1]

    def _two_buffers(self, route: Route, plan: BucketPlan) -> list[Tensor]:
        device = self._device if route.meeting.backend == "nccl" else torch.device("cpu")
        buffers = self._buffers.get(route.channel, [torch.empty(0)])
        if len(buffers[0]) < plan.largest:
            size = plan.largest
            buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
            self._buffers[route.channel] = buffers
        return buffers


def open_store(host: str) -> tuple[Any, int]:
    """Open a store on which groups meet; return it with its port. It ends with this process."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists it nowhere
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _join(route: Route, device: torch.device, until_s: float) -> Any:
    """Make this member's side of a group that is none of the default ones."""
    place = route.meeting
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.host, place.port, is_master=False, wait_for_workers=False, timeout=_left(until_s)
    )
    own = dist.PrefixStore(route.prefix, store)  # type: ignore[attr-defined]
    # Late members are waited for here, and not by gloo: see CONNECTS.
    own.set(f"here/{route.rank}", "")
    own.wait([f"here/{rank}" for rank in range(route.size)], _left(until_s))
    group: Any
    if place.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=place.timeout_s)
        group = dist.ProcessGroupNCCL(own, route.rank, route.size, options)
        group.eager_connect_single_device(device)
    else:
        group = dist.ProcessGroupGloo(own, route.rank, route.size, _left(until_s) / CONNECTS)
    group._set_sequence_number_for_group()
    return group


def _from_first(until_s: float) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, _left(until_s)
    return options


def _left(until_s: float) -> timedelta:
    return timedelta(seconds=max(until_s - time.monotonic(), 0.001))


def _wait(work: Any, until_s: float) -> None:
    if work is not None:
        work.wait(_left(until_s))
