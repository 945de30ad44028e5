"""Training over several ranks, each of which holds a shard of every weight (FSDP2).

All ranks have the same learner, and get the same calls with the same batches (SPMD). What is
computed of a whole batch (advantages, weights of tokens) each computes for itself; passes are
divided, equally many for each rank. Gradients are sums over the ranks, as the losses' denominators
count over the whole mini-batch. Shards of trained weights are in float32 and are the masters;
passes compute in the model's own type.

All that reads whole weights is a collective: every rank calls it, in the same order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
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
from stretto.types import Response, Stats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_NO_WEIGHT = torch.empty(0, 0)


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
    output layer) for the whole pass. Parameters of another type than the model's stay whole on
    every rank.

    Args:
        model: whole on every rank, in evaluation mode, and the same.
        mesh: of the ranks, one-dimensional.
        aside: a group of the same ranks, over gloo, for what is gathered beside the passes.

    Attributes:
        model: whose parameters are shards now.
        dtype: that passes compute in: the model's own.
        template: the output layer of a language model, without its weights.
        parameters: the shards, by name.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, aside: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self._root, self._aside = model, _Root(model), aside
        self.dtype = next(model.parameters()).dtype
        language = unwrapped(model).get_output_embeddings() is not None
        self.template = OutputHead(_NO_WEIGHT)
        if language:
            self.template = replace(output_head(model), weight=_NO_WEIGHT, bias=None)
        self._empty = _without_weights(model)
        # Such as adapters, which compute in float32 beside a model that does not.
        others = {p for p in model.parameters() if p.dtype != self.dtype}
        for parameter in model.parameters():
            if parameter in others:  # which FSDP leaves where they are
                parameter.data = parameter.data.to(mesh.device_type)
            elif parameter.requires_grad:
                parameter.data = parameter.data.float()
        narrow = self.dtype if self.dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for module in (*_layers(model), self._root):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=others)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):  # on gloo, averages are sums in some versions
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        # While a pass is under way, the model has whole weights in their places.
        self.parameters = dict(model.named_parameters())

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
        linear = unwrapped(self.model).get_output_embeddings()
        return replace(self.template, weight=linear.weight, bias=getattr(linear, "bias", None))

    @torch.no_grad()
    def full(self, parameter: Any) -> Tensor:
        """Return a whole weight, in its type in the whole model. A collective."""
        weight: Any = parameter.detach()
        if not isinstance(weight, DTensor):
            return cast(Tensor, weight.clone())
        narrow: Any = weight.to(self.dtype)
        return cast(Tensor, narrow.full_tensor())

    @torch.no_grad()
    def on_first(self, parameter: Any) -> Tensor | None:
        """Return a whole weight on the first rank's CPU, in its type in the whole model.

        A collective, beside whatever else the ranks do.
        """
        weight: Any = parameter.detach()
        if not isinstance(weight, DTensor):
            return weight.to("cpu", copy=True) if dist.get_rank() == 0 else None
        return self.gathered(weight.to_local().to(self.dtype), len(weight))

    def gathered(self, part: Tensor, rows: int) -> Tensor | None:
        """Return on the first rank's CPU the rows of which each rank has its part.

        A collective, beside whatever else the ranks do.
        """
        ranks = dist.get_world_size(self._aside)
        most = -(-rows // ranks)  # of a part; the last ones may have fewer, or none
        padded = torch.zeros(most, *part.shape[1:], dtype=part.dtype)
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(ranks)] if not dist.get_rank() else None
        dist.gather(padded, parts, dst=0, group=self._aside)
        return torch.cat(parts)[:rows] if parts else None

    def whole(self) -> nn.Module | None:
        """Return a copy of the model with whole weights, on the CPU; ``None`` on all ranks but one.

        A collective, beside whatever else the ranks do, while no update is under way.
        """
        model = copy.deepcopy(self._empty) if dist.get_rank() == 0 else None
        empty = dict(model.named_parameters()) if model else {}
        found: dict[int, nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            weight = self.on_first(parameter)
            if weight is not None:
                found[id(empty[name])] = nn.Parameter(weight, parameter.requires_grad)
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
        self._gate.agree = self._all_agree

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
        if isinstance(weight, DTensor):
            return nn.Parameter(weight.to_local())  # shares memory
        return super()._make_master(weight)

    def _to_copy_back(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of weights and their masters, where these are not the shards."""
        return [pair for pair in super()._to_copy_back() if not isinstance(pair[0], DTensor)]

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
        self._add_up_others()
        of_shards = torch.zeros((), dtype=torch.float64, device=self.device)
        of_others = torch.zeros_like(of_shards)
        for weight, master in zip(self._weights, self._masters, strict=True):
            if isinstance(weight, DTensor):
                gradient: Any = weight.grad
                master.grad = None if gradient is None else gradient.to_local()
            if master.grad is not None:
                squares = master.grad.double().square().sum()
                (of_shards if isinstance(weight, DTensor) else of_others).add_(squares)
        dist.all_reduce(of_shards)
        return super().update(math.sqrt((of_shards + of_others).item()))

    def _add_up_others(self) -> None:
        """Add up all ranks' gradients of parameters that are whole on each.

        On some ranks no pass may have reached one of them, such as the adapter of an expert.
        """
        pairs = zip(self._weights, self._masters, strict=True)
        others = [master for weight, master in pairs if not isinstance(weight, DTensor)]
        if not others:
            return
        reached = torch.tensor([m.grad is not None for m in others], device=self.device).float()
        dist.all_reduce(reached, op=dist.ReduceOp.MAX)
        for master, somewhere in zip(others, reached.tolist(), strict=True):
            if somewhere:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                dist.all_reduce(master.grad)

    def _all_agree(self, is_open: bool) -> bool:
        """Return whether no rank's gate is closed: all shards change or none."""
        closed = torch.tensor(float(not is_open), device=self.device)
        dist.all_reduce(closed)
        return closed.item() == 0

    def fingerprint(self) -> str:
        """A short hash of all parameters, frozen ones too. A collective."""
        named = self._sharded.parameters.items()
        return fingerprint((name, self._sharded.full(p)) for name, p in named)

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copies of the whole trained weights, on the first rank. A collective."""
        taken = {}
        for name, weight in zip(self._names, self._weights, strict=True):
            whole = self._sharded.full(weight)
            if dist.get_rank() == 0:
                taken[name] = whole
        return taken

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, whole or not at all.

        A collective, beside whatever else the ranks do; see :meth:`Sharded.whole`.
        """
        model = self._sharded.whole()
        if model is not None:
            save_model(model, tokenizer, folder)

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
        if not _is_like(value, like) or value.shape != like.to_local().shape:
            return value
        return self._sharded.gathered(value, len(like))

    def _cut(self, number: int, value: Any) -> Any:
        """Return this rank's part of a tensor like a weight, or other values."""
        like: Any = self._weights[number]
        if not _is_like(value, like) or value.shape != like.shape:
            return value
        whole = value.to(self.device, torch.float32)
        # Without a source rank nothing is sent: each cuts its own.
        parts = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return parts.to_local()


class ShardedPasses(LocalPasses):
    """Passes of which every rank makes its share; see :class:`~stretto.training.passes.Passes`.

    Args:
        actor, critic: the models; ``None`` for algorithms without a critic.
        config: of the run.
    """

    def __init__(self, actor: Sharded, critic: Sharded | None, config: Config) -> None:
        super().__init__(actor.model, critic.model if critic else None, config, actor.template)
        self._sharded = {s.model: s for s in (actor, critic) if s is not None}
        self._ran: list[list[int]] = []  # tokens of each rank, by mini-batch

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Divide into equally many micro-batches for each rank, of like sizes."""
        return divided(tokens, len(by_token_budget(tokens, self._budget)), dist.get_world_size())

    def run(
        self, parts: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Make this rank's passes, and add up all ranks' metrics; see :class:`Passes`."""
        self._ran.append(
            [
                sum(max(r.total_tokens for r in p.responses) * len(p.responses) for p in share)
                for share in shares(parts)
            ]
        )
        own = [part or MicroBatch.blank(parts[0].part) for part in own_share(parts)]
        by_model = super().run(own, kl_coef, trains_actor=trains_actor)
        said: list[Any] = [None] * dist.get_world_size()
        # Of another rank's GPU nothing can be added here.
        dist.all_gather_object(said, {name: m.on_cpu() for name, m in by_model.items()})
        return {name: sum((metrics[name] for metrics in said), Metrics()) for name in by_model}

    def finish(self) -> Stats:
        """Return how even the step's passes were.

        Returns:
            ``passes/balance``: tokens (padding counted) of an average rank, as a share of those of
            the rank that has the most: 1 where no rank waits for another.
        """
        ran, self._ran = self._ran, []
        most = sum(max(tokens) for tokens in ran)
        return {"passes/balance": sum(map(fmean, ran)) / most} if most else {}

    def _term(self, model: nn.Module, compute: Callable[[], LossTerm]) -> LossTerm:
        def both() -> tuple[Tensor, LossTerm]:
            term = compute()
            return term.loss, term  # FSDP looks for losses in tuples, and not in other objects

        return self._sharded[model](both)[1]

    @property
    def _output(self) -> OutputHead:
        return self._sharded[self._actor].head


def own_share(items: Sequence[T]) -> list[T | None]:
    """Return this rank's share of a list, filled up with ``None`` to those of the others."""
    by_rank = shares(items)
    own = by_rank[dist.get_rank()]
    return [*own, *[None] * (len(by_rank[0]) - len(own))]


def shares(items: Sequence[T]) -> list[Sequence[T]]:
    """Return the shares of all ranks of a list, the last of which may have less."""
    ranks = dist.get_world_size()
    share = -(-len(items) // ranks)
    return [items[rank * share : (rank + 1) * share] for rank in range(ranks)]


def _is_like(value: object, weight: object) -> bool:
    """Return whether a value of a state may be divided as a weight is."""
    return isinstance(value, Tensor) and isinstance(weight, DTensor)
