"""Groups of processes that hold services, or another object each."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from itertools import repeat
from statistics import median
from threading import RLock
from types import MappingProxyType
from typing import Any, Protocol, Self

from stretto.errors import ADVICE, RankError, StrettoError, without_advice
from stretto.protocols import Clock, RealClock
from stretto.saying import Say, silent
from stretto.types import Reply, Work
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
from stretto.workers.services import RankServices, remote_of
from stretto.workers.threads import Method, T, Ts, WorkerThread

START = "its start"
LISTEN, JOIN, MAKE = (f"{START} ({what})" for what in ("listening", "joining its group", "loading"))
SAY_EVERY_S = 30.0  # seconds between reports during a start
PATIENCE_S = 2.0  # for an answer aside from a rank that may hang
CAUSE_S = 1.0  # after an error, to learn whether another rank's death caused it
NO_WORDS: Mapping[Callable[..., Any], str] = MappingProxyType({})
SAMPLES = 5  # round trips to measure the offset of two clocks
SLOW = 20.0  # multiple of the usual time after which a call is assumed to have hung
QUICK_S = 300.0  # no call hangs sooner
KNOWN, LATEST = 5, 31  # calls until the usual time is known, and calls that it is computed from
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


class RankGroup:
    """Processes of a ``torch.distributed`` group, which hold an object each.

    - :meth:`start` starts the processes. Each calls ``make(rank, *arguments)`` once the group
      exists. If ``make`` is :class:`RankServices`, the objects hold services.
    - Methods of the objects can be called, one at a time. Data is pickled, tensors by value.
    - All processes end when one fails, or when this process ends. :meth:`restart` then replaces
      them, if they hold nothing that would be lost.
    """

    def __init__(
        self,
        spec: GroupSpec,
        make: Callable[..., object],
        arguments: tuple[Any, ...] = (),
        *,
        launch: Callable[[GroupSpec], Launched] = ForkedProcesses,
        name: str = "",  # of the process, for messages
        words: Mapping[Callable[..., Any], str] = NO_WORDS,  # nouns for methods' work, for messages
        say: Say = silent,  # gets a line for each restart, and warnings if there are logs
        check: Callable[[Sequence[Facts]], None] | None = None,  # called before make
        replaceable: bool = True,  # the objects hold no state that would be lost
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.remedy = "start again"  # after the cause of a failure is fixed, for messages
        self.facts: Sequence[Facts] = ()  # each rank's description of its process
        self.replaceable = replaceable
        self.generation = 0  # how often the processes were replaced
        self.worker = WorkerThread(name, 0)  # makes the calls of executors
        self._spec = spec
        self._make = make
        self._arguments = arguments
        self._launch = launch
        self._words = words
        self._say = say
        self._report = partial(_report, say, name)
        self._check = check
        self._clock = clock or RealClock()
        self._calling = RLock()
        self._restarting = asyncio.Lock()
        self._connections: Sequence[RankConnection] = ()
        self._kill: Callable[[], object] | None = None
        self._tell: Callable[[RankError], None] | None = None
        self._died: RankError | None = None
        self._ended = True  # no processes, or they are being ended
        self._closed = False  # never start processes again
        self._paces: dict[tuple[str, str], deque[float]] = {}  # seconds per unit of amount, by call
        self._ahead_s = 0.0

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
                self._say(f"{without_advice(str(error))} (restart {restart} of {restarts})")
        return self

    def call(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float | None = None) -> list[T]:
        """Call a method of the object on all ranks at once and return the results. Raises a
        RankError with the error raised by a rank, or with the ranks that did not answer in time.
        Reports slow ranks after half of that time.
        """
        steps = repeat(step(Rank.call, method.__name__, args))
        return self._run(self._work(method), steps, timeout_s)

    def call_each(self, method: Method[*Ts, T], per_rank: Iterable[tuple[*Ts]]) -> list[T]:
        steps = (step(Rank.call, method.__name__, args) for args in per_rank)
        return self._run(self._work(method), steps)

    def ask(self, service: str, method: Method[*Ts, T], *args: *Ts) -> Any:
        """Return the result of a service's method. A reply's times are by this process's clock.
        Blocks.
        """
        name, remote = method.__name__, remote_of(method)
        paces = self._paces.setdefault((service, name), deque(maxlen=LATEST))
        size, sent_s = remote.size(*args), self._clock.now()
        limit_s = None if remote.own_deadline else deadline_s(paces, size)
        answering = step(Rank.call, RankServices.answer.__name__, (service, name, args))
        answers = self._run("its work", repeat(answering), limit_s)
        came_s = self._clock.now()
        answer = answers[0]
        decoded = getattr(getattr(answer, "value", None), "steps", size)  # may be fewer
        paces.append((came_s - sent_s) / max(decoded, 1))
        errors = [a for a in answers if isinstance(a, StrettoError)]
        if errors and len(errors) < len(answers) and self.replaceable:
            self._end()
            raise RankError(
                f"a rank of the {self.name} failed in '{name}', and others did not: they are not "
                f"in step any more, and have been ended: {errors[0]}",
                code="ranks-out-of-step",
            ) from errors[0]
        if errors:
            raise errors[0]
        if not isinstance(answer, Reply):
            return answer
        main_work = [work for work in answer.work if not work.beside]
        self._ahead_s = ahead(self._ahead_s, main_work, sent_s, came_s)
        return answer.shifted(self._ahead_s)

    def aside(
        self, rank: int, method: Method[*Ts, T], *args: *Ts, timeout_s: float = PATIENCE_S
    ) -> T:
        """Call a method of a rank's object during a step. Raises the rank's error, or RankError if
        it does not answer.
        """
        name = method.__name__
        title = " ".join([name, *(arg for arg in args if isinstance(arg, str))])
        answer: T = self._aside(rank, title, Rank.call, name, args, timeout_s=timeout_s)
        return answer

    def stacks(self) -> str:
        """Return the stacks of all threads of each rank that answers, for people."""
        parts = []
        for rank in range(len(self._connections)):
            facts = self.facts[rank] if self.facts else None
            parts.append(f"{self._title(rank)} ({self._launched.where(rank, facts)}):")
            try:
                parts[-1] += f"\n{self._aside(rank, 'stacks', Rank.stacks)}"
            except RankError as error:
                parts[-1] += f" {error}"
        return "\n\n".join(parts)

    def used_bytes(self) -> list[Mapping[str, int]]:
        """Return each rank's memory by metric, empty for a rank that does not answer."""
        memory_by_rank: list[Mapping[str, int]] = [{}] * len(self._connections)
        for rank in range(len(memory_by_rank)):
            with contextlib.suppress(RankError):
                memory_by_rank[rank] = self._aside(rank, "used_bytes", Rank.used_bytes)
        return memory_by_rank

    def watch(self, tell: Callable[[RankError], None]) -> None:
        """Report a death between two calls at once, on a thread. The next call raises it too."""
        self._tell = tell
        if self._died:
            tell(self._died)

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
        self.worker.stop()

    def _replace(self) -> None:
        self._end()
        self.worker.stop()
        self.worker = WorkerThread(self.name, 0)
        self.generation += 1
        self._open()

    def _open(self, *, patient: bool = False) -> None:
        limit_s = self._spec.timeout_s
        make = step(Rank.make, self._make, self._arguments)
        with self._calling:  # deaths from now on are reported here
            launched = self._launched = self._launch(self._spec)
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
                if self._check:
                    self._check(self.facts)
                self._run(MAKE, repeat(make), None if patient else limit_s, SAY_EVERY_S)
                self._ahead_s = self._distance()
            except BaseException as error:
                self._end()
                if isinstance(error, RankError) and isinstance(error.__cause__, StrettoError):
                    raise error.__cause__ from None
                raise
            self.watch(self.worker.fail)

    def _connect(self, launched: Launched, connections: list[RankConnection]) -> None:
        try:
            ends = launched.connect(self._spec.timeout_s)
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
    ) -> list[Any]:
        """Have ranks take steps, starting with the first. Return the results unless one failed,
        which ends all ranks.
        """
        with self._calling:
            if self._ended:
                raise self._died or _ended_error()
            try:
                began_s = time.monotonic()
                pairs = zip(self._connections, steps, strict=False)
                futures = [connection.send(message) for connection, message in pairs]
                self._wait(doing, futures, timeout_s, every_s, began_s)
            except BaseException:  # Ctrl-C too: ranks interrupted in a step cannot be used again
                self._end()
                raise
            outcomes = map(Future.result, futures)
            return [outcome.result for outcome in outcomes if isinstance(outcome, Done)]

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
        if self._ended:
            raise _ended_error()
        silent = {future: rank for rank, future in enumerate(futures)}
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
                    raise self._death(rank, f"in the middle of {doing}", raised) from None
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
        title: str,
        method: Method[*Ts, object],
        *args: *Ts,
        timeout_s: float = PATIENCE_S,
    ) -> Any:
        """Call a :class:`Rank`'s method during a step. ``title`` is for messages."""
        connection = self._connections[rank]
        try:
            return connection.aside(method.__name__, *args, timeout_s=timeout_s)
        except TimeoutError:
            why = f"no answer to '{title}' within {timeout_s:g} s"
            raise RankError(why, code="no-answer-aside") from None
        except RankError as error:
            if not connection.gone:
                raise
            raise self._died or self._death(rank, f"in the middle of '{title}'") from error

    def _distance(self) -> float:
        """Measure the offset of this process's clock from the first rank's."""

        def trip() -> tuple[float, float]:
            before_s = self._clock.now()
            theirs_s: float = self._run("'now'", repeat(step(Rank.now)))[0]
            after_s = self._clock.now()
            return after_s - before_s, (before_s + after_s) / 2 - theirs_s

        return min(trip() for _ in range(SAMPLES))[1]  # by the shortest trip

    def _end(self) -> None:
        self._ended = True
        if self._kill:
            self._kill()

    def _has_ended(self, rank: int, launched: Launched) -> None:
        """Report a rank that ended between two calls. A call in progress detects it itself."""
        with self._calling:
            if self._ended or self._launched is not launched:
                return
            self._died = error = self._death(rank, "between two calls")
            self._end()
        if self._tell:
            self._tell(error)

    def _death(self, rank: int, when: str, raised: Sequence[tuple[int, Failed]] = ()) -> RankError:
        """Return the error for a rank that closed its end, after other ranks may have raised."""
        if self._ended:
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
        note = "" if self.name else ". All ranks have been ended"
        message = f"{self._title(rank)} {what}{note}{ADVICE}, and {self.remedy}"
        return RankError(message, rank, code)

    def _work(self, method: Callable[..., Any]) -> str:
        return self._words.get(method, f"'{method.__name__}'")

    def _title(self, rank: int) -> str:
        if not self.name:
            return f"rank {rank} of {self._spec.size}"
        of = f"rank {rank} of " if self._spec.size > 1 else "the process of "
        return f"{of}the {self.name}"

    def _end_of_log(self, rank: int) -> Sequence[str]:
        lines: list[str] = []
        logs = self._spec.logs
        if logs:
            with contextlib.suppress(OSError):
                lines = logs[rank].read_text(errors="replace").splitlines(True)[-_LAST_LINES:]
        return [f"The end of {logs[rank]}:\n{''.join(lines)}"] if lines else []


def step(method: Method[*Ts, object], *arguments: *Ts) -> memoryview:
    return framed(STEP, (method.__name__, arguments))


def deadline_s(paces: Sequence[float], size: float) -> float | None:
    """Return a call's time limit from earlier calls. ``None`` if too few are known."""
    return max(QUICK_S, SLOW * median(paces) * size) if len(paces) >= KNOWN else None


def ahead(known_s: float, works: Sequence[Work], sent_s: float, came_s: float) -> float:
    """Return this process's clock offset, corrected as little as a call's times allow."""
    if not works:
        return known_s
    # Clocks drift apart over hours. But no work starts before its call was sent, and none ends
    # after its answer arrived.
    least_s = sent_s - min(work.start_s for work in works)
    most_s = came_s - max(work.end_s for work in works)
    if least_s > most_s:  # the work took longer by its own clock than by this one
        return (least_s + most_s) / 2
    return min(max(known_s, least_s), most_s)


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
