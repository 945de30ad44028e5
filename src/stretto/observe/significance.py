"""What the seeds of a comparison show: confidence intervals, and which schedules differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.95
"""Share of such intervals that hold the true mean."""


class Interval(NamedTuple):
    """A mean with the interval that the true one lies in, at :data:`LEVEL`."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of values that scatter normally; ``None`` for fewer than two of them."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """Return the geometric mean of positive ratios, whose logarithms scatter normally.

    Ratios of two paired measurements: what a pair has in common, a seed for one, cancels.
    """
    found = mean_interval([math.log(ratio) for ratio in ratios])
    return found and Interval(*map(math.exp, found))


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return the t that Student's distribution stays within, on both sides, with probability
    ``level``, for ``freedom`` degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # halves the range of the angle down to rounding
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the probability of \\|t\\| below ``sqrt(freedom) tan(angle)``.

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


def verdict(what: str, baseline: str, ratios: Mapping[str, Sequence[float | None]]) -> str:
    """Say in a sentence which variants are better or worse than the baseline, and which may be
    neither.

    A difference is significant where the interval of the mean ratio leaves out 1. A variant with a
    pair that lacks a ratio is not judged: the pairs that have one are a selection.

    Args:
        what: compared quantity, which is the better the smaller it is.
        ratios: by variant, without the baseline: for each seed that both ran, the baseline's
            quantity over the variant's; ``None`` where one of the two did not reach the target.
    """
    kinds = fewer, more, either, unknown = (
        "significantly fewer",
        "significantly more",
        "no significant difference",
        "not judged",
    )
    said: dict[str, list[str]] = {kind: [] for kind in kinds}
    for variant, pairs in ratios.items():
        known = [ratio for ratio in pairs if ratio is not None]
        found = ratio_interval(known)
        if found is None or len(known) < len(pairs):
            reached = f"({len(known)} of {len(pairs)} pairs reached the target)"
            said[unknown].append(f"{variant} {reached}")
        else:
            kind = fewer if found.low > 1 else more if found.high < 1 else either
            figures = f"{found.mean:.2f}x [{found.low:.2f}, {found.high:.2f}]"
            said[kind].append(f"{variant} {figures}")
    found_text = "; ".join(f"{kind}: {', '.join(some)}" for kind, some in said.items() if some)
    return (
        f"{what}, {baseline}'s over the schedule's own, paired by seed: geometric mean and its "
        f"{100 * LEVEL:.0f} % interval (Student's t on logarithms), each schedule by itself. "
        f"{found_text}."
    )
