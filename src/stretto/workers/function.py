"""The parent's side of a reward function's process: starts, queries and kills it when it hangs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import ConfigError, RewardError, TaskError

START_LIMIT_S = 120.0
"""Seconds for the reward function's process to start and import its libraries."""

SLICE_S = 0.5
"""Longest single wait for a pipe, in seconds. A wait of twice that means a pause."""

KILLS = {
    -number
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
}
"""Exit codes of a process that was ended from outside, by a person, a scheduler or the kernel."""

_log = logging.getLogger(__name__)


class Answers(NamedTuple):
    """The answer of a reward function to one request.

    Attributes:
        verdicts: of the samples, each with its index in the request as "at".
        trouble: why some samples have none, if so.
        late: whether the time limit was the reason.
        outside: whether something other than the function ended or paused the process.
    """

    verdicts: Sequence[Mapping[str, Any]]
    trouble: str | None = None
    late: bool = False
    outside: bool = False


class _MismatchError(Exception):
    """A line does not answer the request, or is from another process."""


class _LostError(Exception):
    """The process was ended from outside while it was starting."""


class FunctionProcess:
    """The process of a reward function and its JSON lines. Every wait has a deadline.

    A process killed, or paused until its deadline, has not answered for the function. It is
    replaced once per request, and once if killed during its start.

    Args:
        opening: names the function. See :mod:`stretto.scoring.worker`.
        limit_each: apply the time limit to each verdict rather than to a full request.
    """

    def __init__(self, opening: Mapping[str, Any], *, limit_each: bool = False) -> None:
        self._opening, self._limit_each = opening, limit_each
        self._name = opening.get("function") or opening.get("url") or "of the task"
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = lambda: None
        self._pid = self._input = self._output = -1
        self._unread, self._request = b"", 0

    def start(self) -> dict[str, Any]:
        """Start the process and return its description of the function. Raises if it cannot."""
        try:
            return self._start()
        except _LostError as error:
            _log.warning("reward function %s: its process %s; trying again", self._name, error)
        try:
            return self._start()
        except _LostError as error:
            raise self._not_started(str(error)) from error

    def _start(self) -> dict[str, Any]:
        process = start_child("stretto.scoring.worker")
        assert process.stdin
        assert process.stdout
        self._process = process
        self._unread = b""
        self._request = 0
        self._pid, self._input = process.pid, process.stdin.fileno()
        self._output = process.stdout.fileno()
        self._kill = weakref.finalize(self, kill, process)
        for pipe in (self._input, self._output):
            os.set_blocking(pipe, False)
        try:
            deadline = _Deadline(START_LIMIT_S)
            self._send(self._opening, deadline)
            answer = self._receive(deadline)
        except BaseException as error:
            code = self._exit_code() if isinstance(error, EOFError) else None
            paused = isinstance(error, TimeoutError) and _is_paused(self._pid)
            self.close()
            if code in KILLS or paused:
                how = "was paused" if paused else f"was killed (exit code {code})"
                raise _LostError(f"{how} while it was starting") from error
            match error:
                case EOFError():
                    how = "ended while it was starting"
                case TimeoutError():
                    how = f"took over {START_LIMIT_S:g} s to start"
                case _MismatchError():
                    how = f"was stopped while it was starting, as {error}"
                case _:
                    raise
            raise self._not_started(how) from error
        if "refused" in answer:
            self.close()
            refusals = {"ConfigError": ConfigError, "TaskError": TaskError}
            raise refusals[answer["refused"]](answer["message"], answer["code"])
        return dict(answer["ready"])

    def _not_started(self, how: str) -> RewardError:
        return RewardError(
            f"the process of the reward function {dict(self._opening)} {how}; see what it wrote to "
            f"standard error, or run: {sys.executable} -c 'import stretto.scoring.worker'",
            code="function-not-started",
        )

    def ask(self, samples: Sequence[Mapping[str, Any]], timeout_s: float) -> Answers:
        """Score samples. If the process is lost, asks for all again: a function may compare."""
        answers = self._ask(samples, timeout_s)
        if answers.outside:
            _log.warning("reward function %s: %s; asking once more", self._name, answers.trouble)
            answers = self._ask(samples, timeout_s)
        return answers

    def _ask(self, samples: Sequence[Mapping[str, Any]], timeout_s: float) -> Answers:
        verdicts: list[dict[str, Any]] = []
        if self._process is None:
            try:
                self.start()
            except RewardError as error:
                return Answers(verdicts, str(error))
        deadline, places = _Deadline(timeout_s), set(range(len(samples)))
        try:
            self._send(samples, deadline)
            while "done" not in (answer := self._receive(deadline)):
                at = answer.get("at")
                if not isinstance(at, int) or at not in places:
                    raise _MismatchError(f"its verdict {answer} is for no sample without one")
                places.remove(at)
                verdicts.append(answer)
                if self._limit_each:
                    deadline = _Deadline(timeout_s)
            if answer["done"] is None and places:
                raise _MismatchError(f"it gave {len(verdicts)} verdicts for {len(samples)} samples")
        except BaseException as error:  # a half-read answer would be mistaken for the next one's
            code = self._exit_code() if isinstance(error, EOFError) else None
            paused = isinstance(error, TimeoutError) and _is_paused(self._pid)
            self.close()
            match error:
                case TimeoutError():
                    how = "it was paused" if paused else "it gave no answer"
                    how = f"{how} within {timeout_s:g} s and was stopped"
                    return Answers(verdicts, how, late=not paused, outside=paused)
                case EOFError():
                    how = f"its process ended in the middle of its work (exit code {code})"
                    return Answers(verdicts, how, outside=code in KILLS)
                case _MismatchError():  # so that no verdict is trusted
                    return Answers([], f"its process was stopped as {error}")
            raise
        return Answers(verdicts, answer["done"])

    def close(self) -> None:
        self._process = None
        self._kill()

    def _exit_code(self) -> int | None:
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=1.0)
        return None

    def _send(self, body: object, deadline: _Deadline) -> None:
        self._request += 1
        message = {"request": self._request, "body": body}
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            deadline.wait(self._input, selectors.EVENT_WRITE)
            try:
                data = data[os.write(self._input, data) :]
            except BrokenPipeError as error:
                raise EOFError from error

    def _receive(self, deadline: _Deadline) -> dict[str, Any]:
        while b"\n" not in self._unread:
            deadline.wait(self._output, selectors.EVENT_READ)
            data = os.read(self._output, 1 << 16)
            if not data:
                raise EOFError
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        expected = {"request": self._request, "pid": self._pid}
        try:
            answer: dict[str, Any] = json.loads(line)
            came = {key: answer.pop(key) for key in expected}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise _MismatchError(f"its pipe had no answer, but {line[:200]!r}") from error
        if came != expected:
            raise _MismatchError(f"{expected} was to answer, and {came} did")
        return answer


class _Deadline:
    """A time limit from now on. Pauses of this process (Ctrl-Z, a debugger, a suspended machine)
    extend it, during waits and between them.
    """

    def __init__(self, seconds: float) -> None:
        self._seen_s = time.monotonic()
        self._at_s = self._seen_s + seconds

    def wait(self, pipe: int, event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            while True:
                self._extend(0.0)
                left_s = max(self._at_s - self._seen_s, 0.0)
                slice_s = min(left_s, SLICE_S)
                ready = selector.select(slice_s)  # even without time left: the answer may be there
                is_extended = self._extend(slice_s)
                if ready:
                    return
                if not left_s and not is_extended:
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


def start_child(module: str) -> subprocess.Popen[bytes]:
    """Start a process for user code. Its own session shields it from the terminal's Ctrl-C and
    forms a group to kill. -P keeps files in the working directory from shadowing libraries.
    """
    command = [sys.executable, "-P", "-m", module]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
    threading.Thread(target=_reap, args=(child,), name=f"reaps {module}", daemon=True).start()
    return child


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, and end its group at once. A killed process thus is no zombie
    until its next call. The group must end now because the system may later reuse its number.
    """
    process.wait()
    _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group immediately."""
    if process.returncode is None:  # otherwise the reaping thread has ended the group
        _kill_group(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5.0)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, and close its pipes, which no other thread may use."""
    end(process)
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
