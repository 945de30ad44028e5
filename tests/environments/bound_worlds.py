"""Tools and environments of things that belong to one thread, or to the main one."""

import functools
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOCAL = threading.local()


class Table:
    """TRL's environment with a connection that was opened by ``reset``."""

    def reset(self, start: int, **columns: Any) -> str:
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table seen (n integer)")
        self.db.execute("insert into seen values (?)", (start,))
        return ""

    def total(self, n: int) -> int:
        """Add a number.

        Args:
            n: the number
        """
        time.sleep(0.01)
        self.db.execute("insert into seen values (?)", (n,))
        return int(self.db.execute("select sum(n) from seen").fetchone()[0])

    def get_reward(self) -> float:
        return float(self.db.execute("select count(*) from seen").fetchone()[0])


def make_table() -> Table:
    """Make a table."""
    return Table()


def rows(completions: Any, environments: Any) -> list[float]:
    """Count the rows of a table after its episode."""
    (table,) = environments
    return [10 * table.get_reward()]


class Alarmed(Table):
    """The same with an alarm around each call."""

    def total(self, n: int) -> int:
        """Add a number.

        Args:
            n: the number
        """
        with limit(5):
            return super().total(n)


class Stepped:
    """gymnasium's, made, reset, stepped and closed in the thread that has its name."""

    closed: list[bool] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:")
        LOCAL.name = id(self)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.db.execute("create table seen (action text)")
        time.sleep(0.01)
        assert LOCAL.name == id(self)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(0.01)
        self.db.execute("insert into seen values (?)", (action,))
        said = ",".join(row[0] for row in self.db.execute("select * from seen"))
        return said, float(LOCAL.name == id(self)), False, False, {}

    def close(self) -> None:
        self.db.close()
        self.closed.append(LOCAL.name == id(self))


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """End what takes too long, as TRL's example with an agent does."""

    def raise_timeout(number: int, frame: Any) -> None:
        raise TimeoutError(f"after {seconds} s")

    signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Limit a function, by what it cannot be seen to do."""
    hidden = {"handler": signal.signal, "set": signal.setitimer}

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        hidden["handler"](signal.SIGVTALRM, lambda *_: None)  # type: ignore[operator]
        return function(*args, **keywords)

    return call


def query(sql: str) -> list[Any]:
    """Ask a database.

    Args:
        sql: what to ask
    """
    with limit(5):
        return sqlite3.connect(":memory:").execute(sql).fetchall()


@limited
def guarded(n: int) -> int:
    """Add one.

    Args:
        n: any number
    """
    return n + 1


def swallows(n: int) -> str:
    """Hide that it could not set an alarm.

    Args:
        n: any number
    """
    import signal as own

    try:
        own.signal(own.SIGALRM, own.SIG_DFL)
        own.alarm(0)
    except ValueError:
        return "no alarm"
    return f"alarm {n}"


async def waits(n: int) -> int:
    """Set an alarm in a coroutine.

    Args:
        n: any number
    """
    with limit(5):
        return n


def where() -> str:
    """Name the thread."""
    return threading.current_thread().name


def marked() -> str:
    """Name the thread."""
    return threading.current_thread().name


marked.main_thread = True  # type: ignore[attr-defined]


def slow(seconds: float) -> str:
    """Sleep, and kill some other process if there is one.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return str(signal.SIGKILL.name)
