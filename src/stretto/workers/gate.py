"""The gate between a schedule and the calls of its roles: outcomes pass one at a time.

A schedule is a function of its settings, its seeds, and the order and times of its calls' outcomes.
Work runs in threads and processes and ends at any moment. :class:`EventGate` hands the next outcome
to the schedule only when no callback is ready to run, and only then does its clock advance. So this
order and these times are all that a record of the run needs (:mod:`stretto.workers.flight`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from itertools import count
from typing import Any, TypeVar

from stretto.errors import StateError
from stretto.workers.flight import (
    AnswerCodec,
    Event,
    FlightRecorder,
    FlightScript,
    RoleCall,
    current_call,
)

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


class EventGate:
    """Numbers the calls of a schedule, passes their outcomes one at a time, and is its clock.

    - Outcomes pass in the order in which they arrive, or in that of a ``script`` until its end.
    - Only the next outcome changes the time, so decisions from times are functions of the record.
    - In other event loops than :class:`GatedLoop` outcomes pass at once.
    """

    def __init__(
        self, recorder: FlightRecorder | None = None, script: FlightScript | None = None
    ) -> None:
        self.script = script
        self.recorder = recorder or FlightRecorder()
        self._indices = count()
        self._open: dict[int, RoleCall[Any]] = {}  # calls whose outcome has not passed
        self._arrived: deque[RoleCall[Any]] = deque()
        self.ticks = self.fact("ticks", _ticks)
        self._ahead = 0  # of this process's clock, after a script

    def now(self) -> float:
        """Return the time at which the last outcome passed, in seconds."""
        return self.ticks / SECOND

    def fact(self, name: str, measure: Callable[[], T]) -> T:
        """Return a measurement on which settings of the schedule depend, or the script's."""
        recorded = self.script.fact(name) if self.script else None
        value: T = measure() if recorded is None else recorded
        self.recorder.fact(name, value)
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
                self.recorder.gave_up()
                if call in self._arrived:
                    self._arrived.remove(call)
            raise
        finally:
            del self._open[call.index]

    def step(self, step: int) -> None:
        """End a step."""
        if self.script:
            self.script.step(step)
        self.recorder.step(step)

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
        if self.script and (coming := self.script.coming):
            self._pass_scripted(self.script, coming)
        elif self._arrived:
            if self.script and not self._ahead:
                self._ahead = self.ticks - _ticks()
            self._pass(self._arrived[0], max(_ticks() + self._ahead, self.ticks))

    def _pass_scripted(self, script: FlightScript, coming: Event) -> None:
        call = self._open.get(coming.call)
        try:
            if call and call.arrived:
                script.passed(call)
                self._pass(call, coming.ticks)
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
        self.recorder.passed(call, ticks)
        if call.work.cancelled():
            call.delivered.cancel()
        elif error := call.work.exception():
            call.delivered.set_exception(error)
        else:
            call.delivered.set_result(call.work.result())


def _ticks() -> int:
    return int(time.perf_counter() * SECOND)
