"""One rank of a group: joins, makes an object, and answers calls of its methods.

The same :class:`Rank` works under every launcher, which gives it the :class:`GroupSpec`, its index
and a connection to its driver. Its steps are ``listen`` (rank 0), ``join``, ``make``, and then
``call`` repeatedly. It ends with its driver, however the driver ends and whatever the rank is
doing.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import psutil

from stretto.errors import RankError
from stretto.models.backend import keep_freed_memory
from stretto.protocols import RealClock
from stretto.workers.connection import Address, DriverConnection, Raw, listening_at

PACKAGES = ("stretto", "torch", "transformers", "ray")  # must have equal versions on all ranks


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """How the processes of a group start, under every launcher."""

    size: int = 1
    backend: str = "gloo"  # or nccl, with a GPU each
    threads: int = 1  # of each rank's torch, 0 for its default
    devices: Sequence[str] = ()  # torch's names there, by default CPUs, with nccl GPUs
    interface: str = ""  # of the group, by default the one that reaches the driver
    timeout_s: float = 600.0  # for each phase of the start, and each collective of the group
    logs: Sequence[Path] = ()  # for everything that each rank prints, on its machine

    def device(self, rank: int) -> str:
        if self.devices:
            return self.devices[rank]
        return f"cuda:{rank}" if self.backend == "nccl" else "cpu"


class Rank:
    """A rank. It is independent of what its object does."""

    def __init__(self, spec: GroupSpec, index: int, connection: Raw) -> None:
        keep_freed_memory()
        self._spec = spec
        self._index = index
        self._device = spec.device(index)
        self._made: Any = None
        self._listener: socket.socket | None = None
        self._driver = DriverConnection(connection, self)

    def serve(self) -> NoReturn:
        self._driver.serve()

    def listen(self) -> Address:
        """Open the socket of the group's store and return its address."""
        interface = self._spec.interface
        self._listener = listening_at(address_of(interface) if interface else self._driver.host)
        address: Address = self._listener.getsockname()[:2]
        return address

    def join(self, host: str, port: int) -> Facts:
        """Join the process group at the store's address, and describe this process."""
        spec = self._spec
        if spec.logs:
            tell_warnings(self._driver.say)
            _print_to(spec.logs[self._index])
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if name not in os.environ:  # defaults follow the machine's name or network
                os.environ[name] = spec.interface or interface_of(self._driver.host)
        import torch
        import torch.distributed as dist

        if spec.threads:
            torch.set_num_threads(spec.threads)
        if self._device.startswith("cuda"):
            torch.cuda.set_device(self._device)
        timeout = timedelta(seconds=spec.timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists it nowhere
            host,
            port,
            spec.size,
            is_master=self._index == 0,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=self._listener.detach() if self._listener else None,
        )
        dist.init_process_group(
            spec.backend, store=store, rank=self._index, world_size=spec.size, timeout=timeout
        )
        return facts(self._device)

    def make(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._made = make(self._index, *arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self._device.startswith("cuda"):  # a thread of a call aside starts on the first GPU
            import torch

            torch.cuda.set_device(self._device)
        return getattr(self._made, method)(*arguments)

    def now(self) -> float:
        return RealClock().now()

    def stacks(self) -> str:
        return stacks()

    def used_bytes(self) -> dict[str, int]:
        return used_bytes(self._device)


def used_bytes(device: str) -> dict[str, int]:
    """Return this process's memory in bytes by metric. Resident memory, and on a GPU already in use
    the memory allocated for tensors, reserved by torch, and allocated at the peak.
    """
    import torch

    bytes_by_metric = {"": psutil.Process().memory_info().rss}
    if device.startswith("cuda") and torch.cuda.is_initialized():
        bytes_by_metric["allocated"] = torch.cuda.memory_allocated(device)
        bytes_by_metric["reserved"] = torch.cuda.memory_reserved(device)
        bytes_by_metric["peak"] = torch.cuda.max_memory_allocated(device)
    return bytes_by_metric


def stacks() -> str:
    """Return the stack of every other thread of this process, for people."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    current_ident = threading.get_ident()
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != current_ident:
            lines = "".join(traceback.format_stack(frame)).rstrip()
            parts.append(f"thread '{names.get(ident, ident)}':\n{lines}")
    return "\n".join(parts)


def tell_warnings(say: Callable[[str], None]) -> None:
    """Report each Python warning, and each log record from WARNING up, once to the user."""
    from transformers.utils import logging as of_transformers

    print_warning, once = warnings.showwarning, cache(say)

    def show(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
        print_warning(message, category, *where, **rest)
        once(f"{category.__name__}: {message}")

    class LineHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            once(f"{record.levelname} {record.name}: {record.getMessage()}")

    warnings.showwarning = show
    root = logging.getLogger()
    root.addHandler(logging.StreamHandler())
    root.addHandler(LineHandler(logging.WARNING))
    # It prints records itself, and propagates them only if CI is in the environment.
    of_transformers.disable_default_handler()
    of_transformers.enable_propagation()


def _print_to(log: Path) -> None:
    """Append everything that this process prints, from any language, to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def address_of(interface: str) -> str:
    """Return a network interface's address. RankError if no interface has that name."""
    names = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in names.get(interface, ()):
            if entry.family == family:
                return str(entry.address).partition("%")[0]
    raise RankError(
        f"{socket.gethostname()} has no network interface '{interface}' with an address; "
        f"it has: {', '.join(sorted(names))}",
        code="no-such-interface",
    )


def interface_of(address: str) -> str:
    """Return the network interface with an address. RankError if there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(str(entry.address).partition("%")[0] == address for entry in entries):
            return str(name)
    raise RankError(
        f"no network interface of {socket.gethostname()} has the address {address}, from which it "
        "reaches the driver; name the interface",
        code="no-interface-has-address",
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about one rank's process and machine."""

    node: str  # name of the machine
    pid: int
    versions: Mapping[str, str]  # of Python and PACKAGES, empty if not installed
    threads: int  # of torch
    device_id: str  # UUID of the rank's GPU, empty on a CPU


def facts(device: str) -> Facts:
    """Collect the facts about this process."""
    import torch

    on_gpu = device.startswith("cuda")
    return Facts(
        socket.gethostname(),
        os.getpid(),
        {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        torch.get_num_threads(),
        str(torch.cuda.get_device_properties(device).uuid) if on_gpu else "",
    )


def _as_far_as_needed(package: str, version: str) -> str:
    if package == "python":
        return version.rpartition(".")[0]
    return version if package == "stretto" else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check(
    ranks: Mapping[str, Facts],
    threads: Mapping[str, int],
    devices: Mapping[str, str] = MappingProxyType({}),
    apart: Collection[str] = (),
) -> None:
    """Compare the ranks' facts, by name, with each other and with the plan. Ranks in ``apart`` have
    their own interpreter. As they exchange pickles of Stretto's data, only Stretto's version and
    Python's minor version must agree.
    """
    names = list(ranks)
    for name in names[1:]:
        for package, first_version in ranks[names[0]].versions.items():
            other_version = ranks[name].versions.get(package, "")
            if name in apart or names[0] in apart:
                first_version, other_version = (
                    _as_far_as_needed(package, first_version),
                    _as_far_as_needed(package, other_version),
                )
            if first_version != other_version:
                raise RankError(
                    f"all ranks need one version of {package}: '{names[0]}' on "
                    f"{ranks[names[0]].node} has {first_version or 'none'}, '{name}' "
                    f"on {ranks[name].node} has {other_version or 'none'}; install "
                    "the same on both",
                    code="versions-differ",
                )
    for name, rank_facts in ranks.items():
        if threads.get(name, rank_facts.threads) != rank_facts.threads:
            raise RankError(
                f"'{name}' on {rank_facts.node} was to use {threads[name]} CPU threads and uses "
                f"{rank_facts.threads}; see whether OMP_NUM_THREADS or the like limits them there",
                code="threads-differ",
            )
    by_device: dict[str, str] = {}
    for name, rank_facts in ranks.items():
        other = by_device.setdefault(rank_facts.device_id, name) if rank_facts.device_id else name
        if other != name and devices.get(name, name) != devices.get(other, other):
            raise RankError(
                f"'{name}' and '{other}' are both on the GPU {rank_facts.device_id} of "
                f"{rank_facts.node}, and are not placed together; see whether "
                "CUDA_VISIBLE_DEVICES is set for both, or place them on one device",
                code="gpu-shared",
            )
