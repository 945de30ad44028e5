"""Slots of the torch engine: rollouts that have one or wait for one, and their KV caches.

A row's newest token is never in the cache: the step that samples its successor writes it. So
prefill needs no logits, and prompts, carried responses and new weights are handled alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from stretto.errors import EngineError
from stretto.models.cached import RowCache
from stretto.rollout.base import EngineSettings, Row
from stretto.rollout.steps import ModelPass


@dataclass(slots=True, kw_only=True, eq=False)
class SlotRow(Row):
    """A rollout whose first ``cached`` tokens have a KV cache.

    Attributes:
        cache_version: weights version that started its cache (older if carried over).
        kv: its cache while it has no slot, because it is waiting or parked.
    """

    seed: int
    cache_version: int
    cached: int = 0
    kv: RowCache | None = None

    @property
    def ready(self) -> bool:
        return self.cached == len(self.tokens) - 1

    def void(self, version: int) -> None:
        self.cached = 0
        self.kv = None
        self.cache_version = version


class Slots:
    """Rollouts in slots and in the queue for one. A row's index in ``rows`` is its slot.

    Args:
        fixed: whether the cache is allocated once, for all slots and the longest rollouts.
    """

    def __init__(self, model_pass: ModelPass, settings: EngineSettings, *, fixed: bool) -> None:
        self.most = settings.slots
        if self.most < 1:
            raise EngineError(f"an engine needs a slot at least; slots = {self.most}", "no-slots")
        self.cache = model_pass.cache
        self.rows: list[SlotRow] = []
        self.waiting: deque[SlotRow] = deque()
        self._pass = model_pass
        self._settings = settings
        self._fixed = fixed

    def requeue(self) -> None:
        """Queue all rows in the order of admission to another engine, for example in a resumed run,
        so that the same rows are prefilled together and results are bitwise equal.
        """
        rows = [*self.rows, *self.waiting]
        self.rows, self.waiting = [], deque(sorted(rows, key=lambda row: row.id))

    def fill(self) -> None:
        """Give free slots to waiting rows."""
        coming = min(len(self.waiting), self.most - len(self.rows))
        if not coming:
            return
        slots = len(self.rows) + coming
        rows = islice(self.waiting, coming)
        tokens = max(len(row.prompt) + row.sampling.max_new_tokens for row in rows)
        if self._fixed:
            slots, tokens = self.most, max(tokens, self._settings.longest)
        self.cache.hold(slots, self.most)
        self.cache.reserve(tokens)
        for _ in range(coming):
            row = self.waiting.popleft()
            if row.kv:
                self.cache.put(len(self.rows), row.kv, self._pass.device)
                row.kv = None
            self.rows.append(row)

    def prefill(self, version: int) -> int:
        """Read tokens of rows within the budget, with weights of a version. Return their number."""
        tokens_read = 0
        room = budget = self._settings.rollout.prefill_tokens
        while room > 0 and (pending := [s for s, row in enumerate(self.rows) if not row.ready]):
            slots = pick_prefill(self.rows, pending, room, version)
            rows = [self.rows[slot] for slot in slots]
            missing = [row.tokens[row.cached : -1] for row in rows]
            width = max(map(len, missing), default=room)
            if room < budget and width > room:
                break  # a pass after the first must prefill rows completely
            if rows:
                parts = [tokens[:room] for tokens in missing]
                self._pass.prefill(slots, [row.cached for row in rows], parts)
                for row, part in zip(rows, parts, strict=True):
                    row.cached += len(part)
                    tokens_read += len(part)
            self._copy_shared_prompts(pending, version)
            room -= width * max(len(rows), 1)
        return tokens_read

    def _copy_shared_prompts(self, pending: Sequence[int], version: int) -> None:
        slot_by_prompt = {
            row.prompt: slot
            for slot, row in enumerate(self.rows)
            if row.cached >= len(row.prompt) - 1 and row.cache_version == version
        }
        for slot in pending:
            row = self.rows[slot]
            if row.cached == 0 and row.prompt in slot_by_prompt:
                row.cached = len(row.prompt) - 1
                self.cache.copy_row(slot_by_prompt[row.prompt], slot, row.cached)

    def kv_of(self, row: SlotRow) -> RowCache | None:
        """Return the KV cache of a row, copied if the row is in a slot."""
        if row not in self.rows:
            return row.kv
        return self.cache.take(self.rows.index(row), row.cached, row.cache_version)

    def vacate(self, slot: int) -> None:
        """Free a slot. The last row moves there."""
        last = self.rows.pop()
        if slot < len(self.rows):
            self.rows[slot] = last
            self.cache.copy_row(len(self.rows), slot, last.cached)
        self.cache.trim(max((row.cached for row in self.rows), default=0) + 1)

    def drop_except(self, ids: Collection[int]) -> None:
        self.waiting = deque(row for row in self.waiting if row.id in ids)
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].id not in ids:
                self.vacate(slot)

    def bound_kept(self, parked: Iterable[SlotRow], version: int) -> None:
        """Drop KV caches outside the slots beyond the slots' tokens, on the device and on the host.

        Drops those of rows waiting for a slot first, from the end of the queue, then of the longest
        parked rows. So an engine needs at most twice the memory of its slots on the device, and as
        much as the slots on the host, however many episodes wait.
        """
        cached_rows = [r for r in (*reversed(self.waiting), *parked) if r.kv]
        longest = max((len(r.prompt) + r.sampling.max_new_tokens for r in cached_rows), default=0)
        room = self.most * max(self.cache.capacity, longest)  # slots grow for incoming rows
        device = self._pass.device
        for on_device in (True, False):
            rows = [r for r in cached_rows if r.kv and (r.kv.device == device) is on_device]
            excess = sum(row.cached for row in rows) - room
            for row in rows:
                if excess <= 0:
                    break
                excess -= row.cached
                row.void(version)


def pick_prefill(
    rows: Sequence[SlotRow], pending: Sequence[int], budget: int, version: int
) -> list[int]:
    """Pick slots for one prefill pass, longest first, with padded width times rows in the budget.

    - No row is padded to more than twice its length, because a second pass costs less.
    - New and continued rows do not mix, because new ones need no mask.
    - Of rows with the same prompt, all but the first wait until it is prefilled under the current
      weights.
    """
    slots: list[int] = []
    prompts = {
        row.prompt
        for row in rows
        if row.cached and len(row.prompt) > 1 and row.cache_version == version
    }
    width = 0
    lengths = {slot: len(rows[slot].tokens) - 1 - rows[slot].cached for slot in pending}
    for slot in sorted(pending, key=lambda s: -lengths[s]):
        row = rows[slot]
        if row.cached == 0 and row.prompt in prompts:
            continue
        width = width or min(lengths[slot], budget)
        if slots and ((len(slots) + 1) * width > budget or 2 * lengths[slot] < width):
            break
        if slots and (row.cached == 0) != (rows[slots[0]].cached == 0):
            continue
        if row.cached == 0 and len(row.prompt) > 1:
            prompts.add(row.prompt)
        slots.append(slot)
    return slots
