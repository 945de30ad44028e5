"""The process for user code: ``python -m stretto.workers.user_code MODULE HOST``.

A class ``HOST`` opens the code and answers requests about it (:class:`Host`). They are JSON lines
over the original standard input and output. Text that user code prints goes to standard error.
::

    in    {"request": number, "body": a description of the code, or a request}
    out   {"request": the same, "pid": of the sender, and one of these:}
          "ready": the host's description                               for the first request
          "refused": name of an error, "message", "code"                or this, and it exits
          "at": anything, ...                                           for a part of an answer
          "answer": the answer, or its end                              for all other requests
          "alive": true               for request 0, each second, if the host is concurrent and no
                                      user code blocks its event loop

In any case the process ends with its parent, however the parent ends and whatever runs here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, ClassVar, NoReturn, Protocol, Self

from stretto.errors import StrettoError

CLOSE_S = 5.0
"""Seconds in which a concurrent host must close once the parent has gone."""

THREADS = 1024
"""Threads for ``asyncio.to_thread`` in user code. asyncio's default follows the number of cores,
and can deadlock a batch of programs that all wait for their turns in such threads."""

BEAT_S = 1.0

Request = Mapping[str, Any]


class Host(Protocol):
    """User code that answers requests, by a method ``answer(body, send)``.

    Attributes:
        concurrent: whether all requests are answered concurrently, in an event loop, by coroutines
            ``answer(body)``. Such a host also has ``is_worn``, whether so much user code hangs that
            the process must be replaced, and a coroutine ``close()``. Other hosts answer requests
            one after another, without an event loop, because functions may run their own. Both
            kinds use the main thread, because only there can signal handlers be set.
    """

    concurrent: ClassVar[bool]

    @classmethod
    def open(cls, opening: Mapping[str, Any]) -> Self:
        """Import the code. Raises ConfigError or TaskError to refuse it."""

    def ready(self) -> Mapping[str, Any]:
        """Describe the code to the parent."""


def main() -> None:
    """Open the host that the arguments name, then answer until the parent exits."""
    module, name = sys.argv[1:]
    host_type = getattr(import_module(module), name)
    if host_type.concurrent:
        asyncio.run(_ConcurrentServer().serve(host_type))
    else:
        _serve(host_type)


def _serve(host_type: Any) -> None:
    requests: SimpleQueue[Request] = SimpleQueue()
    channel = _Channel(requests.put)
    host: Any = channel.open(requests.get(), host_type)
    while True:
        request = requests.get()
        send = partial(channel.send, request["request"])
        send({"answer": host.answer(request["body"], send)})


class _ConcurrentServer:
    """Ends the process once the host is worn. After the parent has gone, cancels all answers and
    closes the host in :data:`CLOSE_S` seconds.
    """

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._host: Any = None

    async def serve(self, host_type: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        take = self._requests.put_nowait
        self._channel = _Channel(
            lambda request: loop.call_soon_threadsafe(take, request), lambda: self._leave(loop)
        )
        self._host = self._channel.open(await self._requests.get(), host_type)
        self._tasks.add(asyncio.create_task(self._beat()))
        while True:
            task = asyncio.create_task(self._answer(await self._requests.get()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the host, unless user code blocks the event loop. Runs in another thread."""
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(CLOSE_S)

    async def _close(self) -> None:
        for task in self._tasks:  # so that their calls do not delay the closing
            task.cancel()
        if self._host is not None:
            await self._host.close()

    async def _answer(self, request: Request) -> None:
        answer = await self._host.answer(request["body"])
        self._channel.send(request["request"], {"answer": answer})
        if self._host.is_worn:
            _end_all()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._channel.send(0, {"alive": True})


class _Channel:
    """The original standard input and output, hidden from user code and its forked children.

    Args:
        take: called with each request, on a thread.
        leave: called on a thread once the parent has gone. The process ends when it returns.
    """

    def __init__(
        self, take: Callable[[Request], object], leave: Callable[[], object] | None = None
    ) -> None:
        self._requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._pid = os.getpid()
        self._lock = Lock()
        self._take = take
        self._leave = leave
        self._nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(self._nothing, 0)
        os.dup2(2, 1)
        os.register_at_fork(after_in_child=self._lose)
        Thread(target=self._listen, daemon=True).start()

    def open(self, request: Request, host_type: type[Host]) -> Host:
        """Open the host of the first request and describe it, or refuse it and exit."""
        try:
            host = host_type.open(request["body"])
        except StrettoError as error:
            refusal = {"refused": type(error).__name__, "message": str(error), "code": error.code}
            self.send(request["request"], refusal)
            sys.exit()
        self.send(request["request"], {"ready": host.ready()})
        return host

    def send(self, number: int, message: Mapping[str, Any]) -> None:
        """Answer the request of this number. Ends a forked child that calls it."""
        if os.getpid() != self._pid:
            os._exit(1)
        line = json.dumps({"request": number, "pid": self._pid, **message})
        try:
            with self._lock:
                self._replies.write(line + "\n")
                self._replies.flush()
        except BrokenPipeError:
            if self._leave is None:
                _end_all()  # otherwise it is called soon and ends the process

    def _lose(self) -> None:
        for end in (self._requests, self._replies):
            os.dup2(self._nothing, end.fileno(), inheritable=False)

    def _listen(self) -> NoReturn:
        """Read lines while user code runs. Once the parent has gone, end everything it started."""
        for line in self._requests:
            self._take(json.loads(line))
        if self._leave is not None:
            self._leave()
        _end_all()


def _end_all() -> NoReturn:
    if os.getpgrp() == os.getpid():  # otherwise started by hand, in a foreign group
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
