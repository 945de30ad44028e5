"""Key-value memory in slots: one row a rollout, every row at its own length.

Shapes: S slots, C positions a slot, n rows in a forward pass, q tokens a row in it, h key-value
heads, d head size.

A transformers model writes and reads its cache through one method, ``update``; before each forward
pass its owner says where that will go (:meth:`SlotCache.aim`). Key j of a row is always the token
at position j, so a mask over positions is all that attention needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

GRAIN = 64
"""Slots grow by multiples of this many positions."""


class SlotCache(Cache):
    """Keys and values of every layer, [S, h, C + 1, d] each, allocated when first seen.

    The last position of a slot is scratch: padding is written there, and never read.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: slice | Tensor = slice(0, 0)
        self._index: Any = None
        self._positions: Tensor | None = None
        self._read = 0

    def reserve(self, positions: int) -> None:
        """Make every slot hold at least ``positions`` tokens; what is stored stays."""
        if positions <= self.capacity:
            return
        self.capacity = -(-positions // GRAIN) * GRAIN
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                store[layer] = old.new_zeros(*old.shape[:2], self.capacity + 1, old.shape[3])
                store[layer][:, :, : old.shape[2] - 1] = old[:, :, :-1]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers; 0 before the first pass."""
        layers = (*self._keys, *self._values)
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in layers)

    def aim(self, rows: slice | Tensor, positions: Tensor | None, read: int) -> None:
        """Say what the next forward pass is about.

        Args:
            rows: its slots; a slice reads them without a copy.
            positions: [n, q] where its tokens go, padding at ``capacity``; ``None`` when every row
                starts at position 0 (attention is then within the pass).
            read: attend to positions up to this one, exclusive; unused at position 0.
        """
        self._rows, self._positions, self._read = rows, positions, read
        if positions is not None:
            index = (
                torch.arange(rows.start, rows.stop, device=positions.device)
                if isinstance(rows, slice)
                else rows
            )
            self._index = index[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [n, h, q, d]; return what to attend to."""
        if layer_idx == len(self._keys):
            shape = (self.slots, key_states.shape[1], self.capacity + 1)
            self._keys.append(key_states.new_zeros(*shape, key_states.shape[3]))
            self._values.append(value_states.new_zeros(*shape, value_states.shape[3]))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, at = self._rows, self._positions
        if at is None:
            width = key_states.shape[2]
            keys[rows, :, :width], values[rows, :, :width] = key_states, value_states
            return key_states, value_states
        keys[self._index, :, at] = key_states.transpose(1, 2)
        values[self._index, :, at] = value_states.transpose(1, 2)
        return keys[rows, :, : self._read], values[rows, :, : self._read]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for store in (self._keys, self._values):
            for layer in store:
                layer[target, :, :length] = layer[source, :, :length]

    def slot_bytes(self, positions: int) -> int:
        """Bytes that :meth:`reserve` allocates for one slot of so many positions.

        Layers are known once a first pass has been made.
        """
        held = -(-positions // GRAIN) * GRAIN + 1
        token = sum(x.shape[1] * x.shape[3] * x.itemsize for x in (*self._keys, *self._values))
        return held * token

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of transformers' interface; positions are always given, so nothing depends on it."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Key length and offset of a pass that starts at position 0."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first query of a pass that starts at position 0."""
        return 0
