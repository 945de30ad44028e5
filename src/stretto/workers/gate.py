"""The gate between a schedule and the calls of its roles: outcomes pass one at a time.

A schedule is a function of its settings, its seeds, and the order and times of its calls' outcomes.
Work runs in threads and processes and ends at any moment. :class:`EventGate` hands the next outcome
to the schedule only when no callback is ready to run, and only then does its clock advance. So this
order and these times are all that a record of the run needs (:mod:`stretto.observe.flight`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from stretto.errors import StateError

T = TypeVar("T")

SECOND = 1_000_000
"""Ticks of the gate's clock. Times are whole microseconds, so that a record holds them exactly."""


class GatedLoop(asyncio.SelectorEventLoop):
    """An event loop that calls :attr:`on_idle` whenever no callback is ready to run."""

    _ready: deque[asyncio.Handle]
    on_idle: Callable[[], object] | None = None

    def _run_once(self) -> None:
        if self.on_idle and not self._ready:
            self.on_idle()
        super()._run_once()  # type: ignore[misc]  # of BaseEventLoop, as in runtime/sim/loop.py


@dataclass(slots=True, eq=False)
class RoleCall(Generic[T]):
    """A call of a role by the schedule.

    Attributes:
        index: in the order in which the schedule makes calls.
        threads: CPU threads of its work, set before by a replay, or by the work itself if their
            number depends on other calls. Otherwise 0.
        answer: how the outcome is recorded, if it cannot be computed again.
        delivered: the outcome that the schedule waits for.
        work: the outcome that has arrived, or will.
        replayed: whether it repeats a call of a recorded run.
    """

    index: int
    role: str
    method: str
    answer: AnswerCodec[T] | None
    delivered: asyncio.Future[T] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    work: asyncio.Future[T] | None = None
    threads: int = 0
    replayed: bool = False

    @property
    def name(self) -> str:
        return f"{self.role} {self.method}"

    @property
    def arrived(self) -> bool:
        return self.work is not None and self.work.done()


current_call: ContextVar[RoleCall[Any] | None] = ContextVar("current_call", default=None)
"""The call that a task, or the work that it starts, belongs to."""


class AnswerCodec(Protocol[T]):
    """How the outcome of a call is recorded, if code outside of Stretto computes it."""

    def plain(self, value: T) -> Any:
        """Return the value as plain data for JSON."""

    def value(self, plain: Any) -> T:
        """Restore the value."""


class Tape:
    """Records what passes a gate. This one records nothing."""

    def fact(self, name: str, value: Any) -> None:
        """Record a measurement that settings of the schedule depend on."""

    def passed(self, call: RoleCall[Any], ticks: int) -> None:
        """Record the outcome of a call."""

    def gave_up(self) -> None:
        """Record that the schedule no longer waits for a call."""

    def step(self, step: int) -> None:
        """Record the end of a step."""

    def saves(self, step: int) -> None:
        """Record that the caller requested a checkpoint after a step."""

    def flush(self) -> None:
        """Write everything recorded so far."""


class Script(Protocol):
    """The order of outcomes that a gate follows, from the record of an earlier run."""

    start_ticks: int

    def fact(self, name: str) -> Any:
        """Return a recorded measurement, ``None`` if it was not made."""

    def prepare(self, call: RoleCall[Any]) -> asyncio.Future[Any] | None:
        """Check a new call against the record. Returns its outcome if it is not to be computed.
        Called after the end of the script, too.
        """

    def coming(self) -> tuple[int, int] | None:
        """Return the index of the next call whose outcome passes, and the clock. ``None`` at the
        end of the script.
        """

    def passed(self, call: RoleCall[Any]) -> None:
        """Compare an outcome with the record. Raises a StateError if they differ."""

    def stuck(self, waiting: list[RoleCall[Any]]) -> NoReturn:
        """Raise a StateError, because the next outcome is of a call that was never made."""

    def step(self, step: int) -> None:
        """Compare the end of a step with the record."""


class EventGate:
    """Numbers the calls of a schedule, passes their outcomes one at a time, and is its clock.

    - Outcomes pass in the order in which they arrive, or in that of a ``script`` until its end.
    - Only the next outcome changes the time, so decisions from times are functions of the record.
    - In other event loops than :class:`GatedLoop` outcomes pass at once.
    """

    def __init__(self, tape: Tape | None = None, script: Script | None = None) -> None:
        self.script = script
        self.tape = tape or Tape()
        self._indices = count()
        self._open: dict[int, RoleCall[Any]] = {}  # calls whose outcome has not passed
        self._arrived: deque[RoleCall[Any]] = deque()
        self.ticks = script.start_ticks if script else _ticks()
        self.tape.fact("ticks", self.ticks)
        self._ahead = 0  # of this process's clock, after a script

    def now(self) -> float:
        """Return the time at which the last outcome passed, in seconds."""
        return self.ticks / SECOND

    def fact(self, name: str, measure: Callable[[], T]) -> T:
        """Return a measurement on which settings of the schedule depend, or the script's."""
        recorded = self.script.fact(name) if self.script else None
        value: T = measure() if recorded is None else recorded
        self.tape.fact(name, value)
        return value

    async def outcome(
        self,
        role: str,
        method: str,
        work: Callable[[], Awaitable[T]],
        answer: AnswerCodec[T] | None = None,
    ) -> T:
        """Return a call's outcome once it has passed. Cancelling this cancels the work.

        Args:
            work: starts the call.
            answer: how the outcome is recorded, if it cannot be computed again.
        """
        loop = asyncio.get_running_loop()
        if isinstance(loop, GatedLoop):
            loop.on_idle = self._pass_next
        call = RoleCall(next(self._indices), role, method, answer)
        recorded_outcome = self.script.prepare(call) if self.script else None
        self._open[call.index] = call
        call.work = recorded_outcome or self._start(call, work)
        call.work.add_done_callback(partial(self._arrive, call))
        try:
            return await call.delivered
        except asyncio.CancelledError:
            if call.delivered.cancelled():
                call.work.cancel()
                self.tape.gave_up()
                if call in self._arrived:
                    self._arrived.remove(call)
            raise
        finally:
            del self._open[call.index]

    def step(self, step: int) -> None:
        """End a step."""
        if self.script:
            self.script.step(step)
        self.tape.step(step)

    @staticmethod
    def _start(call: RoleCall[T], work: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        async def run() -> T:
            return await work()

        context = copy_context()
        context.run(current_call.set, call)
        return asyncio.get_running_loop().create_task(run(), context=context)

    def _arrive(self, call: RoleCall[Any], work: asyncio.Future[Any]) -> None:
        if call.delivered.done():  # given up
            if not work.cancelled():
                work.exception()  # otherwise asyncio logs it
            return
        self._arrived.append(call)
        if not isinstance(asyncio.get_running_loop(), GatedLoop):
            self._pass_next()

    def _pass_next(self) -> None:
        """Let one outcome pass, if the next one has arrived."""
        if self.script and (coming := self.script.coming()):
            self._pass_scripted(self.script, *coming)
        elif self._arrived:
            if self.script and not self._ahead:
                self._ahead = self.ticks - _ticks()
            self._pass(self._arrived[0], max(_ticks() + self._ahead, self.ticks))

    def _pass_scripted(self, script: Script, index: int, ticks: int) -> None:
        call = self._open.get(index)
        try:
            if call and call.arrived:
                script.passed(call)
                self._pass(call, ticks)
            elif not call and self._open and all(c.arrived for c in self._open.values()):
                script.stuck(list(self._open.values()))
        except StateError as error:
            for waiting in self._arrived:
                waiting.delivered.set_exception(error)
            self._arrived.clear()

    def _pass(self, call: RoleCall[Any], ticks: int) -> None:
        assert call.work
        self.ticks = ticks
        self._arrived.remove(call)
        self.tape.passed(call, ticks)
        if call.work.cancelled():
            call.delivered.cancel()
        elif error := call.work.exception():
            call.delivered.set_exception(error)
        else:
            call.delivered.set_result(call.work.result())


def _ticks() -> int:
    return int(time.perf_counter() * SECOND)
