"""Shards: the parts of a model's parameters that each of several ranks holds.

Linear layers are cut into slices (tp). Each rank of the learner holds consecutive rows of one
(fsdp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.bounds import ceil_div

Places = npt.NDArray[np.int64]

Bounds = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, end) in each dimension."""


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


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The ranks that hold a model. ``fsdp`` ranks, tp apart, share the rows of each slice."""

    fsdp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp

    def bounds(self, full: FullParameter, rank: int) -> Bounds:
        """Return the part of a parameter that a rank holds."""
        row, column = divmod(rank, self.tp)
        part = [*full_bounds(full.shape)]
        if full.dim is not None:
            size = full.shape[full.dim] // self.tp
            part[full.dim] = (column * size, (column + 1) * size)
        if full.by_rows and part:
            start, end = part[0]
            chunk = ceil_div(end - start, self.fsdp)  # like torch.chunk
            part[0] = (min(start + row * chunk, end), min(start + (row + 1) * chunk, end))
        return tuple(part)

    def first(self, full: FullParameter, rank: int) -> Bounds | None:
        """Return the part that this rank is the first to hold. ``None`` if it is empty or none."""
        row, column = divmod(rank, self.tp)
        first = (full.dim is not None or column == 0) and (full.by_rows or row == 0)
        bounds = self.bounds(full, rank)
        return bounds if first and all(start < end for start, end in bounds) else None

    def own(self, full: Mapping[str, FullParameter], rank: int) -> dict[str, Bounds]:
        bounds_by_name = {name: self.first(parameter, rank) for name, parameter in full.items()}
        return {name: bounds for name, bounds in bounds_by_name.items() if bounds is not None}


def full_bounds(shape: Sequence[int]) -> Bounds:
    return tuple((0, size) for size in shape)


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
