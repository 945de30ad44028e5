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


WINDOW = "sliding_window"
"""Setting of a model's config: the number of last tokens that a layer with a window sees."""


class LayerMasks:
    """Boolean attention masks [n, 1, q, K] out of positions, one a kind of layer.

    Args:
        config: the text decoder's. Its window is read anew for each mask, as transformers does.
        dtype: type that the model computes in.

    Raises:
        EngineError: a layer keeps other state than keys and values, or windows differ in size.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._additive = config._attn_implementation == "eager"
        kinds = set(getattr(config, "layer_types", None) or ())
        kinds |= {f"{k} (GPT-Neo)" for k in getattr(config, "attention_layers", ()) if k == "local"}
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise EngineError(
                f"layers of type {', '.join(sorted(unknown))} keep no plain key-value cache; "
                "slots are for full and sliding-window attention only. Choose another model"
            )
        try:
            getattr(config, WINDOW, None)
        except RuntimeError as error:  # of a config whose layers differ in it
            raise EngineError(
                "layers have windows of different sizes; slots are for full attention and windows "
                "of one size. Choose another model"
            ) from error
        self._mixed = "sliding_attention" in kinds
        self._windowed = self._mixed or not kinds

    @property
    def window(self) -> int:
        """Number of tokens that a layer with a window sees; 0 if no layer has one."""
        return int(getattr(self._config, WINDOW, None) or 0) if self._windowed else 0

    def __call__(self, positions: Tensor, read: int) -> Masks:
        """Masks for queries at ``positions`` [n, q] over key positions below ``read``."""
        keys = torch.arange(read, device=positions.device)
        at = positions[:, None, :, None]
        full, window = keys <= at, self.window
        if not window or read <= window:
            return self._form(full)
        near = self._form(full & (keys > at - window))
        full = self._form(full)
        return {"full_attention": full, "sliding_attention": near} if self._mixed else near

    def _form(self, mask: Tensor) -> Tensor:
        if not self._additive:
            return mask
        low = torch.finfo(self._dtype).min
        return torch.zeros_like(mask, dtype=self._dtype).masked_fill(~mask, low)
