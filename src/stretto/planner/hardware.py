"""Peak rates of GPUs and links: published, measured (``stretto plan --calibrate``) or by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, field
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ConfigDict, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from stretto.config import recipes
from stretto.errors import ConfigError, nearest
from stretto.files import write_whole
from stretto.layout import Layout
from stretto.runtime.sim.costs import Efficiency

T = TypeVar("T")
TABLES = ("gpu", "links", "assumed", "measured")
"""Tables of a hardware file. ``measured`` is a record that nothing reads back."""
_CHECKED = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


@dataclass(frozen=True, slots=True, config=_CHECKED)
class Gpu:
    """A GPU's peak rates by its data sheet: dense bfloat16 operations a second, bytes a second.
    Links (to neighbours by NVLink, and to the host's memory) count one direction."""

    name: str
    flops: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    memory_bytes: PositiveFloat
    link_bytes_per_s: PositiveFloat
    host_bytes_per_s: PositiveFloat


GPUS: Mapping[str, Gpu] = {
    "a100-40gb": Gpu("A100 40GB", 312e12, 1.555e12, 40e9, 300e9, 32e9),
    "a100-80gb": Gpu("A100 80GB", 312e12, 2.039e12, 80e9, 300e9, 32e9),
    "h100": Gpu("H100", 989e12, 3.35e12, 80e9, 450e9, 64e9),
    "h200": Gpu("H200", 989e12, 4.8e12, 141e9, 450e9, 64e9),
    "gh200": Gpu("GH200", 989e12, 4.0e12, 96e9, 450e9, 450e9),
    "b200": Gpu("B200", 2250e12, 8.0e12, 180e9, 900e9, 64e9),
    "a10g": Gpu("A10G", 70e12, 600e9, 24e9, 32e9, 32e9),
    "l4": Gpu("L4", 121e12, 300e9, 24e9, 32e9, 32e9),
    "l40s": Gpu("L40S", 362e12, 864e9, 48e9, 32e9, 32e9),
    "rtx4090": Gpu("RTX 4090", 165.2e12, 1.008e12, 24e9, 32e9, 32e9),
    "rtx5090": Gpu("RTX 5090", 209.5e12, 1.792e12, 32e9, 64e9, 64e9),
    "mi300x": Gpu("MI300X", 1307.4e12, 5.3e12, 192e9, 448e9, 64e9),
}
"""Operations without sparsity, and half of each link's bandwidth, as sheets count both directions.
A100, H100, H200: SXM variants, by NVIDIA's data sheets "... Tensor Core GPU". GH200: "GH200 Grace
Hopper Superchip". B200: "Blackwell Architecture Technical Brief" (HGX) and an eighth of "DGX B200".
A10G, L4, L40S: their data sheets. RTX: "Ada GPU Architecture" and "RTX Blackwell GPU Architecture",
with sums in float32. MI300X: AMD's data sheet, seven links of 128 GB/s. GPUs without NVLink: PCIe.
"""


@dataclass(frozen=True, slots=True, config=_CHECKED)
class Links:
    """Bandwidths between GPUs in bytes a second, one direction. Each GPU has a network adapter.
    Between nodes the default is 400 Gbit/s, as in NVIDIA's DGX H100."""

    within_bytes_per_s: PositiveFloat
    between_bytes_per_s: PositiveFloat = 50e9
    host_bytes_per_s: PositiveFloat = 64e9
    gpus_per_node: PositiveInt = 8

    @classmethod
    def of(cls, gpu: Gpu, gpus_per_node: int = 8) -> Links:
        host = gpu.host_bytes_per_s
        return cls(gpu.link_bytes_per_s, host_bytes_per_s=host, gpus_per_node=gpus_per_node)

    def bytes_per_s(self, members: int, members_a_node: int) -> float:
        """Return the bytes a second that each member of a group receives in a collective.

        Members of a node share their adapters: NCCL runs a ring for each adapter, which carries its
        part of the bytes. So a group with all GPUs of its nodes is ``gpus_per_node`` times as fast
        between nodes as a group with one GPU of each.
        """
        if members <= members_a_node:
            return self.within_bytes_per_s
        return min(self.within_bytes_per_s, members_a_node * self.between_bytes_per_s)

    def data_bytes_per_s(self, layout: Layout) -> float:
        """Return the speed of collectives over copies or shards."""
        a_node = max(1, self.gpus_per_node // layout.data_stride)
        return self.bytes_per_s(layout.data_parallel, min(layout.data_parallel, a_node))


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs of one kind, their links, and the assumed efficiency of both."""

    gpu: Gpu
    links: Links
    assumed: Efficiency = field(default_factory=Efficiency)

    @classmethod
    def of(cls, gpu: str, assumed: Efficiency | None = None) -> Hardware:
        """Return a GPU and its links by published rates. Raises ConfigError for an unknown kind."""
        name = re.sub(r"nvidia|geforce|amd|instinct|[\s_-]", "", gpu.lower())
        by_name = {key.replace("-", ""): kind for key, kind in GPUS.items()}
        kind = by_name.get(name) or by_name.get(f"rtx{name}")
        if kind is None:
            raise ConfigError(
                f"unknown GPU '{gpu}'. {nearest(gpu, GPUS)} `stretto plan "
                "--hardware FILE` takes the figures of others",
                "unknown-gpu",
            )
        return cls(kind, Links.of(kind), assumed or Efficiency())

    @property
    def usable_bytes(self) -> float:
        return self.assumed.usable * self.gpu.memory_bytes


def read_hardware(file: str | Path) -> Hardware:
    """Read GPUs, links and the assumed efficiency. Raises ConfigError for a fault. ``[gpu]`` needs
    all keys. Others default to :meth:`Links.of` and :class:`Efficiency`."""
    try:
        tables = recipes.read(file)
    except ConfigError as error:
        remedy = f"`stretto plan --calibrate {file}` makes one"
        raise ConfigError(f"{error}; {remedy}", "no-hardware-file") from error
    for name in tables:
        if name not in TABLES:
            problem = f"unknown table [{name}] in '{file}'. {nearest(name, TABLES)}"
            raise ConfigError(problem, "extra_forbidden")
    gpu = _table(file, "gpu", tables.get("gpu", {}), Gpu)
    links = _table(file, "links", tables.get("links", {}), Links, asdict(Links.of(gpu)))
    return Hardware(gpu, links, _table(file, "assumed", tables.get("assumed", {}), Efficiency))


def write_hardware(
    file: str | Path, hardware: Hardware, measured: Mapping[str, Any], head: str = ""
) -> None:
    """Write a file for :func:`read_hardware` with its sources. Raises StorageError."""
    values = (asdict(hardware.gpu), asdict(hardware.links), dict(hardware.assumed), dict(measured))
    tables = dict(zip(TABLES, values, strict=True))
    comments = "".join(f"# {line}\n" for line in head.splitlines())
    write_whole(Path(file), f"{comments}\n{tomli_w.dumps(tables)}".encode())


def _table(
    file: str | Path, table: str, entries: Any, kind: type[T], defaults: Mapping[str, Any] = {}
) -> T:
    if not isinstance(entries, dict):
        problem = f"'{table}' in '{file}' is a table: write [{table}] on a line of its own"
        raise ConfigError(problem, "not-a-table")
    keys = signature(kind).parameters
    if key := next((key for key in entries if key not in keys), ""):
        problem = f"unknown key '{key}' of [{table}] in '{file}'. {nearest(key, keys)}"
        raise ConfigError(problem, "extra_forbidden")
    try:
        return kind(**{**defaults, **entries})
    except ValidationError as error:
        faults = error.errors()
    if missing := [str(fault["loc"][0]) for fault in faults if fault["loc"][0] not in entries]:
        problem = f"[{table}] in '{file}' lacks {', '.join(missing)}"
        remedy = "a data sheet has them, or `stretto plan --calibrate FILE`"
        raise ConfigError(f"{problem}; {remedy}", "missing")
    key, first = faults[0]["loc"][0], faults[0]
    raise ConfigError(
        f"{table}.{key} = {entries[key]!r} in '{file}': {first['msg']}", first["type"]
    )
