"""Work under way, as a line; and who repeats it while the work goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from stretto.clock import Clock, RealClock

FIRST_S = 2.0
"""Seconds without a line until the first one about work that goes on."""

SOON_S = 0.5
"""The same after other work of which nothing was said either."""

EVERY_S = 10.0
"""Seconds between lines, at the least."""

SPARSER = 0.25
"""The same as a share of what the work has taken so far: work of hours gets no line every
:data:`EVERY_S`."""


class Work:
    """Work, and how far it is.

    Args:
        total: of what is done; 0 where that is not known.

    Attributes:
        done: so much of it.
    """

    def __init__(self, what: str, total: int = 0, clock: Clock | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._clock = clock or RealClock()
        self._since_s = self._clock.now()

    def advance(self, count: int) -> None:
        """Take note that so much more is done."""
        self.done += count

    @property
    def took_s(self) -> float:
        """Seconds so far."""
        return self._clock.now() - self._since_s

    @property
    def left_s(self) -> float | None:
        """Seconds left, at the pace so far; ``None`` where that is not known."""
        if not (self.total and self.done):
            return None
        return self.took_s * max(self.total - self.done, 0) / self.done

    @property
    def pause_s(self) -> float:
        """Seconds until the next line."""
        return max(EVERY_S, SPARSER * self.took_s)

    def line(self) -> str:
        """Write how far it is."""
        if not self.total:
            return f"{self.what} ({duration(self.took_s)} so far)"
        share = f"{self.what}: {self.done:,} of {self.total:,}"
        left_s = self.left_s
        return share if left_s is None else f"{share}, {duration(left_s)} left"


@contextmanager
def repeated(act: Callable[[], float], first_s: float) -> Iterator[None]:
    """Call a function now and then, on a thread, while the body of a ``with`` statement runs.

    Args:
        act: returns the seconds until the next call; a terminal that is gone ends the calls.
        first_s: seconds until the first one.
    """
    ended = threading.Event()

    def work() -> None:
        wait_s = first_s
        with suppress(OSError, ValueError, SystemExit):  # the last by Rich, of a closed pipe
            while not ended.wait(wait_s):
                wait_s = act()

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def duration(seconds: float) -> str:
    """Write a duration as '42s', '3m05s' or '1h02m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
