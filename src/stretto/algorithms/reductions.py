"""Reductions over response tokens that do not depend on how a batch is split or padded.

B responses, T tokens. A loss is ``sum(weights * per_token)`` with weights from
:func:`token_weights`, whose denominators count over the full optimizer step. Losses of
micro-batches therefore add up to the loss of the step. The masked statistics read only the selected
tokens, row by row, so that padding columns do not even change the order of a sum.

Each row is a response unless ``episodes`` [B] is given. Rows with the same episode number form one
response, whose tokens are those of all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.config.algorithm import Aggregation


def joined(x: Tensor, episodes: Tensor | None) -> Tensor:
    """Sum over the rows of each row's episode, [B] to [B]. ``None``: return x unchanged."""
    if episodes is None:
        return x
    return torch.where(episodes[:, None] == episodes, x, x.new_zeros(())).sum(dim=1)


def first_rows(episodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row of each episode [E], in order, and each row's index among them [B]."""
    first = (episodes[:, None] == episodes).int().argmax(dim=1)
    rows, places = first.unique(return_inverse=True)
    return rows, places


def token_weights(
    mask: Tensor,
    mode: Aggregation,
    longest: int = 1,
    episodes: Tensor | None = None,
    *,
    counted: bool = True,
) -> Tensor:
    """Return the weight of each token in a per-token loss: [B, T] float32, 0 outside the mask.

    The mask [B, T] must be of *all* responses of one optimizer step. Micro-batches take rows of the
    result. Empty responses do not count among the responses, as they have no tokens to average.
    ``token_mean`` gives ``mask / tokens``, so every token counts the same. ``sequence_mean`` gives
    ``mask / (length_b * responses)``, so every response counts the same. ``sequence_sum`` gives
    ``mask / responses``. ``fixed_length`` gives ``mask / (longest * responses)``. Without
    ``counted``, ``tokens`` and ``responses`` are 1, for any part of these responses.
    """
    lengths = joined(mask.sum(dim=1), episodes)[:, None]
    tokens, responses = mask.sum(), count_responses(mask.any(dim=1), episodes)
    if not counted:
        tokens = responses = torch.ones_like(tokens)
    denominator = {
        "token_mean": tokens,
        "sequence_mean": lengths * responses,
        "sequence_sum": responses,
        "fixed_length": longest * responses,
    }[mode].expand_as(lengths)
    return torch.where(mask, 1.0 / denominator.clamp_min(1), 0.0)


def response_weights(
    mask: Tensor, episodes: Tensor | None = None, *, counted: bool = True
) -> Tensor:
    """Return the weight of each row in a per-response loss, [B] float32. It is 1 / (number of
    non-empty responses, or 1 without ``counted``), divided equally among the rows of an episode.
    Rows without a token get 0.
    """
    present = mask.any(dim=1)
    responses = count_responses(present, episodes) if counted else 1
    denominator = responses * joined(present.long(), episodes)
    return torch.where(present, 1.0 / denominator.clamp_min(1), 0.0)


def count_responses(present: Tensor, episodes: Tensor | None) -> Tensor:
    """Count the responses [] among the rows marked ``present`` [B]."""
    if episodes is None:
        return present.sum()
    earlier = ((episodes[:, None] == episodes) & present).tril(-1).any(dim=1)
    return (present & ~earlier).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the selected entries, []. NaN if none is selected."""
    return x[mask].mean()


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Variance of the selected entries, [], Bessel-corrected (n - 1). 0 for fewer than two."""
    selected = x[mask]
    return selected.var(correction=1) if selected.numel() > 1 else selected.new_zeros(())


@dataclass(frozen=True, slots=True)
class Metrics:
    """Statistics of some rows of a batch. Those of disjoint rows add up to those of the batch. Sums
    are float64 scalars. A weighted sum of per-token metrics is their mean once the weights of all
    added rows sum to 1. Minima keep the smallest value, maxima the largest.
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
        """Return all metrics as floats. Waits for the device, so call it once per step."""
        return {
            name: value.item()
            for group in (self.sums, self.minima, self.maxima)
            for name, value in group.items()
        }


def weighted_sums(weights: Tensor, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``sum(weights * figure)`` in float64 of each per-token metric, [N] like the weights."""
    return {
        name: (weights.double() * figure.detach().double()).sum()
        for name, figure in figures.items()
    }


def _merged(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    return {**a, **{name: combine(a[name], x) if name in a else x for name, x in b.items()}}
