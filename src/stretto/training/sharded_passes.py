"""The passes of a learner whose models are in shards: every rank makes its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from stretto.algorithms.experience import LossTerm
from stretto.algorithms.reductions import Metrics
from stretto.models.forward import by_token_budget
from stretto.models.logits import OutputHead
from stretto.training.losses import Losses, MicroBatch
from stretto.training.partition import divided
from stretto.training.passes import LocalPasses
from stretto.training.sharded import Sharded
from stretto.types import Stats


class ShardedPasses(LocalPasses):
    """Passes of which every rank makes its share; see :class:`~stretto.training.passes.Passes`.
    actor, critic: the models; ``None`` for algorithms without a critic.
    """

    def __init__(
        self, actor: Sharded, critic: Sharded | None, losses: Losses, microbatch_tokens: int
    ) -> None:
        model = critic.model if critic else None
        super().__init__(actor.model, model, losses, microbatch_tokens, actor.template)
        self._grid = actor.grid
        self._sharded = {s.model: s for s in (actor, critic) if s is not None}
        self._ran: list[list[int]] = []  # tokens of each rank, by mini-batch

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Divide into equally many micro-batches for each rank, of like sizes."""
        return divided(tokens, len(by_token_budget(tokens, self._budget)), self._grid.layout.fsdp)

    def run(
        self, parts: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Make this rank's passes, and add up all ranks' metrics; see :class:`Passes`."""
        self._ran.append(
            [
                sum(max(r.total_tokens for r in p.responses) * len(p.responses) for p in share)
                for share in self._grid.shares(parts)
            ]
        )
        own = [part or MicroBatch.blank(parts[0].part) for part in self._grid.share(parts)]
        by_model = super().run(own, kl_coef, trains_actor=trains_actor)
        said: list[Any] = [None] * self._grid.layout.fsdp
        # Of another rank's GPU nothing can be added here.
        own_metrics = {name: m.on_cpu() for name, m in by_model.items()}
        dist.all_gather_object(said, own_metrics, group=self._grid.rows)
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
