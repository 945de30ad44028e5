"""Decoding without a model: which rollouts advance in a call, how far, and how long it takes.

The same rules as a real engine with continuous batching: rollouts wait for a slot, are prefilled,
and then get one token a decode step together with all others, until they end and their slot goes to
the next. Copies of the model (*replicas*) work side by side, each on rollouts of its own.

Rows are never walked step by step. All rows of a replica share one count of steps, so that a row is
two numbers, the steps at which it came and at which it will end; a call costs time in proportion to
the rows that end in it, and to the chunks that it returns.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from stretto.runtime.sim.costs import GeneratorCost
from stretto.types import FinishReason


@dataclass(slots=True)
class SimRow:
    """A rollout that is being decoded.

    Attributes:
        group: rollouts with the same one share a prompt, whose cache they can copy.
        prompt: its tokens.
        tokens: response tokens that have been returned.
        length: response tokens at its end.
        finish: why it will end.
        cached: prompt and response tokens whose keys and values came with it.
        base: the replica's count of steps minus the row's tokens, while it has a slot.
    """

    id: int
    group: int
    prompt: int
    tokens: int
    length: int
    finish: FinishReason
    cached: int = 0
    base: int = 0


@dataclass(slots=True)
class DecodeWork:
    """The work of a call.

    Attributes:
        seconds: how long it took.
        steps: decode steps of the replica that took the most.
        tokens: decoded by all.
        prefilled: prompt and response tokens that had to be prefilled.
        context: tokens of context that the steps read, all in all.
        uneven_s: seconds that a replica waited for the slowest of them, on average.
    """

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    prefilled: int = 0
    context: int = 0
    uneven_s: float = 0.0


class Replica:
    """A copy of the model, with its slots."""

    def __init__(self, cost: GeneratorCost, slots: int | None) -> None:
        self._cost, self._slots = cost, slots
        self.waiting: deque[SimRow] = deque()
        self.rows: dict[int, SimRow] = {}
        self.step = 0
        self._ends: list[tuple[int, int]] = []  # (step, rollout id); left behind by those that went
        self._in_rows = 0  # tokens
        self._longest: list[tuple[int, int]] = []  # (base - prompt, rollout id); likewise
        self._reserved = 0  # tokens of the cache, at the end of all rows
        self._to_prefill = 0
        self._void = False
        self._groups: Counter[int] = Counter()
        self.time_s = 0.0  # since the call began
        self.left = 0  # steps of the call
        self.event_s = inf  # when the next event is; infinite when there is no more to do
        self._event_steps = 0
        self.work = DecodeWork()

    @property
    def load(self) -> int:
        """Rollouts here."""
        return len(self.rows) + len(self.waiting)

    def begin(self, max_steps: int) -> None:
        """Start a call."""
        self.time_s, self.left, self.work = 0.0, max_steps, DecodeWork()
        self.fill()

    def advance(self) -> list[SimRow]:
        """Go on to the next event; return the rows that end there, by id."""
        return self._advance(self._event_steps)

    def advance_until(self, time_s: float) -> list[SimRow]:
        """Finish the step under way at this time of the call; return the rows that end by then."""
        most = self._event_steps
        if not most or time_s <= self.time_s:
            return []
        return self._advance(self._steps_within(time_s - self.time_s, most))

    def take_out(self, rollout_id: int) -> SimRow:
        """Remove a row; it keeps what it needs to go on elsewhere.

        Raises:
            KeyError: it is not here.
        """
        for row in self.waiting:
            if row.id == rollout_id:
                self.waiting.remove(row)
                return row
        row = self.rows.pop(rollout_id)
        self._leave(row)
        return row

    def void_cache(self) -> None:
        """Have the keys and values of all rows made again."""
        self._void = True
        for row in self.waiting:
            row.cached = 0

    def fill(self) -> None:
        """Give free slots to waiting rollouts, prefill what is not cached, plan the next event."""
        if self._void:
            self._to_prefill, self._void = self._tokens_of_rows(), False
        while self.waiting and self.left and self._has_room(self.waiting[0]):
            row = self.waiting.popleft()
            self._reserved += row.prompt + row.length
            shared = row.prompt if self._groups[row.group] else 0
            self._to_prefill += row.prompt + row.tokens - max(row.cached, shared)
            self._groups[row.group] += 1
            self._in_rows += row.prompt + row.tokens
            row.base = self.step - row.tokens
            self.rows[row.id] = row
            if self._cost.padded:
                heapq.heappush(self._longest, (row.base - row.prompt, row.id))
            heapq.heappush(self._ends, (row.base + row.length, row.id))
        if self._to_prefill:
            self.time_s += self._cost.prefill.seconds(self._to_prefill)
            self.work.prefilled += self._to_prefill
            self._to_prefill = 0
        self._plan()

    def _has_room(self, row: SimRow) -> bool:
        limit = self._cost.cache_tokens
        fits = not limit or not self.rows or self._reserved + row.prompt + row.length <= limit
        return fits and (self._slots is None or len(self.rows) < self._slots)

    def _tokens_of_rows(self) -> int:
        prompts = {row.group: row.prompt for row in self.rows.values()}
        return sum(prompts.values()) + sum(self.step - row.base for row in self.rows.values())

    def _plan(self) -> None:
        """Find the next event: a row's end, or that of the call's steps."""
        ends = self._ends
        while ends:
            row = self.rows.get(ends[0][1])
            if row and row.base + row.length == ends[0][0]:
                break
            heapq.heappop(ends)
        self._event_steps = min(ends[0][0] - self.step, self.left) if ends else 0
        self.event_s = self.time_s + self._seconds(self._event_steps) if self._event_steps else inf

    def _context(self) -> int:
        """Count the tokens of context that the next step reads."""
        if not self._cost.padded or not self.rows:
            return self._in_rows
        while True:
            start, id_ = self._longest[0]
            row = self.rows.get(id_)
            if row and row.base - row.prompt == start:
                return len(self.rows) * (self.step - start)
            heapq.heappop(self._longest)

    def _seconds(self, steps: int) -> float:
        return self._cost.decode.seconds(len(self.rows), self._context(), steps)

    def _steps_within(self, seconds: float, most: int) -> int:
        if self._seconds(most) <= seconds:
            return most
        return min(self._cost.decode.steps_within(len(self.rows), self._context(), seconds), most)

    def _advance(self, steps: int) -> list[SimRow]:
        rows, work = len(self.rows), self.work
        self.time_s += self._seconds(steps)
        work.context += steps * self._context() + rows * (steps * (steps - 1) // 2)
        work.steps += steps
        work.tokens += rows * steps
        self.step += steps
        self.left -= steps
        self._in_rows += rows * steps
        ended = []
        while self._ends and self._ends[0][0] <= self.step:
            end, id_ = heapq.heappop(self._ends)
            row = self.rows.get(id_)
            if row and row.base + row.length == end:
                del self.rows[id_]
                ended.append(row)
                self._leave(row)
        return ended

    def _leave(self, row: SimRow) -> None:
        self._in_rows -= row.prompt + self.step - row.base
        self._reserved -= row.prompt + row.length
        self._groups[row.group] -= 1
        if not self._groups[row.group]:
            del self._groups[row.group]


def decode(
    replicas: Sequence[Replica], max_steps: int, stop_after: int
) -> tuple[list[SimRow], DecodeWork]:
    """Make a decode call on all replicas at once.

    Args:
        replicas: each works at its own pace.
        max_steps: tokens a row, at most.
        stop_after: once so many rows have ended, every replica finishes its step and stops; 0 does
            not stop.

    Returns:
        The rows that ended, in the order in which they did (by id at one instant), and the work of
        all.
    """
    for replica in replicas:
        replica.begin(max_steps)
    ended: list[tuple[float, int, int, SimRow]] = []

    def note(replica: Replica, rows: Sequence[SimRow]) -> None:
        ended.extend((replica.time_s, replica.work.steps, row.id, row) for row in rows)

    while True:
        first = min(replicas, key=lambda r: (r.event_s, r.work.steps))
        time_s = first.event_s
        if time_s == inf:
            break
        note(first, first.advance())
        if stop_after and len(ended) >= stop_after:
            for replica in replicas:
                if replica is not first:
                    note(replica, replica.advance_until(time_s))
            break
        first.fill()
    ended.sort(key=lambda e: e[:3])
    slowest_s = max(r.time_s for r in replicas)
    work = DecodeWork(
        seconds=slowest_s,
        uneven_s=slowest_s - sum(r.time_s for r in replicas) / len(replicas),
        steps=max(r.work.steps for r in replicas),
        tokens=sum(r.work.tokens for r in replicas),
        prefilled=sum(r.work.prefilled for r in replicas),
        context=sum(r.work.context for r in replicas),
    )
    return [row for *_, row in ended], work
