"""The step from a coroutine to a call: it runs a schedule in real time, without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

from stretto import signals


def drive(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end; in a thread where an event loop runs already, as in a notebook.

    Ctrl-C, or a signal that stands for it (:mod:`stretto.signals`), cancels the coroutine, and is
    raised once the coroutine has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner() as runner:
            runner.run(_cancellable(work))
        return
    loops: Queue[asyncio.AbstractEventLoop] = Queue()

    async def main() -> None:
        loops.put(asyncio.get_running_loop())
        await work

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, main())
        loop = loops.get()
        try:
            done.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(lambda: [t.cancel() for t in asyncio.all_tasks(loop)])
            raise


async def _cancellable(work: Coroutine[Any, Any, None]) -> None:
    """Cancel the work at a signal, as asyncio does at Ctrl-C."""
    loop, task, stopped = asyncio.get_running_loop(), asyncio.current_task(), False
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
                raise KeyboardInterrupt from None
            raise
