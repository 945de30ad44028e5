"""The account of all waits, deadlines for answers, and the causes that idle roles wait for."""

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
class _Wait:
    """One part of a schedule that waits.

    Attributes:
        who: the part.
        what, rollouts: it waits for, as they are when someone asks.
        over: whether that has come.
    """

    who: str
    what: Text
    rollouts: Ids
    over: Callable[[], bool]

    def __str__(self) -> str:
        what = self.what if isinstance(self.what, str) else self.what()
        ids = sorted(self.rollouts())
        return f"  {self.who} waits for {what}" + (f"; {_listed(ids)}" if ids else "")


class Waits:
    """The account of a schedule's waits: its parts wait for each other here, and nowhere else.

    A part that is not in the account works, or has called a role, which has a deadline. When all
    parts are in it, and nothing that they wait for has come, nothing can ever happen again. So a
    schedule that stands still is known at once, in real and in virtual time, without a timer.
    """

    def __init__(self) -> None:
        self._active = 1  # parts that do not wait; whoever takes the steps is one
        self._waits: dict[_Wait, None] = {}

    def begin(self, work: Work, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Begin the work of one more part, as a task of a group."""
        self._active += 1

        async def part() -> None:
            await work()
            self._active -= 1
            self._check()

        return group.create_task(part())

    async def all_of(
        self, works: Iterable[Work], who: str, what: Text, rollouts: Ids = tuple
    ) -> None:
        """Do several works at the same time, each as a part of its own; wait for all of them."""
        left, ended = 0, asyncio.Event()

        async def counted(work: Work) -> None:
            nonlocal left
            await work()
            left -= 1
            ended.set()

        async with asyncio.TaskGroup() as group:
            for work in works:
                left += 1
                self.begin(partial(counted, work), group)
            await self.until(lambda: not left, ended, who, what, rollouts)

    async def until(
        self,
        condition: Callable[[], bool],
        changed: asyncio.Event,
        who: str,
        what: Text,
        rollouts: Ids = tuple,
    ) -> None:
        """Wait until a condition holds.

        Args:
            condition: depends on what parts do, and on nothing else.
            changed: set by whoever makes the condition hold.

        Raises:
            StalledError: every other part waits too, and none can go on.
        """
        wait = _Wait(who, what, rollouts, condition)
        while not condition():
            changed.clear()
            with self._entered(wait):
                await changed.wait()

    @asynccontextmanager
    async def holding(self, lock: asyncio.Lock, who: str, what: Text) -> AsyncIterator[None]:
        """Wait for a lock, and hold it within a ``with`` statement; errors as of :meth:`until`."""
        with self._entered(_Wait(who, what, tuple, lambda: not lock.locked())):
            await lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _entered(self, wait: _Wait) -> Iterator[None]:
        self._waits[wait] = None
        self._active -= 1
        try:
            self._check()
            yield
        finally:
            self._active += 1
            del self._waits[wait]

    def _check(self) -> None:
        """See that some part can go on.

        Raises:
            StalledError: none can.
        """
        if not self._active and not any(wait.over() for wait in self._waits):
            raise StalledError(
                "nothing is under way, and nothing can begin:\n"
                + "\n".join(map(str, self._waits))
                + "\nThis is a fault of the schedule, and of no role; please report it with these "
                "lines. The run can be taken up again from its newest checkpoint (--resume)",
                {id_ for wait in self._waits for id_ in wait.rollouts()},
            )


async def answered(
    work: Awaitable[T], deadline_s: float, who: str, rollout_ids: Iterable[int] = ()
) -> T:
    """Return what a role answers, within a deadline.

    Raises:
        StalledError: the role did not answer within the deadline; the error names the role and the
            rollouts it worked on.
    """
    try:
        async with asyncio.timeout(deadline_s) as limit:
            return await work
    except StrettoError:
        raise
    except Exception as error:
        ids = sorted(rollout_ids)
        if not limit.expired():
            error.add_note(f"raised by {who}, which worked on {_listed(ids)}")
            raise
        raise StalledError(
            f"{who} has not answered for {deadline_s:g} s; waited for {_listed(ids)}. If it is "
            "only slow, raise schedule.deadline_s",
            ids,
        ) from None


def _listed(ids: Sequence[int]) -> str:
    if not ids:
        return "no rollout in particular"
    shown = ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
    return f"{len(ids)} rollout(s): {shown}"


class Phases:
    """The cause that idle roles wait for, as it changes over time.

    ``data`` while the first responses are being decoded, ``stragglers`` while the last fifth of the
    batch is, ``scores`` from then until the last score, ``weights`` until the next generation.
    """

    KEPT = 256
    """Changes remembered: more than pass between two pieces of work of any role."""

    def __init__(self, clock: Clock, tracer: Tracer) -> None:
        self._clock, self._tracer = clock, tracer
        self._times: list[float] = [clock.now()]
        self._causes: list[str] = ["data"]
        self._lost: dict[str, AbstractContextManager[None]] = {}

    @property
    def current(self) -> str:
        """The cause that an idle role waits for now."""
        return self._causes[-1]

    def enter(self, cause: str) -> None:
        """Make ``cause`` what idle roles wait for from now on."""
        if cause != self._causes[-1]:
            self._times.append(self._clock.now())
            self._causes.append(cause)
            if len(self._times) > 2 * self.KEPT:
                del self._times[: self.KEPT], self._causes[: self.KEPT]

    def waited(self, role: str, since_s: float) -> None:
        """Record that ``role`` was idle from ``since_s`` until now, split by cause."""
        for start_s, end_s, cause in self._split(since_s, self._clock.now()):
            self._tracer.add(role, "wait", start_s, end_s, cause=cause)

    def lost(self, role: str) -> None:
        """Show from now on that ``role`` is lost, until :meth:`down`."""
        if role not in self._lost:
            self._lost[role] = self._tracer.awaiting(role, "down")
            self._lost[role].__enter__()

    def down(self, role: str, since_s: float) -> None:
        """Record that ``role`` was lost at ``since_s``, and serves again or is given up now."""
        if shown := self._lost.pop(role, None):
            shown.__exit__(None, None, None)
        self._tracer.add(role, "down", since_s, self._clock.now(), cause="down")

    def _split(self, start_s: float, end_s: float) -> Iterator[tuple[float, float, str]]:
        at = max(bisect_right(self._times, start_s) - 1, 0)
        while start_s < end_s:
            until_s = self._times[at + 1] if at + 1 < len(self._times) else end_s
            stop_s = min(until_s, end_s)
            if stop_s > start_s:
                yield start_s, stop_s, self._causes[at]
            start_s, at = max(stop_s, start_s), at + 1


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception in a group of groups: the one that made the others stop."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
