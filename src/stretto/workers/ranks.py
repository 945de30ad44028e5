"""Ranks: processes that form a group and end together."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from stretto.errors import ADVICE, RankError
from stretto.workers.connection import (
    STEP,
    Done,
    Failed,
    NotConnectedError,
    RankConnection,
    Raw,
    framed,
)
from stretto.workers.forkserver import ForkedProcesses
from stretto.workers.rank import Facts, Rank, RankSpec
from stretto.workers.threads import Method, T, Ts

if TYPE_CHECKING:
    from stretto.workers.services import Makes

START = "its start"
LISTEN, JOIN, MAKE = (f"{START} ({what})" for what in ("listening", "joining its group", "loading"))
SAY_EVERY_S = 30.0  # seconds between reports during a start
PATIENCE_S = 2.0  # for an answer aside from a rank that may hang
NO_WORDS: Mapping[Callable[..., Any], str] = MappingProxyType({})
NO_SERVICES: Makes = MappingProxyType({})
_END_S = 5.0  # for connections to close once their processes have ended
_LAST_LINES = 20  # of a rank's log, to show when it has died


class Launched(Protocol):
    """Processes started by a launcher, with one :class:`~stretto.workers.rank.Rank` each."""

    one_clock: bool
    """Whether all are on one machine."""

    def connect(self, timeout_s: float) -> Sequence[Raw]:
        """Wait for each connection. Raises NotConnectedError if one has ended or is late."""

    def kill(self) -> None:
        """End all, even at work. Callable from any thread, any number of times."""

    def ended(self, rank: int) -> tuple[str, Sequence[str]]:
        """Describe how a rank ended, such as 'ended with exit code 3', with further notes."""

    def where(self, rank: int, facts: Facts | None) -> str:
        """Describe a rank's location, such as 'pid 17'."""


class Ranks:
    """Processes of a ``torch.distributed`` group. All end when one fails, or when this process
    does. Once the group exists, each process calls ``make(rank, *arguments)``, or makes services.
    Their methods can be called, one at a time. Data is pickled, tensors by value.
    """

    def __init__(
        self,
        size: int,
        make: Callable[..., object] | None = None,
        arguments: tuple[Any, ...] = (),
        *,
        services: Makes = NO_SERVICES,  # made in place of an object
        launch: Callable[[Sequence[RankSpec]], Launched] = ForkedProcesses,
        backend: str = "gloo",  # or nccl, with a GPU each
        threads: int = 1,  # of each rank's torch, 0 for its default
        devices: Sequence[str] = (),  # torch's names there, by default CPUs, with nccl GPUs
        interface: str = "",  # of the group, by default the one that reaches this process
        timeout_s: float = 600.0,  # for each phase of the start, and each collective of the group
        patient: bool = False,  # no time limit for make
        logs: Sequence[Path] = (),  # for each rank's output, on its machine
        patience_s: float = 1.0,  # after an error, to learn whether another rank's death caused it
        role: str = "",  # of a single process, for messages
        words: Mapping[Callable[..., Any], str] = NO_WORDS,  # nouns for methods' work, for messages
        say: Callable[[str], None] = lambda _: None,  # gets warnings, if there are logs
        check: Callable[[Sequence[Facts]], None] = lambda _: None,  # called before make
        begun: Callable[[Ranks], None] = lambda _: None,  # may close this meanwhile
    ) -> None:
        self.remedy = "start again"  # after the cause of a failure is fixed, for messages
        self.facts: list[Facts] = []  # each rank's description of its process
        self._size = size
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._role = role
        self._words = words
        self._logs = logs
        self._calling = RLock()
        self._closed = False
        self._died: RankError | None = None
        self._tell: Callable[[RankError], None] = lambda _: None
        self._say = say
        self._connections: list[RankConnection] = []
        make_step = step(Rank.make, make, arguments) if make else step(Rank.make_services, services)
        specs = [
            RankSpec(
                index=rank,
                world=size,
                backend=backend,
                threads=threads,
                device=devices[rank] if devices else f"cuda:{rank}" if backend == "nccl" else "cpu",
                interface=interface,
                timeout_s=timeout_s,
                log=str(logs[rank]) if logs else "",
            )
            for rank in range(size)
        ]
        with self._calling:  # deaths from now on are reported here
            self._launched = launch(specs)
            self._end = weakref.finalize(self, _end, self._launched, self._connections)
            try:
                begun(self)
                self._connect(say)
                (address,) = self.run(LISTEN, [step(Rank.listen)], timeout_s, SAY_EVERY_S)
                joining = repeat(step(Rank.join, *address))
                self.facts = self.run(JOIN, joining, timeout_s, SAY_EVERY_S)
                check(self.facts)
                limit_s = None if patient else timeout_s
                self.run(MAKE, repeat(make_step), limit_s, SAY_EVERY_S)
            except BaseException:
                self.close()
                raise

    def call(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float | None = None) -> list[T]:
        """Call a method of the object on all ranks at once and return the results. Raises a
        RankError with the error raised by a rank, or with the ranks that did not answer in time.
        Reports slow ranks after half of that time.
        """
        steps = repeat(step(Rank.call, method.__name__, args))
        return self.run(self._work(method), steps, timeout_s)

    def call_each(self, method: Method[*Ts, T], per_rank: Iterable[tuple[*Ts]]) -> list[T]:
        steps = (step(Rank.call, method.__name__, args) for args in per_rank)
        return self.run(self._work(method), steps)

    def run(
        self,
        doing: str,
        steps: Iterable[memoryview],
        timeout_s: float | None = None,
        every_s: float = math.inf,
    ) -> list[Any]:
        """Have ranks take steps, starting with the first. Return the results unless one failed,
        which ends all ranks.
        """
        with self._calling:
            if self._closed:
                raise self._died or _ended()
            try:
                began_s = time.monotonic()
                pairs = zip(self._connections, steps, strict=False)
                futures = [connection.step(message) for connection, message in pairs]
                self._wait(doing, futures, timeout_s, every_s, began_s)
            except BaseException:  # Ctrl-C too: ranks interrupted in a step cannot be used again
                self.close()
                raise
            outcomes = map(Future.result, futures)
            return [outcome.result for outcome in outcomes if isinstance(outcome, Done)]

    def aside(
        self, rank: int, method: Method[*Ts, T], *args: *Ts, timeout_s: float = PATIENCE_S
    ) -> T:
        """Call a :class:`Rank`'s method during a step, see :meth:`RankConnection.aside`."""
        connection = self._connections[rank]
        name = method.__name__
        try:
            answer: T = connection.aside(name, *args, timeout_s=timeout_s)
        except RankError as error:
            if not connection.gone:
                raise
            raise self._died or self._death(rank, f"in the middle of '{name}'") from error
        return answer

    def stacks(self) -> str:
        """Return the stacks of all threads of each rank that answers, for people."""
        parts = []
        for rank in range(len(self._connections)):
            facts = self.facts[rank] if self.facts else None
            parts.append(f"{self._name(rank)} ({self._launched.where(rank, facts)}):")
            try:
                parts[-1] += f"\n{self.aside(rank, Rank.stacks)}"
            except RankError as error:
                parts[-1] += f" {error}"
        return "\n\n".join(parts)

    def used_bytes(self) -> list[Mapping[str, int]]:
        """Return each rank's memory by metric, empty for a rank that does not answer."""
        memory_by_rank: list[Mapping[str, int]] = [{}] * len(self._connections)
        for rank in range(len(memory_by_rank)):
            with contextlib.suppress(RankError):
                memory_by_rank[rank] = self.aside(rank, Rank.used_bytes)
        return memory_by_rank

    def watch(self, tell: Callable[[RankError], None]) -> None:
        """Report a death between two calls at once, on a thread. The next call raises it too."""
        self._tell = tell
        if self._died:
            tell(self._died)

    def close(self) -> None:
        """End all ranks, even at work. Callable from any thread, any number of times."""
        self._closed = True
        self._end()

    def _connect(self, say: Callable[[str], None]) -> None:
        try:
            connections = self._launched.connect(self._timeout_s)
        except NotConnectedError as error:
            if error.what:
                raise self._error(error.rank, error.what, "rank-not-connected") from error
            raise self._death(error.rank, f"in the middle of {START}") from error
        of = weakref.ref(self)

        def ended(rank: int) -> None:
            if ranks := of():
                ranks._has_ended(rank)

        for rank, connection in enumerate(connections):
            self._connections.append(RankConnection(connection, say, partial(ended, rank)))

    def _wait(
        self,
        doing: str,
        futures: Sequence[Future[Done | Failed]],
        timeout_s: float | None,
        every_s: float,
        began_s: float,
    ) -> None:
        """Wait until all ranks are done. Raises an error if one failed. Reports the ranks still at
        work every ``every_s`` seconds, and after half of the limit.
        """
        limit_s = math.inf if timeout_s is None else timeout_s
        end_s = began_s + limit_s
        if self._closed:
            raise _ended()
        silent = {future: rank for rank, future in enumerate(futures)}
        raised: list[tuple[int, Failed]] = []
        say_s = began_s + min(every_s, limit_s / 2)  # time of the next report
        while silent:
            next_s = min(say_s, end_s)
            left_s = None if next_s == math.inf else max(0.0, next_s - time.monotonic())
            done = wait(silent, left_s, FIRST_COMPLETED).done
            if not done and say_s < end_s:
                late = ", ".join(map(self._name, sorted(silent.values())))
                limit_note = f"; it may {limit_s:.3g} s" if timeout_s is not None else ""
                self._say(f"{late}: {doing} has taken {say_s - began_s:.3g} s{limit_note}")
                say_s += every_s
                continue
            if not done:
                break
            for future in [future for future in silent if future in done]:
                rank = silent.pop(future)
                try:
                    answer = future.result()
                except EOFError:
                    raise self._death(rank, f"in the middle of {doing}", raised) from None
                if isinstance(answer, Failed):
                    if not self._launched.one_clock:
                        answer = replace(answer, at_s=time.monotonic())
                    raised.append((rank, answer))
                    end_s = end_s if raised[1:] else time.monotonic() + self._patience_s
        if raised:
            rank, failed = min(raised, key=_time)
            error = self._error(rank, f"failed in {doing}: {failed.what}", "rank-failed")
            raise _explained(error, rank, failed)
        if silent:
            ranks = sorted(silent.values())
            what = f"did not come to the end of {doing} in {limit_s:.3g} s"
            error = self._error(ranks[0], what, "rank-silent")
            error.add_note(f"Silent: rank {', '.join(map(str, ranks))}.\n{self.stacks()}")
            raise error

    def _has_ended(self, rank: int) -> None:
        """Report a rank that ended between two calls. A call in progress detects it itself."""
        with self._calling:
            if self._closed:
                return
            self._died = error = self._death(rank, "between two calls")
            self.close()
        self._tell(error)

    def _death(self, rank: int, when: str, raised: Sequence[tuple[int, Failed]] = ()) -> RankError:
        """Return the error for a rank that closed its end, after other ranks may have raised."""
        if self._closed:
            return RankError(f"the ranks were ended {when}", code="ranks-ended")
        how, notes = self._launched.ended(rank)
        if raised:
            other, failed = min(raised, key=_time)
            what = f"{how} {when}; rank {other} had raised: {failed.what}"
            return _explained(self._error(rank, what, "rank-died"), other, failed)
        error = self._error(rank, f"{how} {when}", "rank-died")
        for note in (*self._end_of_log(rank), *notes):
            error.add_note(note)
        return error

    def _error(self, rank: int, what: str, code: str) -> RankError:
        note = "" if self._role else ". All ranks have been ended"
        message = f"{self._name(rank)} {what}{note}{ADVICE}, and {self.remedy}"
        return RankError(message, rank, code)

    def _work(self, method: Callable[..., Any]) -> str:
        return self._words.get(method, f"'{method.__name__}'")

    def _name(self, rank: int) -> str:
        if not self._role:
            return f"rank {rank} of {self._size}"
        of = f"rank {rank} of " if self._size > 1 else "the process of "
        return f"{of}the {self._role}"

    def _end_of_log(self, rank: int) -> Sequence[str]:
        lines: list[str] = []
        if self._logs:
            with contextlib.suppress(OSError):
                lines = self._logs[rank].read_text(errors="replace").splitlines(True)[-_LAST_LINES:]
        return [f"The end of {self._logs[rank]}:\n{''.join(lines)}"] if lines else []


def step(method: Method[*Ts, object], *arguments: *Ts) -> memoryview:
    return framed(STEP, (method.__name__, arguments))


def _ended() -> RankError:
    return RankError("the ranks have been ended; start new ones", code="ranks-ended")


def _end(launched: Launched, connections: Sequence[RankConnection]) -> None:
    launched.kill()
    until_s = time.monotonic() + _END_S
    for connection in connections:
        connection.wait(max(0.0, until_s - time.monotonic()))
        connection.close()


def _time(raised: tuple[int, Failed]) -> float:
    return raised[1].at_s


def _explained(error: RankError, rank: int, failed: Failed) -> RankError:
    error.__cause__ = failed.error
    if failed.error is None:
        error.add_note(f"On rank {rank}:\n{failed.trace}")
    return error
