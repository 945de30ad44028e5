"""Services: workers that answer with what they did, and when. Executors call them.

A service stands where its worker is, in a thread or in a process of its own. It has the methods of
its role's protocol, which call the worker's and return a :class:`~stretto.types.Reply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

from stretto.models.offload import OffloadedTensors
from stretto.protocols import Clock, RealClock, RemoteMethod, remote_methods
from stretto.types import Reply, Work

T = TypeVar("T")


class Service:
    """A role's worker, with the methods of its role.

    Attributes:
        role: the protocol whose methods are served; a subclass may define some of them itself.
        worker: does the work: plain methods of the same names.
        offloaded: tensors that rest in the host's memory while other services of the process work;
            ``None`` where all stay.
        reads: methods that leave these tensors as they are; all others may change them.
        waits: methods that wait for the tensors themselves, when they come to need them.
    """

    role: ClassVar[type] = object
    offloaded: OffloadedTensors | None = None
    reads: frozenset[str] = frozenset()
    waits: frozenset[str] = frozenset()

    def __init__(self, worker: Any = None, clock: Clock | None = None) -> None:
        self.worker, self._clock = worker, clock or RealClock()
        methods = self._methods = remote_methods(self.role)
        self.reads |= frozenset(name for name, method in methods.items() if method.reads)
        self.waits |= frozenset(name for name, method in methods.items() if method.waits)
        for name, method in methods.items():
            if not hasattr(type(self), name):
                setattr(self, name, partial(self._serve, name, method))

    @property
    def light(self) -> frozenset[str]:
        """Return methods that need no offloaded tensors, and next to no room on the device."""
        return frozenset({"now", *(name for name, m in self._methods.items() if m.light)})

    def now(self) -> Reply[float]:
        """The time by the worker's clock."""
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
        """Return attributes of a call's span."""
        return {}

    def _counts(self) -> Mapping[str, int]:
        """Return totals of the worker; a span gets by how much they grew."""
        return {}

    def _answer(self, reply: Reply[Any]) -> Reply[Any]:
        return reply

    def _timed(
        self, name: str, call: Callable[[], T], about: Callable[[T], Mapping[str, Any]]
    ) -> Reply[T]:
        start_s = self._clock.now()
        value = call()
        attributes = about(value)
        return Reply(value, (Work(name, start_s, self._clock.now(), attributes),))
