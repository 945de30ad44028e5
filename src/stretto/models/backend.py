"""What differs between computing on a CPU and on a CUDA GPU.

Importing this module does not import torch: memory and threads of the process are to be settled
before that (:func:`keep_freed_memory`, :func:`sleep_when_waiting`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from stretto.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stretto.models.packed import PackedLinears

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""glibc's mallopt(3) knows these by number."""

SPIN_TURNS = 2_000
"""Turns for which an early thread of an operation spins before it sleeps; libgomp's own are
300,000."""

_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait."""

# -- the process, before torch is imported -------------------------------------------------------


def keep_freed_memory() -> None:
    """Reuse the memory of freed tensors, and ask for it in huge pages.

    By default glibc maps large tensors anew each time, and every fresh page costs a fault at its
    first touch, which on a CPU makes elementwise operations several times slower
    (docs/performance.md). Takes full effect when called before torch is imported, as the command
    line does. Does nothing where the C library is not glibc.
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

    The threads meet at an operation's end. On a core that another process wants too the last one
    comes late, and threads that spin make it later. A user's own setting stays as it is. Takes
    effect when called before torch is imported, as importing ``stretto`` does, and in all processes
    that this one starts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_TURNS)


# -- device and type -----------------------------------------------------------------------------


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to compute on; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: CUDA is asked for and missing.
    """
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            "model.device = 'cuda' needs a CUDA device, and torch sees none. "
            "Use --model.device auto or cpu, or install a torch build for your GPU"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def pick_dtype(name: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """The type to compute in; for ``auto`` the one that :func:`fastest_dtype` finds."""
    import torch

    if name == "auto":
        return fastest_dtype(device)[0]
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def fastest_dtype(device: torch.device, threads: int = 0) -> tuple[torch.dtype, str]:
    """The type that a device computes fastest in, and how that is known.

    Args:
        device: a CPU is measured (:mod:`stretto.models.rates`), if it has bfloat16 at all.
        threads: of torch, on a CPU; 0 takes the present number.
    """
    return backend_of(device).fastest_dtype(threads)


# -- the backends --------------------------------------------------------------------------------


class Backend:
    """A CPU; :class:`CudaBackend` has what is different on a GPU.

    Attributes:
        graphs: whether decode steps can be replayed as CUDA graphs.
        pinned: whether copies to the device are faster from pinned memory.
        collectives: torch's name of the backend for several ranks.
    """

    graphs = False
    pinned = False
    collectives = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def fastest_dtype(self, threads: int) -> tuple[torch.dtype, str]:
        """The type that the device computes fastest in, and how that is known."""
        import torch

        from stretto.models import rates

        if not rates.cpu_has_bfloat16():
            return torch.float32, "the CPU has no instructions for bfloat16"
        measured = rates.cpu_rates(threads or torch.get_num_threads())
        return measured.choice, str(measured)

    def use_fastest_attention(self, model: Any) -> None:
        """Choose the attention of a transformers model: on a CPU, that for short sequences."""
        from stretto.models.attention import use_short_attention

        use_short_attention(model)

    def packed(self, *modules: nn.Module) -> PackedLinears:
        """Return a context in which linear layers are laid out for decoding; on a GPU it is idle.

        Layers on another device, and of other types than bfloat16, stay as they are.
        """
        from stretto.models.packed import PackedLinears

        return PackedLinears(*modules)

    def rank_device(self, rank: int) -> torch.device:
        """Return the device of a rank on this machine."""
        return self.device

    def most_ranks(self) -> int | None:
        """Return how many ranks have a device of their own; ``None`` for any number."""
        return None

    def free_bytes(self) -> int:
        """Bytes of memory that are free."""
        import psutil

        return int(psutil.virtual_memory().available)

    def random_states(self) -> dict[str, Tensor]:
        """States of torch's random numbers, by device."""
        import torch

        return {"cpu": torch.get_rng_state()}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`random_states`; states of other devices are left alone."""
        import torch

        if "cpu" in states:
            torch.set_rng_state(states["cpu"])

    def new_stream(self) -> Any:
        """Return a stream for copies beside the work; ``None`` where a thread is enough."""
        return None

    def begun(self) -> Any:
        """Mark what the device has begun, for :meth:`copy` to wait for."""
        return None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any, begun: Any) -> None:
        """Copy each second tensor into the first, after what has begun; return when it is done."""
        for to, source in pairs:
            to.copy_(source)


class CudaBackend(Backend):
    """A CUDA GPU."""

    graphs = True
    pinned = True
    collectives = "nccl"

    def fastest_dtype(self, threads: int) -> tuple[torch.dtype, str]:
        """The type that the device computes fastest in, and how that is known."""
        import torch

        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU computes in it"
        return torch.float32, "the GPU has no bfloat16"

    def use_fastest_attention(self, model: Any) -> None:
        """Leave transformers' choice, torch's fused attention."""

    def rank_device(self, rank: int) -> torch.device:
        """Return the GPU of the rank's number."""
        import torch

        return torch.device("cuda", rank)

    def most_ranks(self) -> int | None:
        """Return how many GPUs there are."""
        import torch

        return torch.cuda.device_count()

    def free_bytes(self) -> int:
        """Bytes of the GPU's memory that are free."""
        import torch

        return int(torch.cuda.mem_get_info(self.device)[0])

    def random_states(self) -> dict[str, Tensor]:
        """States of torch's random numbers, by device."""
        import torch

        return {**super().random_states(), str(self.device): torch.cuda.get_rng_state(self.device)}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`random_states`; states of other devices are left alone."""
        import torch

        super().set_random_states(states)
        if str(self.device) in states:
            torch.cuda.set_rng_state(states[str(self.device)], self.device)

    def new_stream(self) -> Any:
        """Return a CUDA stream."""
        import torch

        return torch.cuda.Stream(self.device)

    def begun(self) -> Any:
        """Record an event on the present stream."""
        import torch

        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any, begun: Any) -> None:
        """Copy on the stream, after the event; return when it is done."""
        import torch

        with torch.cuda.stream(stream):
            stream.wait_event(begun)
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        # The host waits, so that a buffer which is let go of afterwards is free at once.
        stream.synchronize()


def backend_of(device: torch.device) -> Backend:
    """Return the backend of a device."""
    return CudaBackend(device) if device.type == "cuda" else Backend(device)
