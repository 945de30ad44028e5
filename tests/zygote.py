"""Forks processes that would import torch and transformers again, which takes seconds each.

After ``install``, ``subprocess`` forks programs of benchmarks, ``python -m stretto`` and servers
that fork ranks from a process that has imported their modules. Other commands start as always. So
do these commands if their environment would change something at import. Each forked process has a
zygote of its own, for the processes that it starts. Tests of imports and start-up must therefore
use ``python -c``.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

PRELOADED = (
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "stretto.cli.main",
    "stretto.runs",
    "stretto.runtime.services",
)
FOLDER = Path(__file__).parent
SERVER = "from stretto.workers.forkserver import serve"
READ_AT_IMPORT = ("PYTHON", "OMP", "GOMP", "KMP", "MKL", "CUDA", "TORCH", "HF_", "STRETTO", "LD_")
"""Beginnings of the names of variables that an import may read."""
SUBREAPER = 36  # of prctl(2): the process becomes the parent of its descendants' orphans

_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_lock = Lock()
_socket, _owner = socket.socket(), -1  # to the zygote of the process with this id


def install() -> None:
    if sys.platform == "linux":
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def _execute_child(
    self: Any, args: Any, executable: Any, preexec: Any, close: Any, passed: Any, cwd: Any,
    env: Any, *rest: Any,
) -> None:  # fmt: skip
    environment, pipes = dict(os.environ if env is None else env), rest[3:9]
    if not (preexec or executable or rest[2]) and _is_forked(args, environment):
        standard = [given if given >= 0 else n for n, given in enumerate((pipes[0], *pipes[3::2]))]
        numbers, folder = [0, 1, 2, *passed], str(Path(cwd or ".").absolute())
        request = [str(part) for part in args[1:]], environment, folder, numbers, rest[14]
        try:
            self.pid = _fork(pickle.dumps(request), [*standard, *passed])
        except (OSError, ValueError):  # the zygote was killed with this process's group
            pass
        else:
            self._child_created = True
            self._close_pipe_fds(*pipes)
            return
    _start(self, args, executable, preexec, close, passed, cwd, env, *rest)


def _is_forked(args: Any, environment: Mapping[str, str]) -> bool:
    if not isinstance(args, list) or len(args) < 2 or args[0] != sys.executable:
        return False
    program = str(args[1]).startswith(str(FOLDER.parent / "benchmarks"))
    if not (program or args[1:3] == ["-m", "stretto"] or SERVER in str(args[-1])):
        return False
    ours, theirs = (
        {name: each[name] for name in each if name.startswith(READ_AT_IMPORT)}
        for each in (os.environ, environment)
    )
    return ours == theirs


def _fork(request: bytes, descriptors: Sequence[int]) -> int:
    """Return the id of a new child of this process, which the zygote has forked."""
    with _lock:
        if _owner != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            path = f"import sys; sys.path.append({str(FOLDER)!r})"
            code = f"{path}; import zygote; zygote.main({theirs.fileno()})"
            with theirs:
                subprocess.Popen([sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()])
            _adopt(ours)
        prctl = ctypes.CDLL(None).prctl
        prctl(SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(_socket, [request], descriptors)
            return int(_socket.recv(64))
        finally:
            prctl(SUBREAPER, 0, 0, 0, 0)


def _adopt(ours: socket.socket) -> None:
    global _socket, _owner
    _socket, _owner = ours, os.getpid()


def main(descriptor: int) -> None:
    """Serve until the other end closes; in forked processes, run the command."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    server = socket.socket(fileno=descriptor)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the group that it shares may get one
    while True:  # each turn is in a process that the one before has forked
        request, descriptors = _serve(server)
        server.close()
        arguments, environment, folder, numbers, session = pickle.loads(request)
        if session:
            os.setsid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            break
        ours.close()
        for each in descriptors:
            os.close(each)
        server = theirs
    theirs.close()
    _adopt(socket.socket(fileno=_above(ours.detach())))
    for given, number in zip([*map(_above, descriptors)], numbers, strict=True):
        os.dup2(given, number)
        os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _run(arguments, folder)


def _serve(server: socket.socket) -> tuple[bytes, Sequence[int]]:
    """Fork for each request; return in the forked processes only."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(server, 1 << 20, 64)
        if not request:
            os._exit(0)
        reading, writing = os.pipe()
        if not (between := os.fork()):
            if not (child := os.fork()):
                os.close(reading)
                os.close(writing)
                return request, descriptors
            os.write(writing, str(child).encode())
            os._exit(0)  # the child's parent is now the process that asked
        for each in (writing, *descriptors):
            os.close(each)
        os.waitpid(between, 0)
        server.send(os.read(reading, 64))
        os.close(reading)


def _above(descriptor: int) -> int:
    """Move a descriptor above all numbers that programs ask for."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 256)
    os.close(descriptor)
    return moved


def _run(arguments: list[str], folder: str) -> None:
    """Run a command as the interpreter does. This process ends with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    random.seed()
    install()
    if SERVER in arguments[-1]:
        exec(arguments[-1], {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv, sys.path = arguments[1:], [folder, *sys.path]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path = arguments, [str(Path(arguments[0]).parent), *sys.path]
        runpy.run_path(arguments[0], run_name="__main__")
