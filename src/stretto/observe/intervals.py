"""Confidence intervals of a mean, and of a mean ratio, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.95
"""Share of such intervals that hold the true mean."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the interval that the true one lies in, at :data:`LEVEL`."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The mean of values that scatter normally; ``None`` for fewer than two of them."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """The geometric mean of positive ratios, whose logarithms scatter normally.

    Ratios of two paired measurements: what a pair has in common, a seed for one, cancels.
    """
    found = mean_interval([math.log(ratio) for ratio in ratios])
    return found and Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t that Student's distribution stays within, on both sides, with probability ``level``.

    Args:
        freedom: degrees of freedom, at least 1.
        level: above 0 and below 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # halves the range of the angle down to rounding
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Probability of \\|t\\| below ``sqrt(freedom) tan(angle)``.

    Finite sums, one for odd and one for even degrees of freedom (Abramowitz and Stegun 26.7.3, 4).
    """
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
