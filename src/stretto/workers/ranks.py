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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any

from stretto.errors import RankError
from stretto.workers.preflight import Facts
from stretto.workers.rank import Done, Failed, Opening
from stretto.workers.side import SideClient

_START = "its start"
_PATIENCE_S = 2.0
"""Seconds to wait for what a rank that may hang says on the side."""
_LAST_LINES = 20
"""Lines of a rank's log that are shown when it has died."""
_NO_WORDS: Mapping[str, str] = MappingProxyType({})


class Ranks:
    """Processes on this machine that form a ``torch.distributed`` group; all end when one fails.

    They end with this process too, however it ends, and leave Ctrl-C to it. What they print goes to
    standard error. What is sent to them and back is pickled, tensors by value; classes and
    functions in it must be importable. One call at a time.

    Attributes:
        remedy: what to do when one has failed and the cause is mended; for messages.
        facts: what each rank found at its place.

    Args:
        size: how many.
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

    Raises:
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
        words: Mapping[str, str] = _NO_WORDS,
        devices: Sequence[str] = (),
        timeout_s: float = 600.0,
        logs: Sequence[Path] = (),
        say: Callable[[str], None] = lambda _: None,
        check: Callable[[Sequence[Facts]], None] = lambda _: None,
    ) -> None:
        self.remedy = "start again"
        self._patience_s, self._words, self._closed = patience_s, words, False
        self._role, self._logs, self._say = role, logs, say
        self._calling = Lock()
        self._died: RankError | None = None
        self._tell: Callable[[RankError], None] = lambda _: None
        self._connections: list[Connection[Any, Any]] = []
        self._lives: list[Connection[Any, Any]] = []
        self._sides: list[SideClient] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kill = weakref.finalize(self, _kill, self._processes)
        made = pickle.dumps((make, arguments))
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
            self.facts: list[Facts] = self._answers(_START, range(size), timeout_s)
            check(self.facts)
            for rank in range(size):
                self._send(rank, made)
            self._answers(_START, range(size))
        except BaseException:
            self.close()
            raise
        Thread(target=_watch, args=(self._lives, weakref.ref(self)), daemon=True).start()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks at once; return the results by rank.

        Raises:
            RankError: a rank failed, and all have been ended, or they had been before. What the
                rank raised is its ``__cause__``, where that was an error of Stretto; the traceback
                of any other is a note.
            PicklingError: an argument cannot be sent.
        """
        return self._call(method, repeat(_pickled(method, args), len(self._processes)))

    def call_each(self, method: str, per_rank: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Call a method with arguments of its own for each rank, which are sent one by one."""
        return self._call(method, (_pickled(method, args) for args in per_rank))

    def aside(self, rank: int, method: str, *args: Any, timeout_s: float = _PATIENCE_S) -> Any:
        """Call a method of a rank while another is under way; see :class:`SideClient`."""
        try:
            return self._sides[rank].call(method, *args, timeout_s=timeout_s)
        except RankError as error:
            if not self._sides[rank].gone:
                raise
            raise self._died or self._death(rank, f"in the middle of '{method}'") from error

    def stacks(self) -> str:
        """Return what every thread of every rank is doing, for people; for those that answer."""
        parts = []
        for rank, process in enumerate(self._processes):
            who = f"{self._who(rank)} (pid {process.pid})"
            try:
                parts.append(f"{who}:\n{self.aside(rank, 'stacks')}")
            except RankError as error:
                parts.append(f"{who}: {error}")
        return "\n\n".join(parts)

    def used_bytes(self) -> list[int]:
        """Return each rank's resident memory; 0 for one that does not answer."""
        used = []
        for rank in range(len(self._sides)):
            try:
                used.append(int(self.aside(rank, "used_bytes")))
            except RankError:
                used.append(0)
        return used

    def watch(self, tell: Callable[[RankError], None]) -> None:
        """Have the death of a rank between two calls told at once; the next call raises it too.

        Args:
            tell: called with the error when all have been ended; on a thread of its own.
        """
        self._tell = tell
        if self._died:
            tell(self._died)

    def close(self) -> None:
        """End all ranks, at work or not; from any thread, any number of times."""
        self._closed = True
        self._kill()
        self._connections = []
        for side in self._sides:
            side.close()

    def _call(self, method: str, messages: Iterable[bytes]) -> list[Any]:
        with self._calling:
            if self._closed:
                raise self._died or RankError("the ranks have been ended; start new ones")
            try:
                sent = 0
                for sent, message in enumerate(messages, 1):
                    self._send(sent - 1, message)
                return self._answers(self._words.get(method, f"'{method}'"), range(sent))
            except BaseException:  # Ctrl-C too: ranks in the middle of work are of no more use
                self.close()
                raise

    def _start(self, opening: Opening) -> None:
        ours, theirs = Pipe()
        side, their_side = Pipe()
        life, held = Pipe(duplex=False)  # nothing is said there: it closes when the process ends
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from stretto.workers.rank import main; "
            f"main({theirs.fileno()}, {their_side.fileno()})"
        )
        descriptors = [theirs.fileno(), their_side.fileno(), held.fileno()]
        descriptors += [opening.listener] if opening.listener else []
        # A session of its own keeps the terminal's Ctrl-C from it.
        with theirs, their_side, held:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=descriptors,
                start_new_session=True,
            )
        self._processes.append(process)
        self._connections.append(ours)
        self._lives.append(life)
        self._sides.append(SideClient(side, self._say))
        self._send(opening.rank, pickle.dumps(opening))

    def _send(self, rank: int, message: bytes) -> None:
        # One that is gone cannot read it; waiting for its answer tells more.
        with contextlib.suppress(OSError, IndexError):
            self._connections[rank].send_bytes(message)

    def _answers(
        self, doing: str, ranks: Sequence[int], timeout_s: float | None = None
    ) -> list[Any]:
        """Wait for an answer of each, or for a failure of any rank."""
        connections = list(self._connections)
        if self._closed:
            raise RankError("the ranks have been ended; start new ones")
        results: dict[int, Any] = {}
        raised: list[tuple[int, Failed]] = []
        silent = {connections[rank]: rank for rank in ranks}
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while silent:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ready = wait(silent, left_s)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = silent.pop(connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    raise self._death(rank, f"in the middle of {doing}", raised) from None
                if isinstance(answer, Done):
                    results[rank] = answer.result
                else:
                    raised.append((rank, answer))
                    until_s = until_s if raised[1:] else time.monotonic() + self._patience_s
            if not ready:
                break
        if raised:
            raise self._failure(*_first(raised), doing)
        if silent:
            raise self._silence(sorted(silent.values()), doing, timeout_s)
        return [results[rank] for rank in ranks]

    def _failure(self, rank: int, failed: Failed, doing: str) -> RankError:
        error = self._error(rank, f"failed in {doing}: {failed.what}")
        _explain(error, rank, failed)
        return error

    def _silence(self, ranks: Sequence[int], doing: str, timeout_s: float | None) -> RankError:
        """Return the error of ranks that did not answer in time, with what all are doing."""
        listed = ", ".join(map(str, ranks))
        error = self._error(ranks[0], f"did not come to the end of {doing} in {timeout_s:g} s")
        error.add_note(f"Silent: rank {listed}.\n{self.stacks()}")
        return error

    def _death(self, rank: int, when: str, raised: Sequence[tuple[int, Failed]] = ()) -> RankError:
        """Return the error of a rank that closed its end without an answer.

        Args:
            rank: the one that ended.
            when: in words, for the message.
            raised: errors of others by then; maybe the cause, maybe a consequence.
        """
        if self._closed:
            return RankError(f"the ranks were ended {when}")
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(timeout=1.0)
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
        if not raised:
            error = self._error(rank, f"{how} {when}")
            if last := self._last_lines(rank):
                error.add_note(f"The end of {self._logs[rank]}:\n{last}")
            return error
        other, failed = _first(raised)
        error = self._error(rank, f"{how} {when}; rank {other} had raised: {failed.what}")
        _explain(error, other, failed)
        return error

    def _error(self, rank: int, what: str) -> RankError:
        ended = "" if self._role else ". All ranks have been ended"
        return RankError(
            f"{self._who(rank)} {what}{ended}; mend the cause, and {self.remedy}", rank
        )

    def _who(self, rank: int) -> str:
        if not self._role:
            return f"rank {rank} of {len(self._processes)}"
        of = f"rank {rank} of " if len(self._processes) > 1 else "the process of "
        return f"{of}the {self._role}"

    def _last_lines(self, rank: int) -> str:
        if not self._logs:
            return ""
        with contextlib.suppress(OSError):
            return "".join(
                self._logs[rank].read_text(errors="replace").splitlines(True)[-_LAST_LINES:]
            )
        return ""

    def _has_ended(self, rank: int) -> None:
        """Tell of a rank that ended between two calls; a call under way finds out by itself."""
        with self._calling:
            if self._closed:
                return
            self._died = error = self._death(rank, "between two calls")
            self.close()
        self._tell(error)


def _watch(lives: Sequence[Connection[Any, Any]], of: weakref.ref[Ranks]) -> None:
    """Wait for the end of a process; in a thread, which ends with it."""
    ended = wait(lives)
    ranks = of()
    if ranks is not None:
        ranks._has_ended(next(rank for rank, life in enumerate(lives) if life in ended))


def _pickled(method: str, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((method, args))
    except (AttributeError, TypeError) as error:  # of local functions, and of locks and the like
        raise pickle.PicklingError(str(error)) from error


def _device(rank: int, backend: str, devices: Sequence[str]) -> str:
    if devices:
        return devices[rank]
    return f"cuda:{rank}" if backend == "nccl" else "cpu"


def _first(raised: Sequence[tuple[int, Failed]]) -> tuple[int, Failed]:
    return min(raised, key=lambda each: each[1].at_s)


def _explain(error: RankError, rank: int, failed: Failed) -> None:
    """Add what a rank raised; an error of Stretto says all that is needed, others have a trace."""
    error.__cause__ = failed.error
    if failed.error is None:
        error.add_note(f"On rank {rank}:\n{failed.trace}")


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and their groups, now."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
