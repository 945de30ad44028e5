"""Time, injected: nothing that coordinates reads the wall clock by itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clock that coordination code reads."""

    def now(self) -> float:
        """Return the seconds since an arbitrary origin; never goes back."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.perf_counter)


class ManualClock:
    """A clock that stands still until it is told otherwise; what tests use."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the seconds, as last set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds`` (never negative)."""
        if seconds < 0:
            raise ValueError(f"time only moves forward; got {seconds} s")
        self._now_s += seconds
