"""Time, injected: nothing that coordinates reads the wall clock by itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clock that coordination code reads."""

    def now(self) -> float:
        """Return the seconds since an arbitrary origin; never goes back."""


class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.perf_counter)
