"""Signals that end this process in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stretto import signals
from stretto.workers.drive import drive


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Those of a fresh process, and again what there was."""
    fresh: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGUSR1: signal.SIG_DFL,
        signal.SIGUSR2: signal.SIG_DFL,
    }
    former = {number: signal.signal(number, handler) for number, handler in fresh.items()}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    signal.raise_signal(number)  # handled before this returns


@pytest.mark.parametrize("number", signals.ENDING)
def test_sigterm_stops_as_ctrl_c_does(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt) as stopped, signals.ending_in_order():
        send(number)
    assert isinstance(stopped.value, signals.Terminated)
    assert stopped.value.number == number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_ctrl_c_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt) as stopped, signals.ending_in_order():
        send(signal.SIGINT)
    assert not isinstance(stopped.value, signals.Terminated)


def test_what_the_program_handles_or_ignores_is_left_alone() -> None:
    told = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.ending_in_order():
        send(signal.SIGTERM)
        send(signal.SIGHUP)
    assert told == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_only_the_main_thread_has_signals() -> None:
    def work() -> None:
        with signals.ending_in_order(), signals.held(), signals.received_by(lambda: None):
            done.append(signal.getsignal(signal.SIGTERM))

    done: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.SIG_DFL]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_what_must_not_be_broken_off(number: int) -> None:
    done = []

    def save() -> None:
        with signals.held():
            send(number)
            done.append("saved")
        done.append("went on")

    with pytest.raises(KeyboardInterrupt), signals.ending_in_order():
        save()
    assert done == ["saved"]


def test_a_second_one_does_not_wait() -> None:
    done = []

    def save() -> None:
        with signals.held():
            send(signal.SIGINT)
            done.append("first")
            send(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt), signals.ending_in_order():
        save()
    assert done == ["first"]


def test_echoes_of_one_request_are_one_request() -> None:
    done = []

    def work() -> None:
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)  # to the process group as well
            send(signal.SIGHUP)  # from a shell that ends too
            done.append("saved")

    with pytest.raises(signals.Terminated) as stopped, signals.ending_in_order():
        work()
    assert done == ["saved"]
    assert stopped.value.number == signal.SIGTERM


ENDLESS = """
import os, signal, sys, time
from stretto import signals
signals.ECHO_S = 0.05
try:
    with signals.ending_in_order():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
except KeyboardInterrupt:
    pass
with signals.ending_in_order():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("saving", flush=True)
        time.sleep(60)
"""


def test_a_second_request_ends_the_process_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"saving\n"
        time.sleep(0.1)
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM


def test_a_signal_cancels_what_is_driven_and_lets_it_end_in_order() -> None:
    import asyncio

    done = []

    async def work() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            done.append("in order")

    with pytest.raises(signals.Terminated), signals.ending_in_order():
        drive(work())
    assert done == ["in order"]


ORPHAN = """
import os, sys, time
from stretto import signals
signals.end_with(int(sys.argv[1]))
try:
    with signals.ending_in_order():
        print(os.getpid(), flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("in order", flush=True)
"""


def test_a_child_ends_in_order_when_its_parent_has_gone() -> None:
    ours, theirs = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(ours)], stdout=subprocess.PIPE, pass_fds=[ours]
    ) as process:
        os.close(ours)
        assert process.stdout
        assert int(process.stdout.readline()) == process.pid
        os.close(theirs)
        assert process.stdout.read() == b"in order\n"
        assert process.wait(20) == 0
