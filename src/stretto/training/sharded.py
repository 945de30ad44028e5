"""Training over several ranks, each of which holds a shard of every weight (FSDP2).

All ranks have the same learner, and get the same calls with the same batches (SPMD). What is
computed of a whole batch (advantages, weights of tokens) each computes for itself; passes are
divided, equally many for each rank. Gradients are sums over the ranks, as the losses' denominators
count over the whole mini-batch. Shards are in float32, and so the masters; passes compute in the
model's own type.

All that reads whole weights is a collective: every rank calls it, in the same order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from stretto.algorithms.experience import LossTerm
from stretto.algorithms.reductions import Metrics
from stretto.config import Config, OptimizerConfig
from stretto.models.forward import (
    backbone,
    by_token_budget,
    output_head,
    response_hidden,
    response_tokens,
    token_budget,
    unwrapped,
)
from stretto.models.load import save_model
from stretto.models.logits import OutputHead, token_logprobs
from stretto.models.weights import fingerprint
from stretto.training.losses import MicroBatch
from stretto.training.partition import divided
from stretto.training.passes import LocalPasses
from stretto.training.trained import TrainedModel
from stretto.types import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class _Root(nn.Module):
    """What FSDP takes for the model: anything may be computed within its forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class Sharded:
    """A model cut into shards, in place. Anything may be computed with its whole weights.

    Its layers are gathered one by one as they are needed, what stands around them (embeddings,
    output layer) for the whole pass.

    Args:
        model: whole on every rank, in evaluation mode, and the same.
        mesh: of the ranks, one-dimensional.

    Attributes:
        model: whose parameters are shards now.
        dtype: that passes compute in: the model's own.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model, self._root = model, _Root(model)
        self.dtype = next(model.parameters()).dtype
        language = unwrapped(model).get_output_embeddings() is not None
        self._head = output_head(model) if language else None  # its scale and cap
        self._empty = _without_weights(model)
        model.float()
        narrow = self.dtype if self.dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self._root, mesh=mesh, mp_policy=policy)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):  # on gloo, averages are sums in some versions
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def __call__(self, compute: Callable[[], T]) -> T:
        """Compute with the whole weights; gradients of tensors, alone or in tuples, reach shards.

        A collective.
        """
        result: T = self._root(compute)
        if not torch.is_grad_enabled():  # else this is done after the backward pass
            cast(FSDPModule, self._root).reshard()
        return result

    @property
    def head(self) -> OutputHead:
        """The output layer; whole within a forward pass alone."""
        assert self._head is not None
        linear = unwrapped(self.model).get_output_embeddings()
        return replace(self._head, weight=linear.weight, bias=getattr(linear, "bias", None))

    @torch.no_grad()
    def full(self, name: str, parameter: Tensor) -> Tensor:
        """Return a whole weight, in the type of the model. A collective."""
        narrow = cast(Any, parameter.detach()).to(self.dtype)
        return cast(Tensor, narrow.full_tensor())

    def whole(self) -> nn.Module | None:
        """Return a copy of the model with whole weights, on the CPU; ``None`` on all ranks but one.

        A collective.
        """
        first = dist.get_rank() == 0
        model = copy.deepcopy(self._empty) if first else None
        empty = dict(model.named_parameters()) if model else {}
        found: dict[int, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            weight = self.full(name, parameter)
            if first:
                found[id(empty[name])] = nn.Parameter(weight.cpu(), parameter.requires_grad)
        for module in model.modules() if model else ():
            for name, own in module._parameters.items():
                if own is not None:
                    module._parameters[name] = found[id(own)]
        return model


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's layers: what its longest list holds."""
    lists = [list(m) for m in backbone(model).children() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _without_weights(model: nn.Module) -> nn.Module:
    """Return a copy that shares no memory and has no weights, but all else, ties included."""
    empty = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, cast(dict[int, Any], empty))


class ShardedModel(TrainedModel):
    """A model in shards, and AdamW on those of this rank; see :class:`TrainedModel`.

    State: as that of a whole model, on the first rank; so a run can be resumed with another number
    of ranks. On the others it is empty.

    Args:
        sharded: the model.
        lr, config, updates, warmup: as of :class:`TrainedModel`.
    """

    def __init__(
        self, sharded: Sharded, lr: float, config: OptimizerConfig, *, updates: int, warmup: int
    ) -> None:
        self._sharded = sharded
        super().__init__(sharded.model, lr, config, updates=updates, warmup=warmup)

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(_local(weight))  # shares memory

    def _copy_back(self) -> None:
        """Do nothing: masters are the shards."""

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return self._sharded.dtype

    @torch.no_grad()
    def logprobs(
        self, responses: Sequence[Response], mask: Tensor, temperature: float, budget: int = 0
    ) -> Tensor:
        """Log-probs [B, T], each rank reading its share; see :meth:`WholeModel.logprobs`."""
        tokens = [r.total_tokens for r in responses]
        wanted = len(by_token_budget(tokens, token_budget(budget, self.device)))
        groups = divided(tokens, wanted, dist.get_world_size())
        logprobs = torch.zeros(mask.shape)
        for rows in own_share(groups):
            part = [responses[row] for row in rows or groups[0]]  # another's, where there is none

            def compute(part: Sequence[Response] = part) -> Tensor:
                hidden = response_hidden(self.model, part)
                targets = response_tokens(part, hidden.device)
                return token_logprobs(self._sharded.head, hidden, targets, temperature)[0]

            flat = self._sharded(compute).float().cpu()
            if rows:
                here = mask[rows]
                logprobs[rows] = torch.zeros(here.shape).masked_scatter(here, flat)
        logprobs = logprobs.to(self.device)
        dist.all_reduce(logprobs)  # of zeros, but for one
        return logprobs.cpu()

    def update(self, norm: float | None = None) -> float:
        """Take an optimizer step on the gradients collected since the last; return their norm."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else _local(weight.grad)
            if master.grad is not None:
                squares += master.grad.double().square().sum()
        dist.all_reduce(squares)
        return super().update(math.sqrt(squares.item()))

    def fingerprint(self) -> str:
        """A short hash of all parameters, frozen ones too. A collective."""
        named = self.model.named_parameters()
        return fingerprint((name, self._sharded.full(name, p)) for name, p in named)

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copies of the whole trained weights, on the first rank. A collective."""
        taken = {}
        for name, weight in zip(self._names, self._weights, strict=True):
            whole = self._sharded.full(name, weight)
            if dist.get_rank() == 0:
                taken[name] = whole
        return taken

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, whole or not at all. A collective."""
        model = self._sharded.whole()
        if model is not None:
            save_model(model, tokenizer, folder)
        dist.barrier()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return masters, AdamW's moments and the schedule's position. A collective."""
        own = super().state_dict()
        state = {
            number: {key: self._gathered(number, value) for key, value in moments.items()}
            for number, moments in own["optimizer"]["state"].items()
        }
        masters = {
            name: self._gathered(i, own["masters"][name]) for i, name in enumerate(self._names)
        }
        if dist.get_rank() != 0:
            return {}
        optimizer = {**own["optimizer"], "state": state}
        return {"masters": masters, "optimizer": optimizer, "schedule": own["schedule"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, of the first rank's state on all."""
        held = state["optimizer"]["state"]
        moments = {
            number: {key: self._cut(number, value) for key, value in values.items()}
            for number, values in held.items()
        }
        masters = {name: self._cut(i, state["masters"][name]) for i, name in enumerate(self._names)}
        optimizer = {**state["optimizer"], "state": moments}
        super().load_state_dict(
            {"masters": masters, "optimizer": optimizer, "schedule": state["schedule"]}
        )

    def _gathered(self, number: int, value: Any) -> Any:
        """Return what the ranks' parts of a tensor like a weight make together, or other values."""
        like: Any = self._weights[number]
        if not isinstance(value, Tensor) or value.shape != _local(like).shape:
            return value
        parts = DTensor.from_local(
            value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        return parts.full_tensor()

    def _cut(self, number: int, value: Any) -> Any:
        """Return this rank's part of a tensor like a weight, or other values."""
        like: Any = self._weights[number]
        if not isinstance(value, Tensor) or value.shape != like.shape:
            return value
        whole = value.to(self.device, torch.float32)
        # Without a source rank nothing is sent: each cuts its own.
        return _local(
            distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        )


class ShardedPasses(LocalPasses):
    """Passes of which every rank makes its share; see :class:`~stretto.training.passes.Passes`.

    Args:
        actor, critic: the models; ``None`` for algorithms without a critic.
        config: of the run.
    """

    def __init__(self, actor: Sharded, critic: Sharded | None, config: Config) -> None:
        super().__init__(actor.model, critic.model if critic else None, config)
        self._sharded = {s.model: s for s in (actor, critic) if s is not None}

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Divide into equally many micro-batches for each rank, of like sizes."""
        return divided(tokens, len(by_token_budget(tokens, self._budget)), dist.get_world_size())

    def run(
        self, parts: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Make this rank's passes, and add up all ranks' metrics; see :class:`Passes`."""
        own = [part or MicroBatch.blank(parts[0].part) for part in own_share(parts)]
        by_model = super().run(own, kl_coef, trains_actor=trains_actor)
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, by_model)
        return {name: sum((metrics[name] for metrics in said), Metrics()) for name in by_model}

    def _term(self, model: nn.Module, compute: Callable[[], LossTerm]) -> LossTerm:
        def both() -> tuple[Tensor, LossTerm]:
            term = compute()
            return term.loss, term  # FSDP looks for losses in tuples, and not in other objects

        return self._sharded[model](both)[1]

    @property
    def _head(self) -> OutputHead:
        return self._sharded[self._actor].head


def own_share(items: Sequence[T]) -> list[T | None]:
    """Return this rank's part of a list of which every rank gets equally many, or ``None``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = -(-len(items) // ranks)
    own = items[rank * share : (rank + 1) * share]
    return [*own, *[None] * (share - len(own))]


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a sharded tensor, whose memory it shares."""
    return cast(Tensor, tensor.to_local())
