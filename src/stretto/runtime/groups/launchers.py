"""Launchers: what starts a run's processes, on this machine or on a Ray cluster."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stretto.config import Config
from stretto.errors import ConfigError
from stretto.models.backend import pick_device
from stretto.runtime.placement import Place
from stretto.saying import Say
from stretto.workers.base import BaseRanks
from stretto.workers.forkserver import server_of
from stretto.workers.group import Group, Host, Makes
from stretto.workers.preflight import Facts
from stretto.workers.ranks import Ranks

if TYPE_CHECKING:
    from stretto.workers.ray_cluster import RayCluster

Check = Callable[[Sequence[Facts]], None]
Begun = Callable[[BaseRanks], None]


class Launcher(Protocol):
    """A launcher of the processes of one run.

    Attributes:
        gpus: there are for it; 0 places all on CPUs.
        host: address of this process, as the others reach it; known once it is prepared.
    """

    gpus: int
    host: str

    def prepare(self, places: Sequence[Place], stack: ExitStack) -> None:
        """Make ready for these processes; the stack undoes it."""
        ...

    def devices(self, place: Place) -> Sequence[str]:
        """Return the devices of a place's ranks, as each of them sees its own."""
        ...

    def launch(
        self, place: Place, makes: Makes, logs: Sequence[Path], check: Check, begun: Begun
    ) -> Group:
        """Start the ranks of a place, with their services.

        Args:
            logs: for what each prints; none for standard error.
            check: called with what they found at their places, before anything is made.
            begun: called with the group while it starts, to be able to end it meanwhile.
        """
        ...


def launcher_of(config: Config, say: Say) -> Launcher:
    """Return the launcher that the settings name."""
    return RayLauncher(config, say) if config.runtime == "ray" else LocalLauncher(config, say)


class LocalLauncher:
    """A launcher of processes on this machine."""

    host = "127.0.0.1"

    def __init__(self, config: Config, say: Say) -> None:
        self._timeout_s, self._say = config.cluster.start_timeout_s, say
        self.gpus = _gpus_here(config)

    def prepare(self, places: Sequence[Place], stack: ExitStack) -> None:
        """Have libraries imported while this process goes on.

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
        """Return the devices of a place's ranks: all see all."""
        return place.devices

    def launch(
        self, place: Place, makes: Makes, logs: Sequence[Path], check: Check, begun: Begun
    ) -> Group:
        """Start the ranks of a place; see :class:`Launcher`."""
        options = self._options(place, logs, check, begun)
        return Ranks(len(place.devices), Host, (makes,), **options)

    def _options(
        self, place: Place, logs: Sequence[Path], check: Check, begun: Begun
    ) -> dict[str, Any]:
        several_gpus = len(place.devices) > 1 and place.device != "cpu"
        return {
            "devices": self.devices(place),
            "backend": "cpu:gloo,cuda:nccl" if several_gpus else "gloo",
            "threads": place.threads,
            "role": place.name,
            "words": {"call": "its work"},
            "timeout_s": self._timeout_s,
            "logs": logs,
            "say": lambda line: self._say(f"{place.name}: {line}"),
            "check": check,
            "begun": begun,
            "python": place.python,
        }


class RayLauncher(LocalLauncher):
    """A launcher of processes on a Ray cluster: one placement group, a bundle for each process."""

    def __init__(self, config: Config, say: Say) -> None:
        super().__init__(config, say)
        self._config = config.cluster
        self._cluster: RayCluster | None = None
        self._positions: dict[str, list[int]] = {}
        if config.cluster.address and config.model.device != "cpu":
            from stretto.workers.ray_cluster import find

            found = find()
            self.gpus = int(found.gpus) if found else 0

    def prepare(self, places: Sequence[Place], stack: ExitStack) -> None:
        """Start or find the cluster, and wait for the bundles.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigError: no cluster answers, or it has not got the bundles in time.
        """
        from stretto.workers.ray_cluster import Bundle, RayCluster

        ranks = [place for place in places for _ in place.devices]
        bundles = [
            Bundle(float(max(place.threads, 1)), gpus_each(place.device, len(ranks), self.gpus))
            for place in ranks
        ]
        self._positions = {
            place.name: [i for i, other in enumerate(ranks) if other is place] for place in places
        }
        self._cluster = cluster = RayCluster(
            bundles,
            address=self._config.address,
            cpus=math.ceil(sum(b.cpus for b in bundles)) if not self._config.address else None,
            gpus=self.gpus if not self._config.address else None,
            timeout_s=self._config.start_timeout_s,
            also=self._config.forward,
            say=self._say,
        )
        stack.callback(cluster.close)
        self.host = cluster.host

    def devices(self, place: Place) -> Sequence[str]:
        """Return the devices of a place's ranks: Ray shows each its own GPU alone."""
        return ["cuda:0" if device.startswith("cuda") else "cpu" for device in place.devices]

    def launch(
        self, place: Place, makes: Makes, logs: Sequence[Path], check: Check, begun: Begun
    ) -> Group:
        """Start the ranks of a place; see :class:`Launcher`."""
        from stretto.workers.ray_ranks import RayRanks

        assert self._cluster is not None
        return RayRanks(
            len(place.devices),
            Host,
            (makes,),
            cluster=self._cluster,
            places=self._positions[place.name],
            interface=self._config.interface,
            **self._options(place, logs, check, begun),
        )


def gpus_each(device: str, processes: int, gpus: int) -> float:
    """Return a process's share of GPUs: one, or an even part where there are too few.

    Args:
        device: that the process is planned on.
    """
    if not device.startswith("cuda") or not gpus:
        return 0.0
    return 1.0 if gpus >= processes else 1.0 / math.ceil(processes / gpus)


def _gpus_here(config: Config) -> int:
    on_gpus = pick_device(config.model.device).type == "cuda"
    return torch.cuda.device_count() if on_gpus else 0
