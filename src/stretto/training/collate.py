"""Conversion of a batch to tensors and to metrics.

Shapes: B responses, T sampled tokens of the longest. Rows are left-aligned. Entry [b, t] belongs to
the sampled token t: its log-probability, and the value of the state before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stretto.algorithms.distill import divided
from stretto.algorithms.experience import Scored
from stretto.config import ENVIRONMENT
from stretto.types import TrainBatch, sampled_of, short_name


def collate(batch: TrainBatch, weights: Mapping[str, float]) -> Scored:
    """Turn a batch of at least one response into tensors. ``weights`` are per reward source."""

    def padded(column: npt.NDArray[Any]) -> Tensor:
        rows = [torch.from_numpy(row) for row in batch.split_sampled(column)]
        return pad_sequence(rows, batch_first=True)

    mask, logprobs = padded(np.ones(len(batch.tokens), np.bool_)), padded(batch.logprobs)
    reference, values = (batch.per_token.get(kind) for kind in ("logprobs", "values"))
    ref_logprobs = span_tokens = None
    if reference is not None:
        ref_logprobs, span_tokens = divided(padded(reference), logprobs, mask)
    turns = None
    if batch.turn_rewards is not None and ENVIRONMENT in batch.rewards:
        turn_weights = torch.from_numpy(batch.applies[ENVIRONMENT])[:, None] * weights[ENVIRONMENT]
        turns = padded(batch.turn_rewards) * turn_weights.float()
    return Scored(
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        span_tokens=span_tokens,
        values=None if values is None else padded(values),
        scores=torch.from_numpy(batch.totals(weights)).float(),
        ended=torch.from_numpy(batch.ended),
        groups=torch.from_numpy(batch.prompt_ids),
        turn_rewards=turns,
        episodes=None if batch.episodes is None else torch.from_numpy(batch.episodes),
        sources=torch.from_numpy(batch.by_source()) if batch.rewards else None,
        weights=torch.tensor([weights[source] for source in batch.rewards], dtype=torch.float64),
    )


def staleness(batch: TrainBatch, version: int) -> dict[str, float]:
    """Measure how many versions behind ``version`` the policies that sampled a batch are. A
    rollout's staleness is that of its oldest token, or 0 for an empty response.
    """
    versions = batch.split_sampled(batch.versions)
    behind = [version - int(v.min(initial=version)) for v in versions]
    other = np.concatenate(versions) != version
    return {
        "staleness/mean": fmean(behind),
        "staleness/max": float(max(behind)),
        "staleness/off_policy_tokens": int(other.sum()) / max(len(other), 1),
    }


def describe(batch: TrainBatch) -> dict[str, float]:
    """Return metrics of a batch that need no model: lengths, endings, and reward means and
    deviations. Each reward source has its mean and standard deviation over the responses that it
    applies to. An episode is one response: its length counts all tokens sampled in it, and its
    reward is the mean over its samples.
    """
    episodes = np.arange(len(batch)) if batch.episodes is None else batch.episodes
    _, first, place = np.unique(episodes, return_index=True, return_inverse=True)

    def summed(of_rows: Iterable[float]) -> list[float]:
        sums = np.bincount(place, list(of_rows))[place[np.sort(first)]]
        return [float(x) for x in sums]

    lengths = summed(int(mask.sum()) for mask in batch.split(sampled_of(batch)))
    stats = {
        "response/length_mean": fmean(lengths),
        "response/length_max": max(lengths),
        "response/ended": fmean(cut == 0 for cut in summed(~batch.ended)),
    }
    for source in sorted(batch.rewards):
        counts = summed(batch.applies[source])
        if any(counts):
            sums = summed(np.where(batch.applies[source], batch.rewards[source], 0.0))
            means = [x / n for x, n in zip(sums, counts, strict=True) if n]
            stats[f"reward/{short_name(source)}"] = fmean(means)
            if len(means) > 1:
                stats[f"reward_std/{short_name(source)}"] = stdev(means)
    return stats
