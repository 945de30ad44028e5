"""The preflight: what each rank finds at its place, compared before anything is loaded."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from stretto.errors import RankError

PACKAGES = ("stretto", "torch", "transformers", "ray")  # of which all ranks must have one version


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about one rank's place."""

    node: str  # name of the machine
    pid: int
    versions: Mapping[str, str]  # of Python and PACKAGES; empty for one that is not installed
    threads: int  # of torch
    device: str  # what the rank computes on: ``cpu``, or the GPU's name
    device_id: str  # the GPU's UUID; empty on a CPU
    free_bytes: int  # of that device's memory
    environment: Mapping[str, str]  # variables that were forwarded to it


def facts(device: str, environment: Mapping[str, str]) -> Facts:
    """Look at this process's place, with the variables that were forwarded here."""
    import psutil
    import torch

    name, id_, free_bytes = "cpu", "", psutil.virtual_memory().available
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        name, id_ = properties.name, str(properties.uuid)
        free_bytes = torch.cuda.mem_get_info(device)[0]
    return Facts(
        node=socket.gethostname(),
        pid=os.getpid(),
        versions={"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        threads=torch.get_num_threads(),
        device=name,
        device_id=id_,
        free_bytes=free_bytes,
        environment=environment,
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
    shared: Sequence[frozenset[str]] = (),
    apart: Collection[str] = (),
) -> None:
    """Compare what ranks found, by their names, with each other and with the plan.

    Ranks ``apart`` have an interpreter of their own, for the sake of other versions. They speak
    pickles of Stretto's data, so that this and Python's minor version are all they share.

    Raises RankError if versions differ, two ranks are on one GPU that were not meant to share it,
    or a rank has other threads than it was given.
    """
    names = list(ranks)
    for name in names[1:]:
        for package, here in ranks[names[0]].versions.items():
            there = ranks[name].versions.get(package, "")
            if name in apart or names[0] in apart:
                here, there = _as_far_as_needed(package, here), _as_far_as_needed(package, there)
            if here != there:
                raise RankError(
                    f"all ranks need one version of {package}: '{names[0]}' on "
                    f"{ranks[names[0]].node} has {here or 'none'}, '{name}' on {ranks[name].node} "
                    f"has {there or 'none'}; install the same on both",
                    code="versions-differ",
                )
    for name, found in ranks.items():
        if threads.get(name, found.threads) != found.threads:
            raise RankError(
                f"'{name}' on {found.node} was to use {threads[name]} CPU threads and uses "
                f"{found.threads}; see whether OMP_NUM_THREADS or the like limits them there",
                code="threads-differ",
            )
    by_device: dict[str, str] = {}
    for name, found in ranks.items():
        other = by_device.setdefault(found.device_id, name) if found.device_id else name
        if other != name and not any({name, other} <= group for group in shared):
            raise RankError(
                f"'{name}' and '{other}' are both on the GPU {found.device_id} of {found.node}, "
                "and are not placed together; see whether CUDA_VISIBLE_DEVICES is set for both, or "
                "place them on one device",
                code="gpu-shared",
            )
