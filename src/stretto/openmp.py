"""The waiting of a tensor operation's threads; to be settled before torch is imported.

The threads meet at the operation's end, and those that are early spin until the last one comes. On
a core that another process wants too the last one comes late, and every operation waits for the
scheduler's turn. A thread that sleeps instead is woken at once.
"""

from __future__ import annotations

import os

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
