"""A rank for ``resharding.py``."""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from stretto.layout import FullParameter, Layout
from stretto.models.layer_shards import divided_parameters
from stretto.models.load import architecture
from stretto.models.shards import index, shape
from stretto.types import WeightsRef
from stretto.weights.broadcast import WeightSender
from stretto.weights.resharding import Resharding


def wholes_named(name: str, tp: int) -> dict[str, FullParameter]:
    """All parameters of a known model in bfloat16, as they are cut into so many slices."""
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(architecture(name), dtype=torch.bfloat16)
    return divided_parameters(model, Layout(tp=tp))


class Rank:
    """A rank with float32 shards of a model (rows), and slices that are filled from them.

    Args:
        rank: its number.
        name: of the model.
        bucket_mb: MiB that travel at a time.
    """

    def __init__(self, rank: int, name: str, bucket_mb: int) -> None:
        self._size = dist.get_world_size()
        self._wholes = wholes_named(name, self._size)
        shards, slices = Layout(fsdp=self._size), Layout(tp=self._size)
        self._sender = WeightSender(torch.device("cpu"), bucket_mb << 20, keep=1)
        self._channel = Resharding(
            self._sender, self._wholes, shards, slices, bucket_mb << 20, torch.device("cpu")
        )
        self._own = shards.own(self._wholes, rank)
        self._rows = {name: shards.bounds(whole, rank) for name, whole in self._wholes.items()}
        self._boxes = {name: slices.bounds(whole, rank) for name, whole in self._wholes.items()}
        torch.manual_seed(rank)
        self._shards = {name: torch.rand(shape(box)) for name, box in self._own.items()}
        self._slices = {
            name: torch.zeros(shape(box), dtype=self._wholes[name].dtype)
            for name, box in self._boxes.items()
        }
        self._before = _peak()

    def reshard(self) -> tuple[float, int, int]:
        """Fill the slices by what each needs; return seconds, bytes of all, and the peak beside."""
        ref = WeightsRef("actor", 0, "", self._sender.name)
        self._sender.put(ref, self._shards)
        dist.barrier()
        start_s = time.perf_counter()
        for name, part in self._channel.get(ref).items():
            self._slices[name][part.to] = part.tensor
        return time.perf_counter() - start_s, self._channel.moved, _peak() - self._before

    def gather(self) -> tuple[float, int, int]:
        """Fill the slices once every rank has the whole model; return the same."""
        dist.barrier()
        start_s = time.perf_counter()
        gathered = {name: self._gathered(name, whole) for name, whole in self._wholes.items()}
        for name, tensor in gathered.items():
            self._slices[name].copy_(tensor[index(self._boxes[name])])
        seconds = time.perf_counter() - start_s
        size = sum(t.nbytes for t in gathered.values()) - sum(
            math.prod(shape(box)) * self._wholes[n].dtype.itemsize for n, box in self._rows.items()
        )
        sizes = torch.tensor(size)
        dist.all_reduce(sizes)
        return seconds, int(sizes), _peak() - self._before

    def slices(self) -> dict[str, Tensor]:
        """Return the slices."""
        return self._slices

    def _gathered(self, name: str, whole: FullParameter) -> Tensor:
        rows = -(-whole.shape[0] // self._size)
        padded = torch.zeros(rows, *whole.shape[1:], dtype=whole.dtype)
        if name in self._shards:
            padded[: len(self._shards[name])] = self._shards[name]
        parts = torch.empty(rows * self._size, *whole.shape[1:], dtype=whole.dtype)
        dist.all_gather_into_tensor(parts, padded)
        return parts[: whole.shape[0]]


def _peak() -> int:
    """Return the most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
