"""Threads of user objects, because sqlite3, Playwright and thread-locals need a single thread."""

from __future__ import annotations

import inspect
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from types import CodeType
from typing import Any

_ALARMS = ("alarm", "setitimer", "SIGALRM")


class ObjectThread:
    """The thread that makes, calls and closes one object. It ends once unreferenced.

    Attributes:
        kind: class of the object, or the function that makes it.
        main: whether calls run in the process's main thread instead.
        hangs: whether a call that was given up still runs.
    """

    def __init__(self, kind: Any = None, *, main: bool = False) -> None:
        self.kind = kind
        self.main = main
        self.hangs = False
        self._calls: SimpleQueue[Callable[[], object] | None] | None = None

    def submit(self, call: Callable[[], object]) -> None:
        """Queue a call, which must not raise, after all earlier ones."""
        if self._calls is None:
            self._calls = SimpleQueue()
            Thread(target=_serve, args=(self._calls,), daemon=True).start()
            weakref.finalize(self, self._calls.put, None)
        self._calls.put(call)

    def result(self, call: Callable[[], Any]) -> Any:
        """Wait for a call and return or raise its result. May run in the main thread."""
        if self.main and threading.current_thread() is threading.main_thread():
            return call()
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self.submit(work)
        return future.result()


def _serve(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while call := calls.get():
        call()
        del call  # it may refer to the object


def needs_main_thread(thing: Any) -> bool:
    """Whether a function, or a class's method, has ``main_thread = True`` or sets an alarm.

    Python allows signal handlers in the main thread only, and many tools hide the error.
    """
    marked = getattr(thing, "main_thread", None)
    if isinstance(marked, bool):
        return marked
    functions = [thing]
    if inspect.isclass(thing):
        functions = [inspect.getattr_static(thing, name, None) for name in dir(thing)]
    seen: set[CodeType] = set()
    return any(_sets_alarm(function, seen) for function in functions)


def _sets_alarm(function: Any, seen: set[CodeType]) -> bool:
    """Whether the code of a function, or of functions named in it, sets an alarm."""
    if hasattr(function, "__wrapped__") and _sets_alarm(function.__wrapped__, seen):
        return True
    function = getattr(function, "__func__", function)
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if not isinstance(code, CodeType) or code in seen:
        return False
    seen.add(code)
    for names in _names(code):
        alarms = [name for name in _ALARMS if name in names]
        if alarms and ("signal" in names or scope.get(alarms[0]) is getattr(signal, alarms[0])):
            return True
        callees = (scope.get(name) for name in names)
        if any(inspect.isfunction(callee) and _sets_alarm(callee, seen) for callee in callees):
            return True
    return False


def _names(code: CodeType) -> Iterator[tuple[str, ...]]:
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def refused_outside_main(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is Python's about signals in other threads."""
    while error is not None:
        if isinstance(error, ValueError | RuntimeError) and "works in main thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
