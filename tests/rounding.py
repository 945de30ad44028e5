"""How far rounding may carry a result from its reference: from the type and the length of the sums.

Kernels differ from CPU to CPU in the order in which they add, in fused multiplications and in how
they approximate exponentials, so a bound that one machine has measured fails on another.
"""

from __future__ import annotations

import math

import torch

CERTAIN = 8.0
"""Bounds of independent roundings hold up to a factor that grows with the certainty asked for
(Higham and Mary 2019, theorem 2.4: with 1 - 2 exp(-CERTAIN**2 / 2) of each sum)."""

GRADIENT_TERMS = 2000
"""Terms on the way through the models of ``helpers.py`` and back: for each of two layers, sums over
16 features in four products and a norm, 32 in one, and up to 120 positions in attention; 61 words;
the same again backwards, and 120 positions of which a weight's gradient is the sum."""


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return a bound of the relative error of a result, for the largest of a tensor's entries.

    Roundings of either sign add up like a random walk: n of them to the square root of n times the
    unit roundoff, half of the type's epsilon, in whatever order the terms are added. A result that
    leaves out or counts twice one of n like terms is wrong by a share of 1 / n, which is orders of
    magnitude more.

    Args:
        terms: added on the longest way from what is given to the result; those of steps that follow
            each other count together.
        dtype: of the computation.
    """
    return CERTAIN * math.sqrt(terms) * torch.finfo(dtype).eps / 2
