"""A role's calls within their deadline, and a new process where the role is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from stretto.clock import Clock
from stretto.errors import RoleLostError, StalledError, StrettoError
from stretto.protocols import Replaceable
from stretto.schedules.fleet import Fleet, Member, MemberState
from stretto.schedules.waits import Phases, Waits, answered
from stretto.types import WeightsRef, short_name

T = TypeVar("T")


class GoneError(Exception):
    """The process that a call was made to is lost; whoever made the call begins anew."""


@dataclass(frozen=True, slots=True)
class Surroundings:
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
        around: Surroundings,
        on_loss: Callable[[], None],
    ) -> None:
        self._role, self._name, self._follows, self._on_loss = role, name, follows, on_loss
        self._fleet, self._deadline_s = around.fleet, around.deadline_s
        self._clock, self._phases = around.clock, around.phases
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
