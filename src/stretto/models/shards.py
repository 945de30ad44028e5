"""Shards: the parts of a model's parameters that each of several ranks holds, by its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.layout import Bounds

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


@dataclass(frozen=True, slots=True)
class FullParameter:
    """A parameter before it is divided, and how it may be divided.

    Attributes:
        dim: the dimension that tensor parallelism cuts, if any.
        by_rows: whether a learner's ranks hold rows of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    by_rows: bool = True


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
