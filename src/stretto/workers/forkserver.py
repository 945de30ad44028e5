"""A server that forks processes which have their libraries imported already.

Importing torch and transformers takes seconds of processor time. A run that needs several processes
pays for it once: the server imports them, and forks. It runs no tensor operation and starts no
thread, so that its children may. It ends with the process that started it.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import psutil

from stretto.errors import RankError
from stretto.models.backend import keep_freed_memory

PRELOADED = (
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "stretto.runtime.learner",
    "stretto.runtime.services",
)
"""Modules that the server imports; names, as it stands below some of them."""

NAME = "stretto-rank"
"""Name of the forked processes, where the system can be told one."""

UNKNOWN = 255
"""Exit code of a process whose server is gone."""

_LENGTH = 8
_DESCRIPTORS = 8


@dataclass(frozen=True, slots=True)
class Request:
    """A request to fork.

    Attributes:
        environment: of the process.
        path: for its imports; ``None`` for that of its own interpreter.
        folder: that it works in.
        listening: whether a listening socket is among its file descriptors.
    """

    environment: Mapping[str, str]
    path: Sequence[str] | None
    folder: str
    listening: bool


class Forked:
    """A process that the server has forked; to be asked about as a ``subprocess.Popen`` is.

    Attributes:
        pid: its number.
        returncode: its exit code, negative for a signal; ``None`` as far as it is known to live.
    """

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or ``None`` while the process lives."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code once the process has ended.

        Raises:
            TimeoutExpired: it has not, within so many seconds.
        """
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code


class ForkServer:
    """The server, as seen from the process that started it; started when it is first needed.

    Args:
        python: interpreter of its processes; without one this process's.
    """

    def __init__(self, python: str = "") -> None:
        self._python = python
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start(self) -> None:
        """Start the server, if it does not run; it imports while others go on."""
        with self._lock:
            self._connected()

    def fork(self, descriptors: Sequence[int], *, listening: bool) -> Forked:
        """Fork a process that runs :func:`stretto.workers.rank.main`.

        Args:
            descriptors: for calls, for the side, one that is held, and the listening socket if any.

        Raises:
            RankError: the server cannot be started, or has ended.
        """
        path = None if self._python else list(sys.path)
        request = Request(dict(os.environ), path, str(Path.cwd()), listening)
        with self._lock:
            server = self._connected()
            try:
                # This process's standard error, as it is now, goes along.
                _send(server, request, [*descriptors, 2])
                pid: int = _receive(server)[0]
            except (OSError, EOFError) as error:
                self._socket = None
                see = (
                    f"this very version of Stretto is installed for {self._python}"
                    if self._python
                    else "memory was short"
                )
                raise RankError(
                    f"the server that starts processes has ended; see whether {see}, and start "
                    "again"
                ) from error
        return Forked(pid, self)

    def exit_code(self, pid: int) -> int | None:
        """Return a process's exit code, or ``None`` while it lives."""
        with self._lock:
            if self._socket is not None and self._owner == os.getpid():
                with suppress(OSError, EOFError):
                    _send(self._socket, pid, [])
                    code: int | None = _receive(self._socket)[0]
                    return code
                self._socket = None
        return None if psutil.pid_exists(pid) else UNKNOWN

    def _connected(self) -> socket.socket:
        """Return the connection to a living server."""
        mine = self._owner == os.getpid()  # else it is that of the process which forked this one
        if self._socket is not None and mine and self._process and self._process.poll() is None:
            return self._socket
        ours, theirs = socket.socketpair()
        path = "" if self._python else f"import sys; sys.path[:] = {sys.path!r}; "
        code = f"{path}from stretto.workers.forkserver import serve; serve({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [self._python or sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # keeps the terminal's Ctrl-C from it
            )
        self._socket, self._owner = ours, os.getpid()
        return ours


SERVER = ForkServer()
"""The server of this process."""

_OTHERS: dict[str, ForkServer] = {}


def server_of(python: str = "") -> ForkServer:
    """Return this process's server for an interpreter; by default for its own."""
    return _OTHERS.setdefault(python, ForkServer(python)) if python else SERVER


def serve(descriptor: int) -> NoReturn:
    """Import, then answer requests until the other end closes; see the top of this file."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    keep_freed_memory()
    for module in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages that no collection touches stay shared with the children
    connection = socket.socket(fileno=descriptor)
    ended: dict[int, int] = {}
    while True:
        try:
            request, descriptors = _receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(request, Request):
            pid = os.fork()
            if not pid:
                connection.close()
                _become(request, descriptors)
            for received in descriptors:
                os.close(received)
            _send(connection, pid, [])
        else:
            _send(connection, _reaped(request, ended), [])


def _become(request: Request, descriptors: Sequence[int]) -> NoReturn:
    """Be the process that was asked for."""
    from stretto.workers.rank import main

    os.setsid()
    os.environ.clear()
    os.environ.update(request.environment)
    if request.path is not None:
        sys.path[:] = request.path
    with suppress(OSError):
        os.chdir(request.folder)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    *own, printed = descriptors
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    main(own[0], own[1], own[3] if request.listening else None)
    os._exit(0)


def _reaped(pid: int, known: dict[int, int]) -> int | None:
    """Return a child's exit code, or ``None`` while it lives; several threads may ask."""
    if pid not in known:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return UNKNOWN
        if not ended:
            return None
        known[pid] = os.waitstatus_to_exitcode(status)
    return known[pid]


def _send(connection: socket.socket, message: Any, descriptors: Sequence[int]) -> None:
    data = pickle.dumps(message)
    head = len(data).to_bytes(_LENGTH, "little")
    socket.send_fds(connection, [head], descriptors)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and the file descriptors that came with it.

    Raises:
        EOFError: the other end is closed.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH, _DESCRIPTORS)
    if len(head) < _LENGTH:
        raise EOFError
    data, left = b"", int.from_bytes(head, "little")
    while left:
        part = connection.recv(left)
        if not part:
            raise EOFError
        data, left = data + part, left - len(part)
    return pickle.loads(data), list(descriptors)
