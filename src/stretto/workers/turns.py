"""Turns of roles that share a device: who is at work, whose tensors rest, and who comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stretto.models.offload import OffloadedTensors
from stretto.types import Reply, Work
from stretto.workers.services import Service

Call = tuple[str, str]
"""A service and its method."""


class Order:
    """The order of calls, as it was the last time."""

    def __init__(self) -> None:
        self._after: dict[Call, tuple[int, str]] = {}
        self._last: Call | None = None
        self._times = 0

    def called(self, call: Call) -> str:
        """Take note of a call; return the service that another one is due of, after this call.

        A call that is made several times in a row is the last of them when it has been made as
        often as before. Empty where nothing is known yet, or more calls of this kind are due.
        """
        if call == self._last:
            self._times += 1
        else:
            if self._last is not None:
                self._after[self._last] = self._times, call[0]
            self._last, self._times = call, 1
        times, service = self._after.get(call, (0, ""))
        return service if self._times >= times else ""


def offloaded_of(service: object) -> OffloadedTensors | None:
    """Return a service's offloaded tensors; any object may be a service, and have none."""
    return getattr(service, "offloaded", None)


class Turns:
    """The turns of a process's services.

    Before a call that needs a service's tensors, others are put away, and these are brought; while
    it is under way, those of the service that comes next.

    Args:
        services: by name. Where none has tensors to offload, nothing is done.
    """

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services = services
        self._order, self._noted = Order(), list[Work]()
        found = {name: offloaded_of(service) for name, service in services.items()}
        self._offloaded = {name: offloaded for name, offloaded in found.items() if offloaded}
        self._copy_streams = {offloaded.copies for offloaded in self._offloaded.values()}

    def begin(self, name: str, method: str) -> None:
        """Prepare for a call: it finds its tensors, unless it waits for them itself."""
        service = self._services[name]
        if not self._offloaded or method in service.light:
            return
        for other, offloaded in self._offloaded.items():
            if other != name:
                offloaded.offload()
        own = self._offloaded.get(name)
        if own:
            own.load()
            if method not in service.waits:
                own.wait()
            own.changed |= method not in service.reads
        coming = self._order.called((name, method))
        if coming in self._offloaded:
            self._offloaded[coming].load(early=True)

    def told(self, result: object) -> object:
        """Return a call's result, with the copies that have ended if it tells of work."""
        for copies in self._copy_streams:
            self._noted += copies.take()
        if not isinstance(result, Reply):  # copies are told of later, waiting was this call's
            self._noted = [work for work in self._noted if work.beside]
            return result
        works, self._noted = self._noted, []
        return replace(result, work=(*works, *result.work))
