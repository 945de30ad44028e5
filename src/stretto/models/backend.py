"""The only module that distinguishes computing on a CPU and on a CUDA GPU.

It does not import torch, because memory and threads of the process must be configured before that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Literal

from stretto.errors import ConfigError
from stretto.saying import Say, working

if TYPE_CHECKING:
    import torch

    from stretto.config import ModelConfig
    from stretto.models.devices import Backend

_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_ARENA_MAX = -8
"""Option numbers of glibc's mallopt(3)."""

SPIN_TURNS = 2_000
"""Turns for which a waiting OpenMP thread spins before it sleeps. libgomp's default is 300,000."""

_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
"""Variables with which a user configures how OpenMP threads wait."""


def keep_freed_memory() -> None:
    """Reuse the memory of freed tensors, and request it in huge pages, if glibc is in use. By
    default glibc maps large tensors newly each time, and every fresh page costs a fault at its
    first touch, which on a CPU makes elementwise operations several times slower
    (docs/performance.md). Takes full effect if called before torch is imported.
    """
    if not sys.platform.startswith("linux"):
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first allocation
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_ARENA_MAX, 1)  # lets a thread reuse memory that another one freed
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 << 20)


def sleep_when_waiting() -> None:
    """Let waiting threads of GNU's OpenMP, which torch's Linux wheels use, sleep soon. If another
    process wants the same core, an operation's last thread is late, and spinning threads delay it
    further. A user's own setting is kept. Takes effect before torch is imported, and in all
    processes that this one starts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_TURNS)


def pick_device(name: str) -> torch.device:
    """Return the device for a name in the settings or a placement ("cuda:3"). GPUs get an explicit
    index, because threads other than the main one start on the first GPU, and communicators
    identify GPUs by it. Raises ConfigError if CUDA is requested but missing.
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
    # Querying the current device would create a context, which the process may not want.
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return torch.device("cuda", index)


def hardware(device: torch.device) -> str:
    """Describe a device's kind, on which the bits of results depend."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def pick_dtype(name: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """Return the type to compute in. ``auto`` uses :func:`fastest_dtype`."""
    import torch

    if name == "auto":
        return fastest_dtype(device)[0]
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def with_dtype(config: ModelConfig, say: Say, threads: int = 0) -> ModelConfig:
    """Decide ``model.dtype = auto`` for this machine and number of threads (0: torch's default),
    and report the reason.
    """
    if config.dtype != "auto":
        return config
    with working(say, "trying which type is faster"):
        dtype, because = fastest_dtype(pick_device(config.device), threads)
    name = str(dtype).removeprefix("torch.")
    say(f"model.dtype = auto takes {name}: {because}")
    return config.model_copy(update={"dtype": name})


def fastest_dtype(device: torch.device, threads: int = 0) -> tuple[torch.dtype, str]:
    return backend_of(device).fastest_dtype(threads)


def backend_of(device: torch.device) -> Backend:
    from stretto.models.devices import Backend, CudaBackend

    return CudaBackend(device) if device.type == "cuda" else Backend(device)
