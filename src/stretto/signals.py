"""Signals that ask this process to end, which stop what is under way in order, as Ctrl-C does.

SIGTERM comes from schedulers, containers and ``kill``, SIGHUP from a terminal that closes, SIGUSR1
and SIGUSR2 from Slurm (``--signal``, submitit). Python handles signals in the main thread alone.
Elsewhere nothing here has an effect.
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
"""Time within which the same signal is the same request: schedulers send it twice, or to a process
and to its group."""

PARENT = "STRETTO_PARENT"
"""Environment variable with the descriptor for :func:`end_with`, of a command that needs it."""

GRACE_S = 60.0
"""Seconds that an orphan gets to end in order before it is ended at once."""

Handlers = dict[signal.Signals, Any]

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_receivers: list[Callable[[], object]] = []
"""Functions that are called on a signal in place of raising; only the last one is."""


class Terminated(KeyboardInterrupt):
    """One of :data:`ENDING`, by its ``number``, stopped the work, as Ctrl-C would have."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Handler:
    """A handler that tells a first signal from its echoes, and from a second request."""

    def __init__(self, first: Callable[[], object], again: Callable[[int], object]) -> None:
        self.number = 0
        self._first, self._again, self._at_s = first, again, 0.0

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
    """Have :data:`ENDING` raise :class:`Terminated`. A second one ends the process at once.

    A signal that is ignored (``nohup``) or that the program handles itself is left as it is.
    """
    handler = _Handler(stop, _end_at_once)
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
    """Have a first of :data:`ENDING` call ``stop``, between any two instructions, and not raise."""
    if _in_main_thread():
        _receivers.append(stop)
    try:
        yield
    finally:
        if _in_main_thread():
            _receivers.remove(stop)


@contextmanager
def raised() -> Iterator[None]:
    """Have Ctrl-C and :data:`ENDING` raise KeyboardInterrupt at once, in an event loop too, which
    otherwise sees them after the code that runs in it.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    # asyncio takes Ctrl-C only if Python's own handler was there before.
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
    """Put off Ctrl-C and :data:`ENDING` until what is inside is done; a second is not put off."""
    former: Handlers = {}

    def again(number: int) -> None:
        _restore(former)
        former.clear()
        signal.raise_signal(number)

    handler = _Handler(lambda: None, again)
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
    """Put back the handlers that a library replaces meanwhile, as Ray does when it starts."""
    numbers = (signal.SIGINT, *ENDING) if _in_main_thread() else ()
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        _restore({n: h for n, h in former.items() if h is not None})  # None: not Python's


def end_with(descriptor: int) -> None:
    """End this process in order when the other end of a pipe closes, which its parent holds."""

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
    """Call the last of the functions given to :func:`received_by`, or raise KeyboardInterrupt."""
    if _receivers:
        _receivers[-1]()
    else:
        raise KeyboardInterrupt


def _end_at_once(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _install(handler: _Handler, numbers: set[signal.Signals]) -> Handlers:
    if not _in_main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def _restore(former: Handlers) -> None:
    for number, handler in former.items():
        signal.signal(number, handler)
