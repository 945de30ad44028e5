"""Rates at which one side is preferred to the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance


@dataclass(frozen=True, slots=True)
class WinRate:
    """A policy's responses against reference responses, by one score of each.

    Attributes:
        by: the source of the scores.
        rate: (wins + ties / 2) / samples.
        standard_error: of the rate.
        wins: pairs in which the policy's response scores above the reference.
        ties: pairs in which both score the same.
        losses: pairs in which the policy's response scores below the reference.
        score: mean score of the policy's responses.
        reference_score: mean score of the references.
    """

    by: str
    rate: float
    standard_error: float
    wins: int
    ties: int
    losses: int
    score: float
    reference_score: float


def compare(by: str, scores: Sequence[float], references: Sequence[float]) -> WinRate:
    """Compare scores pair by pair; at least one pair."""
    points = [point(a - b) for a, b in zip(scores, references, strict=True)]
    return WinRate(
        by=by,
        rate=fmean(points),
        standard_error=standard_error(points),
        wins=points.count(1.0),
        ties=points.count(0.5),
        losses=points.count(0.0),
        score=fmean(scores),
        reference_score=fmean(references),
    )


def point(difference: float) -> float:
    """Points of a pair: 1 for a win, one half for a tie, 0 for a loss."""
    return 0.5 if difference == 0 else float(difference > 0)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean: sqrt(variance / n), the variance with the denominator n."""
    return math.sqrt(pvariance(values) / len(values))
