"""Processes on this machine that form a process group, and end together."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from stretto.errors import RankError
from stretto.pipelines.executor.worker import Done, Failed, Opening

_REMEDY = "All ranks have been ended; mend the cause, and resume from the last checkpoint"


class Ranks:
    """Processes on this machine that form a ``torch.distributed`` group; all end when one fails.

    They end with this process too, however it ends, and leave Ctrl-C to it. What they print goes to
    standard error. What is sent to them and back is pickled, tensors by value; classes and
    functions in it must be importable. One call at a time.

    Args:
        size: how many.
        make: called on each as ``make(rank, *arguments)`` once the group is there; methods of what
            it returns can be called.
        arguments: the same for all ranks.
        backend: ``gloo``, or ``nccl`` with a device each.
        threads: of each rank's torch.
        patience_s: after a rank raised, how long to look whether it did so because another died.

    Raises:
        RankError: a rank could not start, or ``make`` raised.
    """

    def __init__(
        self,
        size: int,
        make: Callable[..., object],
        arguments: tuple[Any, ...],
        *,
        backend: str = "gloo",
        threads: int = 1,
        patience_s: float = 1.0,
    ) -> None:
        self._patience_s, self._closed = patience_s, False
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kill = weakref.finalize(self, _kill, self._processes)
        made = pickle.dumps((make, arguments))
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
                port = listener.getsockname()[1]
                for rank in range(size):
                    fd = listener.fileno() if rank == 0 else None
                    self._start(Opening(rank, size, backend, threads, port, fd))
            for rank in range(size):
                self._send(rank, made)
            self._answers("start", range(size))
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks at once; results by rank.

        Raises:
            RankError: a rank failed, and all have been ended, or they had been before. Its
                ``__cause__`` is what the rank raised, where that was an error of Stretto.
        """
        return self._call(method, [pickle.dumps((method, args))] * len(self._processes))

    def call_each(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of its own for each rank."""
        return self._call(method, [pickle.dumps((method, args)) for args in per_rank])

    def close(self) -> None:
        """End all ranks, at work or not; from any thread, any number of times."""
        self._closed = True
        self._kill()
        self._connections = []

    def _call(self, method: str, messages: Sequence[bytes]) -> list[Any]:
        if self._closed:
            raise RankError("the ranks have been ended; start new ones")
        try:
            for rank, message in enumerate(messages):
                self._send(rank, message)
            return self._answers(method, range(len(messages)))
        except BaseException:  # Ctrl-C too: ranks in the middle of their work are of no more use
            self.close()
            raise

    def _start(self, opening: Opening) -> None:
        ours, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from stretto.pipelines.executor.worker import main; main({theirs.fileno()})"
        )
        descriptors = [theirs.fileno(), *([opening.listener] if opening.listener else [])]
        # A session of its own keeps the terminal's Ctrl-C from it.
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=descriptors,
                start_new_session=True,
            )
        self._processes.append(process)
        self._connections.append(ours)
        self._send(opening.rank, pickle.dumps(opening))

    def _send(self, rank: int, message: bytes) -> None:
        # One that is gone cannot read it; waiting for its answer tells more.
        with contextlib.suppress(OSError, IndexError):
            self._connections[rank].send_bytes(message)

    def _answers(self, method: str, ranks: Sequence[int]) -> list[Any]:
        """Wait for an answer of each, or for a failure of any rank."""
        connections = list(self._connections)
        if self._closed:
            raise RankError("the ranks have been ended; start new ones")
        results: dict[int, Any] = {}
        raised: list[tuple[int, Failed]] = []
        silent = {connections[rank]: rank for rank in ranks}
        until_s = None
        while silent:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ready = wait(silent, left_s)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = silent.pop(connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    raise self._death(rank, method) from None
                if isinstance(answer, Done):
                    results[rank] = answer.result
                else:
                    raised.append((rank, answer))
                    until_s = until_s or time.monotonic() + self._patience_s
            if not ready:
                break
        if raised:
            raise self._failure(*min(raised, key=lambda each: each[1].at_s), method)
        return [results[rank] for rank in ranks]

    def _failure(self, rank: int, failed: Failed, method: str) -> RankError:
        error = RankError(
            f"rank {rank} of {len(self._processes)} failed in '{method}': {failed.what}. {_REMEDY}",
            rank,
        )
        error.add_note(f"On rank {rank}:\n{failed.trace}")
        error.__cause__ = failed.error
        return error

    def _death(self, rank: int, method: str) -> RankError:
        """Of one that closed its end without an answer."""
        if self._closed:
            return RankError(f"the ranks were ended while they were at work in '{method}'")
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(timeout=1.0)
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
        message = f"rank {rank} of {len(self._processes)} {how} in the middle of '{method}'"
        return RankError(f"{message}. {_REMEDY}", rank)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and their groups, now."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
