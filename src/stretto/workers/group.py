"""Groups of ranks that hold services, and the executors that call them."""

from __future__ import annotations

import asyncio
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from stretto.errors import RankError, RoleLostError, StrettoError
from stretto.protocols import Clock, RealClock
from stretto.types import Reply, Work
from stretto.workers.rank import Facts
from stretto.workers.ranks import Ranks
from stretto.workers.services import Service, ServiceTensors, offloaded_of
from stretto.workers.threads import Executor, WorkerThread

SAMPLES = 5  # round trips to measure the offset of two clocks
SLOW = 20.0  # multiple of the usual time after which a call is assumed to have hung
QUICK_S = 300.0  # no call hangs sooner
ALONE_S = 60.0  # how long a failed rank waits for ranks that may be stuck elsewhere
OWN_DEADLINES = frozenset({"load"})  # methods with their own deadlines
KNOWN, LATEST = 5, 31  # calls until the usual time is known, and calls that it is computed from

Makes = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""How to make each service, by name: an importable function and its arguments."""


class Host:
    """Holds the services of a rank, and keeps them alive through recoverable errors."""

    def __init__(self, rank: int, makes: Makes) -> None:
        self._rank, self._services = rank, dict[str, Service]()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._beside = dist.new_group(backend="gloo") if ranks > 1 else None
        for name, (make, arguments) in makes.items():
            self._services[name] = service = make(*arguments)
            if offloaded := offloaded_of(service):  # to make room for the next one
                offloaded.offload()
        self._tensors = ServiceTensors(self._services)

    def call(self, service: str, method: str, args: tuple[Any, ...]) -> object:
        """Return a method's result, or the StrettoError it raised. The rank lives on. Results that
        must be equal on all ranks are compared, and only the first rank returns them. Raises
        RankError if they differ. Raises the error itself if the other ranks have not finished the
        method after :data:`ALONE_S`, as they may wait for this rank elsewhere.
        """
        try:
            self._tensors.begin(service, method)
            result = self.aside(service, method, *args)
        except StrettoError as error:
            result = error
        if self._beside and method in self._services[service].collective:
            self._meet(result, alike := method in self._services[service].alike)
            if alike and self._rank and isinstance(result, Reply):
                result = Reply(None, result.work)
        return self._tensors.noted(result)

    def _meet(self, result: object, alike: bool) -> None:
        """Wait until the method has ended on all ranks. Compare results by a checksum."""
        failed = isinstance(result, StrettoError)
        value = result.value if alike and isinstance(result, Reply) else None
        own = torch.tensor([failed, zlib.crc32(pickle.dumps(value))])
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        work = dist.all_gather(found, own, group=self._beside, async_op=True)
        try:
            work.wait(*[timedelta(seconds=ALONE_S)] if failed else [])
        except RuntimeError:
            if isinstance(result, StrettoError):
                raise result from None
            raise
        gave_up, sums = torch.stack(found).T.tolist()
        if not any(gave_up) and len(set(sums)) > 1:
            other = next(rank for rank, checksum in enumerate(sums) if checksum != sums[0])
            raise RankError(
                f"rank {other} has decoded or scored otherwise than rank 0: both have the same "
                "model and got the same. See whether their GPUs and libraries are the same",
                other,
                "ranks-disagree",
            )

    def now(self) -> float:
        return RealClock().now()

    def aside(self, service: str, method: str, *args: Any) -> object:
        result: object = getattr(self._services[service], method)(*args)
        return result


class ServiceGroup:
    """A group of ranks with services, called one at a time, and replaceable once dead."""

    ranks: Ranks  # of the current generation
    worker: WorkerThread  # makes the calls

    def __init__(
        self,
        name: str,  # for messages
        launch: Callable[[], Ranks],  # starts ranks with a Host each, also to replace them
        clock: Clock | None = None,
        *,
        replaceable: bool = True,  # the ranks hold no state that would be lost
        restarts: int = 0,  # if a rank dies during the first start
        say: Callable[[str], None] = lambda _: None,  # gets a line for each restart
    ) -> None:
        self.name = name
        self._launch = launch
        self._clock = clock or RealClock()
        self.replaceable = replaceable
        self.generation = 0  # how often the group was replaced
        self._restarting = asyncio.Lock()
        self._paces: dict[tuple[str, str], deque[float]] = {}  # seconds per unit of amount, by call
        self._closed, self._ahead_s = False, 0.0
        for restart in range(1, restarts + 2):
            try:
                self._open()
                break
            except RankError as error:
                if error.code != "rank-died" or restart > restarts:
                    raise
                what = str(error).partition("; mend the cause")[0]  # it restarts by itself
                say(f"{what} (restart {restart} of {restarts})")

    def ask(self, service: str, method: str, *args: Any) -> Any:
        """Return a method's result. A reply's times are by this process's clock. Blocks."""
        paces = self._paces.setdefault((service, method), deque(maxlen=LATEST))
        size, sent_s = amount(method, args), self._clock.now()
        limit_s = None if method in OWN_DEADLINES else deadline_s(paces, size)
        answers = self.ranks.call("call", service, method, args, timeout_s=limit_s)
        came_s = self._clock.now()
        steps = getattr(getattr(answers[0], "value", None), "steps", size)  # fewer than asked for
        paces.append((came_s - sent_s) / max(steps, 1))
        errors = [a for a in answers if isinstance(a, StrettoError)]
        if errors and len(errors) < len(answers) and self.replaceable:
            self.ranks.close()
            raise RankError(
                f"a rank of the {self.name} failed in '{method}', and others did not: they are not "
                f"in step any more, and have been ended: {errors[0]}",
                code="ranks-out-of-step",
            ) from errors[0]
        if errors:
            raise errors[0]
        answer = answers[0]
        if not isinstance(answer, Reply):
            return answer
        own = [work for work in answer.work if not work.beside]
        self._ahead_s = ahead(self._ahead_s, own, sent_s, came_s)
        return answer.shifted(self._ahead_s)

    async def restart(self, seen: int) -> None:
        """Replace the ranks, unless another role has done so since generation ``seen``."""
        if not self.replaceable:
            raise RankError(
                f"the processes of the {self.name} hold what is trained, and are not replaced; go "
                "on from the last checkpoint",
                code="not-replaceable",
            )
        async with self._restarting:
            if self.generation <= seen:
                await asyncio.to_thread(self._replace)

    def close(self) -> None:
        """End the ranks, even at work. Callable from any thread, any number of times."""
        self._closed = True
        self._end()

    def _replace(self) -> None:
        self._end()
        self.generation += 1
        if self._closed:
            raise RankError(f"the process of the {self.name} was ended with the run")
        self._open()
        if self._closed:  # the run ended meanwhile
            self._end()

    def _end(self) -> None:
        self.ranks.close()
        self.worker.stop()

    def _open(self) -> None:
        try:
            self.ranks = self._launch()
        except RankError as error:
            if isinstance(error.__cause__, StrettoError):
                raise error.__cause__ from None
            raise
        self.worker = WorkerThread(self.name, 0)
        self._ahead_s = self._distance()
        self.ranks.watch(self.worker.fail)

    def _distance(self) -> float:
        def trip() -> tuple[float, float]:
            before_s = self._clock.now()
            theirs_s: float = self.ranks.call("now")[0]
            after_s = self._clock.now()
            return after_s - before_s, (before_s + after_s) / 2 - theirs_s

        return min(trip() for _ in range(SAMPLES))[1]  # by the shortest trip


def amount(method: str, args: Sequence[Any]) -> float:
    """Return the size that a call's time is proportional to, for example tokens to decode."""
    if method == "decode":
        return float(args[0])
    return float(max(args[0].total_tokens, 1)) if method == "train" else 1.0


def deadline_s(paces: Sequence[float], size: float) -> float | None:
    """Return a call's time limit from earlier calls. ``None`` if too few are known."""
    return max(QUICK_S, SLOW * median(paces) * size) if len(paces) >= KNOWN else None


def ahead(known_s: float, works: Sequence[Work], sent_s: float, came_s: float) -> float:
    """Return this process's clock offset, corrected as little as a call's times allow."""
    if not works:
        return known_s
    # Clocks drift apart over hours. But no work starts before its call was sent, and none ends
    # after its answer arrived.
    least_s = sent_s - min(work.start_s for work in works)
    most_s = came_s - max(work.end_s for work in works)
    if least_s > most_s:  # the work took longer by its own clock than by this one
        return (least_s + most_s) / 2
    return min(max(known_s, least_s), most_s)


class GroupExecutor:
    """Calls one service of a group."""

    def __init__(self, group: ServiceGroup, service: str) -> None:
        self._group = group
        self._service = service
        self.generation = group.generation

    async def call(self, method: str, *args: Any) -> Reply[Any]:
        group = self._group
        if group.generation != self.generation:
            raise RoleLostError(
                self._service,
                f"the process of the {group.name} was replaced, and the {self._service} in it; "
                "start it again",
                "replaced-with-another",
            )
        try:
            reply: Reply[Any] = await group.worker.run(lambda: self.ask(method, *args))
        except RankError as error:
            if not group.replaceable:
                raise
            raise self._lost(error) from error
        return reply

    async def restart(self) -> None:
        try:
            await self._group.restart(self.generation)
        except RankError as error:
            raise self._lost(error) from error
        self.generation = self._group.generation

    def shares_ranks(self, other: Executor) -> bool:
        return isinstance(other, GroupExecutor) and self._group is other._group

    @property
    def facts(self) -> Sequence[Facts]:
        return self._group.ranks.facts

    def ask(self, method: str, *args: Any) -> Any:
        return self._group.ask(self._service, method, *args)

    def aside_on_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        ranks = self._group.ranks

        def call(rank: int) -> Any:
            return ranks.aside(rank, "aside", self._service, method, *args, timeout_s=timeout_s)

        size = len(self.facts)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(call, range(size)))

    def _lost(self, error: RankError) -> RoleLostError:
        lost = RoleLostError(self._service, str(error), error.code)
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        return lost
