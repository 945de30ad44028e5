"""The KL penalty to the reference: per-token estimates and the adaptive coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.config.algorithm import Estimator
from stretto.errors import LearnerError
from stretto.stateful import Stateful

_ERROR_CLIP = 0.2
"""Ziegler et al. 2019, section 2.2: the proportional error is clipped to +-0.2."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Estimator) -> Tensor:
    """Estimate KL(pi || pi_ref) from samples of pi ("Approximating KL divergence", Schulman 2020).

    With ``d = log pi - log pi_ref``: ``k1 = d`` (unbiased, high variance), ``k2 = d^2 / 2``
    (biased, low variance), ``k3 = exp(-d) - 1 + d`` (unbiased, never negative).

    Both inputs are [B, T], of the same tokens at the sampling temperature. The result is
    elementwise, in nats, so slots outside a mask are not cleared.
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


class AdaptiveKL(Stateful):
    """The coefficient beta of the KL penalty, adapted in proportion to the KL's relative error.

    Ziegler et al. 2019, section 2.2::

        e    = clip(KL / target - 1, -0.2, 0.2)
        beta = beta * (1 + e * n / horizon)

    ``n`` must be less than 5 horizons for beta to stay above 0, which the settings check. The
    target is in nats per response. A target of 0 keeps beta fixed.
    """

    saved = ("coef",)

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore an adapted beta. A fixed one is that of the settings."""
        if self._target:
            super().load_state_dict(state)

    def update(self, kl: float, n: int) -> None:
        """Update beta after ``n`` responses with a mean KL of ``kl`` nats per response."""
        if self._target == 0:
            return
        if not math.isfinite(kl):
            raise LearnerError(
                f"the KL to the reference must be finite to adapt its coefficient; got {kl}. "
                "Lower training.lr, or keep the coefficient fixed with algorithm.kl_target = 0",
                "kl-not-finite",
            )
        error = min(max(kl / self._target - 1, -_ERROR_CLIP), _ERROR_CLIP)
        self.coef *= 1 + error * n / self._horizon
