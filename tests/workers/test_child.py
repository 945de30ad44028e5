"""A process for user code, seen from its parent."""

from __future__ import annotations

import json
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from stretto.workers.child import Child
from stretto.workers.user_code import Host


class MeetingLock:
    """A lock that says when a second thread comes to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.contended = threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.contended.set()
            self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_an_answer_may_arrive_before_its_request_is_on_record() -> None:
    host: Any = Host
    child = Child(host, {}, "f", "some-code")
    process: Any = SimpleNamespace(pid=7, returncode=0, wait=lambda timeout: 0)
    lock: Any = MeetingLock()
    readers = list[threading.Thread]()

    class Outbox(SimpleQueue[bytes | None]):
        """Of a process that answers as soon as a request is in its pipe."""

        def put(self, item: bytes | None, *args: Any, **options: Any) -> None:
            if item:
                answer = {"request": json.loads(item)["request"], "pid": 7, "value": 3}
                line = json.dumps(answer).encode()
                readers.append(threading.Thread(target=child._take, args=(process, line)))
                readers[0].start()
                lock.contended.wait()

    child._process = process
    child._lock = lock
    child._outbox = Outbox()
    answers: SimpleQueue[Any] = SimpleQueue()
    child._send("body", answers.put)
    readers[0].join()
    assert answers.get_nowait() == {"value": 3}
