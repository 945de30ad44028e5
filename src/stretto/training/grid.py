"""The ranks that hold a learner's models together, and the ways among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from stretto.models.pieces import Layout, Whole, index, shape
from stretto.models.tensor_parallel import Slices

T = TypeVar("T")


class Grid:
    """All ranks of the default group, as fsdp x tp: those that hold one slice stand tp apart.

    Attributes:
        rank: of this process.
        row: number among the ranks of its slice, which share rows and passes.
        mesh: of these ranks.
        rows: the group of these ranks.
        slices: those that have a slice each; ``None`` where nothing is cut.
    """

    def __init__(self, device: str, layout: Layout) -> None:
        self.layout, self.rank = layout, dist.get_rank()
        self.row = self.rank // layout.tp
        both = init_device_mesh(device, (layout.fsdp, layout.tp), mesh_dim_names=("fsdp", "tp"))
        self.mesh = both["fsdp"]
        self.rows = both.get_group("fsdp")
        self.slices = Slices(both.get_group("tp")) if layout.tp > 1 else None
        self._beside = dist.new_group(backend="gloo")

    def on_first(self, whole: Whole, part: Tensor) -> Tensor | None:
        """Return on the first rank's CPU the whole of a tensor; ``None`` on the others.

        A collective, beside whatever else the ranks do.
        """
        here = part.detach().cpu()
        if self.rank:
            if self.layout.first(whole, self.rank) is not None:
                dist.send(here.contiguous(), 0, group=self._beside)
            return None
        made = torch.empty(whole.shape, dtype=here.dtype)
        for rank in range(self.layout.ranks):
            box = self.layout.first(whole, rank)
            if box is None:
                continue
            if rank:
                here = torch.empty(shape(box), dtype=made.dtype)
                dist.recv(here, rank, group=self._beside)
            made[index(box)] = here
        return made

    def share(self, items: Sequence[T]) -> list[T | None]:
        """Return this rank's share of a list, filled up with ``None`` to those of the others."""
        by_row = self.shares(items)
        own = by_row[self.row]
        return [*own, *[None] * (len(by_row[0]) - len(own))]

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Return the shares of all ranks of a slice, the last of which may have less."""
        ranks = self.layout.fsdp
        share = -(-len(items) // ranks)
        return [items[row * share : (row + 1) * share] for row in range(ranks)]

    @staticmethod
    def sum_(tensor: Tensor) -> Tensor:
        """Add up all ranks' tensors, in place. A collective."""
        dist.all_reduce(tensor)
        return tensor
