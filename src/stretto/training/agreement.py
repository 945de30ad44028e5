"""A check that engine and learner compute the same policy, up to rounding."""

from __future__ import annotations

import math

import torch

from stretto.algorithms.policy import SQUARES, SUM, TOKENS
from stretto.algorithms.reductions import Metrics
from stretto.errors import LearnerError
from stretto.stateful import Stateful

CALIBRATION_TOKENS = 1000
"""Response tokens measured before the rounding estimate is used."""

FACTOR = 2.0
"""The tolerance is this multiple of the measured rounding, plus the floor."""

LIMITS = {True: 0.2, False: 1e-3}
"""The largest tolerance, in bfloat16 and in float32. It applies until rounding is measured."""

FLOORS = {True: 1e-2, False: 1e-4}
"""Added to the tolerance, as rounding may grow while a model learns. Keys: whether it is coarse."""

OUTLIER = 6.0
"""The size of a single outlier that still counts as rounding, in usual differences."""


def is_coarse(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


def differences(metrics: Metrics) -> dict[str, float]:
    """Return mean (learner less engine) and RMS of the summed differences, if there are any."""
    if TOKENS not in metrics.sums:
        return {}
    total, squares, tokens = (metrics.sums[name].item() for name in (SUM, SQUARES, TOKENS))
    return {
        "sampling/logp_difference_mean": total / tokens,
        "sampling/logp_difference_rms": math.sqrt(squares / tokens),
    }


class Agreement(Stateful):
    """Checks the engine's log-probs against the learner's, on responses of the same weights.

    The first :data:`CALIBRATION_TOKENS` tokens measure the root mean square difference, which is
    rounding. From then on the tolerance is :data:`FACTOR` times that plus a floor. For n tokens it
    is sqrt(1 + OUTLIER^2 / n) times larger, so that one outlier among few tokens passes. A
    ``given`` tolerance above 0 replaces all of this. ``exact`` refuses any difference.
    """

    saved = ("_squares", "_tokens")

    def __init__(self, dtype: torch.dtype, given: float, *, exact: bool = False) -> None:
        self._given, self._coarse = given, is_coarse(dtype)
        self._exact = exact
        self._squares, self._tokens = 0.0, 0.0

    @property
    def tolerance(self) -> float:
        """The largest RMS difference of many log-probs that passes, in nats."""
        limit = LIMITS[self._coarse]
        if self._measured is None:
            return limit
        return min(FACTOR * self._measured + FLOORS[self._coarse], limit)

    @property
    def _measured(self) -> float | None:
        enough = self._tokens >= CALIBRATION_TOKENS
        return math.sqrt(self._squares / self._tokens) if enough else None

    def check(self, metrics: Metrics) -> None:
        """Check the sums of a mini-batch, before an update of the weights that sampled part of it.
        Raises LearnerError if the difference exceeds the tolerance.
        """
        if TOKENS not in metrics.sums:
            return
        squares, tokens = metrics.sums[SQUARES].item(), metrics.sums[TOKENS].item()
        rms = math.sqrt(squares / tokens)
        allowed = self._given or self.tolerance * math.sqrt(1 + OUTLIER**2 / tokens)
        remedy = "set training.ratio_tolerance, or model.dtype = 'float32'"
        if self._exact:
            allowed = 0.0
            remedy = "or of another CPU or GPU, leave training.match_engine out"
        if not rms <= allowed:
            start = "" if self._measured is None else f"at the start it was {self._measured:.4g}; "
            raise LearnerError(
                "engine and learner disagree about the policy: on responses sampled by the very "
                f"weights that are trained, their log-probs differ by {rms:.4g} (root mean square "
                f"of {tokens:.0f} tokens; {start}the tolerance is {allowed:.4g}). If it is "
                f"rounding of a low-precision model, {remedy}",
                "policies-disagree",
            )
        if not self._given and self._measured is None:
            self._squares, self._tokens = self._squares + squares, self._tokens + tokens
