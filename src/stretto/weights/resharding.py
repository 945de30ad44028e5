"""Resharding: weights that go from a learner's shards to slices for generation, in the same ranks.

Each rank sends every other what that one needs of its shard, and nothing else (Sheng et al. 2024,
"HybridFlow", section 5.2, whose zero redundancy this is). So a rank that has what it needs gets
nothing. Parameters move bucket by bucket: beside shards and slices a rank holds one bucket of what
it sends and one of what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import EngineError
from stretto.models.pieces import Box, Layout, Part, Whole, overlap, shape, within
from stretto.types import WeightsRef
from stretto.weights.broadcast import Arriving, Outbox


@dataclass(frozen=True, slots=True)
class Move:
    """The part of a parameter that goes from one rank to another."""

    name: str
    box: Box
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

    name = Outbox.name
    mark = ""

    def __init__(
        self,
        outbox: Outbox,
        wholes: Mapping[str, Whole],
        shards: Layout,
        slices: Layout,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._outbox, self._rank, self._device = outbox, dist.get_rank(), device
        self._moves = [
            [moves(wholes, shards, slices, source, target) for target in range(slices.ranks)]
            for source in range(shards.ranks)
        ]
        self.moved = sum(
            move.size
            for source, row in enumerate(self._moves)
            for target, own in enumerate(row)
            if source != target
            for move in own
        )
        self._names = [list(bucket) for bucket in _buckets(wholes, bucket_bytes)]
        self._sent = shards.own(wholes, self._rank)
        self._held = {name: slices.box(whole, self._rank) for name, whole in wholes.items()}

    def put(self, ref: WeightsRef, tensors: Mapping[str, Tensor]) -> None:
        """Refuse: this side only receives."""
        raise EngineError(f"a follower publishes no weights; got version {ref.version}")

    def get(self, ref: WeightsRef) -> Mapping[str, Any]:
        """Return parts of the ticket's tensors, which come as they are read. A collective."""
        tensors = self._outbox.get(ref)
        return Arriving(list(self._held), lambda: self._receive(tensors))

    def _receive(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Part]]:
        for names in self._names:
            chosen = set(names)
            came = self._exchange(tensors, chosen)
            for move, flat in came:
                tensor = flat.view(move.dtype).view(shape(move.box))
                yield move.name, Part(tensor, within(move.box, self._held[move.name]))
            for move in self._of(self._rank, self._rank, chosen):
                own = self._part(tensors, move)
                yield move.name, Part(own, within(move.box, self._held[move.name]))

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
                flat = torch.cat([_bytes(self._part(tensors, move)) for move in out])
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
        return [(move, flat.clone() if _unaligned(flat, move) else flat) for move, flat in came]

    def _of(self, source: int, target: int, names: set[str]) -> list[Move]:
        return [move for move in self._moves[source][target] if move.name in names]

    def _part(self, tensors: Mapping[str, Tensor], move: Move) -> Tensor:
        return tensors[move.name][within(move.box, self._sent[move.name])].to(
            self._device, move.dtype
        )


def moves(
    wholes: Mapping[str, Whole], shards: Layout, slices: Layout, source: int, target: int
) -> list[Move]:
    """Return what a rank that holds a shard sends a rank that needs a slice."""
    found = []
    for name, box in shards.own(wholes, source).items():
        common = overlap(box, slices.box(wholes[name], target))
        if common:
            found.append(Move(name, common, wholes[name].dtype))
    return found


def _buckets(wholes: Mapping[str, Whole], size: int) -> Iterator[Sequence[str]]:
    """Yield names of parameters, in order, whose bytes make a bucket."""
    names, held = list[str](), 0
    for name, whole in wholes.items():
        own = math.prod(whole.shape) * whole.dtype.itemsize
        if names and held + own > size:
            yield names
            names, held = [], 0
        names.append(name)
        held += own
    if names:
        yield names


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _unaligned(flat: Tensor, move: Move) -> bool:
    return bool(flat.storage_offset() % move.dtype.itemsize)
