"""The parent's side of environments: a process that serves requests, or this process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from typing import Any, Protocol

from stretto import outside
from stretto.config import EnvironmentConfig
from stretto.environments.host import CLOSE_S, Host
from stretto.errors import ConfigError, RewardError
from stretto.workers.function import START_LIMIT_S, end, start_child

SILENCE_S = 30.0
"""Seconds without a heartbeat after which a process with open requests is ended, because its event
loop is blocked. At least the time limit of a call."""

SPARE_S = 1.0
"""Seconds for a process to exit, after those for closing its episodes."""

LOOK_S = 2.0
"""Seconds between checks of a place that has not answered."""

Answer = Mapping[str, Any]

SETTING = "`environment.sources`"


def settings_of(config: EnvironmentConfig) -> dict[str, Any]:
    return config.model_dump(
        include={"timeout_s", "parallel", "max_observation_tokens", "settings"}
    )


def locate_source(name: str) -> dict[str, str]:
    """Locate an entry of ``environment.sources``. Raises ConfigError if it does not exist."""
    return outside.locate(name, SETTING)


class ProcessLostError(Exception):
    """The process ended before it answered. The text says how."""


class Place(Protocol):
    """A home of episodes: a process, or threads of this one."""

    ready: Mapping[str, Any]
    starts: int

    def start(self) -> None:
        """Start it unless it runs. ConfigError for wrong sources, ProcessLostError at a restart."""

    def ask(self, body: Mapping[str, Any]) -> Future[Answer]:
        """Send a request. Answers come in any order. May raise ProcessLostError."""

    def require_alive(self) -> None:
        """End it if it gives no sign of life."""

    def close(self) -> None:
        """Close open episodes, for a few seconds at most, and end it."""


async def answer_of(place: Place, body: Mapping[str, Any]) -> Answer:
    """Send a request and check the place until it has answered. Raises ProcessLostError."""
    answer = asyncio.wrap_future(place.ask(body))
    while not answer.done():
        await asyncio.wait({answer}, timeout=LOOK_S)
        place.require_alive()
    return answer.result()


def close_all(places: Sequence[Place]) -> None:
    with ThreadPoolExecutor(len(places)) as pool:
        for closing in [pool.submit(place.close) for place in places]:
            closing.result()


class EnvironmentProcess:
    """A process of environments. :meth:`start` starts another if it was lost.

    Attributes:
        ready: the process's description of the source.
        starts: number of processes started.
    """

    def __init__(self, opening: Mapping[str, Any]) -> None:
        self._opening = opening
        self._silence_s = max(SILENCE_S, float(opening["settings"]["timeout_s"]))
        self.ready: Mapping[str, Any] = {}
        self.starts = 0
        self._lock, self._starting = Lock(), Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = lambda: None
        self._waiting: dict[int, Future[Answer]] = {}
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._request, self._heard_s = 0, 0.0

    def start(self) -> None:
        with self._starting:
            if self._process is None:
                self._start()

    def _start(self) -> None:
        process = start_child("stretto.environments.worker")
        with self._lock:
            self._process = process
            self._waiting = {}
            self._outbox = SimpleQueue()
            self._kill = weakref.finalize(self, end, process)
        self.starts += 1
        me = weakref.ref(self)
        for work in (_write, _read):
            Thread(target=work, args=(me, process, self._outbox), daemon=True).start()
        try:
            answer = self.ask(self._opening).result(START_LIMIT_S)
        except (ProcessLostError, TimeoutError) as error:
            self._end("it did not start")
            if self.ready:  # the sources worked before
                raise ProcessLostError("its process ended while it was starting") from error
            raise RewardError(
                f"the process of {self._named} ended or took over {START_LIMIT_S:g} s while it was "
                "starting; see what it wrote to standard error, or run: "
                f"{sys.executable} -c 'import stretto.environments.worker'",
                code="environment-not-started",
            ) from error
        if "refused" in answer:
            self._end("it was refused")
            raise ConfigError(answer["message"], answer["code"])
        self.ready = answer["ready"]

    @property
    def _named(self) -> str:
        return "environment.sources = " + ", ".join(self._opening["sources"])

    def ask(self, body: Mapping[str, Any]) -> Future[Answer]:
        """Send a request (see :class:`Place`)."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._process is None:
                future.set_exception(ProcessLostError("it had ended"))
                return future
            self._request += 1
            if not self._waiting:
                self._heard_s = time.monotonic()
            self._waiting[self._request] = future
            message = {"request": self._request, "body": body}
            self._outbox.put(json.dumps(message).encode() + b"\n")
        return future

    def require_alive(self) -> None:
        """End the process if it has open requests and was silent for too long."""
        with self._lock:
            silent_s = time.monotonic() - self._heard_s if self._waiting else 0.0
        if silent_s > self._silence_s:
            self._end(f"it gave no sign of life for {silent_s:.0f} s: a coroutine may block it")

    def close(self) -> None:
        """Close the episodes, for a few seconds at most, and end the process."""
        self._end("it was closed", CLOSE_S + SPARE_S)

    def _end(self, how: str, patience_s: float = 0.0) -> None:
        """Kill the process and its children, unless it exits in time. Open requests fail."""
        with self._lock:
            process = self._process
            self._process = None
            kill_it = self._kill
            waiting, self._waiting = self._waiting, {}
            self._outbox.put(None)
        try:
            if process is not None and patience_s:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)  # the writer closes its pipe
        finally:
            if process is not None:
                kill_it()
        for future in waiting.values():
            if not future.done():
                future.set_exception(ProcessLostError(how))

    def _take(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        try:
            message = json.loads(line)
            number, pid = message.pop("request"), message.pop("pid")
        except (ValueError, TypeError, LookupError, AttributeError):
            self._ended(process, f"its pipe had no answer, but {line[:200]!r}")
            return
        with self._lock:
            if process is not self._process or pid != process.pid:
                return
            self._heard_s = time.monotonic()
            future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(message.get("answer", message))

    def _ended(self, process: subprocess.Popen[bytes], how: str) -> None:
        if process is self._process:
            self._end(how)


def _read(
    me: weakref.ref[EnvironmentProcess],
    process: subprocess.Popen[bytes],
    outbox: SimpleQueue[bytes | None],
) -> None:
    """Pass on lines until the process ends, or its owner is garbage-collected.

    Each pipe is closed by the thread that uses it. If another thread closed it, the next process's
    pipe could get the same file descriptor, and this read would take an answer from there.
    """
    assert process.stdout
    unread: list[bytes] = []
    with process.stdout, suppress(OSError):
        while data := os.read(process.stdout.fileno(), 1 << 16):
            *lines, rest = data.split(b"\n")
            for line in lines:
                if owner := me():
                    owner._take(process, b"".join([*unread, line]))
                    unread.clear()
                del owner
            unread.append(rest)
    outbox.put(None)
    if owner := me():
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1.0)
        owner._ended(process, f"its process ended in the middle of its work (exit code {code})")


def _write(me: object, process: subprocess.Popen[bytes], outbox: SimpleQueue[bytes | None]) -> None:
    assert process.stdin
    with process.stdin, suppress(OSError):
        while line := outbox.get():
            left = memoryview(line)
            while left:
                left = left[os.write(process.stdin.fileno(), left) :]


class LocalEnvironment:
    """Environments that the caller has as objects, in an event loop on a thread of this process.

    Calls have deadlines. A function that hangs keeps its thread, and the process is not replaced.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        settings: Mapping[str, Any],
        judges: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._host = Host(named, settings, lambda: None, judges)
        self.ready: Mapping[str, Any] = self._host.ready()
        self.starts = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the event loop."""
        if self._loop is None:
            self.starts += 1
            self._loop = asyncio.new_event_loop()
            Thread(target=_run, args=(self._loop,), daemon=True).start()

    def ask(self, body: Mapping[str, Any]) -> Future[Answer]:
        """Answer a request (see :class:`Host`)."""
        assert self._loop
        if current_thread() is main_thread():
            with suppress(RuntimeError):  # no event loop runs here
                self._host.use_main(asyncio.get_running_loop())
        answer = self._host.answer(json.loads(json.dumps(body)))  # copied, as for a process
        return asyncio.run_coroutine_threadsafe(answer, self._loop)

    def require_alive(self) -> None:
        """Do nothing, because there is no process to end."""

    def close(self) -> None:
        """Close the episodes and the event loop."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            self._host.use_main(None)  # its event loop waits for this method
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._host.close(), loop).result(CLOSE_S)
            loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
