"""The memory of a run's processes, looked at beside its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from stretto.protocols import Clock
from stretto.workers.group import ServiceGroup

EVERY_S = 1.0
"""Seconds between two looks, at least."""


class MemoryWatch:
    """Looks at the resident memory of all processes, on a thread of its own.

    Args:
        clock: for the time between looks.
    """

    def __init__(self, groups: Sequence[ServiceGroup], clock: Clock) -> None:
        self._groups, self._clock = groups, clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._look: Future[Mapping[str, float]] = self._pool.submit(self._used)
        self._since_s = clock.now()
        self._metrics: Mapping[str, float] = {}

    def metrics(self) -> Mapping[str, float]:
        """Return gigabytes by process, as the last look that has ended found them."""
        if self._look.done():
            self._metrics = self._look.result()
            if self._clock.now() - self._since_s >= EVERY_S:
                self._since_s = self._clock.now()
                self._look = self._pool.submit(self._used)
        return self._metrics

    def close(self) -> None:
        """Look no more; waits for nobody."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _used(self) -> Mapping[str, float]:
        used = {group.name: sum(group.ranks.used_bytes()) for group in self._groups}
        return {f"memory/{name}_gb": n / 1e9 for name, n in used.items() if n}
