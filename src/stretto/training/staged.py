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
from stretto.models.forward import (
    by_token_budget,
    inputs,
    pad_right,
    predicting_response,
    response_tokens,
    states_at,
)
from stretto.models.logits import token_logprobs
from stretto.pipelines.executor.executor import PipelineExecutor
from stretto.pipelines.executor.stages import Name, Stage, StageOwners
from stretto.training.backprop import divided
from stretto.training.divided import DividedModel, Division
from stretto.training.trained import LearningRate, Snapshots
from stretto.types import Response

CPU = torch.device("cpu")


class StageModel(DividedModel):
    """A stage of the model called ``name``, and AdamW on its weights.

    - Parameters have their names in the full model. The first stage also keeps the parameters that
      no stage reads, such as a vision tower's.
    - Ranks that hold the same stage share its weights: each updates, publishes and saves some, and
      has masters and moments of these alone (ZeRO stage 1, Rajbhandari et al. 2020). Until the end
      of a mini-batch, each has gradients of all weights, as every pass adds to them.
    - Gradients are summed over pipelines, those of a tied weight over its stages too, on the rank
      that updates it. All ranks clip by the norm over all stages, and all refuse a norm that is not
      finite.
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
        layout = executor.layout
        self.name = name
        self._executor = executor
        self._column = layout.column(name, executor.rank)
        self._rank_of = cast(StageOwners, division.owners).rank_of
        # In a partly frozen model, this stage may have nothing to train.
        super().__init__(stage, division, rate, config, may_be_frozen=True)
        self._names = [stage.names[local] for local in self._names]
        bounds = division.own
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

    def update(self, norm: float | None = None, scale: float = 1.0) -> float:
        gradients = self.gradients()
        self._executor.reduce(self.name, gradients, self._rank_of)
        return super().update(self._executor.norm(self.name, gradients, self._rank_of), scale)

    def _owns(self, name: str) -> bool:
        return self._rank_of(self.model.names[name], self._column) == self._executor.rank

    def _make_master(self, name: str, weight: nn.Parameter) -> nn.Parameter:
        master = super()._make_master(name, weight)
        if master is not weight and not self._owns(name):
            master.untyped_storage().resize_(0)  # only its gradient is used
        return master

    @torch.no_grad()
    def _copy_back(self) -> None:
        """Round own masters to the weights' type, and exchange weights with the ranks that
        update the rest. A collective.
        """
        super()._copy_back()
        weights = zip(self._names, self._weights, strict=True)
        self._executor.spread(self.name, {n: w.detach() for n, w in weights}, self._rank_of)
