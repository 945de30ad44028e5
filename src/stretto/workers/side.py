"""Side channels: a rank answers there while it works, and says what its driver should know.

A call on the side is served by a thread of its own, so that none waits for another. Messages are
plain pickles, tensors by value. ::

    to the rank      (number, method, arguments)
    to the driver    (number, good, result)      good: whether the result is one, or an error
                     (0, True, line)             a line for people
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
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
        self._send(pickle.dumps((_LINE, True, line)))

    def _serve(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                call = pickle.loads(self._connection.recv_bytes())
                Thread(target=self._answer, args=call, name="side call", daemon=True).start()
        self._ended()

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = (number, True, self._handle(method, arguments))
            data = pickle.dumps(answer)
        except StrettoError as error:
            data = pickle.dumps((number, False, error))
        except Exception as error:  # of a result that cannot travel, too
            told = RankError(f"{type(error).__name__}: {error}")
            data = pickle.dumps((number, False, told))
        self._send(data)

    def _send(self, data: bytes) -> None:
        with self._sending, suppress(OSError):
            self._connection.send_bytes(data)


class SideClient:
    """The driver's end.

    Args:
        say: called with each line of the rank, on a thread of its own.
        ended: called when the rank's end has closed, on that thread.

    Attributes:
        gone: whether the connection has ended, on either side.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        say: Callable[[str], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._say, self._sending = connection, say, Lock()
        # To wake up the reader, who alone closes: a number that one thread closes may be another
        # file's before a second thread has read from it, or closed it again.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
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
            self._connection.send_bytes(pickle.dumps((number, method, args)))
        if self.gone:
            self._fail()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self._open.pop(number, None)
            what = " ".join([method, *(a for a in args[:2] if isinstance(a, str))])
            raise RankError(f"no answer to '{what}' within {timeout_s:g} s") from None

    def wait(self, seconds: float) -> bool:
        """Wait until the rank's end has closed, as when its process ends; return whether it has."""
        return self._over.wait(seconds)

    def close(self) -> None:
        """End the connection; from any thread, any number of times."""
        self.gone = True
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        why = "the process has ended"
        try:
            while True:
                number, good, result = pickle.loads(self._connection.recv_bytes())
                if number == _LINE:
                    self._say(result)
                elif future := self._open.pop(number, None):
                    future.set_result(result) if good else future.set_exception(result)
        except (EOFError, OSError):
            pass
        except Exception as error:  # an answer that cannot be read: nobody must wait for it
            why = f"an answer cannot be read: {type(error).__name__}: {error}"
        self.gone = True
        with self._sending:
            self._connection.close()
            self._socket.close()
        self._over.set()
        self._fail(why)
        self._ended()

    def _fail(self, why: str = "the process has ended") -> None:
        for number in list(self._open):
            if future := self._open.pop(number, None):
                future.set_exception(RankError(why))


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
