"""Layouts: how a role's ranks divide its model.

A layout is data-parallel copies (dp) x pipeline stages (pp) x FSDP shards (fsdp) x tensor slices
(tp). Linear layers are cut into slices, and each shard holds consecutive rows of one. The
layout determines the part of each parameter that a rank holds, the ranks that compute together, and
the transfers of a weight sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

from stretto.bounds import ceil_div
from stretto.errors import ConfigError, ModelError, RuleError

Bounds = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, end) in each dimension."""

LAYOUT_SETTINGS = "dp, fsdp and tp"
INDEPENDENT = "dp and tp"
"""Numbers of a layout in settings, and those of copies that work without each other."""
UNCUTTABLE = ("tp-divides", "no-tp-plan")
"""Codes of the errors of models that slices do not divide."""


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


class Decoder(Protocol):
    """The sizes of a decoder to divide."""

    @property
    def layers(self) -> float:
        """Their number."""

    @property
    def heads(self) -> int:
        """Attention heads."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""

    def cuts_into(self, slices: int) -> bool:
        """Whether slices divide its heads."""


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

    @classmethod
    def independent(cls, ranks: int, copies: int = 1) -> Self:
        """Return copies that compute without each other, as engines do."""
        return cls(dp=copies, tp=ranks // copies)

    @classmethod
    def all_independent(cls, ranks: int) -> Iterator[Self]:
        """Yield all layouts of independent copies, from one on each rank to a single one."""
        yield from (cls.independent(ranks, n) for n in range(ranks, 0, -1) if ranks % n == 0)

    @classmethod
    def sharded(cls, ranks: int) -> Self:
        """Return the layout that divides any model evenly."""
        return cls(fsdp=ranks)

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.fsdp * self.tp

    @property
    def per_copy(self) -> Self:
        """The layout of one copy."""
        return replace(self, dp=1)

    @property
    def holds_whole(self) -> bool:
        """Whether each rank holds a full model."""
        return self.ranks == self.dp

    @property
    def gathers(self) -> bool:
        """Whether ranks gather weights for each pass, so that they must run all passes together.
        Such a scorer does not stream.
        """
        return self.fsdp > 1

    @property
    def has_stages(self) -> bool:
        """Whether no rank can run a pass of a full model, only pipelines of ranks can."""
        return self.pp > 1

    @property
    def data_parallel(self) -> int:
        """The copies and shards among which a batch is divided."""
        return self.dp * self.fsdp

    @property
    def data_stride(self) -> int:
        """The distance of ranks that divide a batch: slices and stages stand between them."""
        return self.tp * (self.pp if self.dp > 1 else 1)

    @property
    def close_ranks(self) -> int:
        """The neighbouring ranks that exchange data in each layer. They belong on one machine."""
        return self.tp

    @property
    def groups(self) -> int:
        """The number of groups in which a rank exchanges data within a copy."""
        return sum(size > 1 for size in (self.pp, self.fsdp, self.tp))

    def divides(self, model: Decoder) -> bool:
        """Whether ranks get equal parts of a model's heads."""
        return model.cuts_into(self.tp)

    def check(self, model: Decoder, node: int) -> None:
        """Raise ConfigError if ranks cannot divide a model on nodes of so many GPUs."""
        if self.pp > model.layers:
            subject = f"{self.pp} pipeline stages of a model with {model.layers} layers"
            raise ConfigError(f"{subject}: give each stage one or more", "too-many-stages")
        if not self.divides(model):
            heads = f"{model.heads} heads, {model.kv_heads} of keys and values"
            problem = f"tensor parallelism {self.tp} does not divide {heads}"
            raise ConfigError(problem, "heads-not-divided")
        if self.tp > node:
            subject = f"tensor parallelism {self.tp} on nodes of {node} GPUs"
            raise ConfigError(f"{subject}: it must stay within a node", "tensor-across-nodes")

    def require_divisor(self, count: int, what: str) -> None:
        """Raise ModelError if a number of heads or features cannot be divided."""
        if count % self.tp:
            raise ModelError(
                f"tp = {self.tp} does not divide the {count} {what}; choose a divisor, with more "
                "shards (fsdp) or copies (dp; those of a generator are rollout.engines)",
                "tp-divides",
            )

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
