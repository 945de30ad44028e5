"""Weights sharded over ranks by FSDP2, and gathered layer by layer for a pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from stretto.bounds import shares
from stretto.layout import FullParameter, Layout, Owners
from stretto.models.backend import backend_of
from stretto.models.forward import decoder_layers
from stretto.models.mapped import final, final_dtype
from stretto.models.shards import full_parameters, of_all_ranks
from stretto.models.tensor_parallel import Slices, cut_linears, plan_cuts

T = TypeVar("T")


class Root(nn.Module):
    """The module that FSDP treats as the model, so that its forward pass can run anything.
    Gradients of ``partial`` weights are sums over slices.
    """

    reshard: Callable[[], None]
    set_requires_gradient_sync: Callable[[bool], None]  # both by FSDP

    def __init__(self, model: nn.Module, partial: Collection[str]) -> None:
        super().__init__()
        self.model = model
        self.partial = partial

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()

    def run(self, compute: Callable[[], T]) -> T:
        """Run passes with gathered weights."""
        result: T = self(compute)
        if not torch.is_grad_enabled():  # else the backward pass does this
            self.reshard()
        return result


def divided_parameters(model: nn.Module, *owners: Owners) -> dict[str, FullParameter]:
    """Return all parameters of a full model, which is cut as finely as one of these owners do."""
    return full_parameters(model, plan_cuts(model, max(owner.tp for owner in owners)).dims)


def slice_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Cut a model in place into slices for the ranks of a group."""
    cut_linears(model, plan_cuts(model, dist.get_world_size(group)), Slices(group))


def divide(model: nn.Module, grid: Grid, on_host: bool = False) -> Root:
    """Cut a model into slices and shard these, in place and layer by layer. Frozen shards may stay
    ``on_host``. Return the module whose passes gather them. Raises ModelError if the model cannot
    be cut into that many slices.
    """
    cuts = plan_cuts(model, grid.layout.tp)
    root, dtype = Root(model, cuts.partial), final_dtype(next(model.parameters()))
    names = {id(module): f"{name}." for name, module in model.named_modules()}
    for module in (*decoder_layers(model), root):
        if grid.slices:
            cut_linears(model, cuts, grid.slices, names.get(id(module), ""))
        _shard(module, grid.mesh, dtype, on_host)
    return root


def _shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, on_host: bool) -> None:
    """Keep this rank's rows of a module's parameters, except those already sharded. Passes compute
    in ``dtype``. Parameters that are not of it stay undivided. Trained ones are kept in float32.
    """
    before = {id(p) for p in module.parameters() if isinstance(p, DTensor)}
    # For example adapters, which compute in float32 in a model that does not.
    weights = [p for p in module.parameters() if id(p) not in before]
    unsharded = {p for p in weights if final_dtype(p) != dtype}
    for parameter in unsharded:  # FSDP does not move these
        parameter.data = final(parameter).to(mesh.device_type)
    wide = torch.promote_types(dtype, torch.float32)
    narrow = dtype if dtype != wide else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide)
    pinned = backend_of(torch.device(mesh.device_type)).pinned
    place = CPUOffloadPolicy(pin_memory=pinned) if on_host else OffloadPolicy()
    fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place, ignored_params=unsharded)
    sharded = cast(FSDPModule, module)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo's averages are sums in some versions
    sharded.set_gradient_divide_factor(1.0)

    def converted(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) or id(tensor) in before:
            return tensor
        part = tensor.to(dtype)  # rounds the float32 of files
        return part.to(wide) if tensor.requires_grad else part

    module._apply(converted)  # like module.to(), tensor by tensor


class Grid:
    """All ranks of the default group, as an fsdp x tp grid. Ranks of one slice are tp apart.
    ``row`` is this rank's number among its slice's ranks. These are ``rows``, share the passes, and
    form FSDP's ``mesh``. ``slices`` connects ranks with one slice each, and is ``None`` if nothing
    is cut.
    """

    def __init__(self, device: str, layout: Layout) -> None:
        self.layout, self.rank = layout, dist.get_rank()
        self.row = self.rank // layout.tp
        both = init_device_mesh(device, (layout.fsdp, layout.tp), mesh_dim_names=("fsdp", "tp"))
        self.mesh = both["fsdp"]
        self.rows = both.get_group("fsdp")
        self.slices = Slices(both.get_group("tp")) if layout.tp > 1 else None
        self.beside = dist.new_group(backend="gloo")

    def share(self, items: Sequence[T]) -> list[T | None]:
        by_row = self.shares(items)
        row_items = by_row[self.row]
        return [*row_items, *[None] * (len(by_row[0]) - len(row_items))]

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Return the shares of all ranks of a slice. The last ones may be smaller."""
        return shares(items, self.layout.fsdp)


class GatheredPasses:
    """Passes without gradients of a model in shards. Each row of ranks runs its share of them. They
    are collectives, so all rows must run equally many. ``replaced`` holds layers that have other
    forward passes meanwhile.
    """

    def __init__(
        self,
        grid: Grid,
        run: Callable[[Callable[[], Any]], Any],
        replaced: AbstractContextManager[None] | None = None,
    ) -> None:
        self.grid = grid
        self.device = torch.device(grid.mesh.device_type)
        self._run = run
        self._replaced = replaced or nullcontext()

    @torch.no_grad()
    def compute(self, work: Callable[[], T]) -> T:
        """Run passes with gathered weights."""
        with self._replaced:
            result: T = self._run(work)
        return result

    def share(self, passes: Sequence[T]) -> list[T]:
        """Return this row's passes, as many as of all rows: some rows repeat the first one."""
        rows = self.grid.layout.fsdp
        row_passes = list(passes[self.grid.row :: rows])
        repeats = len(passes[::rows]) - len(row_passes)
        return [*row_passes, *passes[:repeats]]

    def merged(self, results: Mapping[int, T]) -> dict[int, T]:
        """Return the results of all rows. A collective."""
        by_row = of_all_ranks(dict(results), self.grid.rows)
        return {key: result for part in by_row for key, result in part.items()}


def computed(gathered: GatheredPasses | None, work: Callable[[], T]) -> T:
    """Run passes of a model, with gathered weights if it is in shards."""
    return gathered.compute(work) if gathered else work()


def frozen_shards(model: nn.Module, grid: Grid, *, on_host: bool = False) -> GatheredPasses:
    """Freeze a model and divide it in place. Shards ``on_host`` are copied to the device layer by
    layer, as they are gathered.
    """
    return GatheredPasses(grid, divide(model.requires_grad_(False), grid, on_host).run)
