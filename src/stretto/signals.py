"""Signals that ask this process to end, which stop work in order, like Ctrl-C.

SIGTERM comes from schedulers, containers and ``kill``, SIGHUP from a terminal that closes, SIGUSR1
and SIGUSR2 from Slurm (``--signal``, submitit). Python handles signals only in the main thread. In
other threads this module has no effect.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

ECHO_S = 1.0
"""Seconds within which the same signal is one request, because schedulers may send it twice."""

PARENT = "STRETTO_PARENT"
"""Environment variable with the descriptor for :func:`end_with`, for commands that use it."""

GRACE_S = 60.0  # seconds for an orphan to end in order before it is killed

Handlers = dict[signal.Signals, Any]

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_receivers: list[Callable[[], object]] = []
"""Functions to call on a signal instead of raising. Only the last one is called."""


class Terminated(KeyboardInterrupt):
    """A signal of :data:`ENDING`, its ``number``, stopped the work, like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _SignalHandler:
    """A signal handler that distinguishes a first signal, its echoes, and a second request."""

    def __init__(self, first: Callable[[], object], again: Callable[[int], object]) -> None:
        self.number = 0
        self._first = first
        self._again = again
        self._at_s = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._at_s = number, time.monotonic()
            self._first()
            return
        soon = time.monotonic() - self._at_s < ECHO_S
        # A closing terminal sends SIGHUP several times, which never means "at once".
        echo = soon and number == self.number and number in ENDING
        if not (number == signal.SIGHUP or echo):
            self._again(number)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make :data:`ENDING` raise :class:`Terminated`. A second signal ends the process at once.
    Signals that are ignored (``nohup``) or handled by the program itself stay so.
    """
    handler = _SignalHandler(stop, _end_at_once)
    former = _install(handler, {s for s in ENDING if signal.getsignal(s) is signal.SIG_DFL})
    try:
        yield
    except KeyboardInterrupt as error:
        if handler.number and not isinstance(error, Terminated):
            raise Terminated(handler.number) from error
        raise
    finally:
        _restore(former)


@contextmanager
def received_by(stop: Callable[[], object]) -> Iterator[None]:
    """Call ``stop`` on the first of :data:`ENDING`, between any instructions, without raising."""
    if _in_main_thread():
        _receivers.append(stop)
    try:
        yield
    finally:
        if _in_main_thread():
            _receivers.remove(stop)


@contextmanager
def raised() -> Iterator[None]:
    """Make Ctrl-C and :data:`ENDING` raise KeyboardInterrupt at once, also in an event loop, which
    otherwise sees them only after its running code.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    # asyncio handles Ctrl-C only if Python's own handler was installed before.
    ours = _in_main_thread() and isinstance(signal.getsignal(signal.SIGINT), partial)
    former = {signal.SIGINT: signal.getsignal(signal.SIGINT)} if ours else {}
    with received_by(interrupt):
        try:
            if ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            yield
        finally:
            _restore(former)


@contextmanager
def held() -> Iterator[None]:
    """Delay Ctrl-C and :data:`ENDING` until the body is done. A second one is not delayed."""
    former: Handlers = {}

    def again(number: int) -> None:
        _restore(former)
        former.clear()
        signal.raise_signal(number)

    handler = _SignalHandler(lambda: None, again)
    handled = (None, signal.SIG_IGN)
    numbers = {s for s in (signal.SIGINT, *ENDING) if signal.getsignal(s) not in handled}
    former.update(_install(handler, numbers))
    try:
        yield
    finally:
        if former:
            _restore(former)
            if handler.number:
                signal.raise_signal(handler.number)


@contextmanager
def kept() -> Iterator[None]:
    """Restore handlers that a library replaces in the body, for example Ray when it starts."""
    numbers = (signal.SIGINT, *ENDING) if _in_main_thread() else ()
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        _restore({n: h for n, h in former.items() if h is not None})  # None: not Python's


def end_with(descriptor: int) -> None:
    """End this process in order when its parent closes the other end of a pipe."""

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def stop() -> None:
    """Call the last function of :func:`received_by`, or raise KeyboardInterrupt."""
    if _receivers:
        _receivers[-1]()
    else:
        raise KeyboardInterrupt


def _end_at_once(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _install(handler: _SignalHandler, numbers: set[signal.Signals]) -> Handlers:
    if not _in_main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def _restore(former: Handlers) -> None:
    for number, handler in former.items():
        signal.signal(number, handler)
