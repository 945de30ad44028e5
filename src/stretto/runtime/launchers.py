"""Launchers: what starts a run's processes, on this machine or on a Ray cluster."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from stretto.config import Config
from stretto.errors import ConfigError
from stretto.models.backend import pick_device
from stretto.runtime.placement import ProcessPlacement
from stretto.saying import Say
from stretto.workers.forkserver import ForkedProcesses, server_of
from stretto.workers.rank import RankSpec
from stretto.workers.ranks import Launched

if TYPE_CHECKING:
    from stretto.workers.ray_cluster import RayCluster


class Launcher:
    """A launcher of a run's processes on this machine."""

    interface = ""  # network interface of the processes' groups; empty for that of the host
    host = "127.0.0.1"  # address of this process for the others; known once it is prepared

    def __init__(self, config: Config, say: Say) -> None:
        self._config, self._say = config.cluster, say
        on_gpus = pick_device(config.model.device).type == "cuda"
        self.gpus = torch.cuda.device_count() if on_gpus else 0  # 0 places all on CPUs

    def prepare(self, processes: Sequence[ProcessPlacement], stack: ExitStack) -> None:
        """Make ready for these processes: libraries are imported while this process goes on."""
        for python in {process.python for process in processes}:
            if python and shutil.which(python) is None:
                raise ConfigError(
                    f"cluster.processes: python = '{python}' is no program that can be run here; "
                    "name the interpreter of an environment, such as .venv-vllm/bin/python",
                    "no-such-interpreter",
                )
            server_of(python).start()

    def devices(self, process: ProcessPlacement) -> Sequence[str]:
        """Return the devices of a process's ranks, as each sees its own: here all see all."""
        return process.devices

    def launch(self, process: ProcessPlacement, specs: Sequence[RankSpec]) -> Launched:

        return ForkedProcesses(specs, python=process.python)


class RayLauncher(Launcher):
    """A launcher of processes on a Ray cluster: one placement group, a bundle for each process."""

    def __init__(self, config: Config, say: Say) -> None:
        super().__init__(config, say)
        self.interface = config.cluster.interface
        self._cluster: RayCluster | None = None
        self._positions: dict[str, list[int]] = {}
        if config.cluster.address and config.model.device != "cpu":
            from stretto.workers.ray_cluster import find

            found = find()
            self.gpus = int(found.gpus) if found else 0

    def prepare(self, processes: Sequence[ProcessPlacement], stack: ExitStack) -> None:
        from stretto.workers.ray_cluster import Bundle, RayCluster

        ranks = [process for process in processes for _ in process.devices]
        bundles = [
            Bundle(float(max(process.threads, 1)), gpus_each(process.device, len(ranks), self.gpus))
            for process in ranks
        ]
        for i, process in enumerate(ranks):
            self._positions.setdefault(process.name, []).append(i)
        here = not self._config.address
        self._cluster = cluster = RayCluster(
            bundles,
            address=self._config.address,
            cpus=math.ceil(sum(b.cpus for b in bundles)) if here else None,
            gpus=self.gpus if here else None,
            timeout_s=self._config.start_timeout_s,
            also=self._config.forward,
            say=self._say,
        )
        stack.callback(cluster.close)
        self.host = cluster.host

    def devices(self, process: ProcessPlacement) -> Sequence[str]:
        # Ray shows each its own GPU alone.
        return ["cuda:0" if device.startswith("cuda") else "cpu" for device in process.devices]

    def launch(self, process: ProcessPlacement, specs: Sequence[RankSpec]) -> Launched:
        from stretto.workers.ray_ranks import ActorProcesses

        assert self._cluster is not None
        places = self._positions[process.name]
        return ActorProcesses(specs, self._cluster, places, python=process.python)


def gpus_each(device: str, processes: int, gpus: int) -> float:
    """Return the share of GPUs of a process on a device: one, or an even part of too few."""
    if not device.startswith("cuda") or not gpus:
        return 0.0
    return 1.0 if gpus >= processes else 1.0 / math.ceil(processes / gpus)
