"""Devices that roles occupy while they work, and workers that answer in order.

A *device* works for one call at a time, first come, first served. A *worker* is one role's view of
its devices: it answers the role's calls in the order in which they were made, and takes down a span
for each piece of work. Processes on CPUs, each a device, share the machine's *cores*.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stretto.protocols import Tracer


class Device:
    """A device, which a role that needs several takes in the order of their index.

    So two roles that share some of them never wait for each other in a circle.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.busy_s = 0.0  # so far
        self.turn = asyncio.Lock()


class Cores:
    """CPU cores, shared evenly among all threads at work, if these are more."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._left_s: dict[asyncio.Future[float], float] = {}  # of each piece of work, alone
        self._threads: dict[asyncio.Future[float], int] = {}
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float, threads: int) -> float:
        """Keep threads at work for so long. Return the end, before now if the loop was busy."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[float] = loop.create_future()
        self._settle()
        self._left_s[done], self._threads[done] = seconds, threads
        self._plan()
        try:
            return await done
        finally:
            self._settle()
            self._left_s.pop(done, None)
            del self._threads[done]
            self._plan()

    @property
    def _rate(self) -> float:
        return min(1.0, self._count / sum(self._threads.values())) if self._threads else 1.0

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
            wait_s = max(self._left_s[first], 0.0) / self._rate
            self._timer = loop.call_later(wait_s, self._end, first)

    def _end(self, piece: asyncio.Future[float]) -> None:
        del self._left_s[piece]
        if not piece.done():  # by cancellation
            piece.set_result(self._timer.when() if self._timer else 0.0)


class SimWorker:
    """The calls of one role, in order, on its devices; a function has none.

    Its threads share ``cores`` with others, ``None`` where there are enough. Each call, and its
    answer, are on their way for ``call_s``.
    """

    def __init__(
        self,
        role: str,
        devices: Sequence[Device],
        tracer: Tracer,
        *,
        cores: Cores | None = None,
        threads: int = 1,
        call_s: float = 0.0,
    ) -> None:
        self.role = role
        self._turn, self._call_s = asyncio.Lock(), call_s
        self._devices = sorted(devices, key=lambda d: d.index)
        self._tracer, self._cores, self._threads = tracer, cores, threads

    @property
    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A call of the role, which others wait for, from when it is made to its answer."""
        async with self._turn:
            if self._call_s:
                await asyncio.sleep(self._call_s / 2)
            yield
            if self._call_s:
                await asyncio.sleep(self._call_s / 2)

    async def work(self, name: str, seconds: float, **attributes: Any) -> None:
        """Occupy all devices for work that takes so long alone, once they are free; record it."""
        taken = 0
        try:
            for device in self._devices:
                await device.turn.acquire()
                taken += 1
            await self._work(name, seconds, attributes)
        finally:
            for device in self._devices[:taken]:
                device.turn.release()

    async def _work(self, name: str, seconds: float, attributes: Mapping[str, Any]) -> None:
        loop, ended_s = asyncio.get_running_loop(), None
        began_s = loop.time()
        try:
            if self._cores:
                ended_s = await self._cores.work(seconds, self._threads)
            else:
                await asyncio.sleep(seconds)
                ended_s = began_s + seconds
        finally:  # also of work that is broken off
            ended_s = loop.time() if ended_s is None else ended_s
            self._tracer.add(self.role, name, began_s, max(ended_s, began_s), **attributes)
        for device in self._devices:
            device.busy_s += ended_s - began_s
