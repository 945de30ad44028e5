"""The child's side of a process for user code: JSON lines that this code cannot touch."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from threading import Lock, Thread
from typing import Any, NoReturn, TypeVar

from stretto.errors import StrettoError

T = TypeVar("T")
Request = Mapping[str, Any]


class Channel:
    """The original standard input and output, hidden from user code and its forked children.

    Every input line is ``{"request": number, "body": anything}``. Every output line has two keys in
    addition to the answer: ``"request"``, the number that it answers, and ``"pid"`` of the sender.
    The first request describes user code. Its answer is ``"ready"``, or ``"refused"`` (the name of
    an error) with ``"message"`` and ``"code"``, and the process exits. In any case it ends with its
    parent, however the parent ends and whatever runs here.

    Args:
        take: called with each request, on a thread.
        leave: called on a thread once the parent has gone. The process ends when it returns.
    """

    def __init__(
        self, take: Callable[[Request], object], leave: Callable[[], object] | None = None
    ) -> None:
        self._requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._pid = os.getpid()
        self._lock = Lock()
        self._take = take
        self._leave = leave
        self._nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(self._nothing, 0)
        os.dup2(2, 1)
        os.register_at_fork(after_in_child=self._lose)
        Thread(target=self._listen, daemon=True).start()

    def open(self, request: Request, make: Callable[[Any], T]) -> T:
        """Return the object that the first request describes, or refuse it and exit."""
        try:
            return make(request["body"])
        except StrettoError as error:
            refusal = {"refused": type(error).__name__, "message": str(error), "code": error.code}
            self.send(request["request"], refusal)
            sys.exit()

    def send(self, number: int, message: Mapping[str, Any]) -> None:
        """Answer the request of this number. Ends a forked child that calls it."""
        if os.getpid() != self._pid:
            os._exit(1)
        line = json.dumps({"request": number, "pid": self._pid, **message})
        try:
            with self._lock:
                self._replies.write(line + "\n")
                self._replies.flush()
        except BrokenPipeError:
            if self._leave is None:
                end_all()  # otherwise it is called soon and ends the process

    def _lose(self) -> None:
        for end in (self._requests, self._replies):
            os.dup2(self._nothing, end.fileno(), inheritable=False)

    def _listen(self) -> NoReturn:
        """Read lines while user code runs. Once the parent has gone, end everything it started."""
        for line in self._requests:
            self._take(json.loads(line))
        if self._leave is not None:
            self._leave()
        end_all()


def end_all() -> NoReturn:
    if os.getpgrp() == os.getpid():  # otherwise started by hand, in a foreign group
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
