"""The generators of a run: who decodes what, and how stragglers move together.

RLHFuse, inter-stage fusion: once few rollouts remain they are gathered on few generators, and the
devices of the others are free to score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from stretto.clock import Clock
from stretto.errors import LifecycleError
from stretto.protocols import Generator
from stretto.schedules.feedback import DecodeSample
from stretto.schedules.migration import MigrationPolicy, Move
from stretto.schedules.rollout import Rollout
from stretto.schedules.waits import Phases, answered
from stretto.types import Chunk, WeightsRef

T = TypeVar("T")


class Pool:
    """Rollouts spread over generators by load; each generator decodes at its own pace.

    Nothing here is saved: which generator holds which rollout is decided anew after a restart.
    """

    def __init__(
        self,
        generators: Sequence[Generator],
        migration: MigrationPolicy | None,
        deadline_s: float,
        clock: Clock,
        phases: Phases,
        freed: Callable[[int, bool], None],
    ) -> None:
        self._generators, self._migration = generators, migration
        self._deadline_s, self._clock, self._phases = deadline_s, clock, phases
        self._freed = freed
        self._held: list[dict[int, Rollout]] = [{} for _ in generators]
        self._arrivals = [asyncio.Event() for _ in generators]
        self._inbound = [0 for _ in generators]  # moves under way to each
        self._moves: dict[int, list[Move]] = {}
        self._migrated = False
        self._samples: list[DecodeSample] = []
        self._carried: list[int | None] = [None] * len(generators)  # before a round's first call
        names = [f"generator {i}" for i in range(len(generators))]
        self._names = names if len(generators) > 1 else ["generator"]
        self._idle_since_s = [clock.now()] * len(generators)

    @property
    def single(self) -> bool:
        """Return whether there is one generator only."""
        return len(self._generators) == 1

    def holds(self, rollout: Rollout) -> bool:
        """Return whether some generator has the rollout."""
        return any(rollout.id in held for held in self._held)

    def take_samples(self) -> Sequence[DecodeSample]:
        """Return the decode calls since this method was last called."""
        samples, self._samples = self._samples, []
        return samples

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Begin a round: give its rollouts to the generators with the fewest."""
        shares: list[list[Rollout]] = [[] for _ in self._generators]
        loads = [len(held) for held in self._held]
        for rollout in rollouts:
            i = loads.index(min(loads))
            loads[i] += 1
            shares[i].append(rollout)
        for i, share in enumerate(shares):
            self._held[i].update((r.id, r) for r in share)
            self._carried[i] = sum(len(r) > 0 for r in self._held[i].values())
            if share:
                told = [r.response() for r in share]
                await self._answer(i, self._generators[i].admit(told), [r.id for r in share])

    async def load(self, weights: WeightsRef) -> None:
        """Give new weights to all generators."""
        async with asyncio.TaskGroup() as group:
            for i in range(len(self._generators)):
                group.create_task(self._load(i, weights))

    async def _load(self, i: int, weights: WeightsRef) -> None:
        await self._answer(i, self._generators[i].load(weights), ())

    async def decode(
        self,
        chunk_tokens: Callable[[], int],
        missing: Callable[[], int],
        take: Callable[[Sequence[Chunk]], None],
    ) -> None:
        """Decode until nothing is missing, all generators at once.

        Args:
            chunk_tokens: how many tokens a call may add to a rollout.
            missing: rollouts that have to end, at the least, before decoding may stop.
            take: given all chunks as they come.
        """
        self._migrated, self._moves = False, {}
        for i, since_s in enumerate(self._idle_since_s):
            self._freed(i, False)
            self._phases.waited(self._names[i], since_s)
        async with asyncio.TaskGroup() as group:
            for i in range(len(self._generators)):
                group.create_task(self._run(i, chunk_tokens, missing, take))

    async def _run(
        self,
        i: int,
        chunk_tokens: Callable[[], int],
        missing: Callable[[], int],
        take: Callable[[Sequence[Chunk]], None],
    ) -> None:
        """Decode what generator ``i`` holds.

        Consumes admitted and migrated rollouts. Ends when nothing is missing, or when it holds
        nothing and nothing is on the way to it. Unblocked by arrivals.
        """
        held = self._held[i]
        while wanted := missing():
            if held:
                take(await self._decode(i, chunk_tokens(), wanted))
                if left := missing():  # else other generators may have stopped already
                    self._gather(left)
                await self._move(i)
            elif self._inbound[i]:
                self._arrivals[i].clear()
                await self._arrivals[i].wait()
            else:
                break
        await self._move(i)  # others may wait for what was planned
        self._idle_since_s[i] = self._clock.now()
        self._freed(i, True)

    async def _decode(self, i: int, max_tokens: int, stop_after: int) -> Sequence[Chunk]:
        held, start_s = self._held[i], self._clock.now()
        chunks = await self._answer(i, self._generators[i].decode(max_tokens, stop_after), held)
        if not chunks:
            raise LifecycleError(
                f"{self._names[i]} is idle, but rollouts {sorted(held)} never ended"
            )
        steps = max(len(c.tokens) for c in chunks)
        if steps:
            rows, seconds = sum(len(c.tokens) for c in chunks) / steps, self._clock.now() - start_s
            first, carried = self._carried[i] is not None, self._carried[i] or 0
            self._samples.append(DecodeSample(rows, steps, seconds, first, carried))
        self._carried[i] = None
        for chunk in chunks:
            if chunk.finish:
                del held[chunk.rollout_id]
        return chunks

    def _gather(self, missing: int) -> None:
        """Plan to move stragglers together, once in a round, when few enough are missing.

        What is in flight beyond the round moves with them: nobody knows yet which of all that are
        being decoded will end first.
        """
        if self._migration is None or self._migrated:
            return
        if missing > self._migration.threshold():
            return
        self._migrated = True
        plan = self._migration.plan(
            [[(r.id, r.total_tokens) for r in held.values()] for held in self._held]
        )
        for move in plan.moves:
            self._moves.setdefault(move.source, []).append(move)
        for moves in self._moves.values():
            for destination in {m.destination for m in moves}:
                self._inbound[destination] += 1

    async def _move(self, source: int) -> None:
        """Carry out what is planned for the rollouts of one generator."""
        moves = self._moves.pop(source, [])
        for destination in sorted({m.destination for m in moves}):
            for with_cache in (True, False):
                ids = [
                    m.rollout_id
                    for m in moves
                    if m.destination == destination
                    and m.with_cache == with_cache
                    and m.rollout_id in self._held[source]  # else it has ended meanwhile
                ]
                if ids:
                    await self._transfer(source, destination, ids, with_cache)
            self._inbound[destination] -= 1
            self._arrivals[destination].set()

    async def _transfer(
        self, source: int, destination: int, ids: Sequence[int], with_cache: bool
    ) -> None:
        moved = [self._held[source].pop(id_) for id_ in ids]
        giver, taker = self._generators[source], self._generators[destination]
        transfers = await self._answer(source, giver.export(ids, with_cache), ids)
        self._held[destination].update((r.id, r) for r in moved)
        await self._answer(destination, taker.accept([r.response() for r in moved], transfers), ids)

    async def _answer(self, i: int, work: Awaitable[T], rollout_ids: Iterable[int]) -> T:
        return await answered(work, self._deadline_s, self._names[i], rollout_ids)
