"""Shards: the parts of a model's parameters that each of several ranks holds, by its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.layout import Bounds, FullParameter
from stretto.models.mapped import final_dtype

T = TypeVar("T")

Places = npt.NDArray[np.int64]


class TensorPart(NamedTuple):
    """Values, and their position in the parameter as it is held on this rank."""

    tensor: Tensor
    to: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's part of a tensor of a full shape. Empty if an earlier rank has the same part."""

    tensor: Tensor
    shape: tuple[int, ...]
    bounds: Bounds


class Peers:
    """The ranks that run a model's passes together, each with parts of its layers. Without
    ``group`` the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum the ranks' tensors in place. A collective."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def least(self, count: int, device: torch.device) -> int:
        """Return the minimum of the ranks' counts. A collective."""
        counts = torch.tensor(count, device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=self.group)
        return int(counts)


class PartialLayer(nn.Module):
    """A layer of which each peer has a part. ``DIMS`` has its cut dimensions by parameter name."""

    DIMS: ClassVar[Mapping[str, int]]
    peers: Peers


def peers_of(model: nn.Module) -> Peers | None:
    """Return the ranks that run a model's passes together, if its layers are divided."""
    layers = (module for module in model.modules() if isinstance(module, PartialLayer))
    return next((layer.peers for layer in layers), None)


def full_parameters(model: nn.Module, dims: Mapping[str, int]) -> dict[str, FullParameter]:
    """Return all parameters by name with their undivided shapes, to be cut along ``dims`` if they
    are not cut yet. A learner's ranks hold rows of parameters in the model's own type. Others, such
    as float32 adapters in a bfloat16 model, are not divided.
    """
    dtype = final_dtype(next(model.parameters()))
    full = {}
    for name, parameter in model.named_parameters():
        layer, _, key = name.rpartition(".")
        dim, sizes = dims.get(name), list(parameter.shape)
        module = model.get_submodule(layer)
        if isinstance(module, PartialLayer) and key in module.DIMS:
            dim = module.DIMS[key]
            sizes[dim] *= module.peers.size
        own_dtype = final_dtype(parameter)
        full[name] = FullParameter(tuple(sizes), own_dtype, dim, by_rows=own_dtype == dtype)
    return full


def of_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group, by default of all. A collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def index(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in bounds)


def shape(bounds: Bounds) -> tuple[int, ...]:
    return tuple(end - start for start, end in bounds)


def overlap(one: Bounds, other: Bounds) -> Bounds | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < end for start, end in common) else None


def within(bounds: Bounds, outer: Bounds) -> tuple[slice, ...]:
    pairs = zip(bounds, outer, strict=True)
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)


def held_elements(places: Places, full: Sequence[int], bounds: Bounds) -> tuple[Places, Places]:
    """Return which of ``places`` in the flat tensor a part holds, and their indices in the part."""
    coordinates = np.unravel_index(places, tuple(full))
    inside = np.ones(len(places), bool)
    for at, (start, end) in zip(coordinates, bounds, strict=True):
        inside &= (start <= at) & (at < end)
    part_coordinates = tuple(
        at[inside] - start for at, (start, _) in zip(coordinates, bounds, strict=True)
    )
    at_flat: Places = np.ravel_multi_index(part_coordinates, shape(bounds)).astype(np.int64)
    return np.flatnonzero(inside), at_flat
