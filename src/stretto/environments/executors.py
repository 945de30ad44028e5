"""The parent's side of environments: a process that serves requests, or this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock, Thread, current_thread, main_thread
from typing import Any, Protocol

from stretto import outside
from stretto.config import EnvironmentConfig
from stretto.environments.host import EnvironmentHost
from stretto.workers.child import Child, Message, ProcessLostError
from stretto.workers.user_code import CLOSE_S

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


class EnvironmentExecutor(Protocol):
    """A home of episodes: a process, or threads of this one. ``ready`` describes the source."""

    ready: Mapping[str, Any]
    starts: int

    def start(self) -> object:
        """Start it unless it runs. ConfigError for wrong sources, ProcessLostError at a restart."""

    def ask(self, body: Mapping[str, Any]) -> Future[Answer]:
        """Send a request. Answers come in any order. May raise ProcessLostError."""

    def require_alive(self) -> None:
        """End it if it gives no sign of life."""

    def close(self) -> None:
        """Close open episodes, for a few seconds at most, and end it."""


async def answer_of(place: EnvironmentExecutor, body: Mapping[str, Any]) -> Answer:
    """Send a request and check the place until it has answered. Raises ProcessLostError."""
    answer = asyncio.wrap_future(place.ask(body))
    while not answer.done():
        await asyncio.wait({answer}, timeout=LOOK_S)
        place.require_alive()
    return answer.result()


def close_all(places: Sequence[EnvironmentExecutor]) -> None:
    with ThreadPoolExecutor(len(places)) as pool:
        for closing in [pool.submit(place.close) for place in places]:
            closing.result()


class EnvironmentProcess(Child):
    """A process of environments. :meth:`start` starts another if it was lost."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        name = f"environment.sources = {', '.join(opening['sources'])}"
        super().__init__(EnvironmentHost, opening, name, "environment-not-started")
        self._silence_s = max(SILENCE_S, float(opening["settings"]["timeout_s"]))
        self.ready: Mapping[str, Any] = {}
        self._starting = Lock()

    def start(self) -> Mapping[str, Any]:
        """Start it unless it runs (see :class:`EnvironmentExecutor`)."""
        with self._starting:
            if not self.ready:
                self.ready = super().start()
            elif self._process is None:
                try:
                    self.ready = self._open()
                except ProcessLostError as error:  # the sources worked before
                    raise ProcessLostError("its process ended while it was starting") from error
        return self.ready

    def ask(self, body: Mapping[str, Any]) -> Future[Answer]:
        """Send a request (see :class:`EnvironmentExecutor`)."""
        future: Future[Answer] = Future()
        self._send(body, partial(_settle, future))
        return future

    def require_alive(self) -> None:
        """End the process if it has open requests and was silent for too long."""
        with self._lock:
            silent_s = time.monotonic() - self._heard_s if self._waiting else 0.0
        if silent_s > self._silence_s:
            how = f"it gave no sign of life for {silent_s:.0f} s: a coroutine may block it"
            self._end(ProcessLostError(how))

    def close(self) -> None:
        """Close the episodes, for a few seconds at most, and end the process."""
        self._end(ProcessLostError("it was closed"), CLOSE_S + SPARE_S)


def _settle(future: Future[Answer], message: Message | ProcessLostError) -> None:
    with suppress(InvalidStateError):  # cancelled
        if isinstance(message, ProcessLostError):
            future.set_exception(message)
        else:
            future.set_result(message.get("answer", message))


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
        self._host = EnvironmentHost(named, settings, judges)
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
        """Answer a request (see :class:`EnvironmentHost`)."""
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
