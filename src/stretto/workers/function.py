"""The parent's side of a reward function's process: start it, ask it, and kill it when it hangs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.errors import ConfigError, RewardError, TaskError

START_LIMIT_S = 120.0
"""Seconds for the reward function's process to start and import its libraries."""


class _MismatchError(Exception):
    """A line came that does not answer the request, or not from the process that was asked."""


class FunctionProcess:
    """The process of a reward function and its JSON lines; every wait has a deadline."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        self._opening = opening
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = lambda: None
        self._pid = self._input = self._output = -1
        self._unread, self._request = b"", 0

    def start(self) -> dict[str, Any]:
        """Start the process; return what it says of the reward function, or raise why it cannot."""
        # A session of its own keeps the terminal's Ctrl-C from it, and makes a group to kill it by.
        # -P keeps files of the working directory from standing in for libraries of their name.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stretto.scoring.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        self._process, self._unread, self._request = process, b"", 0
        self._pid, self._input = process.pid, process.stdin.fileno()
        self._output = process.stdout.fileno()
        self._kill = weakref.finalize(self, kill, process)
        for pipe in (self._input, self._output):
            os.set_blocking(pipe, False)
        try:
            deadline_s = time.monotonic() + START_LIMIT_S
            self._send(self._opening, deadline_s)
            answer = self._receive(deadline_s)
        except BaseException as error:
            self.close()
            match error:
                case EOFError():
                    how = "ended"
                case TimeoutError():
                    how = f"took over {START_LIMIT_S:g} s"
                case _MismatchError():
                    how = f"was stopped as {error}"
                case _:
                    raise
            raise RewardError(
                f"the process of the reward function {dict(self._opening)} {how} while it was "
                "starting; see what it wrote to standard error, or run: "
                f"{sys.executable} -c 'import stretto.scoring.worker'",
                code="function-not-started",
            ) from error
        if "refused" in answer:
            self.close()
            refusals = {"ConfigError": ConfigError, "TaskError": TaskError}
            raise refusals[answer["refused"]](answer["message"], answer["code"])
        return dict(answer["ready"])

    def ask(
        self, samples: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Have samples scored; return the verdicts that came, in order, and why no more came."""
        if self._process is None:
            self.start()
        answers: list[dict[str, Any]] = []
        deadline_s = time.monotonic() + timeout_s
        try:
            self._send(samples, deadline_s)
            while "done" not in (answer := self._receive(deadline_s)):
                if answer.get("at") != len(answers) or len(answers) == len(samples):
                    raise _MismatchError(f"its verdict {answer} is for no sample that was next")
                answers.append(answer)
            if answer["done"] is None and len(answers) < len(samples):
                raise _MismatchError(f"it gave {len(answers)} verdicts for {len(samples)} samples")
        except BaseException as error:  # a half-read answer would be taken for the next one's
            code = self._exit_code() if isinstance(error, EOFError) else None
            self.close()
            match error:
                case TimeoutError():
                    return answers, f"it gave no answer within {timeout_s:g} s and was stopped"
                case EOFError():
                    how = f"its process ended in the middle of its work (exit code {code})"
                    return answers, how
                case _MismatchError():  # so that no verdict is trusted
                    return [], f"its process was stopped as {error}"
            raise
        return answers, answer["done"]

    def close(self) -> None:
        """Kill the process and all that it started."""
        self._process = None
        self._kill()

    def _exit_code(self) -> int | None:
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=1.0)
        return None

    def _send(self, body: object, deadline_s: float) -> None:
        self._request += 1
        message = {"request": self._request, "body": body}
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            _wait(self._input, selectors.EVENT_WRITE, deadline_s)
            try:
                data = data[os.write(self._input, data) :]
            except BrokenPipeError as error:
                raise EOFError from error

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        """Return the next line; raise _MismatchError if it does not answer the request."""
        while b"\n" not in self._unread:
            _wait(self._output, selectors.EVENT_READ, deadline_s)
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


def _wait(pipe: int, event: int, deadline_s: float) -> None:
    """Wait until a pipe is ready; raise TimeoutError if it is not by the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not selector.select(left_s):
            raise TimeoutError


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, now."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5.0)
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
