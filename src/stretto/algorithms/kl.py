"""The KL penalty to the reference: per-token estimates, and a coefficient that adapts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stretto.config.algorithm import Estimator
from stretto.errors import LearnerError, StateError

_ERROR_CLIP = 0.2
"""Ziegler et al. 2019, section 2.2: the proportional error is held within +-0.2."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Estimator) -> Tensor:
    """Estimate KL(pi || pi_ref) from samples of pi ("Approximating KL divergence", Schulman 2020).

    With ``d = log pi - log pi_ref``: ``k1 = d`` (unbiased, high variance), ``k2 = d^2 / 2``
    (biased, low variance), ``k3 = exp(-d) - 1 + d`` (unbiased, never negative).

    Both [B, T] are of the same tokens, at the sampling temperature. The result is in nats, and
    elementwise, so slots outside a mask hold what they held.
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


class AdaptiveKL:
    """The KL's coefficient beta, moved in proportion to the measured KL's distance from its target.

    Ziegler et al. 2019, section 2.2::

        e    = clip(KL / target - 1, -0.2, 0.2)
        beta = beta * (1 + e * n / horizon)

    So ``n`` has to be less than 5 horizons for beta to stay above 0, which the settings see to. The
    target is in nats a response; 0 keeps beta where it is.
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef, self._target, self._horizon = coef, target, horizon

    def update(self, kl: float, n: int) -> None:
        """Move beta after ``n`` responses with a mean KL of ``kl`` nats a response."""
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

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back a state of :meth:`state_dict`; raises StateError if it is another one."""
        if set(state) != {"coef"}:
            raise StateError(
                f"the state of AdaptiveKL holds 'coef' alone; got {sorted(state)}. "
                "Resume from a checkpoint of this version",
                "foreign-state",
            )
        self.coef = float(state["coef"])
