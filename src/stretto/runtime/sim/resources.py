"""Devices that roles occupy while they work, and workers that answer in order.

A *device* runs one call at a time, first come, first served. A *worker* is one role's view of its
devices: it answers the role's calls in the order in which they were made, and records a span for
each piece of work. CPU processes, one per device, share the machine's *cores* with the driver. The
learner's process sends them weights one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from stretto.protocols import Tracer
from stretto.runtime.sim.loop import spend


class Device:
    """A device. Roles acquire several in the order of ``index``, which prevents deadlocks."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.busy_s = 0.0  # so far
        self.turn = asyncio.Lock()


def full_speed(pieces: int, threads: int, cores: int, thread_scaling: float) -> float:
    """Return the rate of pieces of work with so many threads in all, relative to one alone.

    Args:
        thread_scaling: speed of several pieces, relative to one, if they hinder each other by more
            than their need for cores, for example by Python's lock. 0: they do not.
    """
    rate = min(1.0, cores / threads) if threads else 1.0
    return min(rate, thread_scaling / pieces) if thread_scaling and pieces > 1 else rate


def speed_with_driver(pieces: int, threads: int, cores: int, in_processes: bool) -> float:
    """Return the rate of pieces of work while the driver computes. On threads of its process, all
    together are as fast as one of them."""
    if in_processes:
        return full_speed(0, threads, max(cores - 1, 1), 0.0)
    return full_speed(pieces + 1, threads + 1, cores, 1.0)


class Cores:
    """CPU cores, shared evenly by all working threads if there are more threads than cores. For
    ``thread_scaling`` see :func:`full_speed`.
    """

    def __init__(self, count: int, thread_scaling: float = 0.0) -> None:
        self._count, self._thread_scaling = count, thread_scaling
        self._left_s: dict[asyncio.Future[float], float] = {}  # of each piece of work at full speed
        self._ended_s: dict[asyncio.Future[float], float] = {}  # while the driver computed
        self._threads: dict[asyncio.Future[float], int] = {}
        self._in_python: set[asyncio.Future[float]] = set()
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.sending = asyncio.Lock()

    @property
    def in_processes(self) -> bool:
        """Whether pieces of work hinder each other only by their need for cores."""
        return not self._thread_scaling

    async def work(self, seconds: float, threads: int, *, in_python: bool = False) -> float:
        """Occupy threads for that work. Return its end, in the past if the loop was busy.

        ``in_python``: it is Python code of this process. Passes then wait at each operation for
        Python's lock, so that all pieces together are as fast as one of them.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[float] = loop.create_future()
        self._settle()
        self._left_s[done], self._threads[done] = seconds, threads
        if in_python and self._thread_scaling:
            self._in_python.add(done)
        self._plan()
        try:
            return await done
        finally:
            self._settle()
            self._left_s.pop(done, None)
            self._ended_s.pop(done, None)
            del self._threads[done]
            self._in_python.discard(done)
            self._plan()

    def compute(self, seconds: float) -> None:
        """Let the driver compute within a callback. All events wait meanwhile. This takes a core
        from roles in processes of their own, and Python's lock from those on threads."""
        self._settle()
        pieces, threads = len(self._threads), sum(self._threads.values())
        rate = speed_with_driver(pieces, threads, self._count, self.in_processes)
        for piece, left_s in self._left_s.items():
            if left_s <= seconds * rate:
                self._ended_s.setdefault(piece, self._since_s + left_s / rate)
            self._left_s[piece] = left_s - seconds * rate
        spend(seconds)
        self._since_s += seconds
        self._plan()

    @property
    def _rate(self) -> float:
        threads = self._threads.values()
        scaling = 1.0 if self._in_python else self._thread_scaling
        return full_speed(len(threads), sum(threads), self._count, scaling)

    def _settle(self) -> None:
        now_s = asyncio.get_running_loop().time()
        done_s, self._since_s = (now_s - self._since_s) * self._rate, now_s
        for piece in self._left_s:
            self._left_s[piece] -= done_s

    def _plan(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self._left_s:
            loop = asyncio.get_running_loop()
            first = min(self._left_s, key=self._left_s.__getitem__)
            end_s = self._ended_s.get(first, loop.time() + self._left_s[first] / self._rate)
            self._timer = loop.call_at(end_s, self._end, first)

    def _end(self, piece: asyncio.Future[float]) -> None:
        del self._left_s[piece]
        if not piece.done():  # after a cancellation
            piece.set_result(self._timer.when() if self._timer else 0.0)


@dataclass(eq=False)
class SimWorker:
    """Runs the calls of one role in order on its devices. A function has no devices. Its threads
    share ``cores`` with other roles. ``None`` means that there are enough cores. Each call spends
    ``call_s`` in transit, including its answer, which is work for CPU processes.
    """

    role: str
    devices: Sequence[Device]
    tracer: Tracer
    cores: Cores | None = None
    threads: int = 1
    call_s: float = 0.0

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()
        self.devices = sorted(self.devices, key=lambda d: d.index)

    @asynccontextmanager
    async def turn(self, call: str, *arguments: object) -> AsyncIterator[None]:
        """The time from a call until its answer, during which the role's other calls wait. The
        call's name and main arguments are for logs.
        """
        async with self._turn:
            await self._transit()
            yield
            await self._transit()

    async def _transit(self) -> None:
        if self.cores and self.cores.in_processes:  # both sides write, read and copy
            await self.cores.work(self.call_s / 2, 1)
        elif self.call_s:
            await asyncio.sleep(self.call_s / 2)

    async def load(self, version: int, seconds: float) -> None:
        """Load a version of the weights. A thread of the learner's process may have to send it."""
        if self.cores and self.cores.in_processes:
            async with self.cores.sending:
                await self._occupy("load", seconds, self.threads + 1, {"version": version})
        else:
            await self.work("load", seconds, version=version)

    async def work(self, name: str, seconds: float, **attributes: Any) -> None:
        """Occupy all devices, once they are free, for work of that duration, and record it."""
        await self._occupy(name, seconds, self.threads, attributes)

    async def _occupy(
        self, name: str, seconds: float, threads: int, attributes: Mapping[str, Any]
    ) -> None:
        turn_count = 0
        try:
            for device in self.devices:
                await device.turn.acquire()
                turn_count += 1
            await self._work(name, seconds, threads, attributes)
        finally:
            for device in self.devices[:turn_count]:
                device.turn.release()

    async def _work(
        self, name: str, seconds: float, threads: int, attributes: Mapping[str, Any]
    ) -> None:
        loop, ended_s = asyncio.get_running_loop(), None
        began_s = loop.time()
        try:
            if self.cores:
                ended_s = await self.cores.work(seconds, threads)
            else:
                await asyncio.sleep(seconds)
                ended_s = began_s + seconds
        finally:  # also of cancelled work
            ended_s = loop.time() if ended_s is None else ended_s
            self.tracer.add(self.role, name, began_s, max(ended_s, began_s), **attributes)
        for device in self.devices:
            device.busy_s += ended_s - began_s
