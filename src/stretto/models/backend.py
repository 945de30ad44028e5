"""The one seam for what differs between computing on a CPU and on a CUDA GPU.

It does not import torch: memory and threads of the process are to be settled before that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Literal

from stretto.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from stretto.models.devices import Backend

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""glibc's mallopt(3) knows these by number."""

SPIN_TURNS = 2_000
"""Turns for which an early thread of an operation spins before it sleeps; libgomp's own are
300,000."""

_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait."""


def keep_freed_memory() -> None:
    """Reuse the memory of freed tensors, and ask for it in huge pages, where glibc is in use.

    By default it maps large tensors anew each time, and every fresh page costs a fault at its first
    touch, which on a CPU makes elementwise operations several times slower (docs/performance.md).
    Takes full effect when called before torch is imported.
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


def sleep_when_waiting() -> None:
    """Let threads of GNU's OpenMP, which torch's wheels for Linux have, sleep soon when they wait.

    On a core that another process wants too the last thread of an operation comes late, and threads
    that spin make it later. A user's own setting stays. Takes effect before torch is imported, and
    in all processes that this one starts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_TURNS)


def pick_device(name: str) -> torch.device:
    """Return the device to compute on: of a name in the settings, or in a placement ("cuda:3").

    A GPU has its number, as threads other than the main one begin at the first GPU, and as
    communicators are known by it. Raises ConfigError if CUDA is asked for and missing.
    """
    import torch

    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise ConfigError(
            f"model.device = '{name}' needs a CUDA device, and torch sees none. "
            "Use `model.device = auto` or cpu, or install a torch build for your GPU",
            "no-cuda",
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    if name.startswith("cuda:"):
        return torch.device(name)
    # Asking for the current one would make a context, which a process may not want to have.
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return torch.device("cuda", index)


def pick_dtype(name: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """Return the type to compute in; for ``auto`` the one that :func:`fastest_dtype` finds."""
    import torch

    if name == "auto":
        return fastest_dtype(device)[0]
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def fastest_dtype(device: torch.device, threads: int = 0) -> tuple[torch.dtype, str]:
    return backend_of(device).fastest_dtype(threads)


def backend_of(device: torch.device) -> Backend:
    from stretto.models.devices import Backend, CudaBackend

    return CudaBackend(device) if device.type == "cuda" else Backend(device)
