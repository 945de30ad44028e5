"""The door for side channels over a network: only who has the key gets in, before anything is read.

The handshake is that of :mod:`multiprocessing.connection`: both ends prove that they have the key,
and neither sends it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

KEY_BYTES = 32
_POLL_S = 0.2
_HANDSHAKE_S = 10.0
"""Seconds in which one that knocks has to prove its key."""
_QUIET_S = 15
"""Seconds of silence after which the other machine is asked whether it is still there."""

Address = tuple[str, int]


class Door:
    """The driver's listening socket.

    Args:
        host: address of this machine to listen on.

    Attributes:
        address: host and port.
        key: secret, made for this door.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.settimeout(_POLL_S)
        self.address: Address = self._listener.getsockname()[:2]
        self._entered: SimpleQueue[tuple[int, Connection[Any, Any]]] = SimpleQueue()
        self._closed = False
        Thread(target=self._listen, name="door", daemon=True).start()

    def next(self, seconds: float) -> tuple[int, Connection[Any, Any]] | None:
        """Return the next that has come in, with the number that it gave; ``None`` after a time."""
        with contextlib.suppress(Empty):
            return self._entered.get(timeout=seconds)
        return None

    def close(self) -> None:
        """Let nobody in any more; connections that were made stay."""
        self._closed = True

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                with contextlib.suppress(TimeoutError):
                    knocking, _ = self._listener.accept()
                    Thread(
                        target=self._let_in, args=(knocking,), name="handshake", daemon=True
                    ).start()

    def _let_in(self, knocking: socket.socket) -> None:
        def prove(connection: Connection[Any, Any]) -> int:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            number: int = connection.recv()
            return number

        with contextlib.suppress(AuthenticationError, EOFError, OSError):
            number, connection = _shake(knocking, prove)
            self._entered.put((number, connection))


def enter(address: Address, key: bytes, number: int, timeout_s: float) -> Connection[Any, Any]:
    """Come in at a door.

    Args:
        address, key: of the door.
        number: by which the driver knows who this is.
        timeout_s: for the connection.

    Raises:
        OSError: nobody answers there, or not as a door does.
        AuthenticationError: the key is another one.
    """

    def prove(connection: Connection[Any, Any]) -> int:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(number)
        return number

    return _shake(socket.create_connection(address, timeout_s), prove)[1]


def _shake(
    line: socket.socket, prove: Callable[[Connection[Any, Any]], int]
) -> tuple[int, Connection[Any, Any]]:
    """Return what the proof returns, and the connection; it is closed if the proof fails."""
    line.setblocking(True)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may vanish unsaid
    if hasattr(socket, "TCP_KEEPIDLE"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUIET_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit(line, _HANDSHAKE_S)
    connection: Connection[Any, Any] = Connection(line.detach())
    try:
        number = prove(connection)
    except BaseException:
        connection.close()
        raise
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        _limit(same, 0)
    return number, connection


def _limit(line: socket.socket, seconds: float) -> None:
    limit = struct.pack("ll", int(seconds), 0)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
