"""A remedy for old data that was tried and did not become a setting (docs/off-policy.md).

A patch of one process: it replaces a function of ``stretto`` while a run trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from stretto.algorithms import correction
from stretto.algorithms.reductions import joined
from stretto.config import AlgorithmConfig


def geometric_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    settings: AlgorithmConfig,
    episodes: Tensor | None = None,
) -> Tensor:
    """Weights [B, T] of 1 if the geometric mean of a response's token ratios lies from 1 / cap to
    cap, otherwise 0: Geo-Mask (Liu and Li 2025, part 3), ``geo_mask`` of prime-rl,
    ``sequence_mask_metric = "geometric"`` of SkyRL, ``rollout_rs = "geometric"`` of verl.
    """
    log_ratio = joined(torch.where(mask, proximal - behaviour, 0.0).sum(dim=1), episodes)
    mean = (log_ratio / joined(mask.sum(dim=1), episodes).clamp_min(1)).exp()
    cap = settings.correction_cap
    kept = (mean >= 1 / cap) & (mean <= cap)
    return (kept[:, None] & mask).to(proximal.dtype)


def _masking() -> AbstractContextManager[Any]:
    return mock.patch.object(correction, "importance_weights", geometric_mask)


REMEDIES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "geometric mean": _masking,
}
"""What to patch, by name."""
