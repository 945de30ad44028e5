"""Registry of waits, which detects deadlocks, deadlines for answers, and causes of idle time."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from stretto.errors import StalledError, StrettoError
from stretto.protocols import Clock, Tracer

T = TypeVar("T")

Work = Callable[[], Awaitable[None]]
Text = str | Callable[[], str]
Ids = Callable[[], Iterable[int]]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    part: str
    what: Text
    rollouts: Ids
    over: Callable[[], bool]

    def __str__(self) -> str:
        what = self.what if isinstance(self.what, str) else self.what()
        ids = sorted(self.rollouts())
        return f"  {self.part} waits for {what}" + (f"; {_listed(ids)}" if ids else "")


class Waits:
    """Registry of a schedule's waits. Its parts must wait for each other here and nowhere else.

    A part outside the registry works, or has called a role with a deadline. If all parts are in it
    and no condition holds, nothing can ever happen again. So a deadlock is detected at once, in
    real and in virtual time, without a timer.
    """

    def __init__(self) -> None:
        self._active = 1  # parts that do not wait, including the caller of step()
        self._waiters: dict[_Waiter, None] = {}

    def begin(self, work: Work, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Start the work of one more part, as a task of a group."""
        self._active += 1

        async def part() -> None:
            await work()
            self._active -= 1
            self._check()

        return group.create_task(part())

    async def all_of(
        self, works: Iterable[Work], part: str, what: Text, rollouts: Ids = tuple
    ) -> None:
        """Run several works concurrently, each as its own part, and wait for all."""
        n_running, part_ended = 0, asyncio.Event()

        async def run_one(work: Work) -> None:
            nonlocal n_running
            await work()
            n_running -= 1
            part_ended.set()

        async with asyncio.TaskGroup() as group:
            for work in works:
                n_running += 1
                self.begin(partial(run_one, work), group)
            await self.until(lambda: not n_running, part_ended, part, what, rollouts)

    async def until(
        self,
        condition: Callable[[], bool],
        changed: asyncio.Event,
        part: str,
        what: Text,
        rollouts: Ids = tuple,
    ) -> None:
        """Wait for a condition. The part that makes it true must set ``changed``."""
        waiter = _Waiter(part, what, rollouts, condition)
        while not condition():
            changed.clear()
            with self._entered(waiter):
                await changed.wait()

    @asynccontextmanager
    async def holding(self, lock: asyncio.Lock, part: str, what: Text) -> AsyncIterator[None]:
        """Hold a lock in a ``with`` statement. The wait counts as in :meth:`until`."""
        with self._entered(_Waiter(part, what, tuple, lambda: not lock.locked())):
            await lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _entered(self, waiter: _Waiter) -> Iterator[None]:
        self._waiters[waiter] = None
        self._active -= 1
        try:
            self._check()
            yield
        finally:
            self._active += 1
            del self._waiters[waiter]

    def _check(self) -> None:
        if not self._active and not any(waiter.over() for waiter in self._waiters):
            raise StalledError(
                "nothing is under way, and nothing can begin:\n"
                + "\n".join(map(str, self._waiters))
                + "\nThis is a fault of the schedule, and of no role; please report it with these "
                "lines. The run can go on from its newest checkpoint",
                {id_ for waiter in self._waiters for id_ in waiter.rollouts()},
                "all-parts-wait",
            )


@asynccontextmanager
async def deadline(
    deadline_s: float, role: str, rollout_ids: Iterable[int] = ()
) -> AsyncIterator[None]:
    """Limit the wait for a role's answer. StalledError if it exceeds the deadline."""
    try:
        async with asyncio.timeout(deadline_s) as limit:
            yield
    except StrettoError:
        raise
    except Exception as error:
        ids = sorted(rollout_ids)
        if not limit.expired():
            error.add_note(f"raised by {role}, which worked on {_listed(ids)}")
            raise
        raise StalledError(
            f"{role} has not answered for {deadline_s:g} s; waited for {_listed(ids)}. If it is "
            "only slow, raise schedule.deadline_s",
            ids,
            "no-answer-in-time",
        ) from None


def _listed(ids: Sequence[int]) -> str:
    if not ids:
        return "no rollout in particular"
    listing = ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
    return f"{len(ids)} rollout(s): {listing}"


class Phases:
    """Causes of idle time: data, stragglers, environment, scores or weights."""

    KEPT = 256  # changes remembered, which must be more than in any role's idle time

    def __init__(self, clock: Clock, tracer: Tracer) -> None:
        self._clock, self._tracer = clock, tracer
        self._times: list[float] = [clock.now()]
        self._causes: list[str] = ["data"]
        self._lost: dict[str, AbstractContextManager[None]] = {}

    @property
    def cause(self) -> str:
        return self._causes[-1]

    def enter(self, cause: str) -> None:
        """Set the cause of idle time from now on."""
        if cause != self._causes[-1]:
            self._times.append(self._clock.now())
            self._causes.append(cause)
            if len(self._times) > 2 * self.KEPT:
                del self._times[: self.KEPT], self._causes[: self.KEPT]

    def waited(self, role: str, since_s: float) -> None:
        """Record that ``role`` was idle from ``since_s`` until now, split by cause."""
        first = max(bisect_right(self._times, since_s) - 1, 0)
        ends = [*self._times[first + 1 :], self._clock.now()]
        for end_s, cause in zip(ends, self._causes[first:], strict=True):
            if end_s > since_s:
                self._tracer.add(role, "wait", since_s, end_s, cause=cause)
                since_s = end_s

    def lost(self, role: str) -> None:
        """Show ``role`` as lost until :meth:`down`."""
        if role not in self._lost:
            self._lost[role] = self._tracer.awaiting(role, "down")
            self._lost[role].__enter__()

    def down(self, role: str, since_s: float) -> None:
        """Record that ``role`` was lost from ``since_s`` until now. It serves or is given up."""
        if span := self._lost.pop(role, None):
            span.__exit__(None, None, None)
        self._tracer.add(role, "down", since_s, self._clock.now(), cause="down")


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first plain exception in nested groups, which stopped all other tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
