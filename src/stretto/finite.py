"""The range of rewards: they are trained on as float32, and must be finite as such."""

from __future__ import annotations

_ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103
"""Half a step beyond float32's largest number."""


def is_finite(number: float) -> bool:
    """Return whether a number is finite as float32: no NaN, and not rounded to infinity."""
    return abs(number) < _ROUNDS_TO_INFINITY
