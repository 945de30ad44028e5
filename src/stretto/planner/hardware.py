"""Peak figures of GPUs and of what links them, and the shares of them that software reaches.

Peaks are published; the shares are assumptions, every one, and so fields that can be set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from stretto.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device's peak figures, by its data sheet.

    Attributes:
        name: what it is called.
        flops: dense bfloat16 operations a second.
        memory_bytes_per_s: bandwidth of its memory.
        memory_bytes: size of its memory.
        link_bytes_per_s: to its neighbours by NVLink, in one direction.
        host_bytes_per_s: to the host's memory, in one direction.
    """

    name: str
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    host_bytes_per_s: float


GPUS: Mapping[str, Gpu] = {
    "a100-40gb": Gpu("A100 40GB", 312e12, 1.555e12, 40e9, 300e9, 32e9),
    "a100-80gb": Gpu("A100 80GB", 312e12, 2.039e12, 80e9, 300e9, 32e9),
    "h100": Gpu("H100", 989e12, 3.35e12, 80e9, 450e9, 64e9),
    "h200": Gpu("H200", 989e12, 4.8e12, 141e9, 450e9, 64e9),
    "gh200": Gpu("GH200", 989e12, 4.0e12, 96e9, 450e9, 450e9),
}
"""Figures of the SXM variants, by name.

From NVIDIA's data sheets "A100 Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU" and
"GH200 Grace Hopper Superchip": operations without sparsity; half of what is said of links, as that
counts both directions.
"""


def gpu_of(name: str) -> Gpu:
    """Return a GPU's figures.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in GPUS:
        raise ConfigError(f"unknown GPU '{name}'. {nearest(name, GPUS)}")
    return GPUS[name]


@dataclass(frozen=True, slots=True)
class Links:
    """What connects GPUs, in bytes a second and one direction.

    Attributes:
        within_bytes_per_s: of a GPU, to the others of its node.
        between_bytes_per_s: of a GPU's network adapter; each GPU has one. By default 400
            Gbit/s, as in NVIDIA's DGX H100.
        host_bytes_per_s: of a GPU, to its host's memory.
        gpus_per_node: GPUs of a node.
    """

    within_bytes_per_s: float
    between_bytes_per_s: float = 50e9
    host_bytes_per_s: float = 64e9
    gpus_per_node: int = 8

    @classmethod
    def of(cls, gpu: Gpu, between_bytes_per_s: float = 50e9, gpus_per_node: int = 8) -> Links:
        """Return the links of a node of such GPUs."""
        return cls(gpu.link_bytes_per_s, between_bytes_per_s, gpu.host_bytes_per_s, gpus_per_node)

    def bytes_per_s(self, members: int, members_a_node: int) -> float:
        """Return how fast each member of a group takes in what a collective brings it.

        Members of a node share their adapters: NCCL runs a ring for each, and each carries its part
        of the bytes. So a group with all GPUs of its nodes is ``gpus_per_node`` times as fast
        between nodes as a group with one GPU of each.
        """
        if members <= members_a_node:
            return self.within_bytes_per_s
        return min(self.within_bytes_per_s, members_a_node * self.between_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What software reaches of the peaks. The defaults were not measured; vary them.

    Attributes:
        memory: share of the memory bandwidth that a decode step reaches.
        prefill: share of the peak operations in a forward pass over known tokens.
        training: share of the peak operations in forward and backward passes.
        link: share of the bandwidth of links.
        usable: share of a GPU's memory that can be filled: the rest is for CUDA's and NCCL's own
            and for what is lost between allocations.
        optimizer: share of the memory bandwidth that an update of the weights reaches.
        step_s: seconds of a decode step beside the device's own work, with CUDA graphs.
        reduce_s: seconds of an all-reduce among tensor-parallel devices, beside its bytes'.
        call_s: seconds of a call of a generator or scorer to prefill tokens, beside the device's
            work.
    """

    memory: float = 0.7
    prefill: float = 0.5
    training: float = 0.4
    link: float = 0.7
    usable: float = 0.9
    optimizer: float = 0.7
    step_s: float = 0.002
    reduce_s: float = 0.00002
    call_s: float = 0.005

    def __post_init__(self) -> None:
        *shares, step_s, reduce_s, call_s = astuple(self)
        if not all(0 < share <= 1 for share in shares) or min(step_s, reduce_s, call_s) < 0:
            raise ConfigError(f"{self}: shares are above 0 and at most 1, seconds 0 or more")


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs of one kind, their links, and what is assumed of both."""

    gpu: Gpu
    links: Links
    assumed: Assumptions = field(default_factory=Assumptions)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU that can be filled."""
        return self.assumed.usable * self.gpu.memory_bytes
