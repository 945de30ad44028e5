"""A service in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stretto.clock import Clock, RealClock
from stretto.errors import LifecycleError, RankError, StrettoError
from stretto.types import Reply
from stretto.workers.ranks import Ranks
from stretto.workers.threads import WorkerThread

SAMPLES = 5
"""Round trips by which the distance of two clocks is measured."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An error of Stretto that a call ended with; the process lives on."""

    error: StrettoError


class Host:
    """The service's holder in the process; keeps it alive through errors that a run may survive.

    Args:
        rank: of the process in its group of one.
        make: called with ``arguments`` for the service; both travel by pickle.
    """

    def __init__(self, rank: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._service = make(*arguments)

    def call(self, method: str, args: tuple[Any, ...]) -> object:
        """Return a method's result, or the error of Stretto that it raised."""
        try:
            result: object = getattr(self._service, method)(*args)
        except StrettoError as error:
            return Raised(error)
        return result


class ProcessExecutor:
    """An executor that calls a service in a process of its own, one call at a time.

    Args:
        name: of the role, for messages.
        make: an importable function that makes the service there.
        arguments: for it; they travel by pickle.
        threads: of torch in that process.
        clock: of this process.

    Raises:
        StrettoError: ``make`` raised it.
        RankError: the process could not start, or ``make`` raised anything else.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        threads: int,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or RealClock()
        try:
            self._ranks = Ranks(1, Host, (make, arguments), threads=threads, role=name)
        except RankError as error:
            if isinstance(error.__cause__, StrettoError):
                raise error.__cause__ from None
            raise
        self._worker = WorkerThread(name, 0)
        self._ahead_s = self._distance()
        self._ranks.watch(self._worker.fail)

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        """Call the method in the process; see :class:`~stretto.workers.executor.Executor`."""
        reply: Reply[Any] = await self._worker.run(lambda: self.ask(method, *args))
        return reply.shifted(self._ahead_s)

    async def restart(self) -> None:
        """Refuse; see :class:`~stretto.workers.executor.Executor`."""
        raise LifecycleError(
            "the processes of runtime = 'local' are not replaced; take the run up again from its "
            "last checkpoint"
        )

    def ask(self, method: str, *args: Any) -> Any:
        """Return a method's result, by its own clock; only while no call is under way."""
        (answer,) = self._ranks.call("call", method, args)
        if isinstance(answer, Raised):
            raise answer.error
        return answer

    def settle(self, seconds: float) -> bool:
        """Take no more calls, and wait for one under way; return whether it has ended."""
        self._worker.stop()
        return self._worker.join(seconds)

    def close(self) -> None:
        """End the process, at work or not; from any thread, any number of times."""
        self._ranks.close()
        self._worker.stop()

    def _distance(self) -> float:
        """Return the seconds that this process's clock is ahead, by the shortest of round trips."""
        trips: list[tuple[float, float]] = []
        for _ in range(SAMPLES):
            before_s = self._clock.now()
            theirs_s: float = self.ask("now").value
            after_s = self._clock.now()
            trips.append((after_s - before_s, (before_s + after_s) / 2 - theirs_s))
        return min(trips)[1]
