"""Deadlines for answers, and the causes that idle roles wait for."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from stretto.clock import Clock
from stretto.errors import StalledError, StrettoError
from stretto.protocols import Tracer

T = TypeVar("T")


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
