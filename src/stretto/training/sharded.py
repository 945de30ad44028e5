"""Training over several ranks, each of which holds a shard of every weight.

A model is first cut into slices, and then the rows of each slice are sharded over its ranks
(:mod:`stretto.models.layer_shards`). All ranks have the same learner, and get the same calls with
the same batches (SPMD). Each rank computes quantities of the full batch
(advantages, weights of tokens) itself. The ranks of a slice share the passes, equally many each.
Gradients are summed over these ranks, as the losses' denominators count over the full mini-batch.
Shards of trained weights are in float32 and are the masters. Passes compute in the model's own
type.

Everything that reads full weights is a collective: every rank must call it, in the same order.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.algorithms.reductions import Metrics
from stretto.config import OptimizerConfig
from stretto.config.training_config import token_budget
from stretto.models.backend import backend_of
from stretto.models.forward import by_token_budget, head_reader, unwrapped
from stretto.models.layer_shards import Grid, divide, divided_parameters
from stretto.models.logits import OutputHead
from stretto.models.mapped import final_dtype
from stretto.models.shards import Peers, of_all_ranks
from stretto.training.backprop import LocalBackprop, divided
from stretto.training.divided import DividedModel, Division
from stretto.training.losses import MicroBatch
from stretto.training.trained import LearningRate
from stretto.types import Response, Stats

T = TypeVar("T")

COMPARED_EVERY = 50
"""Updates between comparisons of the weights that tensor parallelism does not divide."""
SPARE = 1.5
"""Reduce gradients once per mini-batch if memory for this multiple of a slice's is spare. It
exceeds 1 because allocators leave gaps, and later passes may be somewhat larger.
"""


class ShardedModel(DividedModel):
    """A model cut into shards in place, and AdamW on this rank's shards.

    The full model comes to every rank, in evaluation mode. Its layers are gathered one by one when
    needed, the modules around them (embeddings, output layer) for the entire pass. Gradients are
    reduced after each pass, or once per mini-batch if a GPU has room for those of the slice.
    Parameters of another type than the model's stay undivided on every rank of a slice. If weights
    are left in files (:mod:`stretto.models.mapped`), no rank holds more than its own part and about
    one layer of its slice. With ``lends`` it publishes the shards themselves, as their readers are
    done before they change. Otherwise it publishes copies. Raises as :func:`divide` does.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        rate: LearningRate,
        config: OptimizerConfig,
        *,
        lends: bool = False,
    ) -> None:
        self.grid = grid
        self._lends = lends
        self._dtype = final_dtype(next(model.parameters()))
        self._head: Callable[[], OutputHead] | None = None
        if unwrapped(model).get_output_embeddings() is not None:
            self._head = head_reader(model)
        wholes = divided_parameters(model, grid.layout)
        division = Division(model, wholes, grid.layout, grid.beside)
        self._root = divide(model, grid)
        # During a pass, the model holds full slices in place of these parameters.
        self.parameters = dict(model.named_parameters())
        super().__init__(model, division, rate, config)
        self._updates = 0
        self._reduces_once: bool | None = None  # unknown before the first update

    def _make_master(self, name: str, weight: nn.Parameter) -> nn.Parameter:
        if isinstance(weight, DTensor):
            return nn.Parameter(weight.to_local())  # shares memory
        return super()._make_master(name, weight)

    def _to_copy_back(self) -> list[tuple[Tensor, Tensor]]:
        return [pair for pair in super()._to_copy_back() if not isinstance(pair[0], DTensor)]

    # -- passes ----------------------------------------------------------------------------------

    def compute(self, work: Callable[[], T]) -> T:
        return self._root.run(work)

    def before_pass(self, *, last: bool) -> None:
        # Gradients of passes that are not reduced accumulate in float32.
        self._root.set_requires_gradient_sync(last or not self._reduces_once)

    def _may_reduce_once(self) -> bool:
        """Return whether all ranks have spare memory for the gradients of their full slice. A
        collective. Call it after an update, when the peak of passes is known.
        """
        trained = (p for p in self._weights if isinstance(p, DTensor))
        gradient_bytes = sum(p.numel() * max(p.element_size(), 4) for p in trained)
        spare = backend_of(self.device).spare_bytes() / SPARE
        fits = torch.tensor(float(gradient_bytes <= spare), device=self.device)
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        return fits.item() > 0

    @property
    def head(self) -> OutputHead:
        assert self._head  # a language model's
        return self._head()

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @torch.no_grad()
    def logprobs(
        self, responses: Sequence[Response], mask: Tensor, temperature: float, budget: int = 0
    ) -> Tensor:
        tokens = [r.total_tokens for r in responses]
        count = len(by_token_budget(tokens, token_budget(budget, self.device)))
        groups = divided(tokens, count, self.grid.layout.data_parallel)
        logprobs = torch.zeros(mask.shape)
        for rows in self.grid.share(groups):
            read = [responses[row] for row in rows or groups[0]]  # any rows if this rank has none
            flat = self.compute(partial(self._token_logprobs, read, temperature)).float().cpu()
            if rows:
                row_mask = mask[rows]
                logprobs[rows] = torch.zeros(row_mask.shape).masked_scatter(row_mask, flat)
        logprobs = logprobs.to(self.device)
        dist.all_reduce(logprobs, group=self.grid.rows)  # all but one rank have zeros
        return logprobs.cpu()

    # -- updates ---------------------------------------------------------------------------------

    def _gradient_sums(self) -> list[Tensor]:
        pairs = zip(self._weights, self._masters, strict=True)
        gradients = [w.grad if isinstance(w, DTensor) else m.grad for w, m in pairs]
        return [_local(gradient) for gradient in gradients if gradient is not None]

    def update(self, norm: float | None = None, scale: float = 1.0) -> float:
        for weight, master in zip(self._weights, self._masters, strict=True):
            if isinstance(weight, DTensor):
                master.grad = None if weight.grad is None else _local(weight.grad)
        self._add_up_others()
        norm, self._updates = super().update(self._norm(), scale), self._updates + 1
        if self.grid.slices and self._updates % COMPARED_EVERY == 0:
            self._align(self.grid.slices)
        if self._reduces_once is None:
            self._reduces_once = self._may_reduce_once()
        return norm

    @torch.no_grad()
    def _align(self, slices: Peers) -> None:
        """Compare the undivided weights, such as embeddings, that each slice's optimizer updates.
        Where they differ, all ranks take the first one's. A collective.
        """
        pairs = zip(self._names, self._masters, strict=True)
        copies = {name: master for name, master in pairs if self.wholes[name].dim is None}
        # The sum of a tensor's bits, as integers, distinguishes it from almost all others.
        bits = torch.int64 if self._masters[0].dtype == torch.float64 else torch.int32
        sums = torch.stack([weight.view(bits).sum(dtype=torch.int64) for weight in copies.values()])
        ends = torch.stack([sums, -sums])
        dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=slices.group)
        gaps = dict[str, float]()
        for (name, weight), low, minus_high in zip(copies.items(), *ends.tolist(), strict=True):
            if low != -minus_high:
                reference = weight.clone()
                dist.broadcast(reference, group=slices.group, group_src=0)
                gaps[name] = float((reference - weight).abs().max()) if weight.numel() else 0.0
                weight.copy_(reference)
        self._copy_back()
        if any(gaps.values()):
            name = max(gaps, key=gaps.__getitem__)
            warnings.warn(
                f"ranks with other slices held other values of {len(gaps)} parameters that are not "
                f"divided, up to {gaps[name]:.2g} apart ('{name}'), and have the first rank's now; "
                "see whether their GPUs and libraries are the same",
                stacklevel=2,
            )

    def _norm(self) -> float:
        # First index: whether a slice's ranks shard it. Second: whether slices cut it.
        groups: dict[tuple[bool, bool], list[Tensor]] = defaultdict(list)
        for name, weight, master in zip(self._names, self._weights, self._masters, strict=True):
            if master.grad is not None:
                cut = self.wholes[name].dim is not None
                groups[isinstance(weight, DTensor), cut].append(master.grad)
        add_up = backend_of(self.device).sum_of_squares
        squares = torch.stack(
            [torch.stack([add_up(groups[i, j]) for j in (False, True)]) for i in (False, True)]
        )
        dist.all_reduce(squares[1], group=self.grid.rows)
        of_slices = squares[:, 1].sum()
        if self.grid.slices:
            self.grid.slices.sum_(of_slices)
        return math.sqrt((squares[:, 0].sum() + of_slices).item())

    def _add_up_others(self) -> None:
        """Add up gradients of undivided parameters. A pass may not have reached one on some rank,
        for example with experts.
        """
        for name, master in zip(self._names, self._masters, strict=True):
            if self.grid.slices and name in self._root.partial and master.grad is not None:
                self.grid.slices.sum_(master.grad)
        pairs = zip(self._weights, self._masters, strict=True)
        undivided = [master for weight, master in pairs if not isinstance(weight, DTensor)]
        if not undivided:
            return
        reached = torch.tensor([m.grad is not None for m in undivided], device=self.device).float()
        dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=self.grid.rows)
        for master, has_gradient in zip(undivided, reached.tolist(), strict=True):
            if has_gradient:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                dist.all_reduce(master.grad, group=self.grid.rows)

    # -- weights and state -----------------------------------------------------------------------

    def shard(self, name: str) -> Tensor:
        return _local(self.parameters[name].detach())

    @torch.no_grad()
    def snapshot(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the trained weights, in the model's types unless lent. Omits
        parts that an earlier rank also holds. The ranks' parts together are the full weights.
        """
        names = [name for name in self._names if name in self.division.own]
        if self._lends:
            return {name: self.shard(name) for name in names}
        return {n: self.shard(n).to(self.wholes[n].dtype, copy=True) for n in names}


def _local(tensor: Any) -> Tensor:
    return cast(Tensor, tensor.to_local() if isinstance(tensor, DTensor) else tensor)


class ShardedBackprop(LocalBackprop):
    """Runs each rank's share of the passes."""

    actor: ShardedModel

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grid = self.actor.grid
        self._ran: list[list[int]] = []  # tokens of each rank, by mini-batch

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        count = len(by_token_budget(tokens, self._budget))
        return divided(tokens, count, self._grid.layout.data_parallel)

    def run(
        self, batches: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        tokens = [len(batch.tokens) * (batch.tokens.shape[1] + 1) for batch in batches]
        self._ran.append([sum(share) for share in self._grid.shares(tokens)])
        rank_batches = [
            batch or MicroBatch.blank(batches[0]) for batch in self._grid.share(batches)
        ]
        by_model = super().run(rank_batches, kl_coef, trains_actor=trains_actor)
        # Tensors on another rank's GPU cannot be added here.
        own_metrics = {name: m.on_cpu() for name, m in by_model.items()}
        rank_metrics = of_all_ranks(own_metrics, self._grid.rows)
        return {
            name: sum((metrics[name] for metrics in rank_metrics), Metrics()) for name in by_model
        }

    @property
    def _at_once(self) -> int:
        return 1  # collectives must have one order on all ranks

    def finish(self) -> Stats:
        """Return ``passes/balance``: the mean rank's tokens (padding included) over the largest
        rank's. At 1 no rank waits for another.
        """
        tokens_by_run, self._ran = self._ran, []
        largest = sum(max(tokens) for tokens in tokens_by_run)
        return {"passes/balance": sum(map(fmean, tokens_by_run)) / largest} if largest else {}
