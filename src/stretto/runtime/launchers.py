"""Launchers: what starts a run's processes, on this machine or on a Ray cluster."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stretto.config import Config
from stretto.errors import ConfigError
from stretto.models.backend import pick_device
from stretto.runtime.placement import Place
from stretto.saying import Say
from stretto.workers.forkserver import ForkedProcesses, server_of
from stretto.workers.group import Host, Makes
from stretto.workers.preflight import Facts
from stretto.workers.rank import RankSpec
from stretto.workers.ranks import Launched, Ranks

if TYPE_CHECKING:
    from stretto.workers.ray_cluster import RayCluster


def launcher_of(config: Config, say: Say) -> Launcher:
    """Return the launcher that the settings name."""
    return RayLauncher(config, say) if config.runtime == "ray" else Launcher(config, say)


class Launcher:
    """A launcher of a run's processes on this machine.

    Attributes:
        gpus: there are for it; 0 places all on CPUs.
        host: address of this process, as the others reach it; known once it is prepared.
    """

    def __init__(self, config: Config, say: Say) -> None:
        self._config, self._say, self.host = config.cluster, say, "127.0.0.1"
        on_gpus = pick_device(config.model.device).type == "cuda"
        self.gpus = torch.cuda.device_count() if on_gpus else 0

    def prepare(self, places: Sequence[Place], stack: ExitStack) -> None:
        """Make ready for these processes: libraries are imported while this process goes on.

        Args:
            stack: undoes it.

        Raises:
            ConfigError: an interpreter is not there.
        """
        for python in {place.python for place in places}:
            if python and shutil.which(python) is None:
                raise ConfigError(
                    f"cluster.processes: python = '{python}' is no program that can be run here; "
                    "name the interpreter of an environment, such as .venv-vllm/bin/python"
                )
            server_of(python).start()

    def devices(self, place: Place) -> Sequence[str]:
        """Return the devices of a place's ranks, as each sees its own: here all see all."""
        return place.devices

    def launch(
        self,
        place: Place,
        makes: Makes,
        logs: Sequence[Path],
        check: Callable[[Sequence[Facts]], None],
        begun: Callable[[Ranks], None],
    ) -> Ranks:
        """Start the ranks of a place, with their services.

        Args:
            logs: for what each prints; none for standard error.
            check: called with what they found at their places, before anything is made.
            begun: called with the ranks while they start, to be able to end them meanwhile.
        """
        several_gpus = len(place.devices) > 1 and place.device != "cpu"
        return Ranks(
            len(place.devices),
            Host,
            (makes,),
            launch=self._starter(place),
            devices=self.devices(place),
            backend="cpu:gloo,cuda:nccl" if several_gpus else "gloo",
            threads=place.threads,
            interface=self._interface,
            role=place.name,
            words={"call": "its work"},
            timeout_s=self._config.start_timeout_s,
            logs=logs,
            say=lambda line: self._say(f"{place.name}: {line}"),
            check=check,
            begun=begun,
        )

    @property
    def _interface(self) -> str:
        return ""

    def _starter(self, place: Place) -> Callable[[Sequence[RankSpec]], Launched]:
        return partial(ForkedProcesses, python=place.python)


class RayLauncher(Launcher):
    """A launcher of processes on a Ray cluster: one placement group, a bundle for each process."""

    def __init__(self, config: Config, say: Say) -> None:
        super().__init__(config, say)
        self._cluster: RayCluster | None = None
        self._positions: dict[str, list[int]] = {}
        if config.cluster.address and config.model.device != "cpu":
            from stretto.workers.ray_cluster import find

            found = find()
            self.gpus = int(found.gpus) if found else 0

    def prepare(self, places: Sequence[Place], stack: ExitStack) -> None:
        from stretto.workers.ray_cluster import Bundle, RayCluster

        ranks = [place for place in places for _ in place.devices]
        bundles = [
            Bundle(float(max(place.threads, 1)), gpus_each(place.device, len(ranks), self.gpus))
            for place in ranks
        ]
        self._positions = {
            place.name: [i for i, other in enumerate(ranks) if other is place] for place in places
        }
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

    def devices(self, place: Place) -> Sequence[str]:
        # Ray shows each its own GPU alone.
        return ["cuda:0" if device.startswith("cuda") else "cpu" for device in place.devices]

    @property
    def _interface(self) -> str:
        return self._config.interface

    def _starter(self, place: Place) -> Callable[[Sequence[RankSpec]], Launched]:
        from stretto.workers.ray_ranks import ActorProcesses

        assert self._cluster is not None
        return partial(
            ActorProcesses,
            cluster=self._cluster,
            places=self._positions[place.name],
            python=place.python,
        )


def gpus_each(device: str, processes: int, gpus: int) -> float:
    """Return a process's share of GPUs: one, or an even part where there are too few.

    Args:
        device: that the process is planned on.
    """
    if not device.startswith("cuda") or not gpus:
        return 0.0
    return 1.0 if gpus >= processes else 1.0 / math.ceil(processes / gpus)
