"""Layouts: how a role's ranks divide its model.

A layout is data-parallel copies (dp) x pipeline stages (pp) x FSDP shards (fsdp) x tensor slices
(tp). Linear layers are cut into slices, and each shard holds consecutive rows of one. The
layout determines the part of each parameter that a rank holds, the ranks that compute together, and
the transfers of a weight sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from stretto.bounds import ceil_div
from stretto.errors import RuleError

Bounds = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, end) in each dimension."""


class Divisible(Protocol):
    """A parameter before it is divided, and how it may be divided."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""

    @property
    def dim(self) -> int | None:
        """The dimension that tensor parallelism cuts, if any."""

    @property
    def by_rows(self) -> bool:
        """Whether shards hold rows of it."""


class Owners(Protocol):
    """Who holds which parts of a model: a :class:`Layout`, or pipeline stages."""

    @property
    def ranks(self) -> int:
        """Their number."""

    @property
    def tp(self) -> int:
        """The number of slices of linear layers."""

    def own(self, full: Mapping[str, Divisible], rank: int) -> dict[str, Bounds]:
        """Return the parts of parameters that a rank is the first to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks that hold a role's model. Slices of a shard are neighbours, then shards, then
    stages: rank = ((copy * pp + stage) * fsdp + shard) * tp + slice.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in settings

    dp: int = 1
    pp: int = 1
    fsdp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, size in self._sizes.items():
            if size < 1:
                problem = f"a layout with {name} = {size}: each number is 1 or more"
                raise RuleError(problem, "empty-layout")

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.fsdp * self.tp

    @property
    def data_parallel(self) -> int:
        """The copies and shards among which a batch is divided."""
        return self.dp * self.fsdp

    def bounds(self, full: Divisible, rank: int) -> Bounds:
        """Return the part of a parameter that a rank holds, if its stage has it."""
        part = [*full_bounds(full.shape)]
        if full.dim is not None:
            size, column = full.shape[full.dim] // self.tp, rank % self.tp
            part[full.dim] = (column * size, (column + 1) * size)
        if full.by_rows and part:
            start, end = part[0]
            chunk = ceil_div(end - start, self.fsdp)  # like torch.chunk
            first = start + rank // self.tp % self.fsdp * chunk
            part[0] = (min(first, end), min(first + chunk, end))
        return tuple(part)

    def first(self, full: Divisible, rank: int) -> Bounds | None:
        """Return the part that this rank is the first to hold. ``None`` if it is empty or none."""
        row, column = divmod(rank, self.tp)
        copy, shard = divmod(row, self.fsdp)
        first = not copy and (full.dim is not None or not column) and (full.by_rows or not shard)
        bounds = self.bounds(full, rank)
        return bounds if first and all(start < end for start, end in bounds) else None

    def own(self, full: Mapping[str, Divisible], rank: int) -> dict[str, Bounds]:
        bounds_by_name = {name: self.first(parameter, rank) for name, parameter in full.items()}
        return {name: bounds for name, bounds in bounds_by_name.items() if bounds is not None}

    @property
    def _sizes(self) -> dict[str, int]:
        return {"dp": self.dp, "pp": self.pp, "fsdp": self.fsdp, "tp": self.tp}

    def __str__(self) -> str:
        """Return its numbers above 1, as in settings: ``{ fsdp = 4, tp = 2 }``."""
        parts = [f"{name} = {size}" for name, size in self._sizes.items() if size > 1]
        return f"{{ {', '.join(parts) or 'dp = 1'} }}"


def full_bounds(shape: Sequence[int]) -> Bounds:
    return tuple((0, size) for size in shape)
