"""Rollouts inside the engine: their rows, the rows' slots, and the choice of what to prefill next.

Shapes: S slots, C positions a slot, h key-value heads, d head size, c cached tokens of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.errors import EngineError
from stretto.models.cached import SlotCache
from stretto.rollout.base import Row


@dataclass(frozen=True, slots=True)
class RowCache:
    """The keys and values of one row, outside any slot: what a transfer carries.

    Attributes:
        keys, values: one tensor [h, c, d] a layer, copied out of the slot.
        version: of the weights under which the row's cache was begun.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class SlotRow(Row):
    """A rollout of which ``cached`` tokens have keys and values.

    Attributes:
        seed: of its random stream.
        cache_version: of the weights under which its cache was begun; with carried caches that are
            used again, this may be older than the engine's version.
        kv: keys and values that came with it, until it has a slot.
    """

    seed: int
    cache_version: int
    cached: int = 0
    kv: RowCache | None = None

    @property
    def ready(self) -> bool:
        """Return whether all but the newest token have keys."""
        return self.cached == len(self.tokens) - 1

    def void(self, version: int) -> None:
        """Forget keys and values; new ones will be made under ``version``."""
        self.cached, self.kv, self.cache_version = 0, None, version


class RowSlots(SlotCache):
    """A slot cache whose rows are allocated as they are needed, and whose rows can travel."""

    def __init__(self, most: int, device: torch.device) -> None:
        super().__init__(0)
        self._most, self._device = most, device

    def hold(self, rows: int) -> bool:
        """Allocate at least ``rows`` slots, keeping what is stored; return whether memory moved.

        It grows by half at a time, so that rows which come one by one cost few copies.
        """
        if rows <= self.slots:
            return False
        self.slots = min(self._most, max(rows, self.slots * 3 // 2))
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                store[layer] = old.new_zeros(self.slots, *old.shape[1:])
                store[layer][: len(old)] = old
        return True

    def take(self, slot: int, length: int, version: int) -> RowCache:
        """Return a copy of the first ``length`` positions of a slot."""
        keys, values = (
            tuple(layer[slot, :, :length].clone() for layer in store)
            for store in (self._keys, self._values)
        )
        return RowCache(keys, values, version)

    def put(self, slot: int, row: RowCache) -> None:
        """Write a row that :meth:`take` returned into a slot; it may come from another device.

        Raises:
            EngineError: the row is of a model with other layers, heads or head sizes.
        """
        for store, layers in ((self._keys, row.keys), (self._values, row.values)):
            if not store:
                shapes = [(self.slots, x.shape[0], self.capacity + 1, x.shape[2]) for x in layers]
                store += [
                    x.new_zeros(shape, device=self._device)
                    for x, shape in zip(layers, shapes, strict=True)
                ]
            own, given = ([(x.shape[-3], x.shape[-1]) for x in y] for y in (store, layers))
            if own != given:
                raise EngineError(
                    "a rollout can only move between engines of one model: its cache has layers of "
                    f"(heads, head size) {given}, and the slots here are for {own}"
                )
            for target, source in zip(store, layers, strict=True):
                target[slot, :, : source.shape[1]] = source


def pick_prefill(
    rows: Sequence[SlotRow], pending: Sequence[int], budget: int, version: int
) -> list[int]:
    """Pick slots for one prefill pass: the longest first, padded width times rows in the budget.

    No row is padded to more than its double: a second pass costs less. Fresh rows and rows that go
    on do not mix, as fresh ones need no mask. Of several rows with one prompt, all but the first
    wait until the first has prefilled it under the present weights.

    Args:
        rows: all rows; a row's index is its slot.
        pending: slots of the rows that are not ready.
    """
    picked: list[int] = []
    taken = {
        row.prompt
        for row in rows
        if row.cached and len(row.prompt) > 1 and row.cache_version == version
    }
    width = 0
    left = {slot: len(rows[slot].tokens) - 1 - rows[slot].cached for slot in pending}
    for slot in sorted(pending, key=lambda s: -left[s]):
        row = rows[slot]
        if row.cached == 0 and row.prompt in taken:
            continue
        width = width or min(left[slot], budget)
        if picked and ((len(picked) + 1) * width > budget or 2 * left[slot] < width):
            break
        if picked and (row.cached == 0) != (rows[picked[0]].cached == 0):
            continue
        if row.cached == 0 and len(row.prompt) > 1:
            taken.add(row.prompt)
        picked.append(slot)
    return picked
