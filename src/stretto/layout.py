"""Layouts: how a role's ranks divide its model.

A layout is data-parallel copies (dp) x pipeline stages (pp) x FSDP shards (fsdp) x tensor slices
(tp). Linear layers are cut into slices, and each shard holds consecutive rows of one. The
layout determines the part of each parameter that a rank holds, the ranks that compute together, and
the transfers of a weight sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from stretto.bounds import ceil_div
from stretto.errors import ConfigError, ModelError, RuleError

if TYPE_CHECKING:
    import torch

Bounds = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, end) in each dimension."""

LAYOUT_SETTINGS = "dp, fsdp and tp"
INDEPENDENT = "dp and tp"
"""Numbers of a layout in settings, and those of copies that work without each other."""
UNCUTTABLE = ("tp-divides", "no-tp-plan")
"""Codes of the errors of models that slices do not divide."""


@dataclass(frozen=True, slots=True)
class FullParameter:
    """A parameter before it is divided, and how it may be divided."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None  # that slices cut
    by_rows: bool = True  # shards hold rows of it


class Owners(Protocol):
    """Who holds which parts of a model: a :class:`Layout`, or pipeline stages."""

    @property
    def ranks(self) -> int:
        """Their number."""

    @property
    def tp(self) -> int:
        """The number of slices of linear layers."""

    def bounds(self, full: FullParameter, rank: int) -> Bounds:
        """Return the part of a parameter that a rank holds, if its stage has it."""

    def own(self, full: Mapping[str, FullParameter], rank: int) -> dict[str, Bounds]:
        """Return the parts of parameters that a rank is the first to hold, unless empty."""


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
        for name, size in asdict(self).items():
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
        return replace(self, dp=1)

    @property
    def gathers(self) -> bool:
        """Whether ranks gather weights for each pass, so that all must run it at the same time."""
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

    def divides(self, *counts: int) -> bool:
        """Whether ranks get equal parts of so many heads or features."""
        return not any(count % self.tp for count in counts)

    def check(self, layers: float, heads: int, kv_heads: int, node: int) -> None:
        """Raise ConfigError if ranks cannot divide a model on nodes of so many GPUs."""
        if self.pp > layers:
            subject = f"{self.pp} pipeline stages of a model with {layers} layers"
            raise ConfigError(f"{subject}: give each stage one or more", "too-many-stages")
        if not self.divides(heads, kv_heads):
            subject = f"{heads} heads, {kv_heads} of keys and values"
            problem = f"tensor parallelism {self.tp} does not divide {subject}"
            raise ConfigError(problem, "heads-not-divided")
        if self.tp > node:
            subject = f"tensor parallelism {self.tp} on nodes of {node} GPUs"
            raise ConfigError(f"{subject}: it must stay within a node", "tensor-across-nodes")

    def require_divisor(self, count: int, what: str) -> None:
        """Raise ModelError if a number of heads or features cannot be divided."""
        if not self.divides(count):
            raise ModelError(
                f"tp = {self.tp} does not divide the {count} {what}; choose a divisor, with more "
                "shards (fsdp) or copies (dp; those of a generator are rollout.engines)",
                "tp-divides",
            )

    def bounds(self, full: FullParameter, rank: int) -> Bounds:
        """Return the part that a rank holds. Its stage must have the parameter."""
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

    def own(self, full: Mapping[str, FullParameter], rank: int) -> dict[str, Bounds]:
        """Return the parts that no earlier rank holds."""
        row, column = divmod(rank, self.tp)
        copy, shard = divmod(row, self.fsdp)
        bounds = {
            name: self.bounds(parameter, rank)
            for name, parameter in full.items()
            if not copy and (parameter.dim is not None or not column)
            if parameter.by_rows or not shard
        }
        return {name: box for name, box in bounds.items() if all(start < end for start, end in box)}

    @property
    def settings(self) -> dict[str, int]:
        """Its numbers above 1."""
        return {name: size for name, size in asdict(self).items() if size > 1}

    def __str__(self) -> str:
        """Return it as in settings: ``{ fsdp = 4, tp = 2 }``."""
        parts = [f"{name} = {size}" for name, size in self.settings.items()]
        return f"{{ {', '.join(parts) or 'dp = 1'} }}"


def full_bounds(shape: Sequence[int]) -> Bounds:
    return tuple((0, size) for size in shape)
