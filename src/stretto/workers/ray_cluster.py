"""Ray for one run: connecting to a cluster, places for the ranks there, and ranks as actors."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from stretto import files, signals
from stretto.errors import ConfigError, first_line, require
from stretto.workers.connection import Address, Listener, NotConnectedError, Raw, connected
from stretto.workers.rank import Facts, GroupSpec

OBJECT_STORE_BYTES = 200 * 2**20  # of a cluster started here, as the store is unused
PATTERNS = (
    "NCCL_*", "GLOO_*", "TORCH_*", "PYTORCH_*", "OMP_*", "MKL_*", "GOMP_*", "HF_*",
    "TRANSFORMERS_*", "TOKENIZERS_*", "WANDB_*", "VLLM_*", "CUDA_*", "STRETTO_*",
)  # fmt: skip
"""Names of forwarded variables. The rest stay here, as most concern only this machine."""

_PLACED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables that give each rank its GPU. The driver's would put all ranks on one."""
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH)S?(_|$)")
_LOGIN = re.compile(r"://[^/]*@")

_REASON_S = 2.0  # for Ray to learn how an actor ended
_AGAIN_S = 1.0  # between starts on nodes that are lost
_LOST = "was lost with its node"
_NO_MEMORY = "low on memory"  # Ray's words if its memory monitor has killed a process
_CONNECT_S = 10.0
_SAY_EVERY_S = 30.0
_MISSED = (ConnectionError, RuntimeError, ValueError, TimeoutError)
"""What Ray raises if it cannot connect."""


class Bundle(NamedTuple):
    """The CPUs and GPUs that a place holds on one node."""

    cpus: float = 1.0
    gpus: float = 0.0


class ClusterResources(NamedTuple):
    """A running cluster, with the totals of its living nodes."""

    address: str
    nodes: int
    cpus: float
    gpus: float


class RayCluster:
    """Ray's places for the ranks of one run, all in one placement group. The address of a running
    cluster is ``host:port``, or ``auto`` for this machine's. Without an address, starts a cluster
    on this machine only, unless the process is already connected to one.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],  # the places, by position, each on one node
        *,
        address: str = "",
        cpus: int | None = None,  # of a cluster started here, by default Ray's count
        gpus: int | None = None,
        timeout_s: float = 600.0,
        also: Iterable[str] = (),  # names of further variables to forward to the ranks
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.bundles = tuple(bundles)
        variables = forwarded(os.environ, also)
        self.environment, self.secrets = split(variables)
        self.say = say
        self._group: Any = None
        self._started = _connect(address, cpus, gpus, say)
        try:
            import ray
            from ray.util.placement_group import placement_group

            resources = [
                {"CPU": b.cpus} | ({"GPU": b.gpus} if b.gpus else {}) for b in self.bundles
            ]
            self._group = placement_group(resources, strategy="PACK")
            self._wait(timeout_s)
            nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
            hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            driver_node = ray.get_runtime_context().get_node_id()
            self._indices = by_node(
                self.bundles, [(hosts[nodes[i]], nodes[i]) for i in sorted(nodes)]
            )
            self.alone = set(nodes.values()) == {driver_node}  # all places are on this machine
            self.host = "127.0.0.1" if self.alone else hosts[driver_node]
            say(described(variables))
        except BaseException:
            self.close()
            raise

    def scheduling(self, place: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, self._indices[place])

    def close(self) -> None:
        """Free the places, and end a cluster started here. Callable any number of times."""
        import ray

        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(group)
        if self._started:
            self._started = False
            ray.shutdown()

    def _wait(self, timeout_s: float) -> None:
        began_s = said_s = time.monotonic()
        while not self._group.wait(1):  # short, so that Ctrl-C is handled
            now_s = time.monotonic()
            if now_s - began_s >= timeout_s:
                raise ConfigError(
                    f"the run needs {self._needs()} of Ray, and did not get them within "
                    f"{timeout_s:g} s: {_has()}; add nodes ('ray start --address=HOST:PORT' on "
                    "each), end what else runs there, or ask for less",
                    "places-not-free",
                )
            if now_s - said_s >= _SAY_EVERY_S:
                said_s = now_s
                self.say(f"waiting for {self._needs()} of Ray: {_has()}")

    def _needs(self) -> str:
        largest = max(self.bundles, key=lambda bundle: (bundle.gpus, bundle.cpus))
        total = _amount(*map(sum, zip(*self.bundles, strict=True)))
        return f"{total} (on one node {_amount(*largest)} at least)"


def by_node(bundles: Sequence[Bundle], nodes: Sequence[tuple[str, str]]) -> list[int]:
    """Order equal bundles so that neighbours share a node, in a stable order."""

    def by_address(index: int) -> tuple[int, str, str, int]:
        address, node = nodes[index]
        with contextlib.suppress(ValueError):  # of host names
            return int(ipaddress.ip_address(address)), address, node, index
        return 0, address, node, index

    order = sorted(range(len(bundles)), key=by_address)
    equal = {bundle: iter([i for i in order if bundles[i] == bundle]) for bundle in bundles}
    return [next(equal[bundle]) for bundle in bundles]


def forwarded(environment: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """Select the variables to forward, by the usual patterns and ``also``."""
    also = tuple(also)
    if refused_names := set(_PLACED).intersection(also):
        raise ConfigError(
            f"'{min(refused_names)}' cannot be forwarded: each rank gets the GPU of its place, and "
            "the driver's would put all of them on one; leave it out",
            "cannot-be-forwarded",
        )
    return {
        name: value
        for name, value in sorted(environment.items())
        if name not in _PLACED and any(fnmatchcase(name, p) for p in (*PATTERNS, *also))
    }


def described(variables: Mapping[str, str]) -> str:
    """Describe the forwarded variables in a line. Only usual names, never secrets, have values."""
    entries = []
    for name, value in variables.items():
        usual = any(fnmatchcase(name, pattern) for pattern in PATTERNS)
        entries.append(f"{name}={value}" if usual and not _is_secret(name, value) else name)
    return f"environment of the ranks: {', '.join(entries) or 'nothing'}"


def split(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split off the secrets, as Ray shows the other variables to all users of the cluster."""
    secrets = {name: value for name, value in variables.items() if _is_secret(name, value)}
    return {name: value for name, value in variables.items() if name not in secrets}, secrets


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET.search(name.upper()) or _LOGIN.search(value))


def code_paths(paths: Sequence[str]) -> list[str]:
    """Return the entries of ``sys.path`` that hold modules which are not installed."""
    entries = dict[str, None]()
    for path in paths:
        absolute = Path(path).absolute()  # '' is the working directory
        installed = {"site-packages", "dist-packages"}.intersection(absolute.parts)
        library = absolute.is_relative_to(sysconfig.get_path("stdlib"))
        if not installed and not library and absolute.suffix != ".zip":
            entries[str(absolute)] = None
    return list(entries)


def find(timeout_s: float = 20.0) -> ClusterResources | None:
    """Look for the cluster of ``auto`` in a separate process. ``None`` after ``timeout_s``."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from stretto.workers.ray_cluster import _describe; _describe()"
    )
    with contextlib.suppress(subprocess.SubprocessError, ValueError):
        process = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, timeout=timeout_s, check=True
        )
        return ClusterResources(*json.loads(process.stdout.splitlines()[-1]))
    return None


def _describe() -> None:
    import ray

    _connect("auto", None, None)
    address: str = ray.get_runtime_context().gcs_address
    alive = [node for node in ray.nodes() if node["Alive"]]
    total = ray.cluster_resources()
    print(json.dumps([address, len(alive), total.get("CPU", 0.0), total.get("GPU", 0.0)]))


def _connect(
    address: str, cpus: int | None, gpus: int | None, say: Callable[[str], None] = lambda _: None
) -> bool:
    """Connect to a cluster, or start one. Return whether this process must shut it down."""
    require("ray", "ray", "a cluster")
    import ray

    if ray.is_initialized():
        return False
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
        _make_token()
        with signals.kept():
            ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                # Ray's default of 15 starves ranks if anything else computes.
                _system_config={"worker_niceness": 0},
            )
        return True
    require_answer(address)
    try:
        with signals.kept():
            ray.init(address=address, logging_level=logging.ERROR)
    except _MISSED as error:
        raise _no_cluster(address, first_line(error)) from error
    if os.environ.get("RAY_AUTH_MODE") != "token":
        say(
            "the Ray cluster has no authentication: whoever reaches its ports can run code on it; "
            "start it, and this run, with RAY_AUTH_MODE=token"
        )
    return True


def _make_token() -> None:
    """Make a token for a local cluster if Ray cannot write its own into HOME."""
    path = Path.home() / ".ray" / "auth_token"
    exists = os.environ.get("RAY_AUTH_TOKEN_PATH") or path.exists()
    if not exists and not os.access(files.existing(path), os.W_OK):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def require_answer(address: str) -> None:
    """Raise ConfigError if a cluster's address is silent, as Ray would retry for minutes."""
    if address == "auto" and not os.environ.get("RAY_ADDRESS"):
        return
    address = os.environ["RAY_ADDRESS"] if address == "auto" else address
    if "://" in address:
        raise ConfigError(
            f"the address of a Ray cluster is 'auto' or HOST:PORT, and '{address}' is neither; "
            "run Stretto on a node of the cluster, as with 'ray job submit'",
            "not-a-cluster-address",
        )
    host, _, port = address.rpartition(":")
    if address in ("auto", "local") or not port.isdigit():
        return  # one of Ray's special names
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster answers at '{address}': {why}; start one ('ray start --head' here, "
        "'ray start --address=HOST:PORT' on the other nodes), or leave the address out for a "
        "cluster of this machine",
        "no-cluster-answers",
    )


def _has() -> str:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    alive = sum(node["Alive"] for node in ray.nodes())
    return (
        f"its {alive} node{'s' if alive > 1 else ''} have "
        f"{_amount(total.get('CPU', 0), total.get('GPU', 0))}, of which "
        f"{_amount(free.get('CPU', 0), free.get('GPU', 0))} are free"
    )


def _amount(cpus: float, gpus: float) -> str:
    return f"{gpus:g} GPUs and {cpus:g} CPUs"


class RankActor:
    """A rank in a Ray actor."""

    def run(self, spec: GroupSpec, rank: int, address: Address, key: bytes) -> None:
        """Connect to the driver's listener, and serve as a rank until the driver goes."""
        from stretto.workers.rank import Rank  # imports torch

        connection = connected(address, key, rank, spec.timeout_s)
        os.environ.update(json.loads(connection.recv_bytes()))
        Rank(spec, rank, connection).serve()


@dataclass(eq=False)
class ActorProcesses:
    """Ray actors of ranks, with the import paths of this process. See ``group.Launched``."""

    spec: GroupSpec
    cluster: RayCluster
    places: Sequence[int] = ()  # positions on the cluster, by default the first ones
    share: float = 1.0  # of its place per rank, as other groups may use the rest
    python: str = ""  # interpreter with the cluster's versions of Python and Ray

    def __post_init__(self) -> None:
        self.one_clock = self.cluster.alone
        self.places = self.places or range(self.spec.size)
        self._say = self.cluster.say
        self._listener = Listener(self.cluster.host)
        self._secrets = json.dumps(self.cluster.secrets).encode()
        self._killed = False
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        """Start all actors, unless they were killed meanwhile."""
        import ray

        self._actors: list[Any] = []
        self._runs: list[Any] = []
        environment = _environment(self.cluster.environment, self.spec.threads)
        options: dict[str, Any] = {"env_vars": environment}
        if self.python:
            options["py_executable"] = self.python
        driver = self._listener.address, self._listener.key
        for rank, place in enumerate(self.places):
            bundle = self.cluster.bundles[place]
            actor = ray.remote(RankActor).options(
                num_cpus=bundle.cpus * self.share,
                num_gpus=bundle.gpus * self.share,
                max_restarts=0,  # a restarted one would lack the group and the weights
                max_task_retries=0,
                scheduling_strategy=self.cluster.scheduling(place),
                runtime_env=options,
            )
            self._actors.append(actor.remote())
            self._runs.append(self._actors[-1].run.remote(self.spec, rank, *driver))
        if self._killed:
            self._kill_actors()

    def connect(self, timeout_s: float) -> Sequence[Raw]:
        import ray

        said_s = time.monotonic()
        until_s = said_s + timeout_s
        connections: dict[int, Raw] = {}
        try:
            while len(connections) < len(self._runs):
                if new := self._listener.next(0.2):
                    connections[new[0]] = new[1]
                    with contextlib.suppress(OSError):  # it has ended already
                        new[1].send_bytes(self._secrets)
                    continue
                if time.monotonic() - said_s >= _SAY_EVERY_S:
                    said_s = time.monotonic()
                    progress = f"{len(connections)} of {len(self._runs)} processes"
                    self._say(f"waiting for actors of Ray to start and connect: {progress} have")
                if ended := ray.wait(self._runs, timeout=0)[0]:
                    rank = self._runs.index(ended[0])
                    if self._killed or time.monotonic() >= until_s or not self._lost_its_node(rank):
                        raise NotConnectedError(rank)
                    # Ray takes a while to notice that a node is dead, and to find another place.
                    while connections:
                        connections.popitem()[1].close()
                    self._kill_actors()
                    time.sleep(_AGAIN_S)
                    self._start()
                if time.monotonic() >= until_s:
                    address = ":".join(map(str, self._listener.address))
                    raise NotConnectedError(
                        min(set(range(len(self._runs))) - connections.keys()),
                        f"did not start within {timeout_s:g} s: its place on the cluster is taken, "
                        f"or it cannot reach {address}",
                    )
        finally:
            self._listener.close()
        return [connections[rank] for rank in sorted(connections)]

    def kill(self) -> None:
        self._killed = True
        self._listener.close()
        self._kill_actors()

    def _kill_actors(self) -> None:
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(ray.exceptions.RayError, ValueError):
                    ray.kill(actor)

    def _lost_its_node(self, rank: int) -> bool:
        return self.ended(rank)[0].startswith(_LOST)

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
        return f"pid {facts.pid} on {facts.node}" if facts else f"place {self.places[rank]}"


def explained(reason: BaseException) -> str:
    """Describe how an actor ended, by the error that Ray raised for it."""
    import ray

    text = str(reason)
    if isinstance(reason, ray.exceptions.OutOfMemoryError) or _NO_MEMORY in text:
        return "was killed by Ray for want of memory on its node"
    if isinstance(reason, ray.exceptions.RuntimeEnvSetupError):
        return "could not be given its environment"
    if isinstance(reason, ray.exceptions.ActorUnavailableError):
        return f"{_LOST}, or the connection to it,"
    if getattr(reason, "preempted", False):
        return f"{_LOST}, which was taken away,"
    if "ray.kill" in text:
        return "was killed through Ray"
    if "its node has died" in text:
        return _LOST
    if isinstance(reason, ray.exceptions.RayTaskError):
        return f"failed: {text.strip().splitlines()[-1]}"
    return "ended unexpectedly (it crashed, or was killed by hand or for want of memory)"


def _environment(forwarded: Mapping[str, str], threads: int) -> dict[str, str]:
    thread_limit = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    paths = os.pathsep.join(code_paths(sys.path))
    return {**thread_limit, **forwarded, **({"PYTHONPATH": paths} if paths else {})}
