"""Services: workers in their process, which answer executors with results and timed work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from stretto.models.backend import backend_of
from stretto.models.offload import OffloadedTensors
from stretto.protocols import Clock, RealClock, RemoteMethod, remote_methods
from stretto.types import Reply, Work

T = TypeVar("T")

Call = tuple[str, str]
"""A service and its method."""


class Service:
    """A role's worker, with plain methods, and the methods of the role's protocol."""

    role: ClassVar[type] = object
    offloaded: OffloadedTensors | None = None  # tensors off the device while other services work
    reads: frozenset[str] = frozenset()  # methods that do not change these tensors
    waits: frozenset[str] = frozenset()  # methods that wait for these tensors themselves
    collective: frozenset[str] = frozenset()  # methods in which the service's ranks may meet
    alike: frozenset[str] = frozenset()  # collective methods with the same result on all ranks

    def __init__(self, worker: Any = None, clock: Clock | None = None) -> None:
        self.worker, self._clock = worker, clock or RealClock()
        methods = self._methods = remote_methods(self.role)
        self.reads |= frozenset(name for name, method in methods.items() if method.reads)
        self.waits |= frozenset(name for name, method in methods.items() if method.waits)
        self.collective |= frozenset(name for name, method in methods.items() if method.span)
        self.alike |= frozenset(name for name, method in methods.items() if method.alike)
        for name, method in methods.items():
            if not hasattr(type(self), name):
                setattr(self, name, partial(self._serve, name, method))

    @property
    def light(self) -> frozenset[str]:
        """Methods that need no offloaded tensors and almost no device memory."""
        return frozenset({"now", *(name for name, m in self._methods.items() if m.light)})

    def now(self) -> Reply[float]:
        return Reply(self._clock.now())

    def _serve(self, name: str, method: RemoteMethod, *args: Any) -> Reply[Any]:
        call, before = partial(getattr(self.worker, name), *args), self._counts()
        if not method.span:
            return self._answer(Reply(call()))

        def about(value: Any) -> Mapping[str, Any]:
            counts = {n: count - before[n] for n, count in self._counts().items()}
            return {**self._about(name, args, value), **counts}

        return self._answer(self._timed(self._span(method.span), call, about))

    def _span(self, name: str) -> str:
        return name

    def _about(self, name: str, args: tuple[Any, ...], value: Any) -> Mapping[str, Any]:
        return {}

    def _counts(self) -> Mapping[str, int]:
        """Return counters of the worker. Spans report their increase."""
        return {}

    def _answer(self, reply: Reply[Any]) -> Reply[Any]:
        return reply

    def _timed(
        self, name: str, call: Callable[[], T], about: Callable[[T], Mapping[str, Any]]
    ) -> Reply[T]:
        device = getattr(self.worker, "device", None)
        seconds = backend_of(device).timer() if device else None
        start_s = self._clock.now()
        value = call()
        attributes = about(value)
        if seconds:  # GPU calls return before their work is done, and may wait first
            took_s = seconds()
            start_s = max(start_s, self._clock.now() - took_s)
        return Reply(value, (Work(name, start_s, self._clock.now(), attributes),))


class CallPredictor:
    """Predicts the next service to be called in a process, from its last call sequence."""

    def __init__(self) -> None:
        self._after: dict[Call, tuple[int, str]] = {}
        self._last: Call | None = None
        self._times = 0

    def called(self, call: Call) -> str:
        """Record a call and return the service expected next. A repeated call is assumed finished
        after as many repetitions as last time. Returns an empty string if nothing is known yet or
        more repetitions are due.
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
    return getattr(service, "offloaded", None)


class ServiceTensors:
    """Offloaded tensors of services on one device: a call loads its own and offloads the rest."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services = services
        self._predictor, self._noted = CallPredictor(), list[Work]()
        found = {name: offloaded_of(service) for name, service in services.items()}
        self._offloaded = {name: offloaded for name, offloaded in found.items() if offloaded}
        self._copy_streams = {offloaded.copies for offloaded in self._offloaded.values()}

    def begin(self, name: str, method: str) -> None:
        """Prepare for a call: its tensors are loaded, unless it waits for them itself."""
        service = self._services[name]
        if not self._offloaded or method in service.light:
            return
        for other, offloaded in self._offloaded.items():
            if other != name:
                offloaded.offload()
        if own := self._offloaded.get(name):
            own.load()
            if method not in service.waits:
                own.wait()
            own.changed |= method not in service.reads
        coming = self._predictor.called((name, method))
        if coming in self._offloaded:
            self._offloaded[coming].load(early=True)

    def noted(self, result: object) -> object:
        """Return a call's result, with the finished copies if it is a Reply."""
        for copies in self._copy_streams:
            self._noted += copies.take()
        if not isinstance(result, Reply):  # copies can be reported later, waits only now
            self._noted = [work for work in self._noted if work.beside]
            return result
        works, self._noted = self._noted, []
        return replace(result, work=(*works, *result.work))
