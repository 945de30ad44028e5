"""A learner's shards and slices of the same weights, in the ranks of tests."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.layout import FullParameter, Layout
from stretto.models.shards import index, shape
from stretto.types import WeightsRef
from stretto.weights.broadcast import WeightSender
from stretto.weights.resharding import Resharding

WHOLES: dict[str, FullParameter] = {
    "by outputs": FullParameter((12, 5), torch.float32, 0),
    "bias": FullParameter((12,), torch.bfloat16, 0),
    "by inputs": FullParameter((7, 12), torch.bfloat16, 1),
    "norm": FullParameter((5,), torch.float32),
    "adapter": FullParameter((2, 12), torch.float32, 1, by_rows=False),
    "small": FullParameter((1, 3), torch.bfloat16),
}


def tensors(version: int, wholes: Mapping[str, FullParameter] = WHOLES) -> dict[str, Tensor]:
    """FullParameter weights of a version; no two elements of one are equal."""
    return {
        name: (torch.arange(math.prod(w.shape)) + version).view(w.shape).to(w.dtype)
        for name, w in wholes.items()
    }


class Resharder:
    """A rank with a shard, and a slice that is yet to be loaded."""

    def __init__(
        self,
        rank: int,
        shards: Layout,
        slices: Layout,
        bucket_bytes: int,
        wholes: Mapping[str, FullParameter] = WHOLES,
    ) -> None:
        self._sender = WeightSender(torch.device("cpu"), bucket_bytes, keep=1)
        self._channel = Resharding(
            self._sender, wholes, shards, slices, bucket_bytes, torch.device("cpu")
        )
        self._wholes, self._own = wholes, shards.own(wholes, rank)
        self._slices = slices

    def load(self, version: int) -> tuple[dict[str, Tensor], int]:
        """Return what this rank holds of a version, and the bytes that moved."""
        ref = WeightsRef("actor", version, "", self._sender.name)
        whole = tensors(version, self._wholes)
        self._sender.put(ref, {n: whole[n][index(box)].float() for n, box in self._own.items()})
        boxes = {n: self._slices.bounds(w, dist.get_rank()) for n, w in self._wholes.items()}
        held = {n: torch.empty(shape(b), dtype=self._wholes[n].dtype) for n, b in boxes.items()}
        for name, part in self._channel.get(ref).items():
            held[name][part.to] = part.tensor
        return held, self._channel.moved
