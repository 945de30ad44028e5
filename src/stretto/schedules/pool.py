"""The generators of a run: who decodes what, and how stragglers move together.

RLHFuse, inter-stage fusion: once few rollouts remain they are gathered on few generators, and the
devices of the others are free to score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from stretto.errors import LifecycleError, StrettoError
from stretto.protocols import Generator
from stretto.schedules.controller import DecodeSample
from stretto.schedules.fleet import GoneError, Guard, RoleContext
from stretto.schedules.migration import MigrationPolicy, Move
from stretto.schedules.rollout import Rollout
from stretto.schedules.waits import Work
from stretto.types import Chunk, WeightsRef


class Pool:
    """Rollouts spread over generators by load; each generator decodes at its own pace.

    A generator may be lost in any call. The others go on with its rollouts, from the tokens that
    they had given; what is left over waits for the process that comes in its place. Where none is
    lost, and where losses end the run, all of this comes to nothing.

    Nothing here is saved: which generator holds which rollout is decided anew after a restart.

    Args:
        migration: when stragglers move; ``None`` for never.
        freed: called when a generator's device has become free.
    """

    def __init__(
        self,
        generators: Sequence[Generator],
        migration: MigrationPolicy | None,
        context: RoleContext,
        freed: Callable[[], None],
    ) -> None:
        self._generators, self._migration = generators, migration
        self._clock, self._phases, self._waits = context.clock, context.phases, context.waits
        self._freed, self._replaces = freed, context.fleet.restarts > 0
        self._decoding = context.decoding
        self._held: list[dict[int, Rollout]] = [{} for _ in generators]
        self._untold: list[dict[int, Rollout]] = [{} for _ in generators]  # held, not admitted yet
        self._orphans: dict[int, Rollout] = {}  # while nobody serves
        self._arrivals = [asyncio.Event() for _ in generators]
        self._inbound = [0 for _ in generators]  # moves under way to each
        self._moves: dict[int, list[Move]] = {}
        self._migrated = False
        self._samples: list[DecodeSample] = []
        self._carried: list[int | None] = [None] * len(generators)  # before a round's first call
        names = [f"generator {i}" for i in range(len(generators))]
        self._names = names if len(generators) > 1 else ["generator"]
        self._guards = [
            Guard(generator, self._names[i], "actor", context, partial(self._lost, i))
            for i, generator in enumerate(generators)
        ]
        self._idle_since_s = [self._clock.now()] * len(generators)

    @property
    def single(self) -> bool:
        """Return whether there is one generator only."""
        return len(self._generators) == 1

    def holds(self, rollout: Rollout) -> bool:
        """Return whether some generator has the rollout, or the next to serve will get it."""
        return any(rollout.id in held for held in (*self._held, self._orphans))

    def take_samples(self) -> Sequence[DecodeSample]:
        """Return the decode calls since this method was last called."""
        samples, self._samples = self._samples, []
        return samples

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Begin a round: give its rollouts to the generators with the fewest."""
        self._place(rollouts)
        for i, held in enumerate(self._held):
            self._carried[i] = sum(len(r) > 0 for r in held.values())
            if self._untold[i]:
                await self._admit(i)

    async def _admit(self, i: int) -> None:
        share, self._untold[i] = self._untold[i], {}
        told = [r.response() for r in share.values()]
        with suppress(GoneError):
            await self._guards[i].ask(self._generators[i].admit(told), share)

    @property
    def serving(self) -> list[Generator]:
        """Generators that are not being replaced."""
        return [g for g, guard in zip(self._generators, self._guards, strict=True) if guard.serves]

    async def load(self, weights: WeightsRef) -> None:
        """Give new weights to all generators."""
        async with asyncio.TaskGroup() as group:
            for i in range(len(self._generators)):
                group.create_task(self._load(i, weights))

    async def _load(self, i: int, weights: WeightsRef) -> None:
        with suppress(GoneError):
            await self._guards[i].load(weights)

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
        """
        self._migrated, self._moves = False, {}
        for i, since_s in enumerate(self._idle_since_s):
            self._decoding.add(i)
            self._phases.waited(self._names[i], since_s)
        await self._waits.all_of(
            [partial(self._run, i, chunk_tokens, missing, take) for i in range(len(self._held))],
            "generation",
            lambda: f"the round to be complete, {missing()} responses short",
            lambda: chain(*self._held, self._orphans),
        )

    async def _run(
        self,
        i: int,
        chunk_tokens: Callable[[], int],
        missing: Callable[[], int],
        take: Callable[[Sequence[Chunk]], None],
    ) -> None:
        """Decode what generator ``i`` holds.

        Consumes admitted and migrated rollouts. Ends when nothing is missing, or when it holds
        nothing and nothing is on the way to it, or can come its way through a loss. Unblocked by
        arrivals.
        """
        held = self._held[i]
        while wanted := missing():
            if self._untold[i]:
                await self._admit(i)
            elif held:
                take(await self._decode(i, chunk_tokens(), wanted))
                if left := missing():  # else other generators may have stopped already
                    self._gather(left)
                await self._move(i)
            elif self._inbound[i] or self._replaces:
                await self._arrival(i)
            else:
                break
        await self._move(i)  # others may wait for what was planned
        self._idle_since_s[i] = self._clock.now()
        self._decoding.remove(i)
        self._freed()
        for arrival in self._arrivals if self._replaces else ():
            arrival.set()  # nothing is missing, and they need not wait for it

    async def _arrival(self, i: int) -> None:
        """Wait for rollouts; the device is free meanwhile, unless some are on the way."""
        if not self._inbound[i]:
            self._decoding.remove(i)
            self._freed()
        arrival = self._arrivals[i]
        arrival.clear()
        await self._waits.until(arrival.is_set, arrival, self._names[i], "responses to decode")
        self._decoding.add(i)

    async def _decode(self, i: int, max_tokens: int, stop_after: int) -> Sequence[Chunk]:
        held, start_s = self._held[i], self._clock.now()
        try:
            chunks, steps = await self._guards[i].ask(
                self._generators[i].decode(max_tokens, stop_after), held
            )
        except GoneError:
            return ()
        if not chunks:
            raise LifecycleError(
                f"{self._names[i]} is idle, but rollouts {sorted(held)} never ended"
            )
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
        serving = [i for i, guard in enumerate(self._guards) if guard.serves]
        told = [[r for r in self._held[i].values() if r.id not in self._untold[i]] for i in serving]
        plan = self._migration.plan([[(r.id, r.total_tokens) for r in each] for each in told])
        for m in plan.moves:
            move = replace(m, source=serving[m.source], destination=serving[m.destination])
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
                    and m.rollout_id not in self._untold[source]  # else it has come back to it
                ]
                if ids and self._guards[destination].serves:
                    await self._transfer(source, destination, ids, with_cache)
            self._inbound[destination] -= 1
            self._arrivals[destination].set()

    async def _transfer(
        self, source: int, destination: int, ids: Sequence[int], with_cache: bool
    ) -> None:
        moved = [self._held[source].pop(id_) for id_ in ids]
        giver, taker = self._generators[source], self._generators[destination]
        try:
            transfers = await self._guards[source].ask(giver.export(ids, with_cache), ids)
        except GoneError:
            self._place(moved)
            return
        if not self._guards[destination].serves:  # lost meanwhile
            self._place(moved)
            return
        self._held[destination].update((r.id, r) for r in moved)
        told = [r.response() for r in moved]
        with suppress(GoneError):
            await self._guards[destination].ask(taker.accept(told, transfers), ids)

    # -- losses -------------------------------------------------------------------------------

    def keepers(self) -> Sequence[Work]:
        """Return what replaces lost generators, to be run beside the rounds."""
        return [partial(self._keep, i) for i in range(len(self._guards))] if self._replaces else ()

    async def _keep(self, i: int) -> None:
        """Replace generator ``i`` whenever it is lost.

        Waits for losses, and for new processes. Ends once it is not replaced any more.

        Raises:
            StrettoError: the loss of the last generator.
        """
        guard = self._guards[i]
        while not guard.retired:
            keeper = f"the keeper of {self._names[i]}"
            await self._waits.until(guard.lost.is_set, guard.lost, keeper, "its loss")
            try:
                await guard.replace()
            except StrettoError:
                if not guard.retired or all(g.retired for g in self._guards):
                    raise
            orphans, self._orphans = self._orphans, {}
            self._place(orphans.values())

    def _lost(self, i: int) -> None:
        """Place the rollouts of a generator elsewhere that was lost just now."""
        rollouts = list(self._held[i].values())
        self._held[i].clear()
        self._untold[i].clear()
        for destination in {m.destination for m in self._moves.pop(i, [])}:
            self._inbound[destination] -= 1
            self._arrivals[destination].set()
        self._place(rollouts)

    def _place(self, rollouts: Iterable[Rollout]) -> None:
        """Give rollouts to the generators that serve, to those with the fewest first."""
        serving = [i for i, guard in enumerate(self._guards) if guard.serves]
        for rollout in rollouts:
            if serving:
                i = min(serving, key=lambda i: len(self._held[i]))
                self._held[i][rollout.id] = self._untold[i][rollout.id] = rollout
                self._arrivals[i].set()
            else:
                self._orphans[rollout.id] = rollout
