"""Facts about the machine of a run."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

_SECRET = re.compile(r"((?:^|\0)-[^\0=]*(?:key|token|password|secret)[=\0])[^\0]*", re.IGNORECASE)
"""An option between NULs whose value is secret."""


SCALING_TOKENS = (10, 40)
"""Tokens of the training rows with which :attr:`Machine.thread_scaling` is measured."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine facts that a run's metrics depend on."""

    cpu: str
    cores: int  # usable by this process
    threads: int  # torch's default
    gpus: tuple[str, ...]
    torch: str
    thread_scaling: tuple[float, float] = (0.0, 0.0)
    """Speed of decoding and training at the same time on two threads, relative to one of them, if
    training rows have as many tokens as in :data:`SCALING_TOKENS`. 0: unknown."""

    @classmethod
    def here(cls) -> Self:
        """Return the facts about the machine of this process."""
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


def command_line() -> str:
    """Return this process's command with values of secret options (``--hf-token``) as ``***``."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join(_SECRET.sub(r"\1***", "\0".join([name, *sys.argv[1:]])).split("\0"))


def current_start() -> dict[str, Any]:
    """Return ``date``, ``command`` and ``versions`` (by name) of this training process."""
    versions = {"python": platform.python_version()}
    for package in ("stretto", "torch", "transformers"):
        with suppress(metadata.PackageNotFoundError):  # in a source tree
            versions[package] = metadata.version(package)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "versions": versions,
    }


def is_loopback(host: str | None) -> bool:
    """Return whether a host's name or address is the loopback of this machine."""
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


def usable_cores() -> int:
    """Count the cores that this process may use. Batch systems and ``taskset`` limit them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_gpus() -> int:
    """Count the GPUs that torch would see, without importing it."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    build = version.read_text() if version and version.is_file() else ""
    if re.search(r"^cuda: .*= None$", build, re.M) and re.search(r"^hip: .*= None$", build, re.M):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    nvidia = len([p for p in Path("/dev").glob("nvidia*") if p.name[6:].isdigit()])
    other_gpus = any(Path(device).exists() for device in ("/dev/dxg", "/dev/kfd"))  # WSL, AMD
    return nvidia or int(other_gpus)


def free_memory() -> int:
    """Return the bytes of memory that this process may still use, also within its container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, usage = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    try:
        return min(free, int(limit.read_text()) - int(usage.read_text()))
    except (OSError, ValueError):  # no control groups, or no limit: "max"
        return free


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:(.*)$", file.read_text() if file.is_file() else "", re.M)
    name = match[1].strip() if match else ""
    return name or platform.processor() or platform.machine()
