"""Side channels: a rank answers there while it works, and says what its driver should know.

A call on the side is served by a thread of its own, so that none waits for another. ::

    to the rank      (number, method, arguments)
    to the driver    (number, good, result)      good: whether the result is one, or an error
                     (0, True, line)             a line for people
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Event, Lock, Thread
from typing import Any

from stretto.errors import RankError, StrettoError

_LINE = 0
"""The number of messages that answer no call."""


class SideServer:
    """The rank's end.

    Args:
        connection: to the driver.
        handle: called with the method's name and arguments, on any thread.
        ended: called when the driver's end has closed, on a thread of its own.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        handle: Callable[[str, tuple[Any, ...]], Any],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._handle, self._sending = connection, handle, Lock()
        self._ended = ended
        Thread(target=self._serve, name="side channel", daemon=True).start()

    def say(self, line: str) -> None:
        """Send a line for people; nothing if the driver is gone."""
        self._send((_LINE, True, line))

    def _serve(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                call = self._connection.recv()
                Thread(target=self._answer, args=call, name="side call", daemon=True).start()
        self._ended()

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = (number, True, self._handle(method, arguments))
        except StrettoError as error:
            answer = (number, False, error)
        except Exception as error:
            answer = (number, False, RankError(f"{type(error).__name__}: {error}"))
        self._send(answer)

    def _send(self, message: tuple[int, bool, Any]) -> None:
        with self._sending, suppress(OSError):
            self._connection.send(message)


class SideClient:
    """The driver's end.

        Args:
            connection: to the rank.
            say: called with each line of the rank, on a thread of its own.
    <<<<<<< HEAD
            ended: called when the rank's end has closed, on that thread.
    =======

        Attributes:
            gone: whether the connection has ended, on either side.
    >>>>>>> main
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        say: Callable[[str], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._say, self._sending = connection, say, Lock()
        self._ended, self._over = ended, Event()
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}
        self.gone = False
        Thread(target=self._read, name="side channel", daemon=True).start()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method on the side, and return its result.

        Raises:
            RankError: the rank does not answer in time, is gone, or raised an error of others.
            StrettoError: it raised it.
        """
        number, future = next(self._numbers), Future[Any]()
        self._open[number] = future
        with suppress(OSError), self._sending:
            self._connection.send((number, method, args))
        if self.gone:
            self._fail()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self._open.pop(number, None)
            raise RankError(f"no answer to '{method}' within {timeout_s:g} s") from None

    def wait(self, seconds: float) -> bool:
        """Wait until the rank's end has closed, as when its process ends; return whether it has."""
        return self._over.wait(seconds)

    def close(self) -> None:
        """Close the connection."""
        self.gone = True
        self._connection.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError, TypeError):  # TypeError: it is closed while it is read
            while True:
                number, good, result = self._connection.recv()
                if number == _LINE:
                    self._say(result)
                elif future := self._open.pop(number, None):
                    future.set_result(result) if good else future.set_exception(result)
        self.gone = True
        self._over.set()
        self._fail()
        self._ended()

    def _fail(self) -> None:
        for number in list(self._open):
            if future := self._open.pop(number, None):
                future.set_exception(RankError("the process has ended"))


def stacks() -> str:
    """Return what every thread of this process is doing, for people."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != own:
            lines = "".join(traceback.format_stack(frame)).rstrip()
            parts.append(f"thread '{names.get(ident, ident)}':\n{lines}")
    return "\n".join(parts)
