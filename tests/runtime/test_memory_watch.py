"""The memory of processes, looked at beside the steps."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import ManualClock
from stretto.runtime.processes import MemoryWatch, ThreadPoolExecutor
from stretto.workers.rank import used_bytes


def test_a_process_that_does_not_answer_holds_no_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, looks = threading.Event(), list[Future[Any]]()
    submit = ThreadPoolExecutor.submit

    def looked(self: ThreadPoolExecutor, *args: Any) -> Future[Any]:
        looks.append(submit(self, *args))
        return looks[-1]

    def used_bytes() -> list[dict[str, int]]:
        answers.wait(10)
        gpu = {"allocated": 10**9, "reserved": 3 * 10**9, "peak": 2 * 10**9}
        return [{"": 2 * 10**9}, {"": len(looks) * 10**9, **gpu}, {}]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", looked)
    groups: Any = [
        SimpleNamespace(name="learner", used_bytes=used_bytes),
        SimpleNamespace(name="gone", used_bytes=lambda: [{}]),
    ]
    clock = ManualClock()
    watch = MemoryWatch(groups, clock)
    assert watch.metrics() == {}  # at once
    answers.set()
    looks[0].result(10)
    gpu = {f"memory/learner/{k}_gb": n for k, n in (("allocated", 1), ("reserved", 3), ("peak", 2))}
    assert watch.metrics() == {"memory/learner_gb": 3.0, **gpu}  # all ranks'; the fullest GPU's
    assert watch.metrics() == {"memory/learner_gb": 3.0, **gpu}
    assert len(looks) == 1
    clock.advance(MemoryWatch.EVERY_S)
    watch.metrics()
    assert len(looks) == 2
    looks[1].result(10)
    assert watch.metrics()["memory/learner_gb"] == 4.0
    watch.close()


def test_a_gpu_that_is_in_use_is_looked_at_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads begin at the first GPU; a look must not be what makes a context on one."""
    for name, size in (
        ("memory_allocated", 1),
        ("memory_reserved", 3),
        ("max_memory_allocated", 2),
    ):
        sizes = {"cuda:3": size * 10**9}
        monkeypatch.setattr(torch.cuda, name, sizes.__getitem__)
    assert used_bytes("cuda:3").keys() == {""}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert used_bytes("cpu").keys() == {""}
    found = used_bytes("cuda:3")
    assert found.pop("") > 10**7
    assert found == {"allocated": 10**9, "reserved": 3 * 10**9, "peak": 2 * 10**9}
    watch = MemoryWatch((), ManualClock(), "cuda:3")
    watch._look.result(10)
    assert watch.metrics()["memory/stretto/peak_gb"] == 2.0
    watch.close()
