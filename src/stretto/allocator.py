"""The process's use of memory; to be settled before torch is imported.

Every page of fresh memory costs a fault at its first touch, and by default glibc maps large tensors
anew each time and gives them back when they are freed. On a CPU that makes an elementwise operation
on a fresh tensor several times slower than on one whose memory was kept (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""glibc's mallopt(3) knows these by number."""


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
