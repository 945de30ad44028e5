"""Executors, which carry calls to a worker, wherever it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from stretto.errors import LifecycleError
from stretto.types import Reply
from stretto.workers.threads import WorkerThread


class Executor(Protocol):
    """An executor that makes calls of one service, in the order in which they are asked for."""

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        """Call a method of the service; return its reply, with times by this process's clock.

        Raises:
            Exception: what the method raised.
        """
        ...

    async def restart(self) -> None:
        """End what is left of the service's process and start a new one in its place.

        Raises:
            RoleLostError: the new process could not start.
            LifecycleError: the service has no process of its own.
        """
        ...


class ThreadExecutor:
    """An executor that calls a service of this process on a thread, maybe shared with others."""

    def __init__(self, service: object, worker: WorkerThread) -> None:
        self._service, self._worker = service, worker

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        """Call the method on the thread; see :class:`Executor`."""
        reply: Reply[Any] = await self._worker.run(lambda: getattr(self._service, method)(*args))
        return reply

    async def restart(self) -> None:
        """Refuse; see :class:`Executor`."""
        raise LifecycleError(
            "only a role with a process of its own can be replaced, and this one works on a thread "
            "of the run's process; start the run again"
        )


class DivertingExecutor:
    """An executor with one method whose calls go another way.

    Args:
        instead: called in their place, with their arguments.
    """

    def __init__(
        self, executor: Executor, method: str, instead: Callable[..., Awaitable[Reply[Any]]]
    ) -> None:
        self._executor, self._method, self._instead = executor, method, instead

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        """Call the method; see :class:`Executor`."""
        if method == self._method:
            return await self._instead(*args)
        return await self._executor.call(method, *args)

    async def restart(self) -> None:
        """Start the service again; see :class:`Executor`."""
        await self._executor.restart()
