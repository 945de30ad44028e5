"""Scored rollouts as tensors, and as figures.

Shapes: B responses, T tokens of the longest. Responses are left-aligned: entry [b, t] is response
token t, its log-probability, and the value of the state before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from stretto.algorithms.experience import Scored
from stretto.errors import LearnerError
from stretto.types import (
    Batch,
    FinishReason,
    Rollout,
    ScoreKind,
    of_kind,
    short_name,
    total_reward,
)


def collate(batch: Batch, weights: Mapping[str, float]) -> Scored:
    """Tensors out of scored rollouts.

    Args:
        batch: at least one rollout.
        weights: factor of each reward source, by name.

    Raises:
        LearnerError: a per-token score has another length than its response, or is missing.
    """
    has_reference = bool(of_kind(batch[0], "logprobs"))
    has_critic = bool(of_kind(batch[0], "values"))
    return Scored(
        mask=_pad([torch.ones(len(r), dtype=torch.bool) for r in batch]),
        logprobs=_pad([torch.tensor(r.logprobs, dtype=torch.float32) for r in batch]),
        ref_logprobs=_pad([_per_token(r, "logprobs") for r in batch]) if has_reference else None,
        values=_pad([_per_token(r, "values") for r in batch]) if has_critic else None,
        scores=torch.tensor([total_reward(r, weights) for r in batch], dtype=torch.float32),
        ended=torch.tensor([r.finish is FinishReason.STOP for r in batch]),
        groups=torch.tensor([r.prompt.id for r in batch]),
    )


def _per_token(rollout: Rollout, kind: ScoreKind) -> Tensor:
    scores = of_kind(rollout, kind)
    if len(scores) != 1 or len(scores[0].values) != len(rollout):
        got = [len(s.values) for s in scores]
        raise LearnerError(
            f"rollout {rollout.id} needs one score of kind '{kind}' with {len(rollout)} numbers, "
            f"one a response token; got {got or 'none'}"
        )
    return torch.from_numpy(scores[0].values)


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def staleness(batch: Batch, version: int) -> dict[str, float]:
    """How far the policies that sampled a batch are behind the learner's ``version``.

    A rollout's staleness is the version less the oldest one among its tokens; an empty response has
    none, and is not behind.
    """
    behind = [version - min(r.versions, default=version) for r in batch]
    other = [v != version for r in batch for v in r.versions]
    return {
        "staleness/mean": fmean(behind),
        "staleness/max": float(max(behind)),
        "staleness/off_policy_tokens": sum(other) / max(len(other), 1),
    }


def describe(batch: Batch) -> dict[str, float]:
    """Figures of a batch that need no model: lengths, endings, and each reward source.

    A source's mean is over the responses that it applies to; where there are none, it has none.
    """
    lengths = [len(r) for r in batch]
    stats = {
        "response/length_mean": fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/ended": fmean(r.finish is FinishReason.STOP for r in batch),
    }
    by_source: dict[str, list[float]] = {}
    for score in (s for r in batch for s in of_kind(r, "reward")):
        if (reward := score.scalar) is not None:
            by_source.setdefault(score.source, []).append(reward)
    for name in sorted(by_source):
        stats[f"reward/{short_name(name)}"] = fmean(by_source[name])
    return stats
