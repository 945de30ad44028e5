"""A rank's stage of a model under training: its masters and AdamW, and passes for log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.bounds import shares
from stretto.config import OptimizerConfig
from stretto.config.training_config import token_budget
from stretto.layout import Layout
from stretto.models.forward import (
    by_token_budget,
    inputs,
    pad_right,
    predicting_response,
    response_tokens,
    states_at,
)
from stretto.models.logits import token_logprobs
from stretto.models.shards import index
from stretto.pipelines.executor.executor import PipelineExecutor
from stretto.pipelines.executor.stages import Name, Stage, StageOwners
from stretto.training.backprop import divided
from stretto.training.divided import DividedModel, Division
from stretto.training.shard_files import Stored
from stretto.training.trained import LearningRate, Snapshots
from stretto.types import Response

CPU = torch.device("cpu")


class StageModel(DividedModel):
    """A stage of the model called ``name``, and AdamW on its weights.

    - Parameters have their names in the full model. The first stage also keeps the parameters that
      no stage reads, such as a vision tower's.
    - Gradients are summed over pipelines, those of a tied weight over its stages too. All ranks
      clip by the norm over all stages, and all refuse a norm that is not finite.
    - Ranks that hold the same stage share its weights: each updates, publishes and saves some.
    """

    model: Stage

    def __init__(
        self,
        name: Name,
        stage: Stage,
        full: nn.Module,
        division: Division,
        executor: PipelineExecutor,
        rate: LearningRate,
        config: OptimizerConfig,
    ) -> None:
        # In a partly frozen model, this stage may have nothing to train.
        super().__init__(stage, division, rate, config, may_be_frozen=True)
        self.name = name
        self._executor = executor
        self._names = [stage.names[local] for local in self._names]
        bounds, layout = division.own, executor.layout
        self._slices = Layout(tp=layout.tp(name))
        self._column = layout.column(name, dist.get_rank())
        self._rank_of = cast(StageOwners, division.owners).rank_of
        parameters = dict(full.named_parameters())  # of which the stage may have slices
        parameters |= {stage.names[local]: p for local, p in stage.named_parameters()}
        self._held = {n: p for n, p in parameters.items() if n in bounds}
        named_weights = zip(self._names, self._weights, strict=True)
        self._snapshots = Snapshots({n: weight for n, weight in named_weights if n in bounds})

    def shard(self, name: str) -> Tensor:
        return self._held[name].detach()

    @torch.no_grad()
    def logprobs(
        self, responses: Sequence[Response], mask: Tensor, temperature: float, budget: int = 0
    ) -> Tensor:
        """All pipelines share the passes. A collective."""
        layout, rank = self._executor.layout, dist.get_rank()
        _, pipelines = layout.of(self.name)
        pipeline, _ = layout.place(self.name, rank)
        copies, copy = layout.replicas * pipelines, layout.replica(rank) * pipelines + pipeline
        tokens = [r.total_tokens for r in responses]
        count = len(by_token_budget(tokens, token_budget(budget, self.device)))
        groups = shares(divided(tokens, count, copies), copies)[copy]
        read = [[responses[row] for row in rows] for rows in groups]
        logprobs = torch.zeros(mask.shape)

        def take(number: int, hidden: Tensor) -> None:
            states = states_at(hidden, [predicting_response(r) for r in read[number]])
            targets = response_tokens(read[number], states.device)
            flat, _ = token_logprobs(self.model.head, states, targets, temperature)
            rows = groups[number]
            row_mask = mask[rows]
            logprobs[rows] = torch.zeros(row_mask.shape).masked_scatter(
                row_mask, flat.float().cpu()
            )

        self._executor.read(self.name, [pad_right(inputs(rows), CPU) for rows in read], take)
        logprobs = logprobs.to(self.device) * (self._column == 0)
        dist.all_reduce(logprobs)  # all but last stages have zeros
        return logprobs.cpu()

    def update(self, norm: float | None = None) -> float:
        gradients = self.gradients()
        self._executor.reduce(self.name, gradients)
        return super().update(self._executor.norm(self.name, gradients))

    def _step(self) -> None:
        """Update the masters of this rank's parts. Those of other copies of the stage come from
        their ranks, so that AdamW has moments of these parts alone (ZeRO stage 1, Rajbhandari et
        al. 2020).
        """
        masters = dict(zip(self._names, self._masters, strict=True))
        rank = dist.get_rank()
        others = [m for n, m in masters.items() if self._rank_of(n, self._column) != rank]
        gradients = [master.grad for master in others]
        for master in others:
            master.grad = None
        super()._step()
        for master, gradient in zip(others, gradients, strict=True):
            master.grad = gradient
        weights = {name: master.detach() for name, master in masters.items()}
        self._executor.spread(self.name, weights, self._rank_of)

    def _from_files(self, name: str, value: Tensor | Stored) -> Tensor:
        box = self._slices.bounds(self.wholes[name], self._column)
        part = value.read(box) if isinstance(value, Stored) else value[index(box)].clone()
        return part.to(self.device)
