"""Forward passes over a key-value cache in slots: what the engine and the streamed scorers share.

Shapes: n rows, q tokens a row, K key positions read, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import EngineError
from stretto.models.forward import backbone
from stretto.models.masks import LayerMasks, Masks
from stretto.models.slots import SlotCache


class CachedPass:
    """A causal model without its head, over a slot cache.

    Raises:
        EngineError: its layers keep other state than keys and values.
    """

    def __init__(self, model: nn.Module, cache: SlotCache) -> None:
        self.cache = cache
        self.device = next(model.parameters()).device
        self.backbone = backbone(model)
        self.config_of_model: Any = self.backbone.config
        self._masks = LayerMasks(self.config_of_model, next(model.parameters()).dtype)

    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> Tensor:
        """Put tokens of several rows into the cache, each from its own start position.

        Returns:
            Last hidden states [n, q, H]; entries past a row's end are garbage.
        """
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        index = torch.tensor(slots, device=self.device)
        at = torch.tensor(starts, device=self.device)[:, None] + torch.arange(
            width, device=self.device
        )
        if not any(starts):
            self.cache.aim(index, None, 0)
            return self._hidden(ids, at, None)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        padding = torch.arange(width, device=self.device) >= lengths[:, None]
        read = max(s + len(row) for s, row in zip(starts, rows, strict=True))
        self.cache.aim(index, at.masked_fill(padding, self.cache.capacity), read)
        at = at.masked_fill(padding, 0)  # a model with learned positions has none for padding
        return self._hidden(ids, at, self._masks(at, read))

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Masks | None) -> Tensor:
        output = self.backbone(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def check_cache(
    own: CachedPass,
    newest: Callable[[Tensor, Tensor, int], Tensor],
    head: Callable[[Tensor], Tensor],
) -> None:
    """Prefill, continued prefill and a last token over rows of two lengths must be the plain pass.

    Args:
        own: over a cache of its own, with 2 slots and 8 positions.
        newest: what the newest tokens give, out of ids [2], positions [2] and key positions read.
        head: the same of the hidden states [2, H] of a plain pass.

    Raises:
        EngineError: they are not: the model keeps state besides keys and values, or takes no masks.
    """
    model: Any = own.backbone
    name = type(model).__name__
    advice = "Choose a decoder-only model with plain full or sliding-window attention"
    table: Tensor = model.get_input_embeddings().weight
    rows = [[(3 * i + k) % len(table) for i in range(n)] for k, n in ((0, 7), (1, 3))]
    try:
        own.prefill([0, 1], [0, 0], [rows[0][:3], rows[1][:1]])
        own.prefill([1, 0], [1, 3], [rows[1][1:2], rows[0][3:6]])
        ids = torch.tensor([row[-1] for row in rows], device=own.device)
        at = torch.tensor([len(row) - 1 for row in rows], device=own.device)
        cached = newest(ids, at, 7)
        each = [torch.tensor([row], device=own.device) for row in rows]
        plain = torch.cat(
            [head(model(input_ids=row, use_cache=False).last_hidden_state[:, -1]) for row in each]
        )
    except Exception as error:
        raise EngineError(
            f"{name} does not run over a key-value cache in slots: {error}. {advice}"
        ) from error
    worst = (cached - plain).abs().max().item()
    scale = 1e-3 if table.dtype == torch.float32 else 0.1
    if not worst <= scale * plain.abs().max().item() + 1e-4:
        raise EngineError(
            f"{name} computes something else over a key-value cache in slots than without one "
            f"(its outputs differ by {worst:.3g}). {advice}"
        )
