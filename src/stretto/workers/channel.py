"""The child's side of a process for user code: JSON lines that this code cannot touch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn


class Channel:
    """The original standard input and output, hidden from user code and its forked children.

    Every input line is ``{"request": number, "body": anything}``. Every output line has two keys in
    addition to the answer: ``"request"``, the number that it answers, and ``"pid"`` of the sender.
    The process ends with its parent, however the parent ends and whatever runs here.

    Args:
        take: called with each line, on a thread. Without it lines wait for :meth:`next_request`.
        leave: called on a thread once the parent has gone. The process ends when it returns.
    """

    def __init__(
        self, take: Callable[[str], object] | None = None, leave: Callable[[], object] | None = None
    ) -> None:
        self._requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._pid = os.getpid()
        self._request = 0
        self._lock = Lock()
        self._inbox: SimpleQueue[str] = SimpleQueue()
        self._take, self._leave = take or self._inbox.put, leave
        self._nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(self._nothing, 0)
        os.dup2(2, 1)
        os.register_at_fork(after_in_child=self._lose)
        Thread(target=self._listen, daemon=True).start()

    def next_request(self) -> Any:
        """Return the body of the next request. Everything sent from then on answers it."""
        request = json.loads(self._inbox.get())
        self._request = request["request"]
        return request["body"]

    def send(self, message: Mapping[str, Any], request: int | None = None) -> None:
        """Answer a request, by default the last one. Ends a forked child that calls it."""
        if os.getpid() != self._pid:
            os._exit(1)
        number = self._request if request is None else request
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
            self._take(line)
        if self._leave is not None:
            self._leave()
        end_all()


def end_all() -> NoReturn:
    if os.getpgrp() == os.getpid():  # otherwise started by hand, in a foreign group
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
