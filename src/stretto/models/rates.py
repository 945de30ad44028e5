"""Measured speed of a CPU's matrix products by type, by which ``model.dtype = auto`` chooses.

Instruction sets do not tell it. One CPU has bfloat16 products (AVX512-BF16) at half the speed of
its float32 ones, and another, with the same flag, at twice their speed.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

ROWS, INNER, OUTER = 256, 768, 3072
"""Sizes of the product: a micro-batch's tokens, a small model's hidden size and 4 times that."""
REPEATS = 6
"""Products of each type, in turn; the fastest counts, as the others were disturbed."""
GAIN = 1.2
"""Least speed-up for which bfloat16 is chosen: float32 is more exact, and a near tie would fall
either way from run to run.
"""

Timer = Callable[[torch.dtype], float]
"""Seconds of one product of a type."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of the product in each type, in GFLOP/s."""

    float32: float
    bfloat16: float

    @property
    def choice(self) -> torch.dtype:
        """The type to compute in."""
        return torch.bfloat16 if self.bfloat16 >= GAIN * self.float32 else torch.float32

    def __str__(self) -> str:
        return f"products at {self.bfloat16:.0f} GFLOP/s in bfloat16, {self.float32:.0f} in float32"


@lru_cache
def cpu_rates(threads: int) -> Rates:
    """Measure both types, once in a process: some 50 ms.

    Args:
        threads: of torch; only rates with the same number are comparable.
    """
    before = torch.get_num_threads()
    if threads == before:
        return measure(_Product())
    torch.set_num_threads(threads)
    try:
        return measure(_Product())
    finally:
        torch.set_num_threads(before)


def measure(timer: Timer) -> Rates:
    """The rates by the fastest of several products of each type, after one that warms up."""
    types = (torch.float32, torch.bfloat16)
    for dtype in types:
        timer(dtype)
    seconds = {dtype: float("inf") for dtype in types}
    for _ in range(REPEATS):
        for dtype in types:
            seconds[dtype] = min(seconds[dtype], timer(dtype))
    work = 2 * ROWS * INNER * OUTER / 1e9
    return Rates(*(work / seconds[dtype] for dtype in types))


class _Product:
    """A linear layer's product on fixed numbers, timed."""

    def __init__(self) -> None:
        # No random numbers are drawn: a run draws the same ones with and without a measurement.
        self._x, self._w = torch.ones(ROWS, INNER), torch.ones(OUTER, INNER)

    @torch.inference_mode()
    def __call__(self, dtype: torch.dtype) -> float:
        x, w = self._x.to(dtype), self._w.to(dtype)
        start_s = time.perf_counter()
        torch.nn.functional.linear(x, w)
        return time.perf_counter() - start_s


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 itself; elsewhere it is emulated, and far slower.

    On x86, oneDNN already says yes to AVX512 alone, so the instruction sets are asked for by name.
    On ARM it reads the very instruction.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        has_onednn = torch.backends.mkldnn.is_available()
        return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
