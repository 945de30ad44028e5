"""Streams of roles: each hand-over waits, in stand-ins for CUDA's streams that log their order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from stretto.models.devices import Backend, CudaBackend
from stretto.types import WeightsRef
from stretto.weights.channel import SharedChannel
from stretto.workers.threads import CallerThread, ThreadExecutor, WorkerThread

GPU = torch.device("cuda", 0)
ORDERED = ["role on", "role after caller", "call", "caller after role", "role off"]


class Stream:
    def __init__(self, name: str, log: list[str], priority: int = 0) -> None:
        self.name = name
        self.priority = priority
        self._log = log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} after {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    callers = Stream("caller", events)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        events.append(f"{stream.name} on")
        yield
        events.append(f"{stream.name} off")

    def make(device: Any, priority: int) -> Stream:
        return Stream("role", events, priority)

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    return events


class Role:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def work(self, error: bool = False) -> None:
        self._log.append("call")
        if error:
            raise ValueError("mine")


def called(log: list[str], *args: Any) -> None:
    """Call a role on a thread with a stream, and log when the caller has the answer."""

    async def call() -> None:
        thread = WorkerThread("role", 1, stream=CudaBackend(GPU).role_stream())
        try:
            await ThreadExecutor(Role(log), thread).call(Role.work, *args)
        finally:
            log.append("answer")
            thread.stop()

    asyncio.run(call())


def test_a_call_waits_for_the_callers_stream_which_waits_for_it_before_the_answer(
    log: list[str],
) -> None:
    called(log)
    assert log == [*ORDERED, "answer"]


def test_the_callers_stream_waits_for_a_call_that_fails(log: list[str]) -> None:
    with pytest.raises(ValueError, match="mine"):
        called(log, True)
    assert [*ORDERED[:-1], "answer"] == log


@pytest.mark.parametrize("by_caller", [False, True])
def test_a_call_on_the_side_waits_for_the_call_in_progress(log: list[str], by_caller: bool) -> None:
    worker = WorkerThread("role", 1, stream=CudaBackend(GPU).role_stream())
    thread = CallerThread(worker) if by_caller else worker
    ThreadExecutor(Role(log), thread).aside_on_all(Role.work, False, timeout_s=1.0)
    worker.stop()
    assert log == ["caller after role", "call"]


def test_urgent_roles_have_a_stream_of_high_priority(log: list[str]) -> None:
    backend: Any = CudaBackend(GPU)
    assert backend.role_stream(urgent=True)._stream.priority == -1
    assert backend.role_stream()._stream.priority == 0


def test_weights_in_the_channel_keep_their_memory_until_a_follower_has_copied_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []

    class Recording(Backend):
        def read_on(self, stream: Any, tensor: torch.Tensor) -> torch.Tensor:
            kept.append((stream, tensor))
            return tensor

    monkeypatch.setattr("stretto.weights.channel.backend_of", Recording)
    channel, ref = SharedChannel(), WeightsRef("actor", 1, "", "shared")
    weight = torch.ones(2)
    channel.put(ref, {"w": weight})
    channel.get(ref)
    assert kept == [(None, weight)]
