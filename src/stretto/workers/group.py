"""Groups of ranks that hold services, and the executors that call these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stretto.errors import RankError, RoleLostError, StrettoError
from stretto.protocols import Clock, RealClock
from stretto.types import Reply, Work
from stretto.workers.executor import Executor
from stretto.workers.ranks import Ranks
from stretto.workers.services import Service
from stretto.workers.threads import WorkerThread
from stretto.workers.turns import Turns, offloaded_of

SAMPLES = 5
"""Round trips by which the distance of two clocks is measured."""

Makes = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""How each service is made, by name: an importable function, and its arguments."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An error of Stretto that a call ended with; the process lives on."""

    error: StrettoError


class Host:
    """The holder of services in a rank; keeps them alive through errors that a run may survive.

    Args:
        makes: how the services are made, in this order.
    """

    def __init__(self, rank: int, makes: Makes) -> None:
        self._services: dict[str, Service] = {}
        for name, (make, arguments) in makes.items():
            self._services[name] = service = make(*arguments)
            if offloaded := offloaded_of(service):  # to make room for the next one
                offloaded.offload()
        self._turns = Turns(self._services)

    def call(self, service: str, method: str, args: tuple[Any, ...]) -> object:
        """Return a method's result, or the error of Stretto that it raised."""
        try:
            self._turns.begin(service, method)
            result = self.aside(service, method, *args)
        except StrettoError as error:
            result = Raised(error)
        return self._turns.told(result)

    def now(self) -> float:
        """Return the time by this process's clock."""
        return RealClock().now()

    def aside(self, service: str, method: str, *args: Any) -> object:
        """Call a method of a service, also while another of its methods is under way."""
        result: object = getattr(self._services[service], method)(*args)
        return result


class ServiceGroup:
    """A group of ranks with services, which can be replaced when it has died.

    Calls of all its services are made one at a time, in the order in which they were asked for.

    Args:
        name: for messages.
        launch: starts the ranks, each with a :class:`Host`; called again for a replacement.
        replaceable: whether the ranks hold nothing that would be lost with them.

    Attributes:
        name, replaceable: see above.
        generation: how many groups have died or been ended before this one.

    Raises:
        StrettoError: a service's ``make`` raised it.
        RankError: a rank could not start, or ``make`` raised anything else.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Ranks],
        clock: Clock | None = None,
        *,
        replaceable: bool = True,
    ) -> None:
        self.name, self._launch, self._clock = name, launch, clock or RealClock()
        self.replaceable = replaceable
        self.generation, self._restarting = 0, asyncio.Lock()
        self._closed, self._ahead_s = False, 0.0
        self._open()

    @property
    def ranks(self) -> Ranks:
        """The ranks of the present generation."""
        return self._ranks

    async def run(self, service: str, method: str, args: tuple[Any, ...]) -> Reply[Any]:
        """Call a method of a service; return its reply, with times by this process's clock.

        Raises:
            RankError: a rank has died, or raised an error of no run that goes on.
            StrettoError: the method raised it.
        """
        reply: Reply[Any] = await self._worker.run(lambda: self.ask(service, method, *args))
        return reply

    def ask(self, service: str, method: str, *args: Any) -> Any:
        """Return a method's result; a reply with times by this process's clock. Blocks."""
        sent_s = self._clock.now()
        answers = self._ranks.call("call", service, method, args)
        came_s = self._clock.now()
        answer = next((a for a in answers if isinstance(a, Raised)), answers[0])
        if isinstance(answer, Raised):
            raise answer.error
        if not isinstance(answer, Reply):
            return answer
        own = [work for work in answer.work if not work.beside]
        self._ahead_s = ahead(self._ahead_s, own, sent_s, came_s)
        return answer.shifted(self._ahead_s)

    async def restart(self, seen: int) -> None:
        """Replace the ranks, unless another role has done so since generation ``seen``.

        Raises:
            RankError: they hold what would be lost.
        """
        if not self.replaceable:
            raise RankError(
                f"the processes of the {self.name} hold what is trained, and are not replaced; go "
                "on from the last checkpoint with --resume"
            )
        async with self._restarting:
            if self.generation > seen:
                return
            await asyncio.to_thread(self._replace)

    def close(self) -> None:
        """End the ranks, at work or not; from any thread, any number of times."""
        self._closed = True
        self._end()

    def _replace(self) -> None:
        self._end()
        self.generation += 1
        if self._closed:
            raise RankError(f"the process of the {self.name} was ended with the run")
        self._open()
        if self._closed:  # the run has ended meanwhile
            self._end()

    def _end(self) -> None:
        self._ranks.close()
        self._worker.stop()

    def _open(self) -> None:
        try:
            self._ranks = self._launch()
        except RankError as error:
            if isinstance(error.__cause__, StrettoError):
                raise error.__cause__ from None
            raise
        self._worker = WorkerThread(self.name, 0)
        self._ahead_s = self._distance()
        self._ranks.watch(self._worker.fail)

    def _distance(self) -> float:
        """Return the seconds that this process's clock is ahead, by the shortest of round trips."""

        def trip() -> tuple[float, float]:
            before_s = self._clock.now()
            theirs_s: float = self._ranks.call("now")[0]
            after_s = self._clock.now()
            return after_s - before_s, (before_s + after_s) / 2 - theirs_s

        return min(trip() for _ in range(SAMPLES))[1]


def ahead(known_s: float, works: Sequence[Work], sent_s: float, came_s: float) -> float:
    """Return by how much this process's clock is ahead, corrected by a call and its answer.

    Clocks drift apart over hours. But no work begins before it was asked for, and none ends after
    its answer has come; what is known is moved as little as that asks for.

    Args:
        known_s: what it was before.
        works: done for the call, by the other clock.
        sent_s, came_s: when the call was sent and its answer came, by this process's clock.
    """
    if not works:
        return known_s
    least_s = sent_s - min(work.start_s for work in works)
    most_s = came_s - max(work.end_s for work in works)
    if least_s > most_s:  # the work took longer by its own clock than by this one
        return (least_s + most_s) / 2
    return min(max(known_s, least_s), most_s)


class GroupExecutor:
    """An executor that calls one service of a group."""

    def __init__(self, group: ServiceGroup, service: str) -> None:
        self._group, self._service, self.generation = group, service, group.generation

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        if self._group.generation != self.generation:
            raise RoleLostError(
                self._service,
                f"the process of the {self._group.name} was replaced, and the {self._service} in "
                "it; start it again",
            )
        try:
            return await self._group.run(self._service, method, args)
        except RankError as error:
            if not self._group.replaceable:
                raise
            raise _lost(self._service, error) from error

    async def restart(self) -> None:
        try:
            await self._group.restart(self.generation)
        except RankError as error:
            raise _lost(self._service, error) from error
        self.generation = self._group.generation

    def shares_ranks(self, other: Executor) -> bool:
        return isinstance(other, GroupExecutor) and self._group is other._group

    @property
    def size(self) -> int:
        return len(self._group.ranks.facts)

    def ask(self, method: str, *args: Any) -> Any:
        return self._group.ask(self._service, method, *args)

    def aside(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self._aside(0, method, args, timeout_s)

    def aside_on_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        def call(rank: int) -> Any:
            return self._aside(rank, method, args, timeout_s)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(call, range(self.size)))

    def _aside(self, rank: int, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        return self._group.ranks.aside(
            rank, "aside", self._service, method, *args, timeout_s=timeout_s
        )


def _lost(service: str, error: RankError) -> RoleLostError:
    lost = RoleLostError(service, str(error))
    for note in getattr(error, "__notes__", ()):
        lost.add_note(note)
    return lost
