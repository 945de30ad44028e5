"""Groups of processes that hold services, or another object each."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from threading import Lock
from typing import Any, Protocol, Self

from stretto.errors import ADVICE, RankError, StrettoError, without_advice
from stretto.saying import Say, silent
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
from stretto.workers.rank import Facts, GroupSpec, Rank
from stretto.workers.rank_turns import RankTurns
from stretto.workers.threads import Method, T, Ts

START = "its start"
LISTEN, JOIN, MAKE = (f"{START} ({what})" for what in ("listening", "joining its group", "loading"))
SAY_EVERY_S = 30.0  # seconds between reports during a start
PATIENCE_S = 2.0  # for an answer aside from a rank that may hang
CAUSE_S = 1.0  # after an error, to learn whether another rank's death caused it
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


@dataclass(eq=False)
class RankGroup:
    """Processes of a ``torch.distributed`` group, which hold an object each.

    - :meth:`start` starts the processes. Each calls ``make(rank, *arguments)`` once the group
      exists.
    - Methods of the objects can be called, one at a time. Data is pickled, tensors by value.
    - All processes end when one fails, or when this process ends. :meth:`restart` then replaces
      them, if they hold nothing that would be lost.
    """

    spec: GroupSpec
    make: Callable[..., object]
    arguments: tuple[Any, ...] = ()
    launch: Callable[[GroupSpec], Launched] = ForkedProcesses
    name: str = ""  # of the process, for messages
    say: Say = silent  # gets a line for each restart, and warnings if there are logs
    check: Callable[[Sequence[Facts]], None] | None = None  # called before make
    replaceable: bool = True  # the objects hold no state that would be lost

    def __post_init__(self) -> None:
        self.remedy = "start again"  # after the cause of a failure is fixed, for messages
        self.facts: Sequence[Facts] = ()  # each rank's description of its process
        self.generation = 0  # how often the processes were replaced
        self.all_ranks = range(self.spec.size)
        self.request = RankTurns().request
        self._report = partial(_report, self.say, self.name)
        self._dying = Lock()
        self._restarting = asyncio.Lock()
        self._connections: Sequence[RankConnection] = ()
        self._kill: Callable[[], object] | None = None
        self._died: RankError | None = None
        self._ended = True  # no processes, or they are being ended
        self._closed = False  # never start processes again

    def start(self, restarts: int = 0, *, patient: bool = False) -> Self:
        """Start the processes, again if one dies meanwhile. ``make`` has no time limit if
        ``patient``. Raises the StrettoError that ``make`` raised, or RankError.
        """
        for restart in range(1, restarts + 2):
            try:
                self._open(patient=patient)
                break
            except RankError as error:
                if error.code != "rank-died" or restart > restarts:
                    raise
                self.say(f"{without_advice(str(error))} (restart {restart} of {restarts})")
        return self

    def call(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float | None = None) -> list[T]:
        """Call a method of the object on all ranks at once and return the results. Raises a
        RankError with the error raised by a rank, or with the ranks that did not answer in time.
        Reports slow ranks after half of that time.
        """
        steps = repeat(step(Rank.call, method.__name__, args))
        with self.request(self.all_ranks):
            return self._run(f"'{method.__name__}'", steps, timeout_s)

    def stacks(self) -> str:
        """Return the stacks of all threads of each rank that answers, for people."""
        parts = []
        for rank in range(len(self._connections)):
            facts = self.facts[rank] if self.facts else None
            parts.append(f"{self._title(rank)} ({self._launched.where(rank, facts)}):")
            try:
                stacks = self._aside(rank, "'stacks'", Rank.stacks)
                parts[-1] += f"\n{stacks}"
            except RankError as error:
                parts[-1] += f" {error}"
        return "\n\n".join(parts)

    def used_bytes(self) -> list[Mapping[str, int]]:
        """Return each rank's memory by metric, empty for a rank that does not answer."""
        memory_by_rank: list[Mapping[str, int]] = [{}] * len(self._connections)
        for rank in range(len(memory_by_rank)):
            with contextlib.suppress(RankError):
                memory_by_rank[rank] = self._aside(rank, "'used_bytes'", Rank.used_bytes)
        return memory_by_rank

    async def restart(self, seen: int) -> None:
        """Replace the processes, unless another role has done so since generation ``seen``."""
        if not self.replaceable:
            raise RankError(
                f"the processes of the {self.name} hold what is trained, and are not replaced; go "
                "on from the last checkpoint",
                code="not-replaceable",
            )
        async with self._restarting:
            if self.generation <= seen:
                await asyncio.to_thread(self._replace)

    def close(self) -> None:
        """End all processes, even at work. Callable from any thread, any number of times."""
        self._closed = True
        self._end()

    def _replace(self) -> None:
        self._end()
        self.generation += 1
        self._open()

    def _open(self, *, patient: bool = False) -> None:
        limit_s = self.spec.timeout_s
        make = step(Rank.make, self.make, self.arguments)
        with self.request(self.all_ranks):  # deaths from now on are reported here
            launched = self._launched = self.launch(self.spec)
            connections = list[RankConnection]()
            self._kill = weakref.finalize(self, _kill, launched, connections)
            self._ended = False
            self._died = None
            try:
                if self._closed:
                    raise RankError(
                        f"the process of the {self.name} was ended with the run", code="ranks-ended"
                    )
                self._connect(launched, connections)
                (address,) = self._run(LISTEN, [step(Rank.listen)], limit_s, SAY_EVERY_S)
                joining = repeat(step(Rank.join, *address))
                self.facts = self._run(JOIN, joining, limit_s, SAY_EVERY_S)
                if self.check:
                    self.check(self.facts)
                self._run(MAKE, repeat(make), None if patient else limit_s, SAY_EVERY_S)
                self._opened()
            except BaseException as error:
                self._end()
                if isinstance(error, RankError) and isinstance(error.__cause__, StrettoError):
                    raise error.__cause__ from None
                raise

    def _opened(self) -> None:
        """Do nothing. Called in the turn of the start, once the objects exist."""

    def _connect(self, launched: Launched, connections: list[RankConnection]) -> None:
        try:
            ends = launched.connect(self.spec.timeout_s)
        except NotConnectedError as error:
            if error.what:
                raise self._error(error.rank, error.what, "rank-not-connected") from error
            raise self._death(error.rank, f"in the middle of {START}") from error
        of = weakref.ref(self)

        def ended(rank: int) -> None:
            if group := of():
                group._has_ended(rank, launched)

        for rank, end in enumerate(ends):
            connections.append(RankConnection(end, self._report, partial(ended, rank)))
        self._connections = connections

    def _run(
        self,
        doing: str,
        steps: Iterable[memoryview],
        timeout_s: float | None = None,
        every_s: float = math.inf,
        ranks: Iterable[int] | None = None,  # by default all
    ) -> list[Any]:
        """Have ranks take steps in their turn, starting with the first. Return the results unless
        one failed, which ends all ranks.
        """
        if self._ended:
            raise self._died or _ended_error()
        try:
            began_s = time.monotonic()
            pairs = zip(self.all_ranks if ranks is None else ranks, steps, strict=False)
            futures = {rank: self._connections[rank].send(message) for rank, message in pairs}
            self._wait(doing, futures, timeout_s, every_s, began_s)
        except BaseException:  # Ctrl-C too: ranks interrupted in a step cannot be used again
            self._end()
            raise
        outcomes = map(Future.result, futures.values())
        return [outcome.result for outcome in outcomes if isinstance(outcome, Done)]

    def _wait(
        self,
        doing: str,
        futures: Mapping[int, Future[Done | Failed]],
        timeout_s: float | None,
        every_s: float,
        began_s: float,
    ) -> None:
        """Wait until all ranks are done. Raises an error if one failed. Reports the ranks still at
        work every ``every_s`` seconds, and after half of the limit.
        """
        limit_s = math.inf if timeout_s is None else timeout_s
        end_s = began_s + limit_s
        if self._ended:
            raise _ended_error()
        silent = {future: rank for rank, future in futures.items()}
        raised: list[tuple[int, Failed]] = []
        say_s = began_s + min(every_s, limit_s / 2)  # time of the next report
        while silent:
            next_s = min(say_s, end_s)
            left_s = None if next_s == math.inf else max(0.0, next_s - time.monotonic())
            done = wait(silent, left_s, FIRST_COMPLETED).done
            if not done and say_s < end_s:
                late = ", ".join(map(self._title, sorted(silent.values())))
                limit_note = f"; it may {limit_s:.3g} s" if timeout_s is not None else ""
                self._report(f"{late}: {doing} has taken {say_s - began_s:.3g} s{limit_note}")
                say_s += every_s
                continue
            if not done:
                break
            for future in [future for future in silent if future in done]:
                rank = silent.pop(future)
                try:
                    answer = future.result()
                except EOFError:
                    death = self._death(rank, f"in the middle of {doing}", raised)
                    self._died = self._died or death  # another rank's, which came first
                    raise death from None
                if isinstance(answer, Failed):
                    if not self._launched.one_clock:
                        answer = replace(answer, at_s=time.monotonic())
                    raised.append((rank, answer))
                    end_s = end_s if raised[1:] else time.monotonic() + CAUSE_S
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

    def _aside(
        self,
        rank: int,
        doing: str,
        method: Method[*Ts, object],
        *args: *Ts,
        timeout_s: float = PATIENCE_S,
    ) -> Any:
        """Call a :class:`Rank`'s method during a step. ``doing`` is for messages."""
        connection = self._connections[rank]
        try:
            return connection.aside(method.__name__, *args, timeout_s=timeout_s)
        except TimeoutError:
            why = f"{self._title(rank)} did not answer within {timeout_s:g} s during {doing}"
            raise RankError(why, code="no-answer-aside") from None
        except RankError as error:
            if not connection.gone:
                raise
            raise self._died or self._death(rank, f"in the middle of {doing}") from error

    def _end(self) -> None:
        self._ended = True
        if self._kill:
            self._kill()

    def _has_ended(self, rank: int, launched: Launched) -> None:
        """Keep the error for the next call after a rank ended between two calls, and end the rest.
        A call in progress detects it itself.
        """
        if self._ended:
            return
        with self.request([rank]), self._dying:  # of several, one is reported
            if self._ended or self._launched is not launched:
                return
            self._died = self._death(rank, "between two calls")
            self._end()

    def _death(self, rank: int, when: str, raised: Sequence[tuple[int, Failed]] = ()) -> RankError:
        """Return the error for a rank that closed its end, after other ranks may have raised."""
        if self._ended:
            why = f": {without_advice(str(self._died))}" if self._died else ""
            return RankError(f"the ranks were ended {when}{why}", code="ranks-ended")
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
        note = "" if self.name else ". All ranks have been ended"
        message = f"{self._title(rank)} {what}{note}{ADVICE}, and {self.remedy}"
        return RankError(message, rank, code)

    def _title(self, rank: int) -> str:
        if not self.name:
            return f"rank {rank} of {self.spec.size}"
        of = f"rank {rank} of " if self.spec.size > 1 else "the process of "
        return f"{of}the {self.name}"

    def _end_of_log(self, rank: int) -> Sequence[str]:
        lines: list[str] = []
        logs = self.spec.logs
        if logs:
            with contextlib.suppress(OSError):
                lines = logs[rank].read_text(errors="replace").splitlines(True)[-_LAST_LINES:]
        return [f"The end of {logs[rank]}:\n{''.join(lines)}"] if lines else []


def step(method: Method[*Ts, object], *arguments: *Ts) -> memoryview:
    return framed(STEP, (method.__name__, arguments))


def _report(say: Say, name: str, line: str) -> None:
    say(f"{name}: {line}")


def _ended_error() -> RankError:
    return RankError("the ranks have been ended; start new ones", code="ranks-ended")


def _kill(launched: Launched, connections: Sequence[RankConnection]) -> None:
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
