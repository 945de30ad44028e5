"""Attention masks out of positions, for passes over a key-value cache.

Shapes: n rows, q tokens a row, K key positions read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.errors import EngineError

Masks = Tensor | Mapping[str, Tensor]


class LayerMasks:
    """Boolean attention masks [n, 1, q, K] out of positions, one a kind of layer."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._additive = config._attn_implementation == "eager"
        kinds = set(getattr(config, "layer_types", None) or ())
        kinds |= {f"{k} (GPT-Neo)" for k in getattr(config, "attention_layers", ()) if k == "local"}
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise EngineError(
                f"layers of type {', '.join(sorted(unknown))} keep no plain key-value cache; "
                "slots are for full and sliding-window attention only. Choose another model"
            )
        self._window = int(getattr(config, "sliding_window", None) or 0)
        self._mixed = "sliding_attention" in kinds
        if kinds and not self._mixed:
            self._window = 0

    def __call__(self, positions: Tensor, read: int) -> Masks:
        """Masks for queries at ``positions`` [n, q] over key positions below ``read``."""
        keys = torch.arange(read, device=positions.device)
        at = positions[:, None, :, None]
        full = keys <= at
        if not self._window or read <= self._window:
            return self._form(full)
        near = self._form(full & (keys > at - self._window))
        full = self._form(full)
        return {"full_attention": full, "sliding_attention": near} if self._mixed else near

    def _form(self, mask: Tensor) -> Tensor:
        """Eager attention adds its mask to the scores."""
        if not self._additive:
            return mask
        low = torch.finfo(self._dtype).min
        return torch.zeros_like(mask, dtype=self._dtype).masked_fill(~mask, low)
