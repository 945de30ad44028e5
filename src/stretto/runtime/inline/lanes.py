"""Lanes: threads that work for roles, one call at a time.

Roles on one lane take turns; roles on different lanes work side by side, as far as the interpreter
and the cores allow. Which role is on which lane is the placement of a run in one process.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PATIENCE_S = 5.0
"""How long the end of a run waits for a call that was interrupted."""


class Interrupted(BaseException):
    """Raised in a lane's thread when the run ends while it works."""


class Lane:
    """A thread with a queue of calls.

    Args:
        name: of the thread.
        threads: CPU threads for the tensor work of its calls; 0 leaves torch's choice. Lanes that
            work at the same time should share the cores out: threads that wait for each other spin.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy = False
        # A daemon, so that a call that cannot be interrupted does not keep the process alive.
        self._thread = Thread(target=self._work, args=(threads,), name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """The result of ``call``, made after all calls that were asked for before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(set_it: Callable[[Any], None], value: Any) -> None:
            if not future.done():  # else nobody waits any more
                set_it(value)

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = call()
            except Interrupted:
                raise
            except BaseException as error:
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, result)

        self._calls.put(work)
        return await future

    def close(self) -> None:
        """End the thread; a call that is under way is interrupted between two of its steps."""
        self._calls.put(None)
        if self._busy and self._thread.ident is not None:
            # What Ctrl-C does to the main thread: the exception surfaces at the next bytecode.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            )
        self._thread.join(PATIENCE_S)

    def _work(self, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        try:
            while (call := self._calls.get()) is not None:
                self._busy = True
                call()
                self._busy = False
        except Interrupted:
            pass
