"""Runs a coroutine, such as a schedule in real time, from a plain call, without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from queue import Queue, SimpleQueue
from typing import Any, TypeVar

from stretto import signals
from stretto.workers.gate import GatedLoop

T = TypeVar("T")
Calls = SimpleQueue[Callable[[], object] | None]

_calls: ContextVar[Calls | None] = ContextVar("_calls", default=None)
"""Calls for the thread of :func:`drive`. ``None`` if the event loop is in that thread."""


def drive(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, in a thread if an event loop already runs, as in a notebook.
    Ctrl-C, or a signal treated like it (:mod:`stretto.signals`), cancels the coroutine, and is
    raised once the coroutine has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=GatedLoop) as runner:
            end = runner.run(_cancellable(work))
        if end is not None:
            raise end from None
        return
    started: Queue[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Queue()
    calls: Calls = SimpleQueue()

    async def main() -> None:
        task = asyncio.current_task()
        assert task
        _calls.set(calls)
        started.put((asyncio.get_running_loop(), task))
        await work

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(_run, main())
        done.add_done_callback(lambda _: calls.put(None))
        loop, task = started.get()
        try:
            while call := calls.get():
                call()
            done.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


def _run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=GatedLoop) as runner:
        runner.run(work)


async def in_caller(call: Callable[[], T]) -> T:
    """Make a call in the thread of :func:`drive`. Ctrl-C interrupts the call. Blocks the event loop
    if that is in the same thread.
    """
    calls = _calls.get()
    if calls is not None:
        answer: Future[T] = Future()
        calls.put(lambda: _settle(answer, call))
        return await asyncio.wrap_future(answer)
    try:
        with signals.raised():
            return call()
    except KeyboardInterrupt:
        signals.stop()
        await asyncio.get_running_loop().create_future()  # until this task is cancelled
        raise


def _settle(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        with signals.raised():
            answer.set_result(call())
    except KeyboardInterrupt:  # drive() then cancels the task that waits for the answer
        raise
    except BaseException as error:
        answer.set_exception(error)


async def _cancellable(work: Coroutine[Any, Any, None]) -> BaseException | None:
    """Return the interrupt or exit that ended the work, because asyncio would log it if raised."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stopped = False
    assert task

    def stop() -> None:
        nonlocal stopped
        stopped = True
        loop.call_soon_threadsafe(task.cancel)

    with signals.received_by(stop):
        try:
            await work
        except asyncio.CancelledError:
            if stopped:
                return KeyboardInterrupt()
            raise
        except (KeyboardInterrupt, SystemExit) as end:
            return end
    return None
