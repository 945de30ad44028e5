"""Resharding: weights that go from a learner's shards to slices for generation, in the same ranks.

Each rank sends every other what that one needs of its shard, and nothing else (Sheng et al. 2024,
"HybridFlow", section 5.2, whose zero redundancy this is). So a rank that has what it needs gets
nothing. Parameters move bucket by bucket: beside shards and slices a rank holds one bucket of what
it sends and one of what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.models.shards import (
    Bounds,
    FullParameter,
    ShardLayout,
    TensorPart,
    full_bounds,
    overlap,
    shape,
    within,
)
from stretto.types import WeightsRef
from stretto.weights.broadcast import Arriving, WeightSender
from stretto.weights.buckets import plan_of_boxes


@dataclass(frozen=True, slots=True)
class Move:
    """The part of a parameter that goes from one rank to another."""

    name: str
    box: Bounds
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(shape(self.box)) * self.dtype.itemsize


class Resharding:
    """The channel of a follower that shares its ranks with the learner.

    All ranks call all methods, in the same order.

    Args:
        wholes: the parameters that travel, by name.
        bucket_bytes: of a bucket, of all that a rank gets; a larger parameter has its own.
        device: of this rank, over which all travels.

    Attributes:
        mark: what stands for the checksum of another way: nothing is checked on this one but the
            fingerprint.
        moved: bytes that go from one rank to another, at each hand-over.
    """

    name = WeightSender.name
    mark = ""

    def __init__(
        self,
        sender: WeightSender,
        wholes: Mapping[str, FullParameter],
        shards: ShardLayout,
        slices: ShardLayout,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._sender, self._rank, self._device = sender, dist.get_rank(), device
        self._moves = [
            [moves(wholes, shards, slices, source, target) for target in range(slices.ranks)]
            for source in range(shards.ranks)
        ]
        apart = [(s, t) for s in range(shards.ranks) for t in range(slices.ranks) if s != t]
        self.moved = sum(move.size for s, t in apart for move in self._moves[s][t])
        boxes = {name: full_bounds(whole.shape) for name, whole in wholes.items()}
        dtypes = {name: whole.dtype for name, whole in wholes.items()}
        buckets = plan_of_boxes(boxes, dtypes, bucket_bytes).buckets
        self._names = [{place.name for place in bucket.slices} for bucket in buckets]
        self._sent = shards.own(wholes, self._rank)
        self._held = {name: slices.bounds(whole, self._rank) for name, whole in wholes.items()}

    def get(self, ref: WeightsRef) -> Mapping[str, Any]:
        """Return parts of the ticket's tensors, which come as they are read. A collective."""
        tensors = self._sender.kept(ref)
        return Arriving(list(self._held), lambda: self._receive(tensors))

    def _receive(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, TensorPart]]:
        for names in self._names:
            for move, flat in self._exchange(tensors, names):
                # A view as another type needs its bytes to be aligned.
                own = flat.clone() if flat.storage_offset() % move.dtype.itemsize else flat
                tensor = own.view(move.dtype).view(shape(move.box))
                yield move.name, TensorPart(tensor, within(move.box, self._held[move.name]))
            for move in self._of(self._rank, self._rank, names):
                tensor = self._part(tensors, move)
                yield move.name, TensorPart(tensor, within(move.box, self._held[move.name]))

    def _exchange(
        self, tensors: Mapping[str, Tensor], names: set[str]
    ) -> list[tuple[Move, Tensor]]:
        """Exchange a bucket with all other ranks; return what came, as bytes."""
        posted, came, kept = list[dist.P2POp](), list[tuple[Move, Tensor]](), list[Tensor]()
        for other in range(len(self._moves)):
            if other == self._rank:
                continue
            out = self._of(self._rank, other, names)
            if out:
                parts = [self._part(tensors, move).contiguous() for move in out]
                flat = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
                del parts
                kept.append(flat)
                posted.append(dist.P2POp(dist.isend, flat, other))
            into = self._of(other, self._rank, names)
            if into:
                flat = torch.empty(
                    sum(m.size for m in into), dtype=torch.uint8, device=self._device
                )
                posted.append(dist.P2POp(dist.irecv, flat, other))
                came += zip(into, flat.split([move.size for move in into]), strict=True)
        for work in dist.batch_isend_irecv(posted) if posted else ():
            work.wait()
        return came

    def _of(self, source: int, target: int, names: set[str]) -> list[Move]:
        return [move for move in self._moves[source][target] if move.name in names]

    def _part(self, tensors: Mapping[str, Tensor], move: Move) -> Tensor:
        return tensors[move.name][within(move.box, self._sent[move.name])].to(
            self._device, move.dtype
        )


def moves(
    wholes: Mapping[str, FullParameter],
    shards: ShardLayout,
    slices: ShardLayout,
    source: int,
    target: int,
) -> list[Move]:
    """Return what a rank that holds a shard sends a rank that needs a slice."""
    found = []
    for name, box in shards.own(wholes, source).items():
        common = overlap(box, slices.bounds(wholes[name], target))
        if common:
            found.append(Move(name, common, wholes[name].dtype))
    return found
