"""Runs calls of user code concurrently, each with a deadline, on threads or in the event loop."""

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

from stretto.environments.object_threads import (
    ObjectThread,
    needs_main_thread,
    refused_outside_main,
)
from stretto.outside import describe, in_this_process
from stretto.scoring.conventions import awaited

GRACE_S = 5.0
"""Seconds for the thread of a cancelled call to end, before it counts as lost."""


class CallError(Exception):
    """User code raised, or timed out.

    Attributes:
        place: location of the error, for people. The policy reads the error's own text.
        timed_out: whether it timed out.
    """

    def __init__(self, said: str, place: str = "", *, timed_out: bool = False) -> None:
        super().__init__(said)
        self.place, self.timed_out = place or said, timed_out


class _Job:
    """A call on a thread. Only ``begun`` is set outside the event loop's thread."""

    def __init__(self, call: Callable[[], Any], thread: ObjectThread | None) -> None:
        self.call = call
        self.thread = thread
        self.ended: Future[tuple[Any, BaseException | None]] = Future()  # in the running loop
        self.begun = False
        self.given_up = False
        self.lost = False  # counted as a hanging thread


class Runner:
    """Runs coroutines in the event loop, methods in their object's thread, and functions each on a
    new thread, or in the main thread if they set an alarm.

    A coroutine that times out is cancelled. A thread cannot be cancelled. It is lost, and another
    one replaces it, until so many are lost that the process must be replaced.

    Args:
        parallel: most concurrent calls. The time of a waiting call begins when it starts.
        timeout_s: seconds of a call.
        most_lost: hanging threads after which the process is worn. By default ``parallel``.

    Attributes:
        main: event loop in the main thread, if any. A call there delays the loop.
    """

    def __init__(self, parallel: int, timeout_s: float, most_lost: int | None = None) -> None:
        self.timeout_s = timeout_s
        self._most_lost = most_lost or parallel
        self._places, self._lost = Semaphore(parallel), 0
        self._own: dict[int, tuple[object, Semaphore]] = {}
        self.main: AbstractEventLoop | None = None
        self._main_free = asyncio.Lock()
        self._needs_main: dict[int, tuple[object, bool]] = {}

    async def __call__(
        self, call: Callable[[], Any], of: object = None, thread: ObjectThread | None = None
    ) -> Any:
        """Return a call's awaited result. Raises CallError for its error or timeout.

        Arguments are bound by ``partial``, because users' parameters may have any name.

        Args:
            of: user object whose ``deadline_s`` and ``parallel`` apply to the call, if any.
            thread: of the user object, if the call makes it or is one of its methods.
        """
        timeout_s = float(getattr(of, "deadline_s", None) or self.timeout_s)
        async with self._limit(of), self._places:
            if _is_async(call) and self.main in (None, asyncio.get_running_loop()):
                return await self._in_loop(call, timeout_s)
            in_main = thread.main if thread else self.main and self._runs_in_main(_function(call))
            if self.main and in_main:
                return await self._in_main(call, timeout_s)
            if _is_async(call):
                return await self._in_loop(call, timeout_s)
            try:
                result = await self._on_thread(call, timeout_s, thread)
            except CallError as error:
                if self.main is None or not refused_outside_main(error.__cause__):
                    raise
                key = _function(call) if thread is None else thread.kind
                self._needs_main[id(key)] = key, True
                if thread:
                    thread.main = True
                return await self._in_main(call, timeout_s)
            if inspect.isawaitable(result):
                return await self._in_loop(partial(awaited, result), timeout_s)
            return result

    @property
    def is_worn(self) -> bool:
        return self._lost >= self._most_lost

    def thread_for(self, kind: Any) -> ObjectThread:
        return ObjectThread(kind, main=self._runs_in_main(kind))

    def _runs_in_main(self, thing: Any) -> bool:
        if id(thing) not in self._needs_main:
            self._needs_main[id(thing)] = thing, needs_main_thread(thing)
        return self._needs_main[id(thing)][1]

    def _limit(self, of: object) -> Semaphore:
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
            task.cancel()  # not awaited, because it may ignore this
            raise _too_long(timeout_s)
        if task.cancelled():
            raise CallError("CancelledError: it cancelled itself")
        return _value(*task.result())

    async def _in_main(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Run a call in the main thread, between other tasks of its event loop."""
        assert self.main
        main, work = self.main, partial(_outcome, partial(_called, call))

        def submit() -> Awaitable[Any]:
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), main))

        async with self._main_free:
            return _value(*await self._in_loop(submit, timeout_s))

    async def _on_thread(
        self, call: Callable[[], Any], timeout_s: float, thread: ObjectThread | None
    ) -> Any:
        loop, job = asyncio.get_running_loop(), _Job(call, thread)
        work = partial(self._work, job, loop)
        if thread is None:
            Thread(target=work, daemon=True).start()
        else:
            thread.submit(work)
        try:
            done, _ = await asyncio.wait({job.ended}, timeout=timeout_s)
        except asyncio.CancelledError:
            job.given_up = True
            loop.call_later(GRACE_S, self._lose, job)
            raise
        if not done:
            self._lose(job)
            raise _too_long(timeout_s)
        return _value(*job.ended.result())

    def _lose(self, job: _Job) -> None:
        """Count a thread as lost, unless its call has ended, or has not begun."""
        job.given_up = True
        if job.ended.done() or not job.begun:
            return
        job.lost = True
        if job.thread:
            job.thread.hangs = True
        self._lost += 1

    def _work(self, job: _Job, loop: AbstractEventLoop) -> None:
        job.begun = True
        if job.given_up:
            return
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = in_this_process(job.call), None
        except BaseException as error:  # including SystemExit, which must not end the thread
            outcome = None, error

        def hand_over() -> None:
            if job.lost:
                self._lost -= 1
            if job.thread:
                job.thread.hangs = False
            if not job.ended.done():
                job.ended.set_result(outcome)

        with suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(hand_over)


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(call, partial):
        call = call.func
    return call


def _is_async(function: Callable[..., Any]) -> bool:
    function = _function(function)
    called = getattr(function, "__call__", None)  # noqa: B004  # of an object with that method
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def _called(call: Callable[[], Any]) -> Any:
    result = in_this_process(call)
    return await result if inspect.isawaitable(result) else result


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
        if os.getpid() != pid:  # a process forked by user code
            os._exit(0)


def is_cancelled() -> bool:
    """Whether the current task was cancelled. If not, user code raised CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _value(result: Any, error: BaseException | None) -> Any:
    if error is None:
        return result
    if isinstance(error, CallError):
        raise error
    text = str(error)
    raise CallError(
        f"{type(error).__name__}: {text}" if text else type(error).__name__, describe(error, None)
    ) from error


def _too_long(timeout_s: float) -> CallError:
    return CallError(f"it took longer than {timeout_s:g} s and was given up", timed_out=True)
