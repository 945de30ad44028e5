"""The generator in virtual time: it takes the time of a cost model and samples nothing.

Tokens are placeholders, and lengths come from a distribution. Calls out of order (a rollout
admitted twice, or after its end) are errors as with a real engine. As in continuous batching,
rollouts wait for a slot, are prefilled, and then get one token per decode step together with all
others, until they end and their slot goes to the next.

In an episode a rollout leaves its slot when its turn has ended. Its keys and values stay, move to
the host or are dropped, see :meth:`SimGenerator.hold`. If decoding rows need the room, those parked
longest are dropped.

If steps verify proposed tokens, each token of a row counts as a step with a lower cost.

Rows are never stepped one by one. All rows of a replica share one step counter, so that a row is
two numbers, the steps at which it came and at which it will end. The cost of a call is proportional
to the rows that end in it, and to the chunks that it returns.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from stretto.errors import EngineError
from stretto.runtime.sim.cluster import GeneratorRole, known
from stretto.runtime.sim.costs import DecodeCost, GeneratorCost, SimSpeculation, TransferCost
from stretto.runtime.sim.resources import SimWorker
from stretto.runtime.sim.turns import PLACEHOLDERS, SimTurn, turn_of
from stretto.types import (
    Chunk,
    Decoded,
    FinishReason,
    Hold,
    IntArray,
    KVTransfer,
    Response,
    WeightsRef,
    episode_of,
)

_LOGPROBS = np.full(len(PLACEHOLDERS), -1.0, np.float32)
"""Log-probabilities of the placeholders."""
_LOGPROBS.flags.writeable = False


@dataclass(slots=True)
class SimRow:
    """A rollout being decoded. Rows of one group share a prompt, whose cache they can copy.

    Attributes:
        prompt: its tokens.
        tokens: response tokens already returned.
        length: response tokens at its end, or its turn's.
        cached: prompt and response tokens whose keys and values came with it.
        base: the replica's step counter minus the row's tokens, while it has a slot.
    """

    id: int
    group: int
    prompt: int
    tokens: int
    length: int
    finish: FinishReason
    cached: int = 0
    base: int = 0


class Replica:
    """A copy of the model with its slots. 0 slots: unlimited."""

    def __init__(self, cost: GeneratorCost, slots: int, speculation: SimSpeculation) -> None:
        self._cost = cost
        self._slots = slots
        self._speculating = speculation.rows
        self._costs = cost.decode, cost.decode.speculating(speculation)
        self.waiting: deque[SimRow] = deque()
        self.rows: dict[int, SimRow] = {}
        self.step = 0
        self._ends: list[tuple[int, int]] = []  # (step, rollout id), including stale entries
        self._in_rows = 0  # tokens
        self._longest: list[tuple[int, int]] = []  # (base - prompt, rollout id), likewise
        self._reserved = 0  # tokens of the cache, at the end of all rows
        self._to_prefill = 0
        self._void = False
        self._groups: Counter[int] = Counter()
        self.parked: dict[int, int] = {}  # tokens with cached keys and values, oldest first
        self._in_parked = 0
        self.time_s = 0.0  # since the call began
        self.left = 0  # steps left in the call
        self.event_s = inf  # time of the next event, infinite if there is none
        self._event_steps = 0
        self.work: Counter[str] = Counter()  # of the call

    @property
    def load(self) -> int:
        return len(self.rows) + len(self.waiting)

    def begin(self, max_steps: int) -> None:
        self.time_s = 0.0
        self.left = max_steps
        self.work = Counter()
        self.fill()

    def advance(self) -> list[SimRow]:
        return self._advance(self._event_steps)

    def advance_until(self, time_s: float) -> list[SimRow]:
        """Run to the end of the step in progress at ``time_s``. Return the rows that ended."""
        max_steps = self._event_steps
        if not max_steps or time_s <= self.time_s:
            return []
        return self._advance(self._steps_within(time_s - self.time_s, max_steps))

    def take_out(self, rollout_id: int) -> SimRow:
        """Remove a row with what it needs to continue elsewhere. KeyError if unknown."""
        for row in self.waiting:
            if row.id == rollout_id:
                self.waiting.remove(row)
                return row
        row = self.rows.pop(rollout_id)
        self._leave(row)
        return row

    def void_cache(self) -> None:
        """Drop the keys and values of all rows, which are then recomputed."""
        self._void = True
        for row in self.waiting:
            row.cached = 0
        for id_ in list(self.parked):
            self.unpark(id_)

    def park(self, rollout_id: int, tokens: int) -> None:
        self.parked[rollout_id] = tokens
        self._in_parked += tokens

    def unpark(self, rollout_id: int) -> int:
        tokens = self.parked.pop(rollout_id, 0)
        self._in_parked -= tokens
        return tokens

    def fill(self) -> None:
        """Fill free slots, prefill everything not cached, and plan the next event."""
        if self._void:
            self._to_prefill, self._void = self._tokens_of_rows(), False
        while self.waiting and self.left and self._has_room(self.waiting[0]):
            row = self.waiting.popleft()
            row.cached = max(row.cached, self.unpark(row.id))
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
            self.work["prefilled"] += self._to_prefill
            self._to_prefill = 0
        self._plan()

    def _has_room(self, row: SimRow) -> bool:
        limit, tokens = self._cost.cache_tokens, self._reserved + row.prompt + row.length
        if self._slots and len(self.rows) >= self._slots:
            return False
        if limit and self.rows and tokens > limit:
            return False
        while limit and tokens + self._in_parked - self.parked.get(row.id, 0) > limit:
            oldest = next((id_ for id_ in self.parked if id_ != row.id), None)
            if oldest is None:
                break
            self.unpark(oldest)
        return True

    def _tokens_of_rows(self) -> int:
        prompts = {row.group: row.prompt for row in self.rows.values()}
        return sum(prompts.values()) + sum(self.step - row.base for row in self.rows.values())

    def _plan(self) -> None:
        ends = self._ends
        while ends:
            row = self.rows.get(ends[0][1])
            if row and row.base + row.length == ends[0][0]:
                break
            heapq.heappop(ends)
        self._event_steps = min(ends[0][0] - self.step, self.left) if ends else 0
        self.event_s = self.time_s + self._seconds(self._event_steps) if self._event_steps else inf

    def _context(self) -> int:
        if not self._cost.padded or not self.rows:
            return self._in_rows
        while True:
            start, id_ = self._longest[0]
            row = self.rows.get(id_)
            if row and row.base - row.prompt == start:
                return len(self.rows) * (self.step - start)
            heapq.heappop(self._longest)

    @property
    def _decode(self) -> DecodeCost:
        return self._costs[len(self.rows) <= self._speculating]

    def _seconds(self, steps: int) -> float:
        return self._decode.seconds(len(self.rows), self._context(), steps)

    def _steps_within(self, seconds: float, max_steps: int) -> int:
        if self._seconds(max_steps) <= seconds:
            return max_steps
        return min(self._decode.steps_within(len(self.rows), self._context(), seconds), max_steps)

    def _advance(self, steps: int) -> list[SimRow]:
        rows, work = len(self.rows), self.work
        self.time_s += self._seconds(steps)
        work["context"] += steps * self._context() + rows * (steps * (steps - 1) // 2)
        work["steps"] += steps
        work["tokens"] += rows * steps
        self.step += steps
        self.left -= steps
        self._in_rows += rows * steps
        ended_rows = []
        while self._ends and self._ends[0][0] <= self.step:
            end, id_ = heapq.heappop(self._ends)
            row = self.rows.get(id_)
            if row and row.base + row.length == end:
                del self.rows[id_]
                ended_rows.append(row)
                self._leave(row)
        return ended_rows

    def _leave(self, row: SimRow) -> None:
        self._in_rows -= row.prompt + self.step - row.base
        self._reserved -= row.prompt + row.length
        self._groups[row.group] -= 1
        if not self._groups[row.group]:
            del self._groups[row.group]


def decode(
    replicas: Sequence[Replica], max_steps: int, stop_after: int
) -> tuple[list[SimRow], float, dict[str, float]]:
    """Run a decode call of at most ``max_steps`` on all replicas, each at its own pace.

    Returns the rows that ended, in order of time (then of steps and id), the duration in seconds,
    and the work: decode steps of the replica with the most, tokens decoded, prefilled and read over
    all replicas, and the mean seconds for which replicas waited.

    Args:
        stop_after: once this many rows have ended, every replica finishes its step and stops.
            0: never. The end of a turn does not count.
    """
    for replica in replicas:
        replica.begin(max_steps)
    endings: list[tuple[float, int, int, SimRow]] = []
    finished = 0

    def note(replica: Replica, rows: Sequence[SimRow]) -> None:
        nonlocal finished
        finished += sum(row.finish is not FinishReason.TURN for row in rows)
        endings.extend((replica.time_s, replica.work["steps"], row.id, row) for row in rows)

    while True:
        first = min(replicas, key=lambda r: (r.event_s, r.work["steps"]))
        time_s = first.event_s
        if time_s == inf:
            break
        note(first, first.advance())
        if stop_after and finished >= stop_after:
            for replica in replicas:
                if replica is not first:
                    note(replica, replica.advance_until(time_s))
            break
        first.fill()
    endings.sort(key=lambda e: e[:3])
    slowest_s = max(r.time_s for r in replicas)
    work: dict[str, float] = {"steps": max(r.work["steps"] for r in replicas)}
    work |= {
        name: sum(r.work[name] for r in replicas) for name in ("tokens", "prefilled", "context")
    }
    work["uneven_s"] = slowest_s - sum(r.time_s for r in replicas) / len(replicas)
    return [row for *_, row in endings], slowest_s, work


@dataclass(eq=False)
class SimGenerator:
    """A generator that decodes rollouts to predefined ``lengths``, or through predefined ``turns``.
    Rollouts go to the replica with the fewest, and stay there, even between turns while their keys
    and values are kept. A call occupies all devices. The state is the version. The schedule saves
    rollouts in flight, as with a real engine.
    """

    worker: SimWorker
    role: GeneratorRole
    lengths: Callable[[int], int]
    max_new_tokens: int
    carry: Literal["recompute", "reuse"] = "recompute"
    turns: Callable[[int], Sequence[SimTurn]] = lambda rollout_id: ()

    def __post_init__(self) -> None:
        self._cost = known(self.role.cost)
        self._begin()

    def _begin(self) -> None:
        role = self.role
        self._replicas = [
            Replica(self._cost, role.slots, role.speculation) for _ in range(role.replicas)
        ]
        self._home: dict[int, Replica] = {}
        self._parked: dict[int, Replica] = {}
        self._on_host: dict[int, int] = {}  # tokens with keys and values on the host
        self.version = 0

    async def admit(self, responses: Sequence[Response]) -> None:
        async with self.worker.turn("admit", [r.id for r in responses]):
            back = {r.id: n for r in responses if (n := self._on_host.pop(r.id, 0))}
            for response in responses:
                self._add(response, back.get(response.id, 0))
            if back:
                await self._copy("onload", self._cost.offload, back, sum(back.values()))

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        async with self.worker.turn("decode", max_tokens):
            rows, seconds, work = decode(self._replicas, max_tokens, stop_after)
            for row in rows:
                replica = self._home.pop(row.id)
                if row.finish is FinishReason.TURN:
                    self._parked[row.id] = replica
                    replica.park(row.id, row.prompt + row.length)
            chunks = [self._chunk(row, row.length, row.finish) for row in rows]
            chunks += self._chunks()
            if chunks:
                rollouts, version = [c.rollout_id for c in chunks], self.version
                await self.worker.work("gen", seconds, rollouts=rollouts, version=version, **work)
            return Decoded(chunks, int(work["steps"]))

    async def release(self, rollout_ids: Sequence[int]) -> None:
        async with self.worker.turn("release", rollout_ids):
            for id_ in rollout_ids:
                if replica := self._home.pop(id_, None):
                    replica.take_out(id_)
                self._unpark(id_)

    async def hold(self, rollout_ids: Sequence[int], how: Hold) -> None:
        """Apply ``how`` to keys and values of parked rollouts. Other ids are ignored. Dropped or
        offloaded ones do not return before their rollout continues.
        """
        if how == "keep":
            return
        async with self.worker.turn("hold", rollout_ids, how):
            offloaded_tokens = 0
            for id_ in rollout_ids:
                replica = self._parked.get(id_)
                tokens = replica.unpark(id_) if replica else 0
                if tokens and how == "offload":
                    self._on_host[id_] = tokens
                    offloaded_tokens += tokens
            if offloaded_tokens:
                await self._copy("offload", self._cost.offload, rollout_ids, offloaded_tokens)

    async def _copy(
        self, name: str, cost: TransferCost, rollout_ids: Iterable[int], tokens: int
    ) -> None:
        size_bytes, rollouts = self._cost.cache_bytes * tokens, list(rollout_ids)
        await self.worker.work(name, cost.seconds(size_bytes), rollouts=rollouts, bytes=size_bytes)

    def _unpark(self, rollout_id: int) -> int:
        if replica := self._parked.pop(rollout_id, None):
            replica.unpark(rollout_id)
        return self._on_host.pop(rollout_id, 0)

    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[KVTransfer]:
        """Release rollouts. The receiver accounts for the time of moving a cache."""
        async with self.worker.turn("export", rollout_ids, with_cache):
            replica_by_id = self._home | self._parked
            wrong = [i for i, n in Counter(rollout_ids).items() if n > 1 or i not in replica_by_id]
            if wrong:
                problem = f"rollouts {wrong} are not in this engine, or were named twice"
                raise EngineError(problem, "not-in-engine")
            transfers = []
            for id_ in rollout_ids:
                if id_ in self._parked:
                    cached = self._parked[id_].unpark(id_) + self._unpark(id_)
                else:
                    replica = self._home.pop(id_)
                    decoded = id_ in replica.rows
                    row = replica.take_out(id_)
                    cached = row.prompt + row.tokens if decoded else row.cached
                moved_tokens = cached if with_cache else 0
                transfers.append(KVTransfer(id_, "cache" if moved_tokens else None, moved_tokens))
            return transfers

    async def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        rollouts = [r.id for r in responses]
        async with self.worker.turn("accept", rollouts):
            for response, transfer in zip(responses, transfers, strict=True):
                if response.finish is FinishReason.TURN:
                    replica = min(self._replicas, key=lambda r: r.load)
                    self._parked[response.id] = replica
                    replica.park(response.id, transfer.cached_tokens)
                else:
                    self._add(response, transfer.cached_tokens)
            moved_tokens = sum(t.cached_tokens for t in transfers)
            await self._copy("migrate", self._cost.transfer, rollouts, moved_tokens)

    async def load(self, weights: WeightsRef) -> None:
        async with self.worker.turn("load", weights.version):
            await self.worker.load(weights.version, self._cost.load_s)
            self.version = weights.version
            if self.carry == "recompute":
                self._on_host.clear()
                for replica in self._replicas:
                    replica.void_cache()

    async def restart(self) -> None:
        async with self.worker.turn("restart"):
            self._begin()

    def _add(self, response: Response, cached: int) -> None:
        length, finish = self._end_of(response)
        if response.id in self._home:
            problem = f"rollout {response.id} is in the engine already; release it first"
            raise EngineError(problem, "already-in-engine")
        if response.finish or len(response) >= length:
            raise EngineError(
                f"rollout {response.id} has ended, at {len(response)} tokens; admit only those "
                "that go on",
                "rollout-ended",
            )
        parked = self._parked.pop(response.id, None)
        replica = parked or min(self._replicas, key=lambda r: r.load)
        row = SimRow(
            id=response.id,
            group=response.group,
            prompt=len(response.prompt.tokens),
            tokens=len(response),
            length=length,
            finish=finish,
            cached=cached,
        )
        replica.waiting.append(row)
        self._home[response.id] = replica

    def _end_of(self, response: Response) -> tuple[int, FinishReason]:
        """Return the response's tokens at its end, or its turn's, and why it ends."""
        sampling, start = response.sampling, response.turn_start
        if sampling is None or not sampling.max_turn_tokens:
            limit, full_length = self.max_new_tokens, self.lengths(response.id)
            finish = FinishReason.STOP
        else:
            limit = min(sampling.max_new_tokens, start + sampling.max_turn_tokens)
            turns = self.turns(episode_of(response.id))
            full_length = start + turns[min(turn_of(response), len(turns) - 1)].tokens
            finish = FinishReason.TURN
        return min(full_length, limit), FinishReason.LENGTH if full_length > limit else finish

    def _chunks(self) -> list[Chunk]:
        chunks = []
        for replica in self._replicas:
            for row in replica.rows.values():
                now = replica.step - row.base
                if now > row.tokens:
                    chunks.append(self._chunk(row, now))
                    row.tokens = now
        return sorted(chunks, key=lambda chunk: chunk.rollout_id)

    def _chunk(self, row: SimRow, now: int, finish: FinishReason | None = None) -> Chunk:
        start, new = row.tokens, now - row.tokens
        tokens = self._tokens(row.id, start, now)
        return Chunk(row.id, start, tokens, _LOGPROBS[:new], self.version, finish)

    def _tokens(self, rollout_id: int, start: int, stop: int) -> IntArray:
        return PLACEHOLDERS[: stop - start]
