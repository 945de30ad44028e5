"""VCPO's optimal baseline: the one that gives the gradient of a group its least variance.

The gradient of a loss linear in the advantages is ``sum_i (R_i - b) g_i`` over a group, with the
gradient ``g_i`` of response i at an advantage of 1, including its importance weights. The baseline
of Huang et al. (2026, arXiv 2602.17616) is::

    b = sum_i |g_i|^2 R_i / sum_i |g_i|^2

It is known after all passes of the group. Until then, ``sum_i R_i g_i`` and ``sum_i g_i`` are kept
separately, so that no pass runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.algorithms.policy import POLICY_LOSS
from stretto.algorithms.reductions import Metrics
from stretto.models.backend import backend_of
from stretto.training.losses import MicroBatch
from stretto.training.trained import TrainedModel


@dataclass(frozen=True, slots=True)
class ResponsePass:
    """A response's reward, and the results of its passes with an advantage of 1."""

    reward: float
    squared_norm: float
    metrics: Metrics

    def with_baseline(self, baseline: float) -> Metrics:
        """Return metrics with the loss at the response's advantage."""
        loss = self.metrics.sums[POLICY_LOSS] * (self.reward - baseline)
        return replace(self.metrics, sums={**self.metrics.sums, POLICY_LOSS: loss})


def passes_with_optimal_baseline(
    trained: TrainedModel,
    batches: Sequence[MicroBatch],
    run: Callable[[Sequence[MicroBatch]], Metrics],
) -> Metrics:
    """Add the gradients of all responses of some groups to those of a model.

    The rewards are the micro-batches' advantages, which may all lack the same constant in a group.
    ``run`` adds the gradients of micro-batches. Each has rows of one response.
    """
    total = {name: gradient.clone() for name, gradient in trained.gradients().items()}
    trained.discard()
    metrics = Metrics()
    for group in _by_response(batches):
        passes = list[ResponsePass]()
        group_sum: dict[str, Tensor] = {}
        for response_batches in group:
            of_response = run([batch.with_advantages(1.0) for batch in response_batches])
            gradients = trained.gradients()
            squares = backend_of(trained.device).sum_of_squares([*gradients.values()]).item()
            passes.append(ResponsePass(_reward(response_batches), squares, of_response))
            _add(total, gradients, passes[-1].reward)
            _add(group_sum, gradients, 1.0)
            trained.discard()
        baseline = optimal_baseline(passes)
        _add(total, group_sum, -baseline)
        metrics = sum((response.with_baseline(baseline) for response in passes), metrics)
    for name, gradient in trained.gradients().items():
        gradient.copy_(total[name])
    return metrics


def optimal_baseline(passes: Sequence[ResponsePass]) -> float:
    """Return the mean reward, weighted by squared norms; 0 if no response has a gradient."""
    squares = sum(response.squared_norm for response in passes)
    weighted = sum(response.squared_norm * response.reward for response in passes)
    return weighted / squares if squares else 0.0


def _by_response(batches: Sequence[MicroBatch]) -> list[list[list[MicroBatch]]]:
    """Return the micro-batches of each response of each group."""
    groups: dict[int, dict[int, list[MicroBatch]]] = {}
    for i, batch in enumerate(batches):
        inputs = batch.inputs
        assert inputs.groups is not None
        response = i if inputs.episodes is None else int(inputs.episodes[0])
        group = groups.setdefault(int(inputs.groups[0]), {})
        group.setdefault(response, []).append(batch)
    return [[*responses.values()] for responses in groups.values()]


def _reward(batches: Iterable[MicroBatch]) -> float:
    """Return a response's reward: the advantage of any of its tokens; 0 without tokens."""
    tokens = torch.cat([batch.inputs.of_tokens(batch.inputs.advantages) for batch in batches])
    return tokens[0].item() if len(tokens) else 0.0


def _add(sums: dict[str, Tensor], gradients: Mapping[str, Tensor], factor: float) -> None:
    for name, gradient in gradients.items():
        if name not in sums:
            sums[name] = torch.zeros_like(gradient)
    if gradients:
        present = [sums[name] for name in gradients]
        torch._foreach_add_(present, [*gradients.values()], alpha=factor)
