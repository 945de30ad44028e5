"""The generators of a run: which one decodes what, and how stragglers move together (RLHFuse)."""

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
from stretto.schedules.hold import HoldPolicy, Parked
from stretto.schedules.migration import MigrationPolicy
from stretto.schedules.rollout import Rollout
from stretto.schedules.waits import Work
from stretto.types import Chunk, FinishReason, WeightsRef

DEADLINE_TOKENS = 4096
"""Tokens of each rollout that an engine may take ``schedule.deadline_s`` for."""


class _Engine:
    """A generator, the rollouts that it holds, and what is on its way to it."""

    def __init__(
        self,
        number: int,
        name: str,
        generator: Generator,
        context: RoleContext,
        lost: Callable[[_Engine], None],
    ) -> None:
        self.number, self.name, self.generator = number, name, generator
        self.guard = Guard(generator, name, "actor", context, partial(lost, self))
        self.held: dict[int, Rollout] = {}
        self.untold: dict[int, Rollout] = {}  # held, and not given to it yet
        self.parked: dict[int, Rollout] = {}  # that wait for their environments
        self.gone: list[int] = []  # were parked, and are not wanted any more
        self.arrival = asyncio.Event()  # more to decode, or nothing to wait for any more
        self.inbound = 0  # moves to it that are planned or under way
        self.left = False  # it has no more to do in the round, and its device is free
        self.moves: dict[tuple[_Engine, bool], list[int]] = {}  # planned: to where, and with cache
        self.carried: int | None = None  # with earlier rounds' tokens; None after a first call
        self.idle_since_s = context.clock.now()

    async def let_go(self) -> None:
        gone, self.gone = self.gone, []
        if gone:
            with suppress(GoneError):
                await self.guard.ask(self.generator.release(gone), gone)

    async def admit(self) -> None:
        await self.let_go()
        share, self.untold = self.untold, {}
        rollouts = list(share.values())
        if any(r.in_turns for r in rollouts):  # in the order of answers, which chance decides
            rollouts.sort(key=lambda r: r.id)
        responses = [r.response() for r in rollouts]
        with suppress(GoneError):
            await self.guard.ask(self.generator.admit(responses), share)


class Pool:
    """Rollouts spread over generators by load; each generator decodes at its own pace.

    A generator may be lost in any call. The others go on with its rollouts, from the tokens that
    they had given; what is left over waits for the process that comes in its place. Nothing here is
    saved: which generator holds which rollout is decided anew after a restart.

    The rollout of an episode leaves its generator's slots at the end of a turn, and is parked there
    until :meth:`resume`.
    """

    def __init__(
        self,
        generators: Sequence[Generator],
        migration: MigrationPolicy | None,
        context: RoleContext,
        freed: Callable[[], None],  # called when a generator's device has become free
        chunk_tokens: Callable[[], int],  # that a call may add to a rollout
        missing: Callable[[], int],  # rollouts that have to end, at least, before decoding may stop
        take: Callable[[Sequence[Chunk]], None],  # called with what was decoded
        waiting: Callable[[], int] = lambda: 0,  # rollouts that environments may send back
        lockstep: Callable[[], bool] = lambda: False,  # none goes on before all of these are back
        read_on: Callable[[], None] = lambda: None,  # called when there is nothing but these
        hold: HoldPolicy | None = None,  # of keys and values of these; without one they are kept
    ) -> None:
        self._holds = Parked(hold) if hold else None
        self._waiting, self._lockstep, self._read_on = waiting, lockstep, read_on
        self._gathering: list[_Engine] = []  # where stragglers of the round were moved
        self._migration, self._context, self._freed = migration, context, freed
        self._chunk_tokens, self._missing, self._take = chunk_tokens, missing, take
        self._replaces = context.fleet.restarts > 0
        self._engines = [
            _Engine(i, f"generator {i}" if generators[1:] else "generator", g, context, self._lost)
            for i, g in enumerate(generators)
        ]
        self._orphans: dict[int, Rollout] = {}  # while none serves
        self._back: dict[int, Rollout] = {}  # in lockstep, to be placed once all are back
        self._moving: set[int] = set()  # on the way from one generator to another
        self._landed = asyncio.Event()  # one of these has arrived, or is lost
        self._unwanted: set[int] = set()  # of these, to be let go of there
        self._in_turns = False  # whether rollouts may come as forks, or begin anew
        self._migrated = False
        self._samples: list[DecodeSample] = []

    @property
    def single(self) -> bool:
        return len(self._engines) == 1

    def holds(self, rollout: Rollout) -> bool:
        """Return whether some generator has the rollout, or the next to serve will get it."""
        nowhere = (self._orphans, self._back, self._moving)
        at = (*nowhere, *(engine.held for engine in self._engines))
        return any(rollout.id in each for each in at)

    def take_samples(self) -> Sequence[DecodeSample]:
        samples, self._samples = self._samples, []
        return samples

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Begin a round: give its rollouts to the generators with the fewest."""
        self._place([*self._taken_back(), *rollouts])
        for engine in self._engines:
            engine.carried = sum(len(r) > 0 for r in engine.held.values())
            if engine.untold:
                await engine.admit()

    async def resume(self, rollout: Rollout) -> None:
        """Go on with a rollout whose environment has answered, where it is parked; with its keys
        and values where stragglers are gathered, once they are.
        """
        now_s = self._context.clock.now()
        while rollout.id in self._moving:
            self._landed.clear()
            arrived = self._landed.is_set
            await self._context.waits.until(arrived, self._landed, "an episode", "its move")
        engine = self._unpark(rollout.id, now_s)
        if engine is None or not engine.guard.serves:
            if self._lockstep():  # where it goes must not follow the order of answers
                self._back[rollout.id] = rollout
            else:
                self._place([rollout])
            return
        engine.held[rollout.id] = rollout
        if destination := self._gathered_at(engine):
            destination.inbound += 1
            await self._transfer(engine, destination, [rollout.id], with_cache=True)
            destination.inbound -= 1
            destination.arrival.set()
            return
        engine.untold[rollout.id] = rollout
        engine.arrival.set()

    def release(self, rollout: Rollout) -> None:
        """Let go of a rollout that is parked and goes on no more."""
        if rollout.id in self._moving:
            self._unwanted.add(rollout.id)
        if engine := self._unpark(rollout.id):
            engine.gone.append(rollout.id)

    def _taken_back(self) -> list[Rollout]:
        back, self._back = self._back, {}
        return [back[id_] for id_ in sorted(back)]

    def _unpark(self, rollout_id: int, now_s: float | None = None) -> _Engine | None:
        if self._holds:
            self._holds.end(rollout_id, now_s)
        engines = (engine for engine in self._engines if engine.parked.pop(rollout_id, None))
        return next(engines, None)

    def wake(self) -> None:
        for engine in self._engines:
            engine.arrival.set()

    async def load(self, weights: WeightsRef) -> None:
        """Give new weights to all generators."""
        if self._holds:
            self._holds.void()
        for engine in self._engines:
            await engine.let_go()

        async def load(loaded: Work) -> None:
            with suppress(GoneError):
                await loaded()

        async with asyncio.TaskGroup() as group:
            for loaded in self._context.load([e.guard for e in self._engines], weights):
                group.create_task(load(loaded))

    async def decode(self, *, gathers: bool = True) -> None:
        """Decode until nothing is missing, all generators at once; ``gathers``: stragglers may be
        moved together."""
        self._migrated, self._gathering = not gathers, []
        for engine in self._engines:
            engine.moves, engine.left = {}, False
            self._context.decoding.add(engine.number)
            self._context.phases.waited(engine.name, engine.idle_since_s)
        await self._context.waits.all_of(
            [partial(self._run, engine) for engine in self._engines],
            "generation",
            lambda: f"the round to be complete, {self._missing()} responses short",
            lambda: chain(*(engine.held for engine in self._engines), self._orphans),
        )

    async def _run(self, engine: _Engine) -> None:
        while missing := self._missing():
            if self._waiting() and self._lockstep():
                await self._arrival(engine)
            elif self._back:
                self._place(self._taken_back())
            elif engine.untold:
                await engine.admit()
            elif engine.held:
                self._take(await self._decode(engine, self._chunk_tokens(), missing))
                await self._hold(engine)
                self._plan_moves()
                await self._move(engine)
            elif self._may_come(engine):
                await self._move(engine)
                await self._arrival(engine)
            else:
                break
        engine.left = True
        await self._move(engine)  # others may wait for what was planned
        await engine.let_go()
        engine.idle_since_s = self._context.clock.now()
        self._free(engine)
        if self._replaces or self._in_turns:
            self.wake()  # nothing is missing, and they need not wait for it

    def _may_come(self, engine: _Engine) -> bool:
        """Return whether rollouts may come an engine's way while it has none."""
        held = self._moving or any(other.held for other in self._engines)
        forks = self._in_turns and held
        return bool(engine.inbound or self._replaces or self._waiting() or forks)

    async def _arrival(self, engine: _Engine) -> None:
        """Wait for rollouts; the device is free meanwhile, unless some are on the way."""
        phases, before = self._context.phases, self._context.phases.cause
        if not engine.inbound:
            self._free(engine)
        since_s = self._context.clock.now() if self._waiting() else None
        if since_s is not None and not any(other.held for other in self._engines):
            phases.enter("environment")
            self._read_on()
        engine.arrival.clear()
        await self._context.waits.until(
            engine.arrival.is_set, engine.arrival, engine.name, "responses to decode"
        )
        self._context.decoding.add(engine.number)
        if since_s is not None:
            phases.waited(engine.name, since_s)
            if phases.cause == "environment":
                phases.enter("data" if before == "environment" else before)

    def _free(self, engine: _Engine) -> None:
        self._context.decoding.remove(engine.number)
        self._freed()

    async def _decode(self, engine: _Engine, max_tokens: int, stop_after: int) -> Sequence[Chunk]:
        held, start_s = engine.held, self._context.clock.now()
        try:
            decoding = engine.generator.decode(max_tokens, stop_after)
            deadlines = max(1.0, max_tokens / DEADLINE_TOKENS)
            chunks, steps = await engine.guard.ask(decoding, held, deadlines)
        except GoneError:
            return ()
        if not chunks:
            raise LifecycleError(
                f"{engine.name} is idle, but rollouts {sorted(held)} never ended", "idle-generator"
            )
        if steps:
            rows = sum(len(c.tokens) for c in chunks) / steps
            seconds, carried = self._context.clock.now() - start_s, engine.carried
            first = carried is not None
            self._samples.append(DecodeSample(rows, steps, seconds, first, carried or 0))
        engine.carried = None
        for chunk in chunks:
            if chunk.finish:
                ended = held.pop(chunk.rollout_id)
            if chunk.finish is FinishReason.TURN:
                engine.parked[chunk.rollout_id] = ended
                if self._holds:
                    self._holds.begin(ended, self._context.clock.now())
        return chunks

    async def _hold(self, engine: _Engine) -> None:
        if self._holds is None:
            return
        chunk = self._chunk_tokens()
        decoding = sum(r.total_tokens + chunk for r in engine.held.values())
        decided = self._holds.decide(engine.parked, decoding, self._context.clock.now())
        with suppress(GoneError):
            for how, ids in decided.items():
                await engine.guard.ask(engine.generator.hold(ids, how), ids)

    def _plan_moves(self) -> None:
        missing = self._missing()  # 0 where other generators have stopped already
        if self._migration is None or self._migrated or not missing:
            return
        if missing > self._migration.threshold():
            return
        self._migrated = True
        serving = [engine for engine in self._engines if engine.guard.serves]
        remaining = [
            [
                (r.id, r.total_tokens)
                for r in (*engine.held.values(), *engine.parked.values())
                if r.id not in engine.untold
            ]
            for engine in serving
        ]
        moves = [
            m for m in self._migration.plan(remaining).moves if not serving[m.destination].left
        ]
        for move in sorted(moves, key=lambda move: (move.destination, not move.with_cache)):
            to = serving[move.destination], move.with_cache
            serving[move.source].moves.setdefault(to, []).append(move.rollout_id)
        for destination, _ in chain(*(engine.moves for engine in serving)):
            destination.inbound += 1
            self._gathering.append(destination)
        if self._gathering:
            self.wake()  # what is parked moves, too

    def _gathered_at(self, engine: _Engine) -> _Engine | None:
        """Return where rollouts of a generator go, if stragglers are gathered elsewhere."""
        serving = [other for other in self._gathering if other.guard.serves]
        if not serving or engine in self._gathering:
            return None
        return min(serving, key=lambda other: len(other.held) + len(other.parked))

    async def _move_waiting(self, source: _Engine) -> None:
        """Move parked rollouts to where stragglers are gathered, before their answers come."""
        destination = self._gathered_at(source)
        if not destination or not source.parked:
            return
        moved, source.parked = source.parked, {}
        # An answer may come meanwhile: it is put behind what has arrived.
        responses = [replace(r.response(), finish=FinishReason.TURN) for r in moved.values()]
        self._moving.update(moved)
        try:
            with suppress(GoneError):
                transfers = await source.guard.ask(source.generator.export([*moved], True), moved)
                accepted = destination.generator.accept(responses, transfers)
                await destination.guard.ask(accepted, moved)
                destination.parked |= moved
                for id_ in self._unwanted & moved.keys():
                    del destination.parked[id_]
                    destination.gone.append(id_)
        finally:
            self._moving.difference_update(moved)
            self._unwanted.difference_update(moved)
            self._landed.set()

    async def _move(self, source: _Engine) -> None:
        moves, source.moves = source.moves, {}
        for (destination, with_cache), planned in moves.items():
            # Others have ended meanwhile, or come back to it.
            ids = [id_ for id_ in planned if id_ in source.held and id_ not in source.untold]
            if ids and destination.guard.serves:
                await self._transfer(source, destination, ids, with_cache)
            destination.inbound -= 1
            destination.arrival.set()
        await self._move_waiting(source)

    async def _transfer(
        self, source: _Engine, destination: _Engine, ids: Sequence[int], with_cache: bool
    ) -> None:
        moved = [source.held.pop(id_) for id_ in ids]
        transfers = None
        self._moving.update(ids)
        try:
            with suppress(GoneError):
                transfers = await source.guard.ask(source.generator.export(ids, with_cache), ids)
            await destination.let_go()
        finally:
            self._moving.difference_update(ids)
        if transfers is None or not destination.guard.serves:  # either was lost meanwhile
            self._place(moved)
            return
        destination.held.update((r.id, r) for r in moved)
        responses = [r.response() for r in moved]
        with suppress(GoneError):
            accepted = destination.generator.accept(responses, transfers)
            await destination.guard.ask(accepted, ids)

    # -- losses -------------------------------------------------------------------------------

    def keepers(self) -> Sequence[Work]:
        """Return what replaces lost generators, to be run beside the rounds."""
        return [partial(self._keep, engine) for engine in self._engines] if self._replaces else ()

    async def _keep(self, engine: _Engine) -> None:
        guard, keeper = engine.guard, f"the keeper of {engine.name}"
        while not guard.member.retired:
            await self._context.waits.until(guard.lost.is_set, guard.lost, keeper, "its loss")
            try:
                await guard.replace()
            except StrettoError:
                if not guard.member.retired or all(e.guard.member.retired for e in self._engines):
                    raise
            orphans, self._orphans = self._orphans, {}
            self._place(orphans.values())

    def _lost(self, engine: _Engine) -> None:
        rollouts = list(engine.held.values())
        engine.held.clear()
        engine.untold.clear()
        engine.gone.clear()
        engine.parked.clear()
        moves, engine.moves = engine.moves, {}
        for destination, _ in moves:
            destination.inbound -= 1
            destination.arrival.set()
        self._place(rollouts)

    def _place(self, rollouts: Iterable[Rollout]) -> None:
        serving = [engine for engine in self._engines if engine.guard.serves]
        for rollout in rollouts:
            self._in_turns |= rollout.in_turns
            if serving:
                engine = min(serving, key=lambda engine: len(engine.held) + len(engine.parked))
                engine.held[rollout.id] = engine.untold[rollout.id] = rollout
                engine.arrival.set()
            else:
                self._orphans[rollout.id] = rollout
