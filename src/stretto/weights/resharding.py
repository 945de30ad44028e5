"""Resharding: weights that go from a learner's shards to generation slices in the same ranks.

Each rank sends every other rank exactly the parts of its shard that this one needs (the zero
redundancy of Sheng et al. 2024, "HybridFlow", section 5.2). Parameters travel bucket by bucket: in
addition to shards and slices, a rank holds one bucket to send and one to receive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.layout import Bounds, FullParameter, Layout, Owners
from stretto.models.shards import TensorPart, overlap, shape, within
from stretto.types import WeightsRef
from stretto.weights.broadcast import Arriving, WeightSender
from stretto.weights.buckets import BucketPlan


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """The part of a parameter that goes from one rank to another."""

    name: str
    box: Bounds
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(shape(self.box)) * self.dtype.itemsize


class Resharding:
    """The channel of a follower that shares its ranks with the learner. All ranks must call all
    methods, in the same order. A rank receives one bucket at a time, or a larger parameter by
    itself. Each weight sync moves ``moved`` bytes between ranks.
    """

    name = WeightSender.name
    mark = ""  # no checksum as in other channels: the fingerprint is checked instead

    def __init__(
        self,
        sender: WeightSender,
        wholes: Mapping[str, FullParameter],
        shards: Owners,
        slices: Layout,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._sender = sender
        self._rank = dist.get_rank()
        self._device = device
        pairs = product(range(shards.ranks), range(slices.ranks))
        self._between = {pair: transfers(wholes, shards, slices, *pair) for pair in pairs}
        self.moved = sum(t.size for (s, r), all_ in self._between.items() if s != r for t in all_)
        empty = ((n, torch.empty(w.shape, dtype=w.dtype, device="meta")) for n, w in wholes.items())
        buckets = BucketPlan.of(empty, bucket_bytes).buckets
        self._names = [{tensor.name for tensor in bucket} for bucket in buckets]
        self._sent = shards.own(wholes, self._rank)
        self._held = {
            name: slices.bounds(parameter, self._rank) for name, parameter in wholes.items()
        }

    def get(self, ref: WeightsRef) -> Mapping[str, Any]:
        tensors = self._sender.kept(ref)
        return Arriving(list(self._held), lambda: self._receive(tensors))

    def _receive(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, TensorPart]]:
        for names in self._names:
            remote_parts = ((t, _viewed(t, flat)) for t, flat in self._exchange(tensors, names))
            local_parts = (
                (t, self._part(tensors, t)) for t in self._of(self._rank, self._rank, names)
            )
            for transfer, tensor in chain(remote_parts, local_parts):
                yield (
                    transfer.name,
                    TensorPart(tensor, within(transfer.box, self._held[transfer.name])),
                )

    def _exchange(
        self, tensors: Mapping[str, Tensor], names: set[str]
    ) -> list[tuple[SliceTransfer, Tensor]]:
        operations, send_buffers = list[dist.P2POp](), list[Tensor]()
        arrivals = list[tuple[SliceTransfer, Tensor]]()
        for peer in range(dist.get_world_size()):
            if peer == self._rank:
                continue
            if outgoing := self._of(self._rank, peer, names):
                parts = [self._part(tensors, transfer).contiguous() for transfer in outgoing]
                flat = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
                del parts
                send_buffers.append(flat)
                operations.append(dist.P2POp(dist.isend, flat, peer))
            if incoming := self._of(peer, self._rank, names):
                sizes = [transfer.size for transfer in incoming]
                flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
                operations.append(dist.P2POp(dist.irecv, flat, peer))
                arrivals += zip(incoming, flat.split(sizes), strict=True)
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return arrivals

    def _of(self, source: int, target: int, names: set[str]) -> list[SliceTransfer]:
        return [t for t in self._between[source, target] if t.name in names]

    def _part(self, tensors: Mapping[str, Tensor], transfer: SliceTransfer) -> Tensor:
        part = tensors[transfer.name][within(transfer.box, self._sent[transfer.name])]
        return part.to(self._device, transfer.dtype)


def _viewed(transfer: SliceTransfer, flat: Tensor) -> Tensor:
    # A view with another dtype needs aligned bytes.
    buffer = flat.clone() if flat.storage_offset() % transfer.dtype.itemsize else flat
    return buffer.view(transfer.dtype).view(shape(transfer.box))


def transfers(
    wholes: Mapping[str, FullParameter],
    shards: Owners,
    slices: Layout,
    source: int,
    target: int,
) -> list[SliceTransfer]:
    """Return the transfers from a rank that holds a shard to a rank that needs a slice."""
    overlaps = (
        (name, overlap(box, slices.bounds(wholes[name], target)))
        for name, box in shards.own(wholes, source).items()
    )
    return [SliceTransfer(name, box, wholes[name].dtype) for name, box in overlaps if box]
