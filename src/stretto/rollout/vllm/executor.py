"""vLLM's executor for a process that is one of several ranks, or has a device of its own."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch.distributed as dist
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_names: list[str] = []


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """An executor whose ranks have joined their process group before.

    On CPUs vLLM names shared memory by how the group was joined, which would be the same for all
    groups of a machine, and for what a killed one has left.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        method, rank, local_rank = super()._distributed_args()
        name = [f"stretto-{uuid.uuid4().hex}"]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(name)
        _names.extend(name)
        return f"{method}:{name[0]}", rank, local_rank


def forget_shared_memory() -> None:
    """Remove the names of memory that all ranks have mapped: nobody could once they are killed.

    That is vLLM's on CPUs, and its queues (of :mod:`multiprocessing.shared_memory`).
    """
    dist.barrier()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, found, name = line.partition("/dev/shm/")
        if found and (name.startswith("psm_") or any(own in name for own in _names)):
            Path("/dev/shm", name).unlink(missing_ok=True)
