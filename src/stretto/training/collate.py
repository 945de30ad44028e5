"""A batch as tensors, and as metrics.

Shapes: B responses, T sampled tokens of the longest; they are left-aligned, and entry [b, t] is of
the sampled token t: its log-probability, and the value of the state before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stretto.algorithms.experience import Scored
from stretto.types import TrainBatch, short_name


def collate(batch: TrainBatch, weights: Mapping[str, float]) -> Scored:
    """Turn a batch of at least one response into tensors; ``weights`` are those of rewards."""

    def padded(column: npt.NDArray[Any]) -> Tensor:
        rows = [torch.from_numpy(row) for row in batch.split_sampled(column)]
        return pad_sequence(rows, batch_first=True)

    reference, values = (batch.per_token.get(kind) for kind in ("logprobs", "values"))
    return Scored(
        mask=padded(np.ones(len(batch.tokens), np.bool_)),
        logprobs=padded(batch.logprobs),
        ref_logprobs=None if reference is None else padded(reference),
        values=None if values is None else padded(values),
        scores=torch.from_numpy(batch.totals(weights)).float(),
        ended=torch.from_numpy(batch.ended),
        groups=torch.from_numpy(batch.prompt_ids),
    )


def staleness(batch: TrainBatch, version: int) -> dict[str, float]:
    """Measure how far the policies that sampled a batch are behind the learner's ``version``: of a
    rollout, the version less the oldest one among its tokens, or 0 for an empty response.
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
    """Return metrics of a batch that need no model: lengths, endings, and the mean of each reward
    source over the responses that it applies to.
    """
    lengths = batch.lengths.tolist()
    stats = {
        "response/length_mean": fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/ended": fmean(batch.ended.tolist()),
    }
    for source in sorted(batch.rewards):
        applies = batch.applies[source]
        if applies.any():
            stats[f"reward/{short_name(source)}"] = fmean(batch.rewards[source][applies].tolist())
    return stats
