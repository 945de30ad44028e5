"""Processes on this machine that form a process group, and end together."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

from stretto.workers.base import NO_WORDS, START, BaseRanks, pickled
from stretto.workers.forkserver import Forked, server_of
from stretto.workers.preflight import Facts
from stretto.workers.rank import Done, Failed, Opening
from stretto.workers.side import SideClient


class Ranks(BaseRanks):
    """Processes on this machine that form a ``torch.distributed`` group; all end when one fails.

    They end with this process too, however it ends, and leave Ctrl-C to it. What they print goes to
    standard error. What is sent to them and back is pickled, tensors by value; classes and
    functions in it must be importable. One call at a time.

    Attributes:
        remedy: what to do when one has failed and the cause is mended; for messages.
        facts: what each rank found at its place.

    Args:
        make: called on each as ``make(rank, *arguments)`` once the group is there; methods of what
            it returns can be called.
        arguments: the same for all ranks.
        backend: ``gloo``, or ``nccl`` with a device each.
        threads: of each rank's torch.
        patience_s: after a rank raised, how long to look whether it did so because another died.
        role: the role of a process that is alone, for messages.
        words: plain words for the methods' work, for messages: nouns, by the method's name.
        devices: that each rank computes on, as torch names them; without them the CPU, or with
            ``nccl`` the GPU of the rank's number.
        timeout_s: for the start up to the group, and for each of its collectives.
        logs: files for what each rank prints; without them that goes to standard error.
        say: called with each rank's warnings, where there are logs; on a thread of its own.
        check: called with what the ranks found at their places, before ``make``.
        begun: called with this object once there are processes, which may take long from here on;
            to be able to :meth:`close` it meanwhile.
        python: interpreter of the ranks, with the same version of Stretto; without one this
            process's.

    Raises:
        PicklingError: ``make`` or an argument cannot be sent.
        RankError: a rank could not start, or ``make`` raised.
        StrettoError: ``check`` raised it.
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
        role: str = "",
        words: Mapping[str, str] = NO_WORDS,
        devices: Sequence[str] = (),
        timeout_s: float = 600.0,
        logs: Sequence[Path] = (),
        say: Callable[[str], None] = lambda _: None,
        check: Callable[[Sequence[Facts]], None] = lambda _: None,
        begun: Callable[[BaseRanks], None] = lambda _: None,
        python: str = "",
    ) -> None:
        super().__init__(size, patience_s, role, words, logs)
        self._say, self._server = say, server_of(python)
        self._connections: list[Connection[Any, Any]] = []
        self._lives: list[Connection[Any, Any]] = []
        self._processes: list[Forked] = []
        self._kill = weakref.finalize(self, _kill, self._processes)
        made = pickled(make, arguments)
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
                port = listener.getsockname()[1]
                for rank in range(size):
                    opening = Opening(
                        rank=rank,
                        size=size,
                        backend=backend,
                        threads=threads,
                        host="127.0.0.1",
                        port=port,
                        listener=listener.fileno() if rank == 0 else None,
                        timeout_s=timeout_s,
                        device=_device(rank, backend, devices),
                        log=str(logs[rank]) if logs else "",
                    )
                    self._start(opening)
            begun(self)
            self.facts = self._answers(START, range(size), timeout_s)
            check(self.facts)
            for rank in range(size):
                self._send(rank, made)
            self._answers(START, range(size))
        except BaseException:
            self.close()
            raise
        Thread(target=_watch, args=(self._lives, weakref.ref(self)), daemon=True).start()

    def _start(self, opening: Opening) -> None:
        ours, theirs = Pipe()
        side, their_side = Pipe()
        life, held = Pipe(duplex=False)  # nothing is said there: it closes when the process ends
        descriptors = [theirs.fileno(), their_side.fileno(), held.fileno()]
        descriptors += [opening.listener] if opening.listener else []
        with theirs, their_side, held:
            process = self._server.fork(descriptors, listening=opening.listener is not None)
        self._processes.append(process)
        self._connections.append(ours)
        self._lives.append(life)
        self._sides.append(SideClient(side, self._say))
        self._send(opening.rank, pickle.dumps(opening))

    def _send(self, rank: int, message: bytes) -> None:
        # One that is gone cannot read it; waiting for its answer tells more.
        with contextlib.suppress(OSError, IndexError):
            self._connections[rank].send_bytes(message)

    def _awaited(self, ranks: Sequence[int]) -> dict[Any, int]:
        connections = list(self._connections)  # none, once they are closed
        return {connections[rank]: rank for rank in ranks} if connections else {}

    def _wait(self, handles: Sequence[Any], seconds: float | None) -> Sequence[Any]:
        return wait(handles, seconds)

    def _read(self, rank: int, handle: Any) -> Done | Failed:
        try:
            answer: Done | Failed = pickle.loads(handle.recv_bytes())
        except OSError as error:
            raise EOFError from error
        return answer

    def _how(self, rank: int) -> str:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(timeout=1.0)
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        by_hand = " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{by_hand}"

    def _where(self, rank: int) -> str:
        return f"pid {self._processes[rank].pid}"

    def _end(self) -> None:
        self._kill()
        self._connections = []


def _watch(lives: Sequence[Connection[Any, Any]], of: weakref.ref[Ranks]) -> None:
    ended = wait(lives)
    ranks = of()
    if ranks is not None:
        ranks._has_ended(next(rank for rank, life in enumerate(lives) if life in ended))


def _device(rank: int, backend: str, devices: Sequence[str]) -> str:
    if devices:
        return devices[rank]
    return f"cuda:{rank}" if backend == "nccl" else "cpu"


def _kill(processes: Sequence[Forked]) -> None:
    """End processes and their groups, now."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # what it has started
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
