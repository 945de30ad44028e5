"""Connections between a driver and its ranks: steps, calls aside, and lines for the user.

A rank takes steps one after the other, on its main thread. A call aside is answered on its own
thread, even during a step. Each message is a number (8 bytes) and a pickle, tensors by value. ::

    to the rank      0 for a step, else the number of a call; (method, arguments)
    to the driver    the same number; Done or Failed
                     LINE; a line for the user

Over a network, a peer must prove that it has the key before anything else from it is read. It uses
the handshake of :mod:`multiprocessing.connection`, in which neither end sends the key. From then on
each message is signed (:class:`SignedConnection`). Pipes on this machine need neither.
"""

from __future__ import annotations

import hmac
import io
import itertools
import os
import pickle
import secrets
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from stretto.errors import OutOfMemoryError, RankError, StrettoError, first_line, is_out_of_memory

KEY_BYTES = 32
STEP = 0
LINE = 2**63
_NUMBER_BYTES = 8
_CODE_BYTES = 32
_HANDSHAKE_S = 10  # for the peer to prove its key
_QUIET_S = 15  # silence after which TCP probes the peer

Address = tuple[str, int]
if TYPE_CHECKING:
    Raw = Connection[Any, Any]
else:
    Raw = Connection
TO_RANK, TO_DRIVER = b"to the rank", b"to the driver"


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a successful call."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that a rank raised."""

    at_s: float  # machine's monotonic clock, as the first failure is the cause
    what: str  # the error in one line, with its location
    trace: str  # full traceback
    error: StrettoError | None  # the error, if it is a StrettoError that can be pickled


class NotConnectedError(Exception):
    """A rank's process did not connect. ``what`` happened is empty if it has ended."""

    def __init__(self, rank: int, what: str = "") -> None:
        super().__init__(what)
        self.rank, self.what = rank, what


def framed(number: int, content: object) -> memoryview:
    """Return the bytes of a message. Raises PicklingError if the content cannot be pickled."""
    buffer = io.BytesIO()
    buffer.write(number.to_bytes(_NUMBER_BYTES, "little"))
    try:
        pickle.dump(content, buffer)
    except (AttributeError, TypeError) as error:  # of local functions, locks and the like
        raise pickle.PicklingError(str(error)) from error
    return buffer.getbuffer()


def _messages(connection: Raw) -> Iterator[tuple[int, memoryview]]:
    with suppress(EOFError, OSError, AuthenticationError):
        while True:
            view = memoryview(connection.recv_bytes())
            yield int.from_bytes(view[:_NUMBER_BYTES], "little"), view[_NUMBER_BYTES:]


class SignedConnection(Raw):
    """An end of a network connection. With a key, each message is preceded by a code. The code is
    HMAC-SHA256 over the direction, the message's number and the message. A message that was
    changed, dropped, repeated or reflected raises AuthenticationError before it is unpickled.
    """

    _key = b""

    def sign(self, key: bytes, sends: bytes, receives: bytes) -> None:
        """Sign messages from now on. The other end needs the same key and swapped directions."""
        self._key = key
        self._sends = sends
        self._receives = receives
        self._sent, self._received = itertools.count(), itertools.count()

    def send_bytes(self, buf: Any, offset: int = 0, size: int | None = None) -> None:
        if self._key:
            super().send_bytes(self._code(self._sends, next(self._sent), buf))
        super().send_bytes(buf, offset, size)

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        if not self._key:
            return super().recv_bytes(maxlength)
        code, message = super().recv_bytes(_CODE_BYTES), super().recv_bytes(maxlength)
        if not hmac.compare_digest(code, self._code(self._receives, next(self._received), message)):
            raise AuthenticationError("a message on the network is not what the other end sent")
        return message

    def _code(self, direction: bytes, number: int, message: Any) -> bytes:
        code = hmac.new(self._key, direction + number.to_bytes(_NUMBER_BYTES, "little"), "sha256")
        code.update(message)
        return code.digest()


class DriverConnection:
    """A rank's end, which calls methods of ``target``. Once the driver's end has closed, calls
    ``ended``, by default os._exit.
    """

    def __init__(
        self, connection: Raw, target: object, ended: Callable[[], None] = lambda: os._exit(0)
    ) -> None:
        self._connection = connection
        self._target = target
        self._ended = ended
        self._sending, self._steps = Lock(), SimpleQueue[memoryview]()
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            local = line.family == socket.AF_UNIX  # otherwise the local address reaches the driver
            self.host: str = "127.0.0.1" if local else line.getsockname()[0]
        Thread(target=self._read, name="connection", daemon=True).start()

    def say(self, line: str) -> None:
        """Send a line for the user, unless the driver is gone."""
        self._send(framed(LINE, line))

    def serve(self) -> NoReturn:
        while True:
            self._answer(STEP, self._steps.get())

    def _read(self) -> None:
        for number, content in _messages(self._connection):
            if number == STEP:
                self._steps.put(content)
            else:
                aside = number, content
                Thread(target=self._answer, args=aside, name="call aside", daemon=True).start()
        self._ended()

    def _answer(self, number: int, content: memoryview) -> None:
        try:
            method, arguments = pickle.loads(content)
            message = framed(number, Done(getattr(self._target, method)(*arguments)))
        except BaseException as error:  # also SystemExit, or if the result cannot be pickled
            message = framed(number, _failed(error))
        self._send(message)

    def _send(self, message: memoryview) -> None:
        with self._sending, suppress(OSError):
            self._connection.send_bytes(message)


def _failed(error: BaseException) -> Failed:
    at_s = time.monotonic()
    frames = traceback.extract_tb(error.__traceback__)
    stretto_error = error if isinstance(error, StrettoError) and _travels(error) else None
    if is_out_of_memory(error):
        stretto_error = OutOfMemoryError(first_line(error))
    what = f"{type(error).__name__}: {error}"
    if frames and stretto_error is None:  # a StrettoError needs no location
        last = frames[-1]
        what += f" ({Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line})"
    return Failed(at_s, what, "".join(traceback.format_exception(error)), stretto_error)


def _travels(error: StrettoError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


class RankConnection:
    """A driver's end of the connection to a rank, with a thread that reads from it."""

    def __init__(
        self, connection: Raw, say: Callable[[str], None], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._connection = connection
        self._say = say
        self._sending = Lock()
        # Wakes up the reader, which alone closes the connection. If another thread closed it, its
        # file descriptor could be reused before the reader has read from it or closed it again.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._ended, self._over = ended, Event()
        self._numbers = itertools.count(STEP + 1)
        self._open: dict[int, Future[Any]] = {}
        self.gone = False  # whether the connection has ended, on either side
        Thread(target=self._read, name="connection", daemon=True).start()

    def send(self, message: memoryview, number: int = STEP) -> Future[Done | Failed]:
        """Send a step, or the call aside with this number."""
        future = self._open[number] = Future[Done | Failed]()
        with suppress(OSError), self._sending:
            self._connection.send_bytes(message)
        if self.gone:
            self._fail()
        return future

    def aside(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method aside. Raises the rank's error, RankError if it has ended, or TimeoutError
        if it does not answer.
        """
        number = next(self._numbers)
        future = self.send(framed(number, (method, args)), number)
        try:
            answer = future.result(timeout_s)
        except TimeoutError:
            self._open.pop(number, None)
            raise
        except EOFError as error:
            raise RankError(str(error), code="process-ended") from None
        if isinstance(answer, Failed):
            raise answer.error or RankError(answer.what, code="rank-failed")
        return answer.result

    def wait(self, seconds: float) -> bool:
        """Wait until the rank's end has closed, as on exit. Return whether it has."""
        return self._over.wait(seconds)

    def close(self) -> None:
        """End the connection. Callable from any thread, any number of times."""
        self.gone = True
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            for number, content in _messages(self._connection):
                self._take(number, content)
        finally:
            self.gone = True
            with self._sending:
                self._connection.close()
                self._socket.close()
            self._over.set()
            self._fail()
            self._ended()

    def _take(self, number: int, content: memoryview) -> None:
        if number == LINE:
            self._say(pickle.loads(content))
        elif future := self._open.pop(number, None):
            try:
                future.set_result(pickle.loads(content))
            except Exception as error:
                why = f"an answer cannot be read: {type(error).__name__}: {error}"
                future.set_exception(RankError(why))

    def _fail(self) -> None:
        for number in list(self._open):
            if future := self._open.pop(number, None):
                future.set_exception(EOFError("the process has ended"))


class Listener:
    """The driver's listening socket for network connections, with its own secret key."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._socket = listening_at(host)
        self.address: Address = self._socket.getsockname()[:2]
        self._connected = SimpleQueue[tuple[int, Raw]]()
        Thread(target=self._listen, name="listener", daemon=True).start()

    def next(self, seconds: float) -> tuple[int, Raw] | None:
        with suppress(Empty):
            return self._connected.get(timeout=seconds)
        return None

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with self._socket, suppress(OSError):
            while True:
                line, _ = self._socket.accept()
                Thread(target=self._let_in, args=(line,), name="handshake", daemon=True).start()

    def _let_in(self, line: socket.socket) -> None:
        with suppress(AuthenticationError, EOFError, OSError):
            with _handshake(line) as connection:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
                greeting = connection.recv_bytes(_NUMBER_BYTES + KEY_BYTES)
                nonce = secrets.token_bytes(KEY_BYTES)
                connection.send_bytes(nonce)
                connection.sign(_key_of(self.key, greeting, nonce), TO_RANK, TO_DRIVER)
            number = int.from_bytes(greeting[:_NUMBER_BYTES], "little")
            self._connected.put((number, connection))


def listening_at(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)


def connected(address: Address, key: bytes, number: int, timeout_s: float) -> SignedConnection:
    """Connect to a listener with its key. ``number`` identifies this end."""
    with _handshake(socket.create_connection(address, timeout_s)) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        greeting = number.to_bytes(_NUMBER_BYTES, "little") + secrets.token_bytes(KEY_BYTES)
        connection.send_bytes(greeting)
        connection.sign(
            _key_of(key, greeting, connection.recv_bytes(KEY_BYTES)), TO_DRIVER, TO_RANK
        )
    return connection


def _key_of(key: bytes, greeting: bytes, nonce: bytes) -> bytes:
    """Derive a connection's own key, so that its messages are invalid on any other."""
    return hmac.digest(key, greeting + nonce, "sha256")


@contextmanager
def _handshake(line: socket.socket) -> Iterator[SignedConnection]:
    """Make a connection from a socket. The body must prove the key in time, or it is closed."""
    line.setblocking(True)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may vanish silently
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    quiet = {"TCP_KEEPIDLE": _QUIET_S, "TCP_KEEPINTVL": _QUIET_S, "TCP_KEEPCNT": 4}
    for option, value in quiet.items():
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    _limit(line, _HANDSHAKE_S)
    connection = SignedConnection(line.detach())
    try:
        yield connection
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            _limit(same, 0)
    except BaseException:
        connection.close()
        raise


def _limit(line: socket.socket, seconds: int) -> None:
    limit = struct.pack("ll", seconds, 0)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
