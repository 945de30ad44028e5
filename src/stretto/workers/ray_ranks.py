"""Ranks as Ray actors, which may be on several machines. Ray starts them; all else goes past it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.workers.connection import Address, Listener, Raw, connected
from stretto.workers.preflight import Facts
from stretto.workers.rank import Rank, RankSpec
from stretto.workers.ranks import NotConnectedError
from stretto.workers.ray_cluster import RayCluster, code_paths

_REASON_S = 2.0  # for Ray to learn how an actor ended
_NO_MEMORY = "low on memory"  # what Ray says when its memory monitor has killed a process


class RankActor:
    """A rank in a Ray actor."""

    def run(self, spec: RankSpec, address: Address, key: bytes) -> None:
        """Connect to the driver's listener, and be a rank until the driver goes."""
        Rank(spec, connected(address, key, spec.index, spec.timeout_s)).serve()


class ActorProcesses:
    """Ray actors of ranks; see :class:`~stretto.workers.ranks.Launched`.

    Classes and functions that are sent to them must be installed there, or under the same paths as
    here. What they print goes where Ray sends it.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        cluster: RayCluster,
        places: Sequence[int] = (),  # positions on the cluster; by default the first ones
        share: float = 1.0,  # of its place that each takes, as other groups may have the rest
        python: str = "",  # interpreter, with the same versions of Python and Ray as the cluster's
    ) -> None:
        import ray

        self.one_clock = cluster.alone
        self._places = places or range(len(specs))
        self._listener = Listener(cluster.host)
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        try:
            for spec, place in zip(specs, self._places, strict=False):
                environment = _environment(cluster.environment, spec.threads)
                options = {"env_vars": environment} | ({"py_executable": python} if python else {})
                bundle = cluster.bundles[place]
                actor = ray.remote(RankActor).options(
                    num_cpus=bundle.cpus * share,
                    num_gpus=bundle.gpus * share,
                    max_restarts=0,  # another one would have neither the group nor the weights
                    max_task_retries=0,
                    scheduling_strategy=cluster.scheduling(place),
                    runtime_env=options,
                )
                self._actors.append(actor.remote())
                run = self._actors[-1].run
                own = replace(spec, environment=environment)
                self._runs.append(run.remote(own, self._listener.address, self._listener.key))
        except BaseException:
            self.kill()
            raise

    def connect(self, timeout_s: float) -> Sequence[Raw]:
        import ray

        until_s = time.monotonic() + timeout_s
        came: dict[int, Raw] = {}
        try:
            while len(came) < len(self._runs):
                if new := self._listener.next(0.2):
                    came[new[0]] = new[1]
                    continue
                for ended in ray.wait(self._runs, timeout=0)[0]:
                    raise NotConnectedError(self._runs.index(ended))
                if time.monotonic() >= until_s:
                    address = ":".join(map(str, self._listener.address))
                    raise NotConnectedError(
                        min(set(range(len(self._runs))) - came.keys()),
                        f"did not start within {timeout_s:g} s: its place on the cluster is taken, "
                        f"or it cannot reach {address}",
                    )
        finally:
            self._listener.close()
        return [came[rank] for rank in sorted(came)]

    def kill(self) -> None:
        import ray

        self._listener.close()
        if ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(ray.exceptions.RayError, ValueError):
                    ray.kill(actor)

    def ended(self, rank: int) -> tuple[str, Sequence[str]]:
        import ray

        if ray.is_initialized():
            try:
                ray.get(self._runs[rank], timeout=_REASON_S)
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayError as reason:
                return explained(reason), [f"Ray says: {reason}"]
        return "closed its connection", ()

    def where(self, rank: int, facts: Facts | None) -> str:
        return f"pid {facts.pid} on {facts.node}" if facts else f"place {self._places[rank]}"


def explained(reason: BaseException) -> str:
    """Say how an actor ended, by the error that Ray raised for it."""
    import ray

    said = str(reason)
    if isinstance(reason, ray.exceptions.OutOfMemoryError) or _NO_MEMORY in said:
        return "was killed by Ray for want of memory on its node"
    if isinstance(reason, ray.exceptions.RuntimeEnvSetupError):
        return "could not be given its environment"
    if isinstance(reason, ray.exceptions.ActorUnavailableError):
        return "was lost with its node, or the connection to it,"
    if getattr(reason, "preempted", False):
        return "was ended with its node, which was taken away,"
    if "ray.kill" in said:
        return "was killed through Ray"
    if "its node has died" in said:
        return "was lost with its node"
    if isinstance(reason, ray.exceptions.RayTaskError):
        return f"failed: {said.strip().splitlines()[-1]}"
    return "ended unexpectedly (it crashed, or was killed by hand or for want of memory)"


def _environment(forwarded: Mapping[str, str], threads: int) -> dict[str, str]:
    given = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    paths = os.pathsep.join(code_paths(sys.path))
    return {**given, **forwarded, **({"PYTHONPATH": paths} if paths else {})}
