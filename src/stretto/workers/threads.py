"""Threads of the run's process that work for roles, one call at a time, and their executors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch

from stretto.errors import LifecycleError
from stretto.models.cpu_threads import interrupt, set_threads
from stretto.models.devices import RoleStream
from stretto.types import Reply
from stretto.workers.drive import in_caller
from stretto.workers.flight import RoleCall, current_call
from stretto.workers.rank import Facts

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Method = Callable[[Any, *Ts], T]
"""A function of a class, such as ``LearnerService.train``, that executors call by its name."""


class Interrupted(KeyboardInterrupt):
    """The interruption of a worker's thread: code that catches all other errors lets it through."""


class WorkerThread:
    """A thread with a queue of calls.

    Args:
        threads: CPU threads of their tensor work, as a function if they depend on other calls.
            0: torch's choice.
        stream: of calls on a GPU, if not the default stream.
    """

    def __init__(
        self,
        name: str,
        threads: int | Callable[[], int],
        *,
        stream: RoleStream | None = None,
    ) -> None:
        self.stream = stream or RoleStream()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = threads
        self.busy = False  # a call is under way
        # A daemon, so that a call that cannot be interrupted does not keep the process alive.
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call after all calls that were asked for before, and return its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        tell = partial(_tell, future)
        role_call = current_call.get()

        def work() -> None:
            if future.cancelled():
                return
            self._share_cores(role_call)
            try:
                with self.stream.call():
                    result = call()
            except Interrupted:
                raise
            except StopIteration as error:  # which a future refuses to hold
                tell(future.set_exception, RuntimeError(f"a role raised {error!r}"))
            except BaseException as error:
                tell(future.set_exception, error)
            else:
                tell(future.set_result, result)

        self._calls.put(work)
        return await future

    def interrupt(self) -> None:
        """Have the thread end; a call that is under way is broken off between two of its steps."""
        self._calls.put(None)
        if self.busy:
            interrupt(self._thread, Interrupted)

    def stop(self) -> None:
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def threads(self) -> int:
        """CPU threads of a call that begins now; 0: torch's choice."""
        return self._threads() if callable(self._threads) else self._threads

    def _share_cores(self, role_call: RoleCall[Any] | None) -> None:
        """Set the CPU threads for a call. A replay says how many, because they change sums."""
        if role_call and role_call.threads:
            set_threads(role_call.threads)
        elif callable(self._threads):
            threads = self._threads()
            torch.set_num_threads(threads)
            if role_call:
                role_call.threads = threads

    def _work(self) -> None:
        if threads := self.threads:
            set_threads(threads)
        try:
            while (call := self._calls.get()) is not None:
                self.busy = True
                try:
                    call()
                finally:
                    self.busy = False
        except Interrupted:
            pass


class CallerThread:
    """The thread that started the run, for calls that only a main thread can make.

    Its calls take turns with those of a worker, so that the two never work at the same time.
    """

    def __init__(self, worker: WorkerThread) -> None:
        self._worker = worker
        self.stream = worker.stream
        self.threads = worker.threads

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call after all calls that the worker was asked for before; return its result."""
        turn, over = asyncio.get_running_loop().create_future(), Event()

        def hold() -> None:
            _tell(turn, turn.set_result, None)
            over.wait()

        hold_task = asyncio.ensure_future(self._worker.run(hold))
        try:
            await turn
            return await in_caller(call)
        finally:
            over.set()
            hold_task.cancel()


def _tell(future: asyncio.Future[Any], set_it: Callable[[Any], None], value: Any) -> None:
    def settle() -> None:
        if not future.done():  # else it was given up
            set_it(value)

    with suppress(RuntimeError):  # the loop is closed: the run is over
        future.get_loop().call_soon_threadsafe(settle)


class Executor(Protocol):
    """An executor that makes calls of one service, in the order in which they are asked for."""

    @property
    def generation(self) -> int:
        """How many processes of the service have died or been ended before the present one."""

    @property
    def facts(self) -> Sequence[Facts]:
        """What each rank that holds the service has found at its place."""

    @property
    def threads(self) -> int:
        """CPU threads of the service's work, if they do not depend on other calls."""

    async def call(self, method: Method[*Ts, Reply[T]], *args: *Ts) -> Reply[T]:
        """Call a method of the service; return its reply, with times by this process's clock.

        Raises what the method raised, RoleLostError if the service's process has died, or been
        replaced with what it held, and RankError if it has died and cannot be replaced.
        """

    async def call_jointly(
        self, others: Sequence[Any], method: Method[*Ts, Reply[T]], *args: *Ts
    ) -> list[Reply[T]]:
        """Call a method of this service and of others, which executors like this one call, at the
        same time. In a group they must divide the ranks among themselves.
        """

    def ask(self, method: Method[*Ts, T], *args: *Ts) -> T:
        """Return a method's result; blocks. Only while nothing else is asked of the service."""

    def ask_jointly(self, others: Sequence[Any], method: Method[*Ts, T], *args: *Ts) -> list[T]:
        """Return a method's results of this service and of others, as :meth:`call_jointly`."""

    def aside_on_all(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float) -> list[T]:
        """Call a method on all ranks at once while another may be under way; blocks."""

    async def restart(self) -> None:
        """Start a new process of the service in place of what is left of the old one."""

    def shares_ranks(self, other: Executor) -> bool:
        """Return whether another executor's service is in the same ranks."""


class ThreadExecutor:
    """An executor that calls a service of this process on a thread, maybe shared with others."""

    generation = 0
    facts: Sequence[Facts] = ()

    def __init__(self, service: Any, thread: WorkerThread | CallerThread) -> None:
        self.service, self._thread = service, thread

    @property
    def threads(self) -> int:
        return self._thread.threads or torch.get_num_threads()

    async def call(self, method: Method[*Ts, Reply[T]], *args: *Ts) -> Reply[T]:
        return await self._thread.run(lambda: self.ask(method, *args))

    async def call_jointly(
        self, others: Sequence[Any], method: Method[*Ts, Reply[T]], *args: *Ts
    ) -> list[Reply[T]]:
        calls = (executor.call(method, *args) for executor in (self, *others))
        return list(await asyncio.gather(*calls))

    def ask(self, method: Method[*Ts, T], *args: *Ts) -> T:
        answer: T = getattr(self.service, method.__name__)(*args)
        return answer

    def ask_jointly(self, others: Sequence[Any], method: Method[*Ts, T], *args: *Ts) -> list[T]:
        return [executor.ask(method, *args) for executor in (self, *others)]

    def aside_on_all(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float) -> list[T]:
        self._thread.stream.follow()
        return [self.ask(method, *args)]

    async def restart(self) -> None:
        role_call = current_call.get()
        if role_call and role_call.replayed:  # of a run whose roles had processes
            await self._thread.run(self.service.forget)
            return
        raise LifecycleError(
            "only a role with a process of its own can be replaced, and this one works on a thread "
            "of the run's process; start the run again"
        )

    def shares_ranks(self, other: Executor) -> bool:
        return isinstance(other, ThreadExecutor)
