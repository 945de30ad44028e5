"""Distribution of rollouts over generators, and the loop that decodes on each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.protocols import Generator
from stretto.schedules.controller import DecodeSample
from stretto.schedules.engines import HELD, EngineHandle, Locations, Moves, Place
from stretto.schedules.fleet import GoneError, Guard
from stretto.schedules.hold import Parked
from stretto.schedules.rollout import Rollout
from stretto.schedules.waits import Work
from stretto.types import WeightsRef

if TYPE_CHECKING:
    from stretto.schedules.rounds import Rounds


class Pool:
    """Spreads rollouts over generators by load. Each generator decodes at its own pace.

    - A generator may be lost in any call. Other generators continue its rollouts from the tokens
      received. If there are none, its rollouts wait for a replacement.
    - Nothing is saved, because a restart spreads rollouts again.
    - A rollout of an episode leaves its slot at the end of a turn, and is parked at its generator
      until :meth:`resume`.
    """

    def __init__(self, roles: Sequence[Generator], rounds: Rounds) -> None:
        self._rounds, self._scoring = rounds, rounds.scoring
        context, controls = rounds.context, rounds.controls
        self._context = context
        self._holds = Parked(controls.hold) if controls.hold else None
        self._replaces = context.fleet.restarts > 0
        self._locations = Locations()
        self._engines: list[EngineHandle] = []
        for i, generator in enumerate(roles):
            name = f"generator {i}" if roles[1:] else "generator"
            guard = Guard(generator, name, "actor", context, partial(self._lost, i))
            at, clock = self._locations, context.clock
            engine = EngineHandle(i, name, generator, guard, at, self._holds, clock, clock.now())
            self._engines.append(engine)
        self._moves = Moves(self._engines, self._locations, controls.migration, self.place)
        self.single = len(roles) == 1
        self._in_turns = False  # whether forks and restarts of episodes may occur
        self._samples: list[DecodeSample] = []

    def holds(self, rollout: Rollout) -> bool:
        """Return whether a generator decodes the rollout, or will."""
        return self._locations.place_of(rollout) not in (None, Place.PARKED)

    def take_samples(self) -> Sequence[DecodeSample]:
        samples = self._samples.copy()
        self._samples.clear()  # in place, because calls in progress add to it
        return samples

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Start a round: give its rollouts to the least loaded generators."""
        self.place([*self._back(), *rollouts])
        for engine in self._engines:
            engine.carried = sum(len(r) > 0 for r in engine.held.values())
            if engine.at(Place.WAITING):
                await engine.admit()

    async def resume(self, rollout: Rollout) -> None:
        """Continue an answered rollout at its engine, or with its cache at one for stragglers."""
        now_s = self._context.clock.now()
        moves = self._moves
        locations = self._locations
        await self._context.waits.until(
            lambda: not locations.is_moving(rollout), moves.landed, "an episode", "its move"
        )
        engine = self._parked_at(rollout, now_s)
        if engine is None or not engine.serves:
            if self._rounds.lockstep:  # its place must not depend on the order of answers
                locations.put(rollout, Place.BACK)
            else:
                self.place([rollout])
        elif destination := moves.gathered_at(engine):
            await moves.transfer(engine, destination, True, [rollout])
            destination.arrival.set()
        else:
            locations.put(rollout, Place.WAITING, engine.number)
            engine.arrival.set()

    def release(self, rollout: Rollout) -> None:
        """Release a parked rollout that does not continue."""
        if self._locations.is_moving(rollout):
            self._locations.put(rollout, Place.DROPPED)
        if engine := self._parked_at(rollout):
            self._locations.remove(rollout)
            engine.released.append(rollout.id)

    def _parked_at(self, rollout: Rollout, now_s: float | None = None) -> EngineHandle | None:
        """Return the engine that keeps a rollout, and end its wait. ``now_s``: it continues."""
        if self._holds:
            self._holds.end(rollout.id, now_s)
        parked = (e for e in self._engines if rollout.id in e.at(Place.PARKED))
        return next(parked, None)

    def _back(self) -> list[Rollout]:
        return [r for _, r in sorted(self._locations.at(Place.BACK).items())]

    def wake(self) -> None:
        for engine in self._engines:
            engine.arrival.set()

    async def load(self, weights: WeightsRef) -> None:
        """Load weights into all generators."""
        if self._holds:
            self._holds.void()
        for engine in self._engines:
            await engine.release()

        async def load(loaded: Work) -> None:
            with suppress(GoneError):
                await loaded()

        async with asyncio.TaskGroup() as group:
            for loaded in self._context.load([e.guard for e in self._engines], weights):
                group.create_task(load(loaded))

    async def decode(self, *, gathers: bool = True) -> None:
        """Decode on all generators until nothing is missing. ``gathers``: stragglers may move."""
        self._moves.begin_round(gathers=gathers)
        for engine in self._engines:
            engine.left = False
            self._context.decoding.add(engine.number)
            self._context.phases.waited(engine.name, engine.idle_since_s)
        await self._context.waits.all_of(
            [partial(self._run, engine) for engine in self._engines],
            "generation",
            lambda: f"the round to be complete, {self._rounds.missing()} responses short",
            lambda: chain(*(e.held for e in self._engines), self._locations.at(Place.NOWHERE)),
        )

    async def _run(self, engine: EngineHandle) -> None:
        """Decode the rollouts of one generator. Waits for answers of environments and for moves,
        until an arrival or the end of the round.
        """
        in_round = self._rounds
        while missing := in_round.missing():
            if in_round.waiting and in_round.lockstep:
                await self._arrival(engine)
            elif back := self._back():
                self.place(back)
            elif engine.at(Place.WAITING):
                await engine.admit()
            elif engine.at(Place.DECODING):
                in_round.take(await engine.decode(in_round.chunk_tokens, missing, self._samples))
                await engine.hold(in_round.chunk_tokens)
                self._moves.plan(in_round.missing())  # fewer, because other generators decode, too
                await self._moves.carry_out(engine)
            elif self._may_come(engine):
                await self._moves.carry_out(engine)
                await self._arrival(engine)
            else:
                break
        engine.left = True
        await self._moves.carry_out(engine)  # because destinations wait for planned moves
        await engine.release()
        engine.idle_since_s = self._context.clock.now()
        self._context.decoding.remove(engine.number)
        self._scoring.look()
        if self._replaces or self._in_turns:
            self.wake()  # nothing is missing, so no engine needs to wait

    def _may_come(self, engine: EngineHandle) -> bool:
        """Return whether an engine without rollouts may still get some."""
        expected = self._moves.come_to(engine) or self._rounds.waiting
        forks = self._in_turns and self._locations.any_at(*HELD, Place.MOVING, Place.DROPPED)
        return bool(expected or self._replaces or forks)

    async def _arrival(self, engine: EngineHandle) -> None:
        """Wait for rollouts. The device is free meanwhile, unless some are moving to it."""
        phases, before = self._context.phases, self._context.phases.cause
        if not self._moves.come_to(engine):
            self._context.decoding.remove(engine.number)
            self._scoring.look()
        since_s = self._context.clock.now() if self._rounds.waiting else None
        if since_s is not None and not self._locations.any_at(*HELD):
            phases.enter("environment")
            self._scoring.read_on()
        engine.arrival.clear()
        await self._context.waits.until(
            engine.arrival.is_set, engine.arrival, engine.name, "responses to decode"
        )
        self._context.decoding.add(engine.number)
        if since_s is not None:
            phases.waited(engine.name, since_s)
            if phases.cause == "environment":
                phases.enter("data" if before == "environment" else before)

    def keepers(self) -> Sequence[Work]:
        """Return one loop per generator that replaces it after a loss. None without restarts."""
        return [partial(self._keep, engine) for engine in self._engines] if self._replaces else ()

    async def _keep(self, engine: EngineHandle) -> None:
        guard, keeper = engine.guard, f"the keeper of {engine.name}"
        while not guard.member.retired:
            await self._context.waits.until(guard.lost.is_set, guard.lost, keeper, "its loss")
            try:
                await guard.replace()
            except StrettoError:
                if not guard.member.retired or all(e.guard.member.retired for e in self._engines):
                    raise
            self.place(list(self._locations.at(Place.NOWHERE).values()))

    def _lost(self, number: int) -> None:
        engine = self._engines[number]
        rollouts = list(engine.held.values())
        engine.released.clear()
        for rollout in [*engine.at(Place.PARKED).values()]:  # placed when their answers come
            self._locations.remove(rollout)
        self._moves.cancel(engine)
        self.place(rollouts)

    def place(self, rollouts: Iterable[Rollout]) -> None:
        """Give rollouts to the least loaded engines, which admit them before their next call."""
        serving = [engine for engine in self._engines if engine.serves]
        for rollout in rollouts:
            self._in_turns |= rollout.in_turns
            if serving:
                engine = min(serving, key=lambda engine: engine.load)
                self._locations.put(rollout, Place.WAITING, engine.number)
                engine.arrival.set()
            else:
                self._locations.put(rollout, Place.NOWHERE)
