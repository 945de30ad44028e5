"""The memory of processes, looked at beside the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from helpers import ManualClock
from stretto.runtime.memory import EVERY_S, MemoryWatch


def until(found: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    until_s = time.monotonic() + 10
    while not (metrics := found()) and time.monotonic() < until_s:
        time.sleep(0.01)
    return metrics


def test_a_process_that_does_not_answer_holds_no_step_up() -> None:
    answers, looks = threading.Event(), list[int]()

    def used_bytes() -> list[int]:
        answers.wait(10)
        looks.append(1)
        return [2 * 10**9, len(looks) * 10**9]

    groups: Any = [
        SimpleNamespace(name="learner", ranks=SimpleNamespace(used_bytes=used_bytes)),
        SimpleNamespace(name="gone", ranks=SimpleNamespace(used_bytes=lambda: [0])),
    ]
    clock = ManualClock()
    watch = MemoryWatch(groups, clock)
    assert watch.metrics() == {}  # at once
    answers.set()
    assert until(watch.metrics) == {"memory/learner_gb": 3.0}  # of all its ranks
    assert watch.metrics() == {"memory/learner_gb": 3.0}
    assert len(looks) == 1
    clock.advance(EVERY_S)
    watch.metrics()
    assert until(lambda: {"": 1.0} if len(looks) > 1 else {})
    watch.close()
