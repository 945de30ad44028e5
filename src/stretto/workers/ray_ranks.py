"""Ranks as Ray actors: a process group whose processes may be on several machines."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.workers.base import NO_WORDS, START, BaseRanks, pickled
from stretto.workers.door import Address, Door
from stretto.workers.preflight import Facts
from stretto.workers.rank import Done, Failed, Opening
from stretto.workers.ray_actor import RankActor
from stretto.workers.ray_cluster import RayCluster, code_paths
from stretto.workers.side import SideClient

_SHARED_BYTES = 100 * 2**10
"""Size from which a message for all ranks is stored once; Ray stores such arguments anyway."""
_REASON_S = 2.0
"""Seconds for Ray to learn how an actor ended."""
_END_S = 5.0
_NO_MEMORY = "low on memory"
"""What Ray says when its memory monitor has killed a process."""


class RayRanks(BaseRanks):
    """Ray actors that form a ``torch.distributed`` group; all end when one fails, or the driver.

    What is sent to them and back is pickled, tensors by value; classes and functions in it must be
    importable there: installed, or under the same paths as here. One call at a time.

    Args:
        make: called on each as ``make(rank, *arguments)`` once the group is there; methods of what
            it returns can be called.
        arguments: the same for all ranks.
        cluster: where they are.
        places: position of each rank's place on the cluster; without them the first ones.
        share: part of its place that each takes; groups that share places have parts of them.
        backend: ``gloo``, or ``nccl`` with a GPU each.
        threads: of each rank's torch; 0 leaves its choice.
        patience_s: after a rank raised, how long to look whether it did so because another died.
        role: the role of a process that is alone, for messages.
        words: plain words for the methods' work, for messages: nouns, by the method's name.
        devices: that each rank computes on, as torch names them there; without them the CPU, or
            with ``nccl`` the GPU that Ray lets it see.
        timeout_s: for the start up to the group, and for each of its collectives.
        logs: files for what each rank prints, on its machine; without them it goes where Ray sends
            it.
        say: called with each rank's warnings, where there are logs; on a thread of its own.
        check: called with what the ranks found at their places, before ``make``.
        begun: called with this object once there are processes, which may take long from here on;
            to be able to :meth:`close` it meanwhile.
        interface: network interface of the group; without one, that of each node's address.
        python: interpreter of the ranks, with the same versions of Python and Ray; without one, the
            cluster's.

    Raises:
        PicklingError: ``make`` or an argument cannot be sent.
        RankError: a rank could not start, or ``make`` raised.
        StrettoError: ``check`` raised it.
    """

    def __init__(
        self,
        size: int,
        make: Callable[..., object],
        arguments: tuple[Any, ...],
        *,
        cluster: RayCluster,
        places: Sequence[int] = (),
        share: float = 1.0,
        backend: str = "gloo",
        threads: int = 1,
        patience_s: float = 1.0,
        role: str = "",
        words: Mapping[str, str] = NO_WORDS,
        devices: Sequence[str] = (),
        timeout_s: float = 600.0,
        logs: Sequence[Path] = (),
        say: Callable[[str], None] = lambda _: None,
        check: Callable[[Sequence[Facts]], None] = lambda _: None,
        begun: Callable[[BaseRanks], None] = lambda _: None,
        interface: str = "",
        python: str = "",
    ) -> None:
        super().__init__(size, patience_s, role, words, logs)
        self._cluster, self._say, self._places = cluster, say, places or range(size)
        self._until_s = time.monotonic() + timeout_s
        self._timeout_s, self._reasons = timeout_s, dict[int, BaseException]()
        self._actors: list[Any] = []
        self._asked: dict[int, Any] = {}
        self._stored: tuple[bytes, Any] = (b"", None)
        self._kill = weakref.finalize(self, _kill, self._actors, self._sides)
        made = pickled(make, arguments)
        door = Door(cluster.host)
        try:
            environment = _environment(cluster.environment, threads)
            runtime = {"env_vars": environment} | ({"py_executable": python} if python else {})
            with self._calling:  # what dies now is told here
                for rank in range(size):
                    self._start(rank, door, share, runtime)
                begun(self)
                self._let_in(door)
                host, port = self._meet(interface)
                for rank in range(size):
                    opening = Opening(
                        rank=rank,
                        size=size,
                        backend=backend,
                        threads=threads,
                        host=host,
                        port=port,
                        listener=None,  # rank 0 has it
                        interface=interface,
                        timeout_s=timeout_s,
                        device=_device(rank, backend, devices),
                        log=str(logs[rank]) if logs else "",
                        environment=environment,
                    )
                    self._step(rank, "join", pickle.dumps((opening,)))
                self.facts = self._answers(START, range(size), self._left_s())
                check(self.facts)
                for rank in range(size):
                    self._step(rank, "make", made)
                self._answers(START, range(size))
        except BaseException:
            self.close()
            raise
        finally:
            door.close()

    def _start(self, rank: int, door: Door, share: float, runtime: Mapping[str, Any]) -> None:
        import ray

        place = self._places[rank]
        bundle = self._cluster.bundles[place]
        actor = ray.remote(RankActor).options(
            num_cpus=bundle.cpus * share,
            num_gpus=bundle.gpus * share,
            max_restarts=0,  # another one would have neither the group nor the weights
            max_task_retries=0,
            max_concurrency=1,  # calls are made in their order
            scheduling_strategy=self._cluster.scheduling(place),
            runtime_env=dict(runtime),
        )
        self._actors.append(
            actor.remote(rank, door.address, door.key, self._cluster.alone, self._timeout_s)
        )

    def _let_in(self, door: Door) -> None:
        """Wait for each actor's side channel.

        Raises:
            RankError: one died, or did not come in time.
        """
        import ray

        here = [actor.ready.remote() for actor in self._actors]
        came: dict[int, SideClient] = {}
        try:
            while len(came) < self._size:
                if new := door.next(0.2):
                    came[new[0]] = SideClient(new[1], self._say, _teller(self, new[0]))
                    continue
                for reference in ray.wait(here, timeout=0)[0]:
                    self._require_alive(here.index(reference), reference)
                if not self._left_s():
                    missing = min(set(range(self._size)) - came.keys())
                    raise self._error(
                        missing,
                        f"did not start within {self._timeout_s:g} s: its place on the cluster is "
                        f"taken, or it cannot reach {':'.join(map(str, door.address))}",
                    )
        finally:
            self._sides.extend(came[rank] for rank in sorted(came))

    def _require_alive(self, rank: int, reference: Any) -> None:
        import ray

        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            self._reasons[rank] = error
            raise self._death(rank, f"in the middle of {START}") from error

    def _meet(self, interface: str) -> Address:
        """Return where rank 0 listens for the others.

        Raises:
            RankError: it has died, or cannot listen there.
        """
        import ray

        try:
            address: Address = ray.get(
                self._actors[0].listen.remote(interface), timeout=self._left_s()
            )
        except ray.exceptions.RayTaskError as error:
            what = f"{type(error.cause).__name__}: {error.cause}"
            raise self._error(0, f"failed in {START}: {what}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise self._silence([0], START, self._timeout_s) from error
        except ray.exceptions.RayError as error:
            self._reasons[0] = error
            raise self._death(0, f"in the middle of {START}") from error
        return address

    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def _send(self, rank: int, message: bytes) -> None:
        self._step(rank, "call", message)

    def _step(self, rank: int, step: str, message: bytes) -> None:
        import ray

        sent: Any = message
        if len(message) > _SHARED_BYTES:
            if self._stored[0] is not message:
                self._stored = message, ray.put(message)
            sent = self._stored[1]
        self._asked[rank] = self._actors[rank].take.remote(step, sent)

    def _awaited(self, ranks: Sequence[int]) -> dict[Any, int]:
        self._stored = b"", None
        return {self._asked.pop(rank): rank for rank in ranks if rank in self._asked}

    def _wait(self, handles: Sequence[Any], seconds: float | None) -> Sequence[Any]:
        import ray

        ready: Sequence[Any] = ray.wait(list(handles), num_returns=1, timeout=seconds)[0]
        return ready

    def _read(self, rank: int, handle: Any) -> Done | Failed:
        import ray

        try:
            answer: Done | Failed = pickle.loads(ray.get(handle))
        except ray.exceptions.RayError as error:
            self._reasons[rank] = error
            raise EOFError from error
        if isinstance(answer, Failed) and not self._cluster.alone:
            return replace(answer, at_s=time.monotonic())  # machines have clocks of their own
        return answer

    def _dead(self, rank: int, seconds: float) -> bool:
        """Ask Ray whether an actor is dead, and why."""
        import ray

        if not ray.is_initialized():
            return False
        try:
            ray.get(self._actors[rank].ready.remote(), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayError as error:
            self._reasons[rank] = error
            return True
        return False

    def _how(self, rank: int) -> str:
        if rank not in self._reasons and not self._dead(rank, _REASON_S):
            return "closed its connection"
        return explained(self._reasons[rank])

    def _notes(self, rank: int) -> Iterator[str]:
        yield from super()._notes(rank)
        if rank in self._reasons:
            yield f"Ray says: {self._reasons[rank]}"

    def _where(self, rank: int) -> str:
        if not self.facts:
            return f"place {self._places[rank]}"
        return f"pid {self.facts[rank].pid} on {self.facts[rank].node}"

    def _end(self) -> None:
        self._kill()


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
    if getattr(reason, "actor_init_failed", False):
        return f"failed: {said.strip().splitlines()[-1]}"
    return "ended unexpectedly (it crashed, or was killed by hand or for want of memory)"


def _teller(ranks: RayRanks, rank: int) -> Callable[[], None]:
    """Return what is called when a rank's side channel closes; it keeps no ranks alive."""
    of = weakref.ref(ranks)

    def tell() -> None:
        if ended := of():
            ended._has_ended(rank)

    return tell


def _device(rank: int, backend: str, devices: Sequence[str]) -> str:
    if devices:
        return devices[rank]
    return "cuda:0" if backend == "nccl" else "cpu"  # Ray shows each rank its own GPUs only


def _environment(forwarded: Mapping[str, str], threads: int) -> dict[str, str]:
    given = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    paths = code_paths(sys.path)
    return {**given, **forwarded, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def _kill(actors: Sequence[Any], sides: Sequence[SideClient]) -> None:
    """End actors, and wait until their processes have."""
    import ray

    if ray.is_initialized():
        for actor in actors:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)
    until_s = time.monotonic() + _END_S
    for side in sides:
        side.wait(max(0.0, until_s - time.monotonic()))
