"""The machine that a run works on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures of a run depend on.

    Attributes:
        cpu: its model.
        cores: that this process may use.
        threads: that torch uses unless it is told a number.
        gpus: by name.
        torch: its version.
    """

    cpu: str
    cores: int
    threads: int
    gpus: tuple[str, ...]
    torch: str

    @classmethod
    def here(cls) -> Self:
        """Look at the machine of this process."""
        import torch

        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return cls(_cpu(), usable_cores(), torch.get_num_threads(), gpus, metadata.version("torch"))

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        gpus = [
            f"{n} x {name}" if (n := self.gpus.count(name)) > 1 else name
            for name in dict.fromkeys(self.gpus)
        ]
        return ", ".join([self.cpu, cores, *gpus, f"torch {self.torch}"])


def usable_cores() -> int:
    """Count the cores that this process may use, which a batch system or ``taskset`` limits."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
