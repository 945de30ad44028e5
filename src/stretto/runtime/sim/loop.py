"""An asyncio event loop in virtual time: nothing sleeps, and the order of events is reproducible.

Time stands still while callbacks run, unless one declares its duration (:func:`spend`), and jumps
to the next timer once no callback is ready. A schedule that would take an hour on a cluster thus
takes only the time of its Python code, and two runs of one program are equal, event by event.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

from stretto.errors import StalledError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_ROUNDS_AT_ONE_INSTANT = 1_000_000
_FIRST_SWEEP = 256


class VirtualClock:
    """The time of the running loop, in seconds since its creation."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class _Task(asyncio.Task[Any]):
    """A task whose hash follows the order of creation instead of its memory address. asyncio keeps
    tasks in sets and iterates over them, for example to cancel a group. With the usual hash that
    order would differ between two runs of the same program.
    """

    order: int

    def __new__(cls, coro: Any, *, loop: VirtualLoop, **_: Any) -> _Task:
        self = super().__new__(cls)
        self.order = next(loop.orders)
        return self

    def __hash__(self) -> int:
        return self.order


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that runs callbacks in virtual time. No sockets, no threads, no signals.

    Callbacks run in the order of creation. Timers run in the order of their times, and at the same
    time in the order in which they were set. With ``shuffle``, callbacks ready at the same moment
    run in an order drawn from ``seed`` instead. Each seed is a reproducible interleaving that could
    happen on a real machine.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, seed: int = 0, shuffle: bool = False) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._sweep_at = _FIRST_SWEEP
        self._random = random.Random(seed) if shuffle else None
        self._rounds = 0
        self.orders = count()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back at a virtual time, or as soon as possible if that is past."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self.orders), timer))
        if len(self._timers) > self._sweep_at:
            # Deadlines are set and cancelled by the thousand, long before they expire.
            self._timers = [t for t in self._timers if not t[2].cancelled()]
            heapq.heapify(self._timers)
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._timers))
        return timer

    def spend(self, seconds: float) -> None:
        """Let time pass within a callback, so that timers due meanwhile run late."""
        self._now_s += seconds

    @staticmethod
    def _make_task(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **keywords: Any,
    ) -> asyncio.Task[T]:
        assert isinstance(loop, VirtualLoop)
        return _Task(coroutine, loop=loop, **keywords)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: :meth:`call_at` sweeps cancelled timers, :meth:`_advance` skips them."""

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        self._rounds += 1
        if self._rounds > _ROUNDS_AT_ONE_INSTANT:
            raise StalledError(
                f"tasks woke each other {_ROUNDS_AT_ONE_INSTANT:,} times at {self._now_s} s and "
                f"let no time pass; wait for an event instead of polling. {self._waiting()}",
                code="no-time-passes",
            )
        if self._random and len(ready) > 1:
            self._random.shuffle(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _advance(self) -> None:
        """Advance to the time of the next timer. StalledError if there is no timer."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise StalledError(
                f"nothing can happen any more at {self._now_s} s: no task is ready and no timer is "
                f"set. {self._waiting()}",
                code="nothing-to-wait-for",
            )
        self._now_s = max(self._now_s, timers[0][0])
        self._rounds = 0
        while timers and timers[0][0] <= self._now_s:
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                self._ready.append(timer)

    def _waiting(self) -> str:
        lines = []
        for task in self._all_tasks():
            coroutine, frames = task.get_coro(), task.get_stack(limit=1)
            name = getattr(coroutine, "__qualname__", repr(coroutine))
            at = f" at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
            lines.append(f"{task.get_name()} ({name}{at})")
        return "Tasks that wait: " + "; ".join(lines)

    def _all_tasks(self) -> list[_Task]:
        return sorted(
            (t for t in asyncio.all_tasks(self) if isinstance(t, _Task)), key=lambda t: t.order
        )

    def cancel_all(self) -> None:
        """Cancel every task, in the order of creation. StalledError if one does not end."""
        tasks = self._all_tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for task in tasks:
            if not task.cancelled() and (error := task.exception()):
                self.call_exception_handler(
                    {"message": "a task failed when cancelled", "exception": error, "task": task}
                )
        self.run_until_complete(self.shutdown_asyncgens())


def spend(seconds: float) -> None:
    """Let virtual time pass in which the running loop does nothing else, as if it computed."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.spend(seconds)


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, shuffle: bool = False) -> T:
    """Run a coroutine to its end in virtual time, and cancel the tasks it leaves behind.

    Raises StalledError if everything waits and no timer is set, or if tasks wake each other
    endlessly.

    Args:
        seed: of the order of simultaneous callbacks, with ``shuffle`` only.
        shuffle: permute callbacks ready at the same moment.
    """
    loop = VirtualLoop(seed, shuffle)
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            loop.cancel_all()
        finally:
            loop.close()
