"""The generators of a run, the rollouts at each, and moves between generators (RLHFuse)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from stretto.errors import LifecycleError
from stretto.protocols import Clock, Generator
from stretto.schedules.controller import DecodeSample
from stretto.schedules.fleet import GoneError, Guard
from stretto.schedules.hold import Parked
from stretto.schedules.migration import MigrationPolicy
from stretto.schedules.rollout import Rollout
from stretto.types import Chunk, FinishReason

DEADLINE_TOKENS = 4096  # per rollout, covered by one schedule.deadline_s


class Place(StrEnum):
    """The kinds of places at which an unfinished rollout can be."""

    WAITING = "waiting"  # for its engine's next admission
    DECODING = "decoding"
    PARKED = "parked"  # its engine keeps it until the environment answers
    MOVING = "moving"  # to another engine
    DROPPED = "dropped"  # moving, and released on arrival
    BACK = "back"  # answered in lockstep, placed once all answers have arrived
    NOWHERE = "nowhere"  # no engine serves


class Location(NamedTuple):
    """A place, and the engine to which it belongs, if any."""

    place: Place | None = None
    engine: int | None = None


HELD = (Place.DECODING, Place.WAITING)

_ENTERED_FROM: Mapping[Place, tuple[Place, ...]] = {
    Place.DECODING: (Place.WAITING, Place.MOVING),
    Place.PARKED: (Place.DECODING, Place.MOVING),
    Place.MOVING: (Place.DECODING, Place.PARKED),
    Place.DROPPED: (Place.MOVING, Place.DROPPED),
}
"""Places that lead to each place. Unlisted places follow any, for example after a loss."""


class Locations:
    """State machine with one location per unfinished rollout. Each location keeps arrival order."""

    def __init__(self) -> None:
        self._locations: dict[int, Location] = {}
        self._rollouts: defaultdict[Location, dict[int, Rollout]] = defaultdict(dict)

    def place_of(self, rollout: Rollout) -> Place | None:
        return self._locations.get(rollout.id, Location()).place

    def is_moving(self, rollout: Rollout) -> bool:
        return self.place_of(rollout) in (Place.MOVING, Place.DROPPED)

    def at(self, place: Place, engine: int | None = None) -> Mapping[int, Rollout]:
        return self._rollouts[Location(place, engine)]

    def any_at(self, *places: Place) -> bool:
        return any(self._rollouts[at] for at in self._rollouts if at.place in places)

    def put(self, rollout: Rollout, place: Place, engine: int | None = None) -> None:
        """Set the place of a rollout. LifecycleError if the present one does not lead there."""
        before = self.place_of(rollout)
        if before not in _ENTERED_FROM.get(place, (before,)):
            raise LifecycleError(
                f"rollout {rollout.id} is {before}, and cannot be {place}", "no-such-edge"
            )
        self.remove(rollout)
        location = self._locations[rollout.id] = Location(place, engine)
        self._rollouts[location][rollout.id] = rollout

    def remove(self, rollout: Rollout) -> None:
        if location := self._locations.pop(rollout.id, None):
            del self._rollouts[location][rollout.id]


@dataclass(slots=True, eq=False)
class EngineHandle:
    """A generator, and the rollouts at it."""

    number: int
    name: str
    generator: Generator
    guard: Guard
    locations: Locations
    holds: Parked | None
    clock: Clock
    idle_since_s: float
    released: list[int] = field(default_factory=list)  # formerly parked rollouts to drop
    arrival: asyncio.Event = field(default_factory=asyncio.Event)  # more to decode, or the end
    left: bool = False  # whether it is done with the round, and its device is free
    carried: int | None = None  # rollouts with earlier rounds' tokens. None after a first call

    @property
    def serves(self) -> bool:
        return self.guard.member.serves

    @property
    def held(self) -> Mapping[int, Rollout]:
        return {id_: r for place in HELD for id_, r in self.at(place).items()}

    @property
    def load(self) -> int:
        return sum(len(self.at(place)) for place in (*HELD, Place.PARKED))

    def at(self, place: Place) -> Mapping[int, Rollout]:
        return self.locations.at(place, self.number)

    async def release(self) -> None:
        """Have the generator drop the rollouts in ``released``."""
        ids, self.released = self.released, []
        if ids:
            with suppress(GoneError):
                await self.guard.ask(self.generator.release(ids), ids)

    async def admit(self) -> None:
        """Give the generator the waiting rollouts."""
        await self.release()
        rollouts = list(self.at(Place.WAITING).values())
        for rollout in rollouts:
            self.locations.put(rollout, Place.DECODING, self.number)
        if any(r.in_turns for r in rollouts):  # answers come in random order
            rollouts.sort(key=lambda r: r.id)
        responses = [r.response() for r in rollouts]
        with suppress(GoneError):
            await self.guard.ask(self.generator.admit(responses), [r.id for r in rollouts])

    async def decode(
        self, max_tokens: int, stop_after: int, samples: list[DecodeSample]
    ) -> Sequence[Chunk]:
        """Return the chunks of a decode call, or none after a loss, and add to ``samples``."""
        decoding, start_s = self.at(Place.DECODING), self.clock.now()
        try:
            deadlines = max(1.0, max_tokens / DEADLINE_TOKENS)
            decode_call = self.generator.decode(max_tokens, stop_after)
            chunks, steps = await self.guard.ask(decode_call, decoding, deadlines)
        except GoneError:
            return ()
        if not chunks:
            raise LifecycleError(
                f"{self.name} is idle, but rollouts {sorted(decoding)} never ended",
                "idle-generator",
            )
        if steps:
            rows = sum(len(c.tokens) for c in chunks) / steps
            seconds, first = self.clock.now() - start_s, self.carried is not None
            samples.append(DecodeSample(rows, steps, seconds, first, self.carried or 0))
        self.carried = None
        for chunk in chunks:
            rollout = decoding[chunk.rollout_id]
            if chunk.finish is FinishReason.TURN:
                self.locations.put(rollout, Place.PARKED, self.number)
                if self.holds:
                    self.holds.begin(rollout, self.clock.now())
            elif chunk.finish:
                self.locations.remove(rollout)
        return chunks

    async def hold(self, chunk_tokens: int) -> None:
        """Offload or drop the KV cache of parked rollouts, as the hold policy decides."""
        if self.holds is None:
            return
        decoding = sum(r.total_tokens + chunk_tokens for r in self.held.values())
        ids_by_treatment = self.holds.decide(self.at(Place.PARKED), decoding, self.clock.now())
        with suppress(GoneError):
            for treatment, ids in ids_by_treatment.items():
                await self.guard.ask(self.generator.hold(ids, treatment), ids)


@dataclass(slots=True, eq=False)
class Moves:
    """The moves of a round, planned once and made between decode calls of their source."""

    engines: Sequence[EngineHandle]
    locations: Locations
    policy: MigrationPolicy | None
    place: Callable[[Iterable[Rollout]], None]  # for rollouts whose move failed
    landed: asyncio.Event = field(default_factory=asyncio.Event)  # a move has ended
    _may_plan: bool = False
    _planned: dict[tuple[EngineHandle, EngineHandle, bool], list[int]] = field(default_factory=dict)
    """Ids of rollouts, by source, destination, and whether the KV cache moves along."""
    _gathering: Sequence[EngineHandle] = ()  # destinations of the round's stragglers

    def begin_round(self, *, gathers: bool) -> None:
        self._may_plan = gathers and self.policy is not None
        self._planned, self._gathering = {}, ()

    def plan(self, missing: int) -> None:
        """Plan the round's moves once few enough responses are missing (0: the round is over)."""
        if not (self._may_plan and self.policy and 0 < missing <= self.policy.threshold()):
            return
        self._may_plan = False
        serving = [engine for engine in self.engines if engine.serves]
        rollouts_by_engine = [
            (*e.at(Place.DECODING).values(), *e.at(Place.PARKED).values()) for e in serving
        ]
        migration_plan = self.policy.plan(
            [[(r.id, r.total_tokens) for r in rollouts] for rollouts in rollouts_by_engine]
        )
        for move in sorted(
            migration_plan.moves,
            key=lambda move: (move.source, move.destination, not move.with_cache),
        ):
            if not serving[move.destination].left:
                key = serving[move.source], serving[move.destination], move.with_cache
                self._planned.setdefault(key, []).append(move.rollout_id)
        self._gathering = [destination for _, destination, _ in self._planned]
        if self._planned:
            for engine in self.engines:
                engine.arrival.set()  # so that parked rollouts move, too

    def come_to(self, engine: EngineHandle) -> bool:
        """Return whether rollouts to decode are moving to an engine, or planned to."""
        is_planned = any(destination is engine for _, destination, _ in self._planned)
        return is_planned or bool(engine.at(Place.MOVING))

    def gathered_at(self, engine: EngineHandle) -> EngineHandle | None:
        """Return the destination for rollouts of an engine if stragglers are gathered elsewhere."""
        serving = [other for other in self._gathering if other.serves]
        if not serving or engine in self._gathering:
            return None
        return min(serving, key=lambda other: other.load)

    def cancel(self, source: EngineHandle) -> None:
        for key in [key for key in self._planned if key[0] is source]:
            del self._planned[key]
            key[1].arrival.set()

    async def carry_out(self, source: EngineHandle) -> None:
        """Make the planned moves from an engine. Parked rollouts move before they are answered."""
        for key in [key for key in self._planned if key[0] is source]:
            decoding = source.at(Place.DECODING)
            # Some planned rollouts have ended meanwhile, or wait for another admission.
            rollouts = [decoding[id_] for id_ in self._planned.get(key, ()) if id_ in decoding]
            if rollouts and key[1].serves:
                await self.transfer(*key, rollouts)
            self._planned.pop(key, None)  # unless it was cancelled
            key[1].arrival.set()
        parked = list(source.at(Place.PARKED).values())
        if parked and (destination := self.gathered_at(source)):
            await self.transfer(source, destination, True, parked, parked=True)

    async def transfer(
        self,
        source: EngineHandle,
        destination: EngineHandle,
        with_cache: bool,
        rollouts: Sequence[Rollout],
        *,
        parked: bool = False,
    ) -> None:
        """Move rollouts between generators. Those being decoded belong to the destination before it
        has accepted them, so that its next decode call comes after that call. If a generator is
        lost, any other one takes the rollouts: parked ones when their answers come.
        """
        ids, locations = [r.id for r in rollouts], self.locations
        # Copied first: an answer may add context during the move, which is admitted afterwards.
        finish = FinishReason.TURN if parked else None
        responses = [replace(r.response(), finish=finish) for r in rollouts]
        for rollout in rollouts:
            locations.put(rollout, Place.MOVING, None if parked else destination.number)
        with suppress(GoneError):
            export_call = source.generator.export(ids, with_cache)
            transfers = await source.guard.ask(export_call, ids)
            if not parked:
                await destination.release()
                if not destination.serves:  # lost meanwhile
                    raise GoneError
                for rollout in rollouts:
                    locations.put(rollout, Place.DECODING, destination.number)
            accept_call = destination.generator.accept(responses, transfers)
            await destination.guard.ask(accept_call, ids)
            if parked:
                for rollout in rollouts:
                    if locations.place_of(rollout) is Place.MOVING:
                        locations.put(rollout, Place.PARKED, destination.number)
                    else:
                        destination.released.append(rollout.id)
        lost_rollouts = [rollout for rollout in rollouts if locations.is_moving(rollout)]
        for rollout in lost_rollouts:
            locations.remove(rollout)
        if not parked:
            self.place(lost_rollouts)
        self.landed.set()
