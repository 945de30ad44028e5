"""The parent's side of a process for user code: starts it, exchanges JSON lines, and ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from stretto.errors import ConfigError, RewardError, TaskError
from stretto.workers.user_code import Host

START_LIMIT_S = 120.0
"""Seconds for a process to start and import the user's libraries."""

SLICE_S = 0.5
"""Longest single wait for a message, in seconds. A wait of twice that means a pause."""

KILLS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}
"""Exit codes of a process that was ended from outside, by a person, a scheduler or the kernel."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Message = Mapping[str, Any]
Outbox = SimpleQueue[bytes | None]
Process = subprocess.Popen[bytes]


class ProcessLostError(Exception):
    """The process ended before it answered. The text says how.

    Attributes:
        code: its exit code, if known.
        outside: whether something other than user code ended or paused it.
    """

    def __init__(self, how: str, code: int | None = None, *, outside: bool = False) -> None:
        super().__init__(how)
        self.code = code
        self.outside = outside


class LateError(ProcessLostError):
    """It did not answer in time."""


class MismatchError(ProcessLostError):
    """It sent a line that answers no open request, or another process did."""


Inbox = SimpleQueue[Message | ProcessLostError]


class Child:
    """A process for user code. Requests and messages are JSON lines with numbers.

    - A message with the key "at" is part of an answer. Any other message ends its answer.
    - Messages for request 0 are signs of life.
    - However the process ends, each open request gets a :class:`ProcessLostError`.

    Args:
        host: answers the requests in the process (see :mod:`stretto.workers.user_code`).
        opening: the first request, which describes the user's code.
        name: of the user's code, for people.
        code: of the error if no process can be started.

    Attributes:
        starts: number of processes started.
    """

    def __init__(self, host: type[Host], opening: Mapping[str, Any], name: str, code: str) -> None:
        self._host = host
        self._opening = opening
        self._name = name
        self._code = code
        self.starts = 0
        self._lock = Lock()
        self._process: Process | None = None
        self._loss: ProcessLostError | None = None  # of a process that was not ended from here
        self._kill: Callable[[], object] = lambda: None
        self._waiting: dict[int, Callable[[Message | ProcessLostError], object]] = {}
        self._outbox: Outbox = SimpleQueue()
        self._request = 0
        self._heard_s = 0.0

    def start(self) -> Mapping[str, Any]:
        """Start the process, once more if it was killed or paused, and return its description of
        the user's code. Raises RewardError, or the ConfigError or TaskError that refuses the code.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                return self._open()
            except ProcessLostError as error:
                how = _while_starting(error)
                if attempts == 2 or not error.outside:
                    raise RewardError(
                        f"the process of {self._name} {how}; see what it wrote to standard error, "
                        f"or run: {sys.executable} -c 'import {self._host.__module__}'",
                        code=self._code,
                    ) from error
                _log.warning("%s: its process %s; trying again", self._name, how)

    def _open(self) -> Mapping[str, Any]:
        """Start the process once (see :meth:`start`). Raises ProcessLostError."""
        process = start_child(self._host)
        with self._lock:
            self._process = process
            self._loss = None
            self._outbox = SimpleQueue()
            self._kill = weakref.finalize(self, end, process)
        self.starts += 1
        me = weakref.ref(self)
        for work in (_write, _read):
            Thread(target=work, args=(me, process, self._outbox), daemon=True).start()
        inbox: Inbox = SimpleQueue()
        try:
            self._send(self._opening, inbox.put)
            answer = self._next(inbox, Deadline(START_LIMIT_S))
            if "refused" in answer:
                refusal = TaskError if answer["refused"] == "TaskError" else ConfigError
                raise refusal(answer["message"], answer["code"])
        except BaseException:
            self._end(ProcessLostError("it did not start"))
            raise
        ready: Mapping[str, Any] = answer["ready"]
        return ready

    def _send(self, body: object, take: Callable[[Message | ProcessLostError], object]) -> None:
        """Send a request. Messages that answer it go to ``take``, called on another thread."""
        with self._lock:
            if self._process is not None:
                self._request += 1
                message = {"request": self._request, "body": body}
                self._outbox.put(json.dumps(message).encode() + b"\n")
                if not self._waiting:
                    self._heard_s = time.monotonic()
                self._waiting[self._request] = take
                return
        take(self._loss or ProcessLostError("it had ended"))

    def _next(self, inbox: Inbox, deadline: Deadline) -> Message:
        """Wait for a message. Raises ProcessLostError."""
        try:
            message = deadline.next(inbox)
        except TimeoutError:
            process = self._process
            is_paused = process is not None and _is_paused(process.pid)
            how = "it was paused" if is_paused else "it gave no answer"
            message = LateError(how, outside=is_paused)
        if isinstance(message, ProcessLostError):
            raise message
        return message

    def _end(
        self, error: ProcessLostError, patience_s: float = 0.0, lost: Process | None = None
    ) -> None:
        """Kill the process and its children, unless it exits in time. Open requests fail.

        If ``lost`` is given, and has been replaced, do nothing.
        """
        with self._lock:
            process = self._process
            if lost not in (None, process):
                return
            self._process = None
            self._loss = error if lost else None
            kill_it = self._kill
            waiting, self._waiting = self._waiting, {}
            self._outbox.put(None)
        try:
            if process is not None and patience_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)  # the writer closes its pipe
        finally:
            if process is not None:
                kill_it()
        for take in waiting.values():
            take(error)

    def _take(self, process: Process, line: bytes) -> None:
        take, trouble = None, ""
        with self._lock:  # because a request may be answered before _send has returned
            if process is not self._process:
                return
            self._heard_s = time.monotonic()
            try:
                message = json.loads(line)
                number, pid = message.pop("request"), message.pop("pid")
                take = self._waiting.get(number)
                if pid != process.pid or not (take or number == 0):
                    trouble = (
                        f"request {self._request} of process {process.pid} was to be answered, and "
                        f"{number} of {pid} was"
                    )
                elif "at" not in message:
                    self._waiting.pop(number, None)
            except (ValueError, TypeError, LookupError, AttributeError):
                trouble = f"its pipe had no answer, but {line[:200]!r}"
        if trouble:
            self._end(MismatchError(trouble), lost=process)
        elif take is not None:
            take(message)


def _read(me: weakref.ref[Child], process: Process, outbox: Outbox) -> None:
    """Pass on lines until the process ends, or its owner is garbage-collected.

    Each pipe is closed by the thread that uses it. If another thread closed it, the next process's
    pipe could get the same file descriptor, and this read would take an answer from there.
    """
    assert process.stdout
    unread: list[bytes] = []
    with process.stdout, contextlib.suppress(OSError):
        while data := os.read(process.stdout.fileno(), 1 << 16):
            *lines, rest = data.split(b"\n")
            for line in lines:
                if owner := me():
                    owner._take(process, b"".join([*unread, line]))
                    unread.clear()
                del owner
            unread.append(rest)
    outbox.put(None)
    if owner := me():
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1.0)
        how = f"its process ended in the middle of its work (exit code {code})"
        owner._end(ProcessLostError(how, code, outside=code in KILLS), lost=process)


def _write(me: object, process: Process, outbox: Outbox) -> None:
    assert process.stdin
    with process.stdin, contextlib.suppress(OSError):
        while line := outbox.get():
            view = memoryview(line)
            while view:
                view = view[os.write(process.stdin.fileno(), view) :]


class Deadline:
    """A time limit from now on. Pauses of this process (Ctrl-Z, a debugger, a suspended machine)
    extend it, during waits and between them.
    """

    def __init__(self, seconds: float) -> None:
        self._seen_s = time.monotonic()
        self._at_s = self._seen_s + seconds

    def next(self, inbox: SimpleQueue[T]) -> T:
        """Wait for an item. Raises TimeoutError."""
        while True:
            self._extend(0.0)
            left_s = max(self._at_s - self._seen_s, 0.0)
            slice_s = min(left_s, SLICE_S)
            try:
                return inbox.get(timeout=slice_s)  # even without time left: it may be there
            except Empty:
                is_late = not left_s
            finally:
                is_extended = self._extend(slice_s)
            if is_late and not is_extended:
                raise TimeoutError

    def _extend(self, expected_s: float) -> bool:
        """Add a pause since the last call, in which so many seconds were expected to pass."""
        now_s = time.monotonic()
        paused_s, self._seen_s = now_s - self._seen_s - expected_s, now_s
        if paused_s <= SLICE_S:
            return False
        self._at_s += paused_s
        return True


def _is_paused(pid: int) -> bool:
    """Return whether a signal stopped a process, if the system has /proc."""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("T", "t")
    return False


def _while_starting(error: ProcessLostError) -> str:
    match error:
        case LateError(outside=False):
            return f"took over {START_LIMIT_S:g} s to start"
        case MismatchError():
            return f"was stopped while it was starting, as {error}"
        case LateError():
            how = "was paused"
        case _:
            how = f"was killed (exit code {error.code})" if error.outside else "ended"
    return f"{how} while it was starting"


def start_child(host: type[Host]) -> Process:
    """Start a process for user code. Its own session shields it from the terminal's Ctrl-C and
    forms a group to kill. -P keeps files in the working directory from shadowing libraries.
    """
    serve = [sys.executable, "-P", "-m", "stretto.workers.user_code"]
    command = [*serve, host.__module__, host.__name__]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
    Thread(target=_reap, args=(child,), name=f"reaps {host.__name__}", daemon=True).start()
    return child


def _reap(process: Process) -> None:
    """Wait for the end of a process, and end its group at once. A killed process thus is no zombie
    until its next call. The group must end now because the system may later reuse its number.
    """
    process.wait()
    _kill_group(process)


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end(process: Process) -> None:
    """End a process and its group immediately. The threads that use its pipes close them."""
    if process.returncode is None:  # otherwise the reaping thread has ended the group
        _kill_group(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5.0)
