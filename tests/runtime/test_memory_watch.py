"""The memory of processes, looked at beside the steps."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import ManualClock
from stretto.runtime.processes import MemoryWatch, ThreadPoolExecutor


def test_a_process_that_does_not_answer_holds_no_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, looks = threading.Event(), list[Future[Any]]()
    submit = ThreadPoolExecutor.submit

    def looked(self: ThreadPoolExecutor, *args: Any) -> Future[Any]:
        looks.append(submit(self, *args))
        return looks[-1]

    def used_bytes() -> list[int]:
        answers.wait(10)
        return [2 * 10**9, len(looks) * 10**9]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", looked)
    groups: Any = [
        SimpleNamespace(name="learner", ranks=SimpleNamespace(used_bytes=used_bytes)),
        SimpleNamespace(name="gone", ranks=SimpleNamespace(used_bytes=lambda: [0])),
    ]
    clock = ManualClock()
    watch = MemoryWatch(groups, clock)
    assert watch.metrics() == {}  # at once
    answers.set()
    looks[0].result(10)
    assert watch.metrics() == {"memory/learner_gb": 3.0}  # of all its ranks
    assert watch.metrics() == {"memory/learner_gb": 3.0}
    assert len(looks) == 1
    clock.advance(MemoryWatch.EVERY_S)
    watch.metrics()
    assert len(looks) == 2
    looks[1].result(10)
    assert watch.metrics() == {"memory/learner_gb": 4.0}
    watch.close()
