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
from dataclasses import replace

import torch
from torch import Tensor

from stretto.algorithms.policy import POLICY_LOSS
from stretto.algorithms.reductions import Metrics
from stretto.models.backend import backend_of
from stretto.training.losses import MicroBatch
from stretto.training.trained import TrainedModel


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
        passes = list[tuple[float, float, Metrics]]()
        group_sum: dict[str, Tensor] = {}
        for response_batches in group:
            of_response = run([batch.with_advantages(1.0) for batch in response_batches])
            gradients, reward = trained.gradients(), _reward(response_batches)
            squares = backend_of(trained.device).sum_of_squares([*gradients.values()]).item()
            passes.append((reward, squares, of_response))
            _add(total, gradients, reward)
            _add(group_sum, gradients, 1.0)
            trained.discard()
        all_squares = sum(squares for _, squares, _ in passes)  # 0 if no response has a gradient
        weighted = sum(squares * reward for reward, squares, _ in passes)
        baseline = weighted / all_squares if all_squares else 0.0
        _add(total, group_sum, -baseline)
        for reward, _, of_response in passes:
            loss = of_response.sums[POLICY_LOSS] * (reward - baseline)
            metrics += replace(of_response, sums={**of_response.sums, POLICY_LOSS: loss})
    for name, gradient in trained.gradients().items():
        gradient.copy_(total[name])
    return metrics


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
