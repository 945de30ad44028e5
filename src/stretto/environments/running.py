"""Calls of users' code, many at a time, each with a deadline: on threads, or in the event loop."""

from __future__ import annotations

import asyncio
import inspect
import os
from asyncio import AbstractEventLoop, Future, Semaphore
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

from stretto.scoring.conventions import describe, in_this_process

GRACE_S = 5.0
"""Seconds that the thread of a call that was cancelled has to end, before it counts as lost."""


class CallError(Exception):
    """Users' code raised, or took too long.

    Attributes:
        place: where it raised, for people; the error's own text is what the policy reads.
        timed_out: whether it took too long.
    """

    def __init__(self, said: str, place: str = "", *, timed_out: bool = False) -> None:
        super().__init__(said)
        self.place, self.timed_out = place or said, timed_out


class Runner:
    """Runs users' code: coroutines in the event loop, other functions each on a thread.

    A coroutine that takes too long is cancelled. A thread cannot be: it is lost, and another one
    takes its place, until so many are lost that the process must be replaced.

    Args:
        parallel: calls at a time, at most; others wait, and their time begins when they start.
        timeout_s: seconds of a call.
        worn: is called once too many threads are lost.
        most_lost: so many; as many as calls may run at a time, if it is left out.
    """

    def __init__(
        self,
        parallel: int,
        timeout_s: float,
        worn: Callable[[], object],
        most_lost: int | None = None,
    ) -> None:
        self.parallel, self.timeout_s, self._worn = parallel, timeout_s, worn
        self._most_lost = most_lost or parallel
        self._places, self._lost = Semaphore(parallel), 0
        self._own: dict[int, tuple[object, Semaphore]] = {}

    async def __call__(
        self, function: Callable[..., Any], *args: Any, of: object = None, **keywords: Any
    ) -> Any:
        """Return what a call returns, awaited; raise CallError for what it raises, or for its time.

        ``of`` is the user's object whose ``deadline_s`` and ``parallel`` hold for the call, if any.
        """
        timeout_s = float(getattr(of, "deadline_s", None) or self.timeout_s)
        async with self._limit(of), self._places:
            call = partial(function, *args, **keywords)
            if _is_async(function):
                return await self._in_loop(call, timeout_s)
            result = await self._on_thread(call, timeout_s)
            if inspect.isawaitable(result):
                return await self._in_loop(partial(_itself, result), timeout_s)
            return result

    def _limit(self, of: object) -> Semaphore:
        """Return the object's own limit; its class's, where it is an instance."""
        limit = getattr(of, "parallel", None)
        if not isinstance(limit, int) or limit < 1:
            return Semaphore()
        owner = of if inspect.isroutine(of) or inspect.isclass(of) else type(of)
        return self._own.setdefault(id(owner), (owner, Semaphore(limit)))[1]

    async def _in_loop(self, call: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        task = asyncio.ensure_future(_outcome(call))
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()  # and not awaited, as it may refuse
            raise _too_long(timeout_s)
        if task.cancelled():
            raise CallError("CancelledError: it cancelled itself")
        return _value(*task.result())

    async def _on_thread(self, call: Callable[[], Any], timeout_s: float) -> Any:
        loop = asyncio.get_running_loop()
        ended: Future[tuple[Any, BaseException | None]] = loop.create_future()
        late: list[bool] = []
        Thread(target=self._work, args=(call, loop, ended, late), daemon=True).start()
        try:
            done, _ = await asyncio.wait({ended}, timeout=timeout_s)
        except asyncio.CancelledError:
            loop.call_later(GRACE_S, self._lose, ended, late)
            raise
        if not done:
            self._lose(ended, late)
            raise _too_long(timeout_s)
        return _value(*ended.result())

    def _lose(self, ended: Future[Any], late: list[bool]) -> None:
        """Count a thread as lost, unless its call has ended."""
        if ended.done():
            return
        late.append(True)
        self._lost += 1
        if self._lost == self._most_lost:
            self._worn()

    def _work(
        self, call: Callable[[], Any], loop: AbstractEventLoop, ended: Future[Any], late: list[bool]
    ) -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = in_this_process(call), None
        except BaseException as error:  # SystemExit too: it is this call's, not the thread's
            outcome = None, error

        def hand_over() -> None:
            if late:
                self._lost -= 1
            if not ended.done():
                ended.set_result(outcome)

        with suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(hand_over)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    called = getattr(function, "__call__", None)  # noqa: B004  # of an object with that method
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def _itself(result: Awaitable[Any]) -> Any:
    return await result


async def _outcome(call: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    pid = os.getpid()
    try:
        return await call(), None
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        return None, error
    except BaseException as error:  # SystemExit would end the event loop
        return None, error
    finally:
        if os.getpid() != pid:  # a process that users' code has forked
            os._exit(0)


def is_cancelled() -> bool:
    """Return whether the task at work was cancelled; else a CancelledError is users' code's."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _value(result: Any, error: BaseException | None) -> Any:
    if error is None:
        return result
    if isinstance(error, CallError):
        raise error
    said = str(error)
    raise CallError(
        f"{type(error).__name__}: {said}" if said else type(error).__name__, describe(error, None)
    ) from error


def _too_long(timeout_s: float) -> CallError:
    return CallError(f"it took longer than {timeout_s:g} s and was given up", timed_out=True)
