"""Groups of processes that hold services, and executors of the services."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any

from stretto.errors import LifecycleError, RankError, RoleLostError, StrettoError
from stretto.protocols import Clock, RealClock
from stretto.types import Reply, Work
from stretto.workers.group import RankGroup, step
from stretto.workers.rank import Facts, GroupSpec, Rank
from stretto.workers.rank_turns import RankTurn
from stretto.workers.services import Makes, RankServices, remote_of
from stretto.workers.threads import Executor, Method, T, Ts, WorkerThread

SAMPLES = 5  # round trips to measure the offset of two clocks
SLOW = 20.0  # multiple of the usual time after which a call is assumed to have hung
QUICK_S = 300.0  # no call hangs sooner
KNOWN, LATEST = 5, 31  # calls until the usual time is known, and calls that it is computed from


class ServiceGroup(RankGroup):
    """A group whose ranks hold services. Calls of services that share a rank are made one at a
    time, in the order of their requests, and calls of services on disjoint ranks at the same time.
    """

    def __init__(
        self,
        spec: GroupSpec,
        makes: Makes,
        ranks: Mapping[str, Sequence[int]] = MappingProxyType({}),
        *,
        clock: Clock | None = None,
        **options: Any,  # of RankGroup
    ) -> None:
        super().__init__(spec, RankServices, (makes, dict(ranks)), **options)
        self._ranks = ranks
        self._shared = len(makes) > 1
        self._clock = clock or RealClock()
        sets = {frozenset(self.all_ranks), *map(frozenset, ranks.values())}
        self.workers = {members: WorkerThread(self.name, 0) for members in sets}  # of executors
        # Seconds per unit of amount, by services and method.
        self._paces: dict[tuple[str, ...], deque[float]] = {}
        self._ahead_s: dict[int, float] = {}  # this clock's offset from that of a first rank

    def ranks_of(self, *services: str) -> list[int]:
        return [r for service in services for r in self._ranks.get(service, self.all_ranks)]

    def close(self) -> None:
        super().close()
        for worker in self.workers.values():
            worker.stop()

    def ask(
        self,
        services: Sequence[str],
        method: Method[*Ts, T],
        *args: *Ts,
        turn: RankTurn | None = None,  # requested before
    ) -> list[Any]:
        """Return the results of a method of services, the times of replies by this process's clock.
        Blocks. Raises an error that all ranks of a service raised. Several services must divide all
        ranks among themselves, so that all ranks may meet in the method.
        """
        name, remote = method.__name__, remote_of(method)
        size, jointly = remote.size(*args), len(services) > 1
        steps = dict[int, memoryview]()
        for service in services:
            call = service, name, args, jointly
            message = step(Rank.call, RankServices.answer.__name__, call)
            steps |= dict.fromkeys(self.ranks_of(service), message)
        ranks = self.ranks_of(*services)
        if jointly and sorted(ranks) != list(self.all_ranks):
            raise LifecycleError(f"{services} do not divide the ranks of the {self.name}")
        with turn or self.request(ranks):
            paces = self._paces.setdefault((*services, name), deque(maxlen=LATEST))
            limit_s = None if remote.own_deadline else deadline_s(paces, size)
            sent_s = self._clock.now()
            answers = self._run(self._doing(services, method), steps.values(), limit_s, ranks=steps)
            came_s = self._clock.now()
            decoded = getattr(getattr(answers[0], "value", None), "steps", size)  # may be fewer
            paces.append((came_s - sent_s) / max(decoded, 1))
            by_rank = dict(zip(steps, answers, strict=True))
            by_service = [{r: by_rank[r] for r in self.ranks_of(service)} for service in services]
            return [self._result(name, each, sent_s, came_s) for each in by_service]

    def aside_of(
        self, rank: int, service: str, method: Method[*Ts, T], *args: *Ts, timeout_s: float
    ) -> T:
        """Call a method of a rank's service during a step. Raises the rank's error, or RankError if
        it does not answer.
        """
        call = RankServices.aside.__name__, (service, method.__name__, args)
        doing = self._doing([service], method)
        answer: T = self._aside(rank, doing, Rank.call, *call, timeout_s=timeout_s)
        return answer

    def _doing(self, services: Sequence[str], method: Callable[..., Any]) -> str:
        """Describe a call in messages, such as 'its update (learner)'."""
        names = f" ({', '.join(services)})" if self._shared else ""
        return f"its {remote_of(method).task}{names}"

    def _opened(self) -> None:
        firsts = {ranks[0] for ranks in (self.all_ranks, *self._ranks.values())}
        self._ahead_s = {rank: self._distance(rank) for rank in firsts}

    def _distance(self, rank: int) -> float:
        """Measure the offset of this process's clock from a rank's."""

        def trip() -> tuple[float, float]:
            before_s = self._clock.now()
            theirs_s: float = self._run("'now'", [step(Rank.now)], ranks=[rank])[0]
            after_s = self._clock.now()
            return after_s - before_s, (before_s + after_s) / 2 - theirs_s

        return min(trip() for _ in range(SAMPLES))[1]  # by the shortest trip

    def _result(self, name: str, answers: Mapping[int, Any], sent_s: float, came_s: float) -> Any:
        """Return the answer of a service's first rank. Raises its ranks' error."""
        errors = [a for a in answers.values() if isinstance(a, StrettoError)]
        if errors and len(errors) < len(answers) and self.replaceable:
            self._end()
            raise RankError(
                f"a rank of the {self.name} failed in '{name}', and others did not: they are not "
                f"in step any more, and have been ended: {errors[0]}",
                code="ranks-out-of-step",
            ) from errors[0]
        if errors:
            raise errors[0]
        first, answer = next(iter(answers.items()))
        if not isinstance(answer, Reply):
            return answer
        main_work = [work for work in answer.work if not work.beside]
        self._ahead_s[first] = ahead(self._ahead_s.get(first, 0.0), main_work, sent_s, came_s)
        return answer.shifted(self._ahead_s[first])


class GroupExecutor:
    """Calls one service of a group."""

    def __init__(self, group: ServiceGroup, service: str) -> None:
        self._group = group
        self._service = service
        self._ranks = group.ranks_of(service)
        self.generation = group.generation

    async def call(self, method: Method[*Ts, Reply[T]], *args: *Ts) -> Reply[T]:
        (reply,) = await self.call_jointly([], method, *args)
        return reply

    async def call_jointly(
        self, others: Sequence[GroupExecutor], method: Method[*Ts, Reply[T]], *args: *Ts
    ) -> list[Reply[T]]:
        group = self._group
        for executor in (self, *others):
            if group.generation != executor.generation:
                raise RoleLostError(
                    executor._service,
                    f"the process of the {group.name} was replaced, and the {executor._service} in "
                    "it; start it again",
                    "replaced-with-another",
                )
        services = [executor._service for executor in (self, *others)]
        turn = group.request(group.ranks_of(*services))
        worker = group.workers[turn.ranks]
        try:
            return await worker.run(partial(group.ask, services, method, *args, turn=turn))
        except RankError as error:
            if not group.replaceable:
                raise
            raise self._lost(error) from error
        finally:
            turn.withdraw()

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
        facts = self._group.facts
        return [facts[rank] for rank in self._ranks] if facts else ()

    @property
    def threads(self) -> int:
        return self.facts[0].threads if self.facts else 0

    def ask(self, method: Method[*Ts, T], *args: *Ts) -> T:
        (answer,) = self.ask_jointly([], method, *args)
        return answer

    def ask_jointly(
        self, others: Sequence[GroupExecutor], method: Method[*Ts, T], *args: *Ts
    ) -> list[T]:
        return self._group.ask([e._service for e in (self, *others)], method, *args)

    def aside_on_all(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float) -> list[T]:
        def ask(rank: int) -> T:
            return self._group.aside_of(rank, self._service, method, *args, timeout_s=timeout_s)

        with ThreadPoolExecutor(len(self._ranks)) as pool:
            return list(pool.map(ask, self._ranks))

    def _lost(self, error: RankError) -> RoleLostError:
        lost = RoleLostError(self._service, str(error), error.code)
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        return lost


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
