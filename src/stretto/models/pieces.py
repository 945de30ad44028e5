"""Pieces: the parts of a model's parameters that each of several ranks holds.

Linear layers are cut into slices for tensor parallelism (tp); of its slice, or of the whole, a
rank of the learner holds a run of rows (fsdp). Everything here follows from names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from stretto.models.mapped import final_dtype
from stretto.models.tensor_parallel import slices_of

Places = npt.NDArray[np.int64]

Box = tuple[tuple[int, int], ...]
"""The part of a tensor: in each dimension, from where to where."""


class Part(NamedTuple):
    """A part of a tensor that goes to a part of a parameter.

    Attributes:
        tensor: its values.
        to: the place in the parameter, as it is held here.
    """

    tensor: Tensor
    to: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor.

    Attributes:
        tensor: its values.
        shape: of the whole tensor.
        box: has no elements where a rank before this one has them too.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter as it is when nothing is divided, and how it may be.

    Attributes:
        shape: of the parameter.
        dtype: that it travels in.
        dim: along which tensor parallelism cuts it; ``None`` where it does not.
        by_rows: whether a learner's ranks hold rows of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    by_rows: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks that hold a model: fsdp times tp, and those of one slice tp apart.

    Attributes:
        fsdp: ranks that share the rows of a slice.
        tp: slices.
    """

    fsdp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.fsdp * self.tp

    def box(self, whole: Whole, rank: int) -> Box:
        """Return the part of a parameter that a rank holds."""
        row, column = divmod(rank, self.tp)
        box = [*box_of(whole.shape)]
        if whole.dim is not None:
            size = whole.shape[whole.dim] // self.tp
            box[whole.dim] = (column * size, (column + 1) * size)
        if whole.by_rows and box:
            start, end = box[0]
            each = -(-(end - start) // self.fsdp)  # as torch.chunk deals out
            box[0] = (min(start + row * each, end), min(start + (row + 1) * each, end))
        return tuple(box)

    def owns(self, whole: Whole, rank: int) -> bool:
        """Return whether a rank is the first that holds its part; others have the same."""
        row, column = divmod(rank, self.tp)
        return (whole.dim is not None or column == 0) and (whole.by_rows or row == 0)

    def first(self, whole: Whole, rank: int) -> Box | None:
        """Return the part that a rank is the first to hold; ``None`` for none, or an empty one."""
        box = self.box(whole, rank)
        return box if self.owns(whole, rank) and all(start < end for start, end in box) else None

    def own(self, wholes: Mapping[str, Whole], rank: int) -> dict[str, Box]:
        """Return the parts, by parameter, that a rank is the first to hold."""
        boxes = {name: self.first(whole, rank) for name, whole in wholes.items()}
        return {name: box for name, box in boxes.items() if box is not None}


def wholes_of(model: nn.Module, dims: Mapping[str, int]) -> dict[str, Whole]:
    """Return all parameters of a model by name, as they are when nothing is divided.

    A learner's ranks hold rows of those in the model's own type; others, such as adapters in
    float32 beside a model in bfloat16, stay as they are.

    Args:
        model: whole, or cut into slices.
        dims: along which tensor parallelism cuts, by parameter name.
    """
    slices, cut = slices_of(model)
    dtype = final_dtype(next(model.parameters()))
    found = {}
    for name, parameter in model.named_parameters():
        sizes = list(parameter.shape)
        if slices and name in cut:
            sizes[cut[name]] *= slices.size
        own = final_dtype(parameter)
        found[name] = Whole(tuple(sizes), own, dims.get(name), by_rows=own == dtype)
    return found


def box_of(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def index(box: Box) -> tuple[slice, ...]:
    """Return what selects a box of a whole tensor."""
    return tuple(slice(start, end) for start, end in box)


def shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(end - start for start, end in box)


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes of one tensor have in common; ``None`` for nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < end for start, end in common) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return what selects a box of a tensor in another box that holds it."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)


def held_elements(places: Places, whole: Sequence[int], box: Box) -> tuple[Places, Places]:
    """Return which of some elements a box holds.

    Args:
        places: of the elements in the flat whole tensor.
        whole: shape of that.

    Returns:
        The numbers of those elements in ``places``, and their places in the flat part.
    """
    coordinates = np.unravel_index(places, tuple(whole))
    inside = np.ones(len(places), bool)
    for at, (start, end) in zip(coordinates, box, strict=True):
        inside &= (start <= at) & (at < end)
    own = tuple(at[inside] - start for at, (start, _) in zip(coordinates, box, strict=True))
    at_flat: Places = np.ravel_multi_index(own, shape(box)).astype(np.int64)
    return np.flatnonzero(inside), at_flat
