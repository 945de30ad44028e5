"""CPU threads of torch's operations, and Python threads that share them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Lock, Thread
from typing import TypeVar

import torch

T = TypeVar("T")

_SETTING = Lock()

WAKE_S = 0.1
"""Interval in seconds at which a waiting thread notices an interrupt."""


def set_threads(threads: int) -> None:
    """Set how many CPU threads the operations of this Python thread use."""
    # torch keeps one number for threads that have not read theirs yet. A thread that has set its
    # own also takes that number at its first read, so it must read before another thread sets it.
    with _SETTING:
        torch.set_num_threads(threads)
        torch.get_num_threads()


def interrupt(thread: Thread, error: type[BaseException]) -> None:
    """Raise an error in a thread at its next bytecode, like Ctrl-C in the main thread."""
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error)
        )


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run independent calls in parallel, each on its share of this thread's CPU threads.

    Threads of one operation wait for each other at its end, and are idle in operations too small to
    split: two calls on one thread each end before the same calls one after the other on two
    (docs/performance.md). If the threads cannot be divided evenly, the calls run in sequence. An
    error or an interrupt of this thread ends the other calls.
    """
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    share, remainder = divmod(threads, len(calls))
    if len(calls) < 2 or remainder:
        return [call() for call in calls]
    pending: list[tuple[Callable[[], T], Future[T]]] = [(call, Future()) for call in calls]

    def make(call: Callable[[], T], answer: Future[T]) -> None:
        try:
            set_threads(share)
            with torch.set_grad_enabled(grad):  # torch keeps it per thread
                answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    (first_call, _), *rest = pending
    workers = [Thread(target=make, args=call_and_answer, daemon=True) for call_and_answer in rest]
    answers = [answer for _, answer in rest]
    try:
        for worker in workers:
            worker.start()
        set_threads(share)
        first = first_call()
        # Thread.join would, if interrupted, consider the other thread ended (Python 3.11).
        while wait(answers, WAKE_S).not_done:
            pass
    except BaseException:
        for worker in workers:
            interrupt(worker, SystemExit)
        raise
    finally:
        for worker in workers:
            worker.join()
        set_threads(threads)
    return [first, *(answer.result() for answer in answers)]


def thread_scaling(calls: Sequence[Callable[[], object]], threads: int, seconds: float) -> float:
    """Measure the speed of calls repeated at the same time, relative to one call after the
    other: 1 if Python's lock or the memory allows only one of them at a time, at most their number.

    Args:
        threads: CPU threads of each call.
        seconds: duration of the measurement of each call, and of all at the same time.
    """

    def repeat(call: Callable[[], object], rates: list[float]) -> None:
        set_threads(threads)
        count, began_s = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began_s) < seconds or not count:
            call()
            count += 1
        rates.append(count / took_s)

    def rates_of(group: Sequence[Callable[[], object]]) -> list[float]:
        rates: list[list[float]] = [[] for _ in group]
        workers = [Thread(target=repeat, args=pair) for pair in zip(group, rates, strict=True)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [number for (number,) in rates]

    single_rates = [rates_of([call])[0] for call in calls]
    return sum(rate / single for rate, single in zip(rates_of(calls), single_rates, strict=True))
