"""Calls in the thread that drives a run: their thread, their turn, their errors and Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from stretto.workers.drive import drive
from stretto.workers.threads import CallerThread, WorkerThread


def called(call: Callable[[], Any], *, in_a_loop: bool = False) -> tuple[Any, threading.Thread]:
    """The result of a call by CallerThread, and the thread that it was made in."""
    found: list[Any] = []

    async def work() -> None:
        worker = WorkerThread("other", 1)
        try:
            caller = CallerThread(worker)
            found.extend(await caller.run(lambda: (call(), threading.current_thread())))
        finally:
            worker.stop()

    async def notebook() -> None:
        drive(work())

    asyncio.run(notebook()) if in_a_loop else drive(work())
    return found[0], found[1]


@pytest.mark.parametrize("in_a_loop", [False, True], ids=["script", "notebook"])
def test_calls_are_made_in_the_thread_that_drives(in_a_loop: bool) -> None:
    assert called(lambda: 7, in_a_loop=in_a_loop) == (7, threading.main_thread())
    with pytest.raises(ValueError, match="mine"):
        called(lambda: int("mine"), in_a_loop=in_a_loop)


@pytest.mark.parametrize("in_a_loop", [False, True], ids=["script", "notebook"])
def test_alarms_work_there(in_a_loop: bool) -> None:
    def alarmed() -> str:
        class LateError(Exception):
            pass

        def late(*_: object) -> None:
            raise LateError

        former = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(20)
        except LateError:
            return "late"
        finally:
            signal.signal(signal.SIGALRM, former)
        return "never"

    assert called(alarmed, in_a_loop=in_a_loop)[0] == "late"


def test_a_call_takes_turns_with_the_worker() -> None:
    at_work: list[str] = []

    async def work() -> None:
        worker = WorkerThread("other", 1)

        def of_worker(name: str) -> None:
            at_work.append(f"{name} begins")
            time.sleep(0.02)
            at_work.append(f"{name} ends")

        caller = CallerThread(worker)
        calls = [worker.run(lambda: of_worker("a")), caller.run(lambda: of_worker("b"))]
        await asyncio.gather(*calls, worker.run(lambda: of_worker("c")))
        worker.stop()

    drive(work())
    assert sorted(at_work[::2]) == ["a begins", "b begins", "c begins"]
    for begins, ends in zip(at_work[::2], at_work[1::2], strict=True):
        assert begins.replace("begins", "ends") == ends


@pytest.mark.parametrize("in_a_loop", [False, True], ids=["script", "notebook"])
def test_ctrl_c_breaks_a_call_off(in_a_loop: bool) -> None:
    def interrupted() -> None:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        time.sleep(20)

    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        called(interrupted, in_a_loop=in_a_loop)
    assert time.monotonic() - began_s < 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_work_is_raised_and_not_logged_later(
    end: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise end

    with pytest.raises(end):
        drive(work())
    gc.collect()  # asyncio logs an exception of a task that nobody has asked for
    assert not caplog.records
