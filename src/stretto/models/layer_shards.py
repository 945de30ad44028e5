"""Weights sharded over ranks by FSDP2, and gathered layer by layer for a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stretto.models.forward import decoder_layers
from stretto.models.mapped import final, final_dtype

T = TypeVar("T")


class Root(nn.Module):
    """The module that FSDP treats as the model, so that its forward pass can run anything."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()

    def run(self, compute: Callable[[], T]) -> T:
        """Run passes with gathered weights."""
        result: T = self(compute)
        if not torch.is_grad_enabled():  # else the backward pass does this
            cast(FSDPModule, self).reshard()
        return result


def shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
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
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=unsharded)

    def converted(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) or id(tensor) in before:
            return tensor
        part = tensor.to(dtype)  # rounds the float32 of files
        return part.to(wide) if tensor.requires_grad else part

    module._apply(converted)  # like module.to(), tensor by tensor


class FrozenShards:
    """A frozen model, sharded in place over all ranks. Passes are collectives, so all ranks must
    run equally many.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self.ranks = dist.get_world_size()
        self._rank = dist.get_rank()
        self._root = Root(model.requires_grad_(False))
        dtype = final_dtype(next(model.parameters()))
        mesh = init_device_mesh(device_type, (self.ranks,))
        for module in (*decoder_layers(model), self._root):
            shard(module, mesh, dtype)

    @torch.no_grad()
    def compute(self, work: Callable[[], T]) -> T:
        """Run passes with gathered weights."""
        return self._root.run(work)

    def share(self, passes: Sequence[T]) -> list[T]:
        """Return this rank's passes, as many as on all ranks: some ranks repeat the first one."""
        own = list(passes[self._rank :: self.ranks])
        repeats = len(passes[:: self.ranks]) - len(own)
        return [*own, *passes[:repeats]]

    def merged(self, results: Mapping[int, T]) -> dict[int, T]:
        """Return the results of all ranks. A collective."""
        by_rank: list[Any] = [None] * self.ranks
        dist.all_gather_object(by_rank, dict(results))
        return {key: result for part in by_rank for key, result in part.items()}
