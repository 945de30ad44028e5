"""How this process holds on to memory, and how its threads wait. No torch here: both must be
settled before torch is imported.

Every page of fresh memory costs a fault at its first touch, and by default glibc maps large tensors
anew each time and gives them back when they are freed. On a CPU that makes an elementwise operation
on a fresh tensor several times slower than on one whose memory was kept (docs/performance.md).

The threads of a tensor operation meet at its end, and those that are early spin until the last one
comes. On a core that another process wants too the last one comes late, and every operation waits
for the scheduler's turn. A thread that sleeps instead is woken at once.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""glibc's mallopt(3) knows these by number."""

SPIN_TURNS = 2_000
"""Turns for which an early thread spins before it sleeps; libgomp's own are 300,000."""
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait."""


def sleep_when_waiting() -> None:
    """Let the threads of GNU's OpenMP, which torch's wheels for Linux have, sleep soon when they
    wait; a user's own setting stays as it is.

    Takes effect when called before torch is imported, as importing ``stretto`` does, and in all
    processes that this one starts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_TURNS)


def keep_freed_memory() -> None:
    """Reuse the memory of freed tensors, and ask for it in huge pages.

    Takes full effect when called before torch is imported, as the command line does. It does
    nothing where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first allocation
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_ARENA_MAX, 1)  # what one thread frees, another may reuse
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 << 20)
