"""Ranks in tests: calls that only tests make, deaths, and processes that must end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

import psutil

from stretto.errors import RankError
from stretto.workers.group import Launched, RankGroup, step
from stretto.workers.rank import Rank


def require_gone(pids: list[int], seconds: float) -> None:
    """Wait until all of these have ended, so long at most."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def call_each(ranks: RankGroup, method: Any, per_rank: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Call a method with other arguments on each rank."""
    steps = (step(Rank.call, method.__name__, args) for args in per_rank)
    with ranks.request(ranks.all_ranks):
        return ranks._run(f"'{method.__name__}'", steps)


def deaths_of(ranks: RankGroup) -> SimpleQueue[RankError]:
    """Return a queue that gets the error of each death between two calls once it was noticed."""
    deaths = SimpleQueue[RankError]()
    notice = ranks._has_ended

    def noticed(rank: int, launched: Launched) -> None:
        before = ranks._died
        notice(rank, launched)
        if ranks._died and ranks._died is not before:
            deaths.put(ranks._died)

    ranks._has_ended = noticed  # type: ignore[method-assign]
    return deaths
