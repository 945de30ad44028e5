"""The roles of a run that may be lost: what becomes of each, and calls within their deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from stretto.errors import LifecycleError, RoleLostError, StalledError, StrettoError
from stretto.protocols import Clock, Replaceable
from stretto.schedules.waits import Phases, Waits, answered
from stretto.types import WeightsRef, short_name

T = TypeVar("T")


class MemberState(StrEnum):
    """The state of a role's process, as far as a schedule knows."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    STARTING = "starting"
    STALE = "stale"
    RETIRED = "retired"


_S = MemberState

_EDGES: Mapping[str, Mapping[MemberState, MemberState]] = {
    "late": {_S.HEALTHY: _S.SUSPECT, _S.SUSPECT: _S.SUSPECT},
    "answered": {_S.HEALTHY: _S.HEALTHY, _S.SUSPECT: _S.HEALTHY},
    "died": dict.fromkeys((_S.HEALTHY, _S.SUSPECT, _S.STARTING, _S.STALE), _S.DEAD),
    "starting": {_S.DEAD: _S.STARTING},
    "started": {_S.STARTING: _S.STALE},
    "loaded": {_S.STALE: _S.HEALTHY, _S.HEALTHY: _S.HEALTHY, _S.SUSPECT: _S.HEALTHY},
    "retired": {_S.DEAD: _S.RETIRED},
}


class Member:
    """One role's process, and those that come in its place, as a pure state machine.

    ::

        HEALTHY <-> SUSPECT          late, answered
        HEALTHY, SUSPECT -> DEAD     died
        DEAD -> STARTING             starting, as often as the budget allows
        STARTING -> STALE            started: the process is there, with whatever weights
        STALE -> HEALTHY             loaded: it has the weights of the others, and serves
        STARTING, STALE -> DEAD      died
        DEAD -> RETIRED              retired: it is not replaced again

    A new member serves after a hand-over, and there is no other way.

    Args:
        restarts: how many processes may come in the place of the first.

    Attributes:
        state: what is known of the process.
        deaths: processes that were lost.
        lives: processes that were started in place of another; tells one from the next.
        version: of the weights that it loaded last.
        cause: why the last process was lost.
    """

    def __init__(self, name: str, restarts: int) -> None:
        self.name, self._restarts = name, restarts
        self.state = MemberState.HEALTHY
        self.deaths = self.lives = self.version = 0
        self.cause = ""

    @property
    def serves(self) -> bool:
        """Return whether it may be given work."""
        return self.state in (MemberState.HEALTHY, MemberState.SUSPECT)

    @property
    def exhausted(self) -> bool:
        """Return whether the budget has no further process."""
        return self.lives >= self._restarts

    def late(self) -> None:
        """Note that an answer is overdue."""
        self._go("late")

    def answered(self) -> None:
        """Note an answer."""
        self._go("answered")

    def died(self, cause: str) -> None:
        """Note that the process is lost."""
        self._go("died")
        self.deaths, self.cause = self.deaths + 1, cause

    def starting(self) -> None:
        """Note that a new process is being started.

        Raises:
            LifecycleError: the budget is spent, or nobody has died.
        """
        if self.exhausted:
            raise LifecycleError(
                f"{self.name} has been replaced {self.lives} times, and may be {self._restarts} "
                "times; retire it"
            )
        self._go("starting")
        self.lives += 1

    def started(self) -> None:
        """Note that the new process is there; its weights are not those of the others."""
        self._go("started")

    def loaded(self, version: int) -> None:
        """Note a hand-over, after which a new process serves."""
        self._go("loaded")
        self.version = version

    def retired(self) -> None:
        """Note that nobody comes in the place of the last process."""
        self._go("retired")

    def _go(self, event: str) -> None:
        """Move along an edge.

        Raises:
            LifecycleError: there is none for this event from the present state.
        """
        after = _EDGES[event].get(self.state)
        if after is None:
            raise LifecycleError(f"{self.name} is {self.state}; '{event}' cannot happen to it")
        self.state = after


class Fleet:
    """The members of a run, and the weights that those who follow a model hold.

    State: the tickets, and the totals so far. Budgets begin anew when a run is taken up again, as
    its processes do.

    Args:
        restarts: budget of each member.
        initial: tickets of the weights that roles start with, by model.

    Attributes:
        restarts: as given; with 0 there are no replacements.
        held: tickets of the weights that were handed over last, by model.
    """

    def __init__(self, restarts: int = 0, initial: Mapping[str, WeightsRef] | None = None) -> None:
        self.restarts = restarts
        self.held: Mapping[str, WeightsRef] = dict(initial or {})
        self._members: list[Member] = []
        self._told: dict[int, int] = {}  # deaths that a line was returned about, by member
        self._before = [0, 0]  # deaths and restarts before the run was taken up again

    def member(self, name: str) -> Member:
        """Return a new member, healthy."""
        self._members.append(Member(name, self.restarts))
        return self._members[-1]

    @property
    def deaths(self) -> int:
        """Processes lost in the whole run."""
        return self._before[0] + sum(m.deaths for m in self._members)

    @property
    def replacements(self) -> int:
        """Processes started in place of others in the whole run."""
        return self._before[1] + sum(m.lives for m in self._members)

    def losses(self) -> list[str]:
        """Return a line for people about each member lost since the last call."""
        lines = []
        for i, member in enumerate(self._members if self.restarts else ()):
            if member.deaths > self._told.get(i, 0):
                self._told[i] = member.deaths
                what = member.cause.partition("; mend the cause")[0]  # the run goes on by itself
                dead = member.state in (MemberState.DEAD, MemberState.RETIRED)
                number = member.lives + dead
                then = f"restart {number} of {self.restarts}"
                lines.append(f"{what} ({then if number <= self.restarts else 'not replaced'})")
        return lines

    def metrics(self) -> dict[str, float]:
        """Return the totals, where members may be replaced."""
        if not self.restarts:
            return {}
        return {
            "cluster/deaths": float(self.deaths),
            "cluster/restarts": float(self.replacements),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return tickets and totals, as plain data."""
        return {
            "held": tickets_of(self.held),
            "totals": [self.deaths, self.replacements],
        }

    def load_state_dict(self, state: Mapping[str, Any], channel: str = "") -> None:
        """The inverse of :meth:`state_dict`; initial tickets stay where it has none."""
        self.held = {**self.held, **tickets_from(state["held"], channel)}
        self._before = list(state["totals"])


def tickets_of(refs: Mapping[str, WeightsRef]) -> dict[str, Any]:
    """Return tickets as plain data; without the channel, which is another on each runtime."""
    return {
        model: {"version": ref.version, "fingerprint": ref.fingerprint}
        for model, ref in refs.items()
    }


def tickets_from(state: Mapping[str, Any], channel: str) -> dict[str, WeightsRef]:
    """The inverse of :func:`tickets_of`, for weights in a channel."""
    return {
        model: WeightsRef(model, ref["version"], ref["fingerprint"], channel)
        for model, ref in state.items()
    }


class GoneError(Exception):
    """The process that a call was made to is lost; whoever made the call begins anew."""


@dataclass(frozen=True, slots=True)
class RoleContext:
    """The things that all guards of a schedule share.

    Attributes:
        fleet: has the budget, and the tickets of the weights that are held.
        deadline_s: for each call.
        clock, phases: times of a loss are recorded by these.
        waits: the account of all waits.
        decoding: generators that have something to decode, so that their devices are not free.
    """

    fleet: Fleet
    deadline_s: float
    clock: Clock
    phases: Phases
    waits: Waits
    decoding: set[int] = field(default_factory=set)


class Guard:
    """The way to one role: a loss is noted once, whichever call shows it first.

    Args:
        follows: the model whose weights a new process loads; empty for none.
        on_loss: called at each loss of a process that served, before anyone else hears of it.

    Attributes:
        member: what has become of the role.
        lost: set from a loss until the role serves again.
        weights: the ticket given out last; ``None`` where those of the fleet hold.
    """

    def __init__(
        self,
        role: Replaceable,
        name: str,
        follows: str,
        context: RoleContext,
        on_loss: Callable[[], None],
    ) -> None:
        self._role, self._name, self._follows, self._on_loss = role, name, follows, on_loss
        self._fleet, self._deadline_s = context.fleet, context.deadline_s
        self._clock, self._phases = context.clock, context.phases
        self.member: Member = self._fleet.member(name)
        self.lost = asyncio.Event()
        self.weights: WeightsRef | None = None
        self._loss: StrettoError | None = None
        self._down_since_s = 0.0

    @property
    def serves(self) -> bool:
        """Return whether the role may be given work."""
        return self.member.serves

    @property
    def retired(self) -> bool:
        """Return whether the role is given up."""
        return self.member.state is MemberState.RETIRED

    async def ask(self, work: Awaitable[T], rollout_ids: Iterable[int] = ()) -> T:
        """Return what the role answers.

        Raises:
            GoneError: the role was lost before it answered, and may be replaced.
            RoleLostError: it was lost, and roles are not replaced.
            StalledError: it did not answer in time, and roles are not replaced.
        """
        if not self._fleet.restarts:
            return await answered(work, self._deadline_s, self._name, rollout_ids)
        life = self.member.lives
        try:
            answer = await answered(work, self._deadline_s, self._name, rollout_ids)
        except (RoleLostError, StalledError) as error:
            if self._is_at(life):
                self._note(error)
            raise GoneError from error
        if not self._is_at(life):  # another call has shown the loss meanwhile
            raise GoneError
        self.member.answered()
        return answer

    async def load(self, weights: WeightsRef) -> None:
        """Give the role new weights; one that is being replaced gets them with its new process.

        Raises:
            GoneError: see :meth:`ask`.
        """
        self.weights = weights
        if self.serves:
            await self.ask(self._role.load(weights))
            self.member.loaded(weights.version)

    async def replace(self) -> None:
        """Start processes in the place of a lost one, until one has the newest weights.

        Raises:
            StrettoError: the loss with which the budget was spent; the member is retired.
        """
        while not self.member.serves:
            assert self._loss is not None
            if self.retired:
                raise self._loss
            if self.member.exhausted:
                self.member.retired()
                self._phases.down(short_name(self._name), self._down_since_s)
                self._phases.lost(short_name(self._name))  # from now on, for good
                raise self._loss
            try:
                await self._start()
            except (RoleLostError, StalledError) as error:
                self._note(error)
            except BaseException:
                self.member.died("its start was broken off")
                raise
        self.lost.clear()
        self._phases.down(short_name(self._name), self._down_since_s)

    async def _start(self) -> None:
        self.member.starting()
        try:
            await answered(self._role.restart(), self._deadline_s, self._name)
        except (RoleLostError, StalledError):
            raise
        except StrettoError as error:  # it cannot be replaced at all
            assert self._loss is not None
            raise self._loss from error
        self.member.started()
        while weights := self._newest():
            await answered(self._role.load(weights), self._deadline_s, self._name)
            if weights is self._newest():
                break
        self.member.loaded(weights.version if weights else 0)

    def _newest(self) -> WeightsRef | None:
        return self.weights or self._fleet.held.get(self._follows)

    def _is_at(self, life: int) -> bool:
        return self.member.serves and self.member.lives == life

    def _note(self, error: StrettoError) -> None:
        served = self.member.serves
        if served and isinstance(error, StalledError):
            self.member.late()
        self.member.died(str(error))
        self._loss = error
        if served:
            self._down_since_s = self._clock.now()
            self._phases.lost(short_name(self._name))
            self.lost.set()
            self._on_loss()
