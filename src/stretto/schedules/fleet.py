"""Roles whose process may be lost: their states, replacements, and calls with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Literal, TypeVar

from stretto.errors import LifecycleError, RoleLostError, StalledError, StrettoError, without_advice
from stretto.protocols import Clock, Replaceable, Tracer
from stretto.schedules.waits import Phases, Waits, Work, deadline
from stretto.stateful import from_plain, to_plain
from stretto.types import WeightsRef, short_name

T = TypeVar("T")


class MemberState(StrEnum):
    """State of a role's process, as known to the schedule."""

    HEALTHY = "healthy"
    DEAD = "dead"
    STARTING = "starting"
    STALE = "stale"
    RETIRED = "retired"


Event = Literal["died", "starting", "started", "loaded", "retired"]

_S = MemberState

_EDGES: Mapping[Event, Mapping[MemberState, MemberState]] = {
    "died": dict.fromkeys((_S.HEALTHY, _S.STARTING, _S.STALE), _S.DEAD),
    "starting": {_S.DEAD: _S.STARTING},  # as often as the budget allows
    "started": {_S.STARTING: _S.STALE},  # with any weights
    "loaded": {_S.STALE: _S.HEALTHY},  # the newest weights
    "retired": {_S.DEAD: _S.RETIRED},
}


class Member:
    """Pure state machine of one role's process and its replacements."""

    def __init__(self, name: str, restarts: int) -> None:
        self.name, self._restarts = name, restarts
        self.state = MemberState.HEALTHY
        self.deaths, self.cause = 0, ""  # lost processes, and the error of the last
        self.lives = 0  # replacements started. Identifies the present process

    @property
    def serves(self) -> bool:
        return self.state is MemberState.HEALTHY

    @property
    def retired(self) -> bool:
        return self.state is MemberState.RETIRED

    @property
    def exhausted(self) -> bool:
        return self.lives >= self._restarts

    def note(self, event: Event, cause: str = "") -> None:
        """Apply an event. LifecycleError if the state does not allow it, or no restart is left."""
        if event == "starting" and self.exhausted:
            raise LifecycleError(
                f"{self.name} has been replaced {self.lives} times, and may be {self._restarts} "
                "times; retire it",
                "restarts-spent",
            )
        if self.state not in _EDGES[event]:
            raise LifecycleError(
                f"{self.name} is {self.state}; '{event}' cannot happen to it", "no-such-edge"
            )
        self.state = _EDGES[event][self.state]
        self.lives += event == "starting"
        if event == "died":
            self.deaths, self.cause = self.deaths + 1, cause


class Fleet:
    """The members of a run, the weights that followers hold, and totals of losses."""

    def __init__(self, restarts: int = 0, initial: Mapping[str, WeightsRef] | None = None) -> None:
        self.restarts = restarts  # allowed for each member
        self.held: Mapping[str, WeightsRef] = dict(initial or {})  # tickets synced last, by model
        self._members: list[Member] = []
        self._reported: list[int] = []  # deaths reported by losses(), by member
        self._before = [0, 0]  # deaths and restarts before the run was resumed

    def member(self, name: str) -> Member:
        self._members.append(Member(name, self.restarts))
        self._reported.append(0)
        return self._members[-1]

    @property
    def totals(self) -> tuple[int, int]:
        deaths, lives = sum(m.deaths for m in self._members), sum(m.lives for m in self._members)
        return self._before[0] + deaths, self._before[1] + lives

    def losses(self) -> list[str]:
        """Return one line of text about each member lost since the last call."""
        lines = []
        for i, member in enumerate(self._members if self.restarts else ()):
            if member.deaths > self._reported[i]:
                self._reported[i] = member.deaths
                cause = without_advice(member.cause)
                number = member.lives + (member.state is MemberState.DEAD or member.retired)
                outcome = f"restart {number} of {self.restarts}"
                lines.append(f"{cause} ({outcome if number <= self.restarts else 'not replaced'})")
        return lines

    def metrics(self) -> dict[str, float]:
        names = ("cluster/deaths", "cluster/restarts") if self.restarts else ()
        return dict(zip(names, map(float, self.totals), strict=False))

    def state_dict(self) -> dict[str, Any]:
        return {"held": to_plain(self.held), "totals": list(self.totals)}

    def load_state_dict(self, state: Mapping[str, Any], channel: str = "") -> None:
        self.held = {**self.held, **tickets_from(state["held"], channel)}
        self._before = list(state["totals"])


def tickets_from(state: Mapping[str, Any], channel: str) -> dict[str, WeightsRef]:
    """Restore tickets by model, for weights in a channel."""
    return {
        model: from_plain(WeightsRef, {**ref, "model": model}, channel=channel)
        for model, ref in state.items()
    }


class GoneError(Exception):
    """The called process is lost, and the caller must try again."""


Sync = Callable[[WeightsRef, Sequence[Replaceable]], Sequence[Work]]
"""Starts loading weights into roles in parallel. Returns a function per role that awaits it."""


def load_each(weights: WeightsRef, roles: Sequence[Replaceable]) -> Sequence[Work]:
    return [partial(role.load, weights) for role in roles]


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Objects shared by all parts of a schedule."""

    fleet: Fleet
    deadline_s: float  # for each call
    clock: Clock
    tracer: Tracer
    phases: Phases
    waits: Waits
    sync: Sync = load_each
    decoding: set[int] = field(default_factory=set)  # generators whose device is busy
    work: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)  # of all parts
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # wakes the loops

    def load(self, guards: Sequence[Guard], weights: WeightsRef) -> list[Work]:
        """Start loading weights into roles. Lost ones load when replaced. Returns the waits."""
        for guard in guards:
            guard.weights = weights
        serving = [guard for guard in guards if guard.member.serves]
        waits = self.sync(weights, [guard.role for guard in serving])
        wait_of = dict(zip(serving, waits, strict=True))

        async def load_one(guard: Guard) -> None:
            if wait := wait_of.get(guard):
                await guard.ask(wait())

        return [partial(load_one, guard) for guard in guards]


@dataclass(eq=False)
class Guard:
    """Gate for all calls to one role. Notes each loss once, whichever call fails first."""

    role: Replaceable
    name: str
    follows: str  # the model whose weights a new process loads, or empty
    context: RoleContext
    on_loss: Callable[[], None]  # called before the callers get an error, if the role served

    def __post_init__(self) -> None:
        self.member: Member = self.context.fleet.member(self.name)
        self.lost = asyncio.Event()  # set from a loss until the role serves again
        self.weights: WeightsRef | None = None  # newest ones. None: those in fleet.held
        self._loss: StrettoError | None = None
        self._down_since_s = 0.0

    async def ask(
        self, work: Awaitable[T], rollout_ids: Iterable[int] = (), deadlines: float = 1.0
    ) -> T:
        """Return the role's answer. GoneError if it is lost or late, and restarts are allowed."""
        life = self.member.lives
        try:
            async with self._deadline(rollout_ids, deadlines):
                answer = await work
        except (RoleLostError, StalledError) as error:
            if not self.context.fleet.restarts:
                raise
            if self._is_at(life):
                self._note_loss(error)
            raise GoneError from error
        if self.context.fleet.restarts and not self._is_at(
            life
        ):  # another call noted a loss meanwhile
            raise GoneError
        return answer

    async def replace(self) -> None:
        """Start processes until one has the newest weights, else raise the last loss."""
        phases, name = self.context.phases, short_name(self.name)
        while not self.member.serves:
            assert self._loss is not None
            if self.member.retired:
                raise self._loss
            if self.member.exhausted:
                self.member.note("retired")
                phases.down(name, self._down_since_s)
                phases.lost(name)  # for good
                raise self._loss
            try:
                await self._start()
            except (RoleLostError, StalledError) as error:
                self._note_loss(error)
            except BaseException:
                self.member.note("died", "its start was broken off")
                raise
        self.lost.clear()
        phases.down(name, self._down_since_s)

    async def _start(self) -> None:
        self.member.note("starting")
        try:
            async with self._deadline():
                await self.role.restart()
        except (RoleLostError, StalledError):
            raise
        except StrettoError as error:  # the role cannot be replaced
            assert self._loss is not None
            raise self._loss from error
        self.member.note("started")
        while weights := self._newest():
            async with self._deadline():
                await self.role.load(weights)
            if weights is self._newest():
                break
        self.member.note("loaded")

    def _deadline(
        self, rollout_ids: Iterable[int] = (), deadlines: float = 1.0
    ) -> AbstractAsyncContextManager[None]:
        return deadline(deadlines * self.context.deadline_s, self.name, rollout_ids)

    def _newest(self) -> WeightsRef | None:
        return self.weights or self.context.fleet.held.get(self.follows)

    def _is_at(self, life: int) -> bool:
        return self.member.serves and self.member.lives == life

    def _note_loss(self, error: StrettoError) -> None:
        was_serving = self.member.serves
        self.member.note("died", str(error))
        self._loss = error
        if was_serving:
            self._down_since_s = self.context.clock.now()
            self.context.phases.lost(short_name(self.name))
            self.lost.set()
            self.on_loss()
