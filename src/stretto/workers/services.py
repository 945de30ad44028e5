"""Services: workers in their process, which answer executors with results and timed work."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.errors import RankError, StrettoError
from stretto.models.backend import backend_of
from stretto.models.offload import OffloadedTensors
from stretto.protocols import Clock, RealClock
from stretto.types import Reply, Work

F = TypeVar("F", bound=Callable[..., Any])

ALONE_S = 60.0  # how long a failed rank waits for ranks that may be stuck elsewhere

Call = tuple[str, str]
"""A service and its method."""

Makes = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""How to make each service, by name: an importable function and its arguments."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Marks a service's method and says how executors call it.

    Attributes:
        span: its name in traces. Empty if it takes no time worth recording.
        task: a noun for it in error messages.
        light: needs no offloaded tensors, and almost no memory on the device.
        queues: light unless the scorer streams, because it then only stores its arguments.
        reads: leaves offloaded tensors unchanged.
        waits: waits for offloaded tensors itself, when it needs them.
        collective: the ranks of the service may meet in it. Methods with a span always may.
        alike: all ranks with slices of a model return the same value.
        own_deadline: its work has a deadline, so the executor sets none.
        size: the amount of work that its time is proportional to, computed from its arguments.
    """

    span: str = ""
    _: KW_ONLY
    task: str = "work"
    light: bool = False
    queues: bool = False
    reads: bool = False
    waits: bool = False
    collective: bool = False
    alike: bool = False
    own_deadline: bool = False
    size: Callable[..., float] = lambda *_: 1.0

    def __call__(self, method: F) -> F:
        vars(method)["remote"] = self
        return method

    @property
    def meets(self) -> bool:
        return self.collective or bool(self.span)


def remote_of(method: Callable[..., Any]) -> Remote:
    options: Remote = getattr(method, "remote", Remote())
    return options


@dataclass(slots=True)
class Timed:
    """A stretch of work: its attributes for the trace, and the finished work."""

    attributes: dict[str, Any] = field(default_factory=dict)
    work: tuple[Work, ...] = ()


@dataclass(eq=False)
class Service:
    """A role's worker, with the methods that executors call."""

    worker: Any
    _: KW_ONLY
    clock: Clock = field(default_factory=RealClock)
    offloaded: OffloadedTensors | None = None  # tensors off the device while other services work
    rank = 0  # among the ranks of the service, set once it is made

    @property
    def streams(self) -> bool:
        """Whether a scorer reads responses as they arrive."""
        return True

    @contextmanager
    def _timed(self, name: str) -> Iterator[Timed]:
        """Measure the work of a ``with`` statement."""
        device = getattr(self.worker, "device", None)
        seconds = backend_of(device).timer() if device else None
        timed = Timed()
        start_s = self.clock.now()
        yield timed
        if seconds:  # GPU calls return before their work is done, and may wait first
            took_s = seconds()
            start_s = max(start_s, self.clock.now() - took_s)
        timed.work = (Work(name, start_s, self.clock.now(), timed.attributes),)


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


class RankServices:
    """The services of one rank. They share its device: a call loads the offloaded tensors of its
    service and offloads the rest. A service is on its ``ranks``, in ascending order, or on all.
    """

    def __init__(
        self, rank: int, makes: Makes, ranks: Mapping[str, Sequence[int]] = MappingProxyType({})
    ) -> None:
        self._services = dict[str, Service]()
        self._offloaded = dict[str, OffloadedTensors]()
        self._predictor = CallPredictor()
        self._noted = list[Work]()
        self._all = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
        self._ranks = {name: tuple(ranks.get(name, self._all)) for name in makes}
        self._beside = {  # all ranks take part in making each group, in the same order
            members: dist.new_group(members, backend="gloo")
            for members in dict.fromkeys((self._all, *self._ranks.values()))
            if len(members) > 1
        }
        for name, (make, arguments) in makes.items():
            if rank not in self._ranks[name]:
                continue
            service = self._services[name] = make(*arguments)
            service.rank = self._ranks[name].index(rank)
            if offloaded := getattr(service, "offloaded", None):
                self._offloaded[name] = offloaded
                offloaded.offload()  # to make room for the next one
        self._copy_streams = {offloaded.copies for offloaded in self._offloaded.values()}

    def answer(
        self, service: str, method: str, arguments: tuple[Any, ...], jointly: bool = False
    ) -> object:
        """Return the result of a service's method, or the StrettoError it raised. The rank lives
        on. Results that must be equal on all its ranks are compared, and only the first one returns
        them. Raises RankError if they differ. Raises the error itself if the other ranks have not
        finished the method after ``ALONE_S``, as they may wait for this rank elsewhere. Called
        jointly, the method has to end in the other services too.
        """
        call = self._method(service, method)
        remote = remote_of(call)
        self._load_tensors(service, method, remote)
        try:
            result: object = call(*arguments)
        except StrettoError as error:
            result = error
        if remote.meets:
            self._meet(result, self._ranks[service], alike=remote.alike)
            if jointly:
                self._meet(result, self._all, alike=False)
        if remote.alike and self._services[service].rank and isinstance(result, Reply):
            result = Reply(None, result.work)
        return self._finished(result)

    def aside(self, service: str, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._method(service, method)(*arguments)

    def _method(self, service: str, method: str) -> Callable[..., object]:
        call: Callable[..., object] = getattr(self._services[service], method)
        return call

    def _load_tensors(self, name: str, method: str, remote: Remote) -> None:
        """Load a service's tensors for a call, unless it waits for them itself. Offload others."""
        light = remote.light or (remote.queues and not self._services[name].streams)
        if not self._offloaded or light:
            return
        for other, offloaded in self._offloaded.items():
            if other != name:
                offloaded.offload()
        if tensors := self._offloaded.get(name):
            tensors.load()
            if not remote.waits:
                tensors.wait()
            tensors.changed |= not remote.reads
        coming = self._predictor.called((name, method))
        if coming in self._offloaded:
            self._offloaded[coming].load(early=True)

    def _finished(self, result: object) -> object:
        """Return a call's result or error. Finished copies are added to a Reply."""
        for copies in self._copy_streams:
            self._noted += copies.take()
        if not isinstance(result, Reply):  # copies can be reported later, waits only now
            self._noted = [work for work in self._noted if work.beside]
            return result
        works, self._noted = self._noted, []
        return replace(result, work=(*works, *result.work))

    def _meet(self, result: object, ranks: tuple[int, ...], *, alike: bool) -> None:
        """Wait until the method has ended on these ranks. Compare results by a checksum."""
        if len(ranks) == 1:
            return
        failed = isinstance(result, StrettoError)
        value = result.value if alike and isinstance(result, Reply) else None
        summary = torch.tensor([failed, zlib.crc32(pickle.dumps(value))])
        summaries = [torch.empty_like(summary) for _ in ranks]
        work = dist.all_gather(summaries, summary, group=self._beside[ranks], async_op=True)
        try:
            work.wait(*[timedelta(seconds=ALONE_S)] if failed else [])
        except RuntimeError:
            if isinstance(result, StrettoError):
                raise result from None
            raise
        gave_up, sums = torch.stack(summaries).T.tolist()
        if not any(gave_up) and len(set(sums)) > 1:
            pairs = zip(ranks, sums, strict=True)
            other = next(rank for rank, checksum in pairs if checksum != sums[0])
            raise RankError(
                f"rank {other} has decoded or scored otherwise than rank {ranks[0]}: both have the "
                "same model and got the same. See whether their GPUs and libraries are the same",
                other,
                "ranks-disagree",
            )
