"""A server that forks processes in which the libraries are already imported.

Importing torch and transformers takes seconds of processor time. A run that needs several processes
pays once: the server imports them, and forks. It must run no tensor operation and start no thread,
so that its children can. It ends with the process that started it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from threading import Lock
from typing import NoReturn

import psutil

from stretto.errors import RankError
from stretto.models.backend import keep_freed_memory
from stretto.signals import ENDING
from stretto.workers.connection import Raw
from stretto.workers.rank import Facts, GroupSpec, Rank

PRELOADED = (
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "stretto.runtime.learner_service",
    "stretto.runtime.scorer_roles",
)
"""Modules that the server imports. Names, because some of them are in higher layers."""

NAME = "stretto-rank"  # of the forked processes, if the system supports it
UNKNOWN = 255  # exit code of a process whose server is gone


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A request to fork a rank, with its environment."""

    spec: GroupSpec
    rank: int
    environment: Mapping[str, str]
    path: Sequence[str] | None  # sys.path, None for the interpreter's own
    folder: str


class Forked:
    """A process forked by the server, with part of the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.exit_code(self.pid)
        return self._code

    def wait(self, timeout: float) -> int:
        """Return the exit code once the process has ended, or raise TimeoutExpired."""
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code


class ForkServer:
    """The server, seen from the process that started it. Starts when first needed."""

    def __init__(self, python: str = "", preloaded: Sequence[str] = PRELOADED) -> None:
        self._python, self._preloaded = python, tuple(preloaded)
        self._lock = Lock()
        self._connection: Raw | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start(self) -> None:
        with self._lock:
            self._connected()

    def fork(self, spec: GroupSpec, rank: int, connection: int) -> Forked:
        """Fork a process that runs a rank on its end of a connection, a file descriptor."""
        path = None if self._python else list(sys.path)
        request = ForkRequest(spec, rank, dict(os.environ), path, str(Path.cwd()))
        with self._lock:
            server = self._connected()
            try:
                server.send(request)
                for descriptor in (connection, 2):  # the current standard error
                    send_handle(server, descriptor, None)
                pid: int = server.recv()
            except (OSError, EOFError) as error:
                self._connection = None
                installed = f"this very version of Stretto is installed for {self._python}"
                see = installed if self._python else "memory was short"
                raise RankError(
                    f"the server that starts processes has ended; see whether {see}, and start "
                    "again",
                    code="fork-server-ended",
                ) from error
        return Forked(pid, self)

    def exit_code(self, pid: int) -> int | None:
        """Return a process's exit code, or ``None`` while it lives."""
        with self._lock:
            if self._connection is not None and self._owner == os.getpid():
                with suppress(OSError, EOFError):
                    self._connection.send(pid)
                    code: int | None = self._connection.recv()
                    return code
                self._connection = None
        return None if psutil.pid_exists(pid) else UNKNOWN

    def _connected(self) -> Raw:
        mine = self._owner == os.getpid()  # otherwise the process's that forked this one
        if self._connection and mine and self._process and self._process.poll() is None:
            return self._connection
        ours, theirs = Pipe()
        path = "" if self._python else f"import sys; sys.path[:] = {sys.path!r}; "
        arguments = theirs.fileno(), self._preloaded
        code = f"{path}from stretto.workers.forkserver import serve; serve{arguments}"
        with theirs:
            self._process = subprocess.Popen(
                [self._python or sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # shields it from the terminal's Ctrl-C
            )
        self._connection, self._owner = ours, os.getpid()
        return ours


SERVER = ForkServer()
"""This process's server, for its own interpreter."""
_SERVERS = {"": SERVER}


def server_of(python: str = "") -> ForkServer:
    return _SERVERS.setdefault(python, ForkServer(python))


class ForkedProcesses:
    """Processes of ranks on this machine, which print to standard error. See ``group.Launched``."""

    one_clock = True

    def __init__(self, spec: GroupSpec, python: str = "") -> None:
        self.processes: list[Forked] = []
        self._connections: list[Raw] = []
        server = server_of(python)
        try:
            for rank in range(spec.size):
                ours, theirs = Pipe()
                self._connections.append(ours)
                with theirs:
                    self.processes.append(server.fork(spec, rank, theirs.fileno()))
        except BaseException:
            self.kill()
            raise

    def connect(self, timeout_s: float) -> Sequence[Raw]:
        return self._connections

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                with suppress(ProcessLookupError):  # its children
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)

    def ended(self, rank: int) -> tuple[str, Sequence[str]]:
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self.processes[rank].wait(timeout=1.0)
        if code is None or code >= 0:
            return f"ended with exit code {code}", ()
        by_hand = " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{by_hand}", ()

    def where(self, rank: int, facts: Facts | None) -> str:
        return f"pid {self.processes[rank].pid}"


def serve(descriptor: int, preloaded: Sequence[str]) -> NoReturn:
    """Import, then answer requests until the other end closes."""
    for ignored in (signal.SIGINT, *ENDING):
        signal.signal(ignored, signal.SIG_IGN)  # in ranks too: their driver decides
    keep_freed_memory()
    for module in preloaded:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages without collection stay shared with the children
    connection = Raw(descriptor)
    exit_codes: dict[int, int] = {}
    while True:
        try:
            request = connection.recv()
            if isinstance(request, ForkRequest):
                descriptors = [recv_handle(connection) for _ in range(2)]
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(request, ForkRequest):
            pid = os.fork()
            if not pid:
                connection.close()
                _become(request, *descriptors)
            for received in descriptors:
                os.close(received)
            connection.send(pid)
        else:
            connection.send(_reaped(request, exit_codes))


def _become(request: ForkRequest, connection: int, printed: int) -> NoReturn:
    os.setsid()
    os.environ.clear()
    os.environ.update(request.environment)
    if request.path is not None:
        sys.path[:] = request.path
    with suppress(OSError):
        os.chdir(request.folder)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    Rank(request.spec, request.rank, Raw(connection)).serve()


def _reaped(pid: int, exit_codes: dict[int, int]) -> int | None:
    """Return a child's exit code, or ``None`` while it lives. Answers repeated queries."""
    if pid not in exit_codes:
        try:
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return UNKNOWN
        if not ended_pid:
            return None
        exit_codes[pid] = os.waitstatus_to_exitcode(status)
    return exit_codes[pid]
