"""Executors, which carry calls to a service, wherever it is."""

from __future__ import annotations

from typing import Any, Protocol

from stretto.errors import LifecycleError
from stretto.types import Reply
from stretto.workers.threads import WorkerThread


class Executor(Protocol):
    """An executor that makes calls of one service, in the order in which they are asked for."""

    @property
    def generation(self) -> int:
        """How many processes of the service have died or been ended before the present one."""
        ...

    @property
    def size(self) -> int:
        """How many ranks hold the service."""
        ...

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        """Call a method of the service; return its reply, with times by this process's clock.

        Raises:
            RoleLostError: the service's process has died, or been replaced with what it held.
            RankError: it has died, and cannot be replaced.
            Exception: what the method raised.
        """
        ...

    def ask(self, method: str, *args: Any) -> Any:
        """Return a method's result; blocks. Only while nothing else is asked of the service."""
        ...

    def aside(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method on the first rank while another may be under way; blocks."""
        ...

    def aside_on_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method on all ranks at once while another may be under way; blocks."""
        ...

    async def restart(self) -> None:
        """End what is left of the service's process and start a new one in its place.

        Raises:
            RoleLostError: the new process could not start.
            LifecycleError: the service has no process of its own.
        """
        ...

    def shares_ranks(self, other: Executor) -> bool:
        """Return whether another executor's service is in the same ranks."""
        ...


class ThreadExecutor:
    """An executor that calls a service of this process on a thread, maybe shared with others."""

    generation, size = 0, 1

    def __init__(self, service: Any, thread: WorkerThread) -> None:
        self.service, self._thread = service, thread

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        reply: Reply[Any] = await self._thread.run(lambda: self.ask(method, *args))
        return reply

    def ask(self, method: str, *args: Any) -> Any:
        return getattr(self.service, method)(*args)

    def aside(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self.ask(method, *args)

    def aside_on_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return [self.ask(method, *args)]

    async def restart(self) -> None:
        raise LifecycleError(
            "only a role with a process of its own can be replaced, and this one works on a thread "
            "of the run's process; start the run again"
        )

    def shares_ranks(self, other: Executor) -> bool:
        return isinstance(other, ThreadExecutor)
