"""Reductions over response tokens that do not depend on how a batch is split or padded.

B responses, T tokens. A loss is ``sum(weights * per_token)`` with weights from
:func:`token_weights`, whose denominators count over the whole optimizer step: the sum over
micro-batches is then the loss of the whole. The masked statistics read the selected tokens only,
row by row, so that padding columns do not even change the order of a sum.

Rows are responses, but where ``episodes`` [B] says which belong together: an episode is one
response, whose tokens are those of all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.config.algorithm import Aggregation


def joined(x: Tensor, episodes: Tensor | None) -> Tensor:
    """Return for each row the sum over all rows of its episode, [B] to [B]; ``None``: as it is."""
    if episodes is None:
        return x
    return torch.where(episodes[:, None] == episodes, x, x.new_zeros(())).sum(dim=1)


def first_rows(episodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row of each episode [E], in order, and each row's place among these [B]."""
    first = (episodes[:, None] == episodes).int().argmax(dim=1)
    rows, places = first.unique(return_inverse=True)
    return rows, places


def token_weights(
    mask: Tensor, mode: Aggregation, longest: int = 1, episodes: Tensor | None = None
) -> Tensor:
    """Return the weight of each token in a loss of tokens: [B, T] float32, 0 outside the mask.

    The mask [B, T] is of *all* responses of one optimizer step; micro-batches take rows of the
    result. An empty response has no tokens to average and is not counted among the responses.
    ``token_mean`` gives ``mask / tokens``, every token counting alike; ``sequence_mean`` gives
    ``mask / (length_b * responses)``, every response counting alike; ``sequence_sum`` gives ``mask
    / responses``; ``fixed_length`` gives ``mask / (longest * responses)``.
    """
    lengths = joined(mask.sum(dim=1), episodes)[:, None]
    responses = _count(mask.any(dim=1), episodes)
    denominator = {
        "token_mean": mask.sum(),
        "sequence_mean": lengths * responses,
        "sequence_sum": responses,
        "fixed_length": longest * responses,
    }[mode].expand_as(lengths)
    return torch.where(mask, 1.0 / denominator.clamp_min(1), 0.0)


def response_weights(mask: Tensor, episodes: Tensor | None = None) -> Tensor:
    """Return the weight of each row in a loss of whole responses: 1 / responses that are not empty,
    in equal parts on the rows of an episode, and 0 for rows without a token; [B] float32.
    """
    present = mask.any(dim=1)
    denominator = _count(present, episodes) * joined(present.long(), episodes)
    return torch.where(present, 1.0 / denominator.clamp_min(1), 0.0)


def _count(present: Tensor, episodes: Tensor | None) -> Tensor:
    """Count the responses among the rows that are ``present`` [B], []."""
    if episodes is None:
        return present.sum()
    earlier = ((episodes[:, None] == episodes) & present).tril(-1).any(dim=1)
    return (present & ~earlier).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the selected entries, []; the denominator is their count (NaN when there is none)."""
    return x[mask].mean()


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Variance of the selected entries, [], Bessel-corrected (n - 1); 0 for fewer than two."""
    selected = x[mask]
    return selected.var(correction=1) if selected.numel() > 1 else selected.new_zeros(())


@dataclass(frozen=True, slots=True)
class Metrics:
    """Statistics of some rows of a batch, which add up exactly to those of the whole.

    Sums are float64 scalars: a weighted sum of per-token figures, with weights that sum to 1 over
    the whole, becomes their mean. Of minima and maxima the least and the greatest count.
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    minima: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics(
            _merged(self.sums, other.sums, torch.add),
            _merged(self.minima, other.minima, torch.minimum),
            _merged(self.maxima, other.maxima, torch.maximum),
        )

    def on_cpu(self) -> Metrics:
        groups = (self.sums, self.minima, self.maxima)
        return Metrics(*({name: value.cpu() for name, value in g.items()} for g in groups))

    def floats(self) -> dict[str, float]:
        """Return all figures as numbers. Waits for the device: call it once a step."""
        return {
            name: value.item()
            for group in (self.sums, self.minima, self.maxima)
            for name, value in group.items()
        }


def weighted_sums(weights: Tensor, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``sum(weights * figure)`` of each per-token figure ([N], as the weights), in float64."""
    return {
        name: (weights.double() * figure.detach().double()).sum()
        for name, figure in figures.items()
    }


def _merged(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    return {**a, **{name: combine(a[name], x) if name in a else x for name, x in b.items()}}
