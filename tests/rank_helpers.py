"""Processes that must end, for the tests of ranks under every launcher."""

from __future__ import annotations

import time

import psutil


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
