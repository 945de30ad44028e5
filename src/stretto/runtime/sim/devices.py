"""Devices that roles occupy while they work, and workers that answer in order.

A *device* works for one call at a time, first come, first served: roles on one device take turns,
roles on different ones run side by side. A *worker* is one role's view of its devices: it answers
the role's calls in the order in which they were made, and takes down a span for each piece of work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stretto.protocols import Tracer


class Device:
    """An accelerator, or whatever else can do one thing at a time.

    Attributes:
        index: its place in the cluster. A role that needs several devices takes them in this order,
            so that two roles that share some of them never wait for each other in a circle.
        busy_s: virtual seconds of work so far.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.busy_s = 0.0
        self.turn = asyncio.Lock()


class SimWorker:
    """The calls of one role, in order, on its devices.

    A role without devices (a function, a service elsewhere) works on nothing that others share.

    Attributes:
        turn: held by a role for the whole of a call.
    """

    def __init__(self, role: str, devices: Sequence[Device], tracer: Tracer) -> None:
        self.role = role
        self.turn = asyncio.Lock()
        self._devices = sorted(devices, key=lambda d: d.index)
        self._tracer = tracer

    async def work(self, name: str, seconds: float, **attributes: Any) -> None:
        """Occupy all devices for so long, once they are free; recorded as a span of that name."""
        taken = 0
        try:
            for device in self._devices:
                await device.turn.acquire()
                taken += 1
            with self._tracer.span(self.role, name, **attributes):
                await asyncio.sleep(seconds)
            for device in self._devices:
                device.busy_s += seconds
        finally:
            for device in self._devices[:taken]:
                device.turn.release()
