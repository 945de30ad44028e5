"""Groups of ranks that hold services, and the executors that call them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from statistics import median
from typing import Any

from stretto.errors import RankError, RoleLostError, StrettoError, without_advice
from stretto.protocols import Clock, RealClock
from stretto.types import Reply, Work
from stretto.workers.rank import Facts, Rank
from stretto.workers.ranks import Ranks, step
from stretto.workers.services import remote_of
from stretto.workers.threads import Executor, Method, T, Ts, WorkerThread

SAMPLES = 5  # round trips to measure the offset of two clocks
SLOW = 20.0  # multiple of the usual time after which a call is assumed to have hung
QUICK_S = 300.0  # no call hangs sooner
KNOWN, LATEST = 5, 31  # calls until the usual time is known, and calls that it is computed from


class ServiceGroup:
    """A group of ranks with services, called one at a time, and replaceable once dead."""

    ranks: Ranks  # of the current generation
    worker: WorkerThread  # makes the calls

    def __init__(
        self,
        name: str,  # for messages
        launch: Callable[[], Ranks],  # starts ranks with services, also to replace them
        clock: Clock | None = None,
        *,
        work: str = "'call'",  # noun for the work of services
        replaceable: bool = True,  # the ranks hold no state that would be lost
        restarts: int = 0,  # if a rank dies during the first start
        say: Callable[[str], None] = lambda _: None,  # gets a line for each restart
    ) -> None:
        self.name = name
        self._launch = launch
        self._clock = clock or RealClock()
        self._work = work
        self.replaceable = replaceable
        self.generation = 0  # how often the group was replaced
        self._restarting = asyncio.Lock()
        self._paces: dict[tuple[str, str], deque[float]] = {}  # seconds per unit of amount, by call
        self._closed, self._ahead_s = False, 0.0
        for restart in range(1, restarts + 2):
            try:
                self._open()
                break
            except RankError as error:
                if error.code != "rank-died" or restart > restarts:
                    raise
                say(f"{without_advice(str(error))} (restart {restart} of {restarts})")

    def ask(self, service: str, method: Method[*Ts, T], *args: *Ts) -> Any:
        """Return a method's result. A reply's times are by this process's clock. Blocks."""
        name, remote = method.__name__, remote_of(method)
        paces = self._paces.setdefault((service, name), deque(maxlen=LATEST))
        size, sent_s = remote.size(*args), self._clock.now()
        limit_s = None if remote.own_deadline else deadline_s(paces, size)
        answers = self.ranks.run(
            self._work, repeat(step(Rank.answer, service, name, args)), limit_s
        )
        came_s = self._clock.now()
        decoded = getattr(getattr(answers[0], "value", None), "steps", size)  # may be fewer
        paces.append((came_s - sent_s) / max(decoded, 1))
        errors = [a for a in answers if isinstance(a, StrettoError)]
        if errors and len(errors) < len(answers) and self.replaceable:
            self.ranks.close()
            raise RankError(
                f"a rank of the {self.name} failed in '{name}', and others did not: they are not "
                f"in step any more, and have been ended: {errors[0]}",
                code="ranks-out-of-step",
            ) from errors[0]
        if errors:
            raise errors[0]
        answer = answers[0]
        if not isinstance(answer, Reply):
            return answer
        main_work = [work for work in answer.work if not work.beside]
        self._ahead_s = ahead(self._ahead_s, main_work, sent_s, came_s)
        return answer.shifted(self._ahead_s)

    async def restart(self, seen: int) -> None:
        """Replace the ranks, unless another role has done so since generation ``seen``."""
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
        """End the ranks, even at work. Callable from any thread, any number of times."""
        self._closed = True
        self._end()

    def _replace(self) -> None:
        self._end()
        self.generation += 1
        if self._closed:
            raise RankError(f"the process of the {self.name} was ended with the run")
        self._open()
        if self._closed:  # the run ended meanwhile
            self._end()

    def _end(self) -> None:
        self.ranks.close()
        self.worker.stop()

    def _open(self) -> None:
        try:
            self.ranks = self._launch()
        except RankError as error:
            if isinstance(error.__cause__, StrettoError):
                raise error.__cause__ from None
            raise
        self.worker = WorkerThread(self.name, 0)
        self._ahead_s = self._distance()
        self.ranks.watch(self.worker.fail)

    def _distance(self) -> float:
        def trip() -> tuple[float, float]:
            before_s = self._clock.now()
            theirs_s: float = self.ranks.run("'now'", repeat(step(Rank.now)))[0]
            after_s = self._clock.now()
            return after_s - before_s, (before_s + after_s) / 2 - theirs_s

        return min(trip() for _ in range(SAMPLES))[1]  # by the shortest trip


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


class GroupExecutor:
    """Calls one service of a group."""

    def __init__(self, group: ServiceGroup, service: str) -> None:
        self._group = group
        self._service = service
        self.generation = group.generation

    async def call(self, method: Method[*Ts, Reply[T]], *args: *Ts) -> Reply[T]:
        group = self._group
        if group.generation != self.generation:
            raise RoleLostError(
                self._service,
                f"the process of the {group.name} was replaced, and the {self._service} in it; "
                "start it again",
                "replaced-with-another",
            )
        try:
            reply: Reply[T] = await group.worker.run(
                lambda: group.ask(self._service, method, *args)
            )
        except RankError as error:
            if not group.replaceable:
                raise
            raise self._lost(error) from error
        return reply

    async def restart(self) -> None:
        try:
            await self._group.restart(self.generation)
        except RankError as error:
            raise self._lost(error) from error
        self.generation = self._group.generation

    def shares_ranks(self, other: Executor) -> bool:
        return isinstance(other, GroupExecutor) and self._group is other._group

    @property
    def facts(self) -> Sequence[Facts]:
        return self._group.ranks.facts

    def ask(self, method: Method[*Ts, T], *args: *Ts) -> T:
        answer: T = self._group.ask(self._service, method, *args)
        return answer

    def aside_on_all(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float) -> list[T]:
        ranks = self._group.ranks
        call = self._service, method.__name__, args

        def ask(rank: int) -> T:
            answer: T = ranks.aside(rank, Rank.aside, *call, timeout_s=timeout_s)
            return answer

        size = len(self.facts)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(ask, range(size)))

    def _lost(self, error: RankError) -> RoleLostError:
        lost = RoleLostError(self._service, str(error), error.code)
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        return lost
