"""Executors of services in groups of processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from stretto.errors import RankError, RoleLostError
from stretto.types import Reply
from stretto.workers.group import RankGroup
from stretto.workers.rank import Facts
from stretto.workers.services import RankServices
from stretto.workers.threads import Executor, Method, T, Ts


class GroupExecutor:
    """Calls one service of a group."""

    def __init__(self, group: RankGroup, service: str) -> None:
        self._group = group
        self._service = service
        self.generation = group.generation

    async def call(self, method: Method[*Ts, Reply[T]], *args: *Ts) -> Reply[T]:
        group = self._group
        if group.generation != self.generation:
            raise RoleLostError(
                self._service,
                f"the process of the {group.name} was replaced, and the {self._service} in it; "
                "start it again",
                "replaced-with-another",
            )
        try:
            reply: Reply[T] = await group.worker.run(
                partial(group.ask, self._service, method, *args)
            )
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
        return self._group.facts

    def ask(self, method: Method[*Ts, T], *args: *Ts) -> T:
        answer: T = self._group.ask(self._service, method, *args)
        return answer

    def aside_on_all(self, method: Method[*Ts, T], *args: *Ts, timeout_s: float) -> list[T]:
        call = self._service, method.__name__, args

        def ask(rank: int) -> T:
            answer: T = self._group.aside(rank, RankServices.aside, *call, timeout_s=timeout_s)
            return answer

        size = len(self.facts)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(ask, range(size)))

    def _lost(self, error: RankError) -> RoleLostError:
        lost = RoleLostError(self._service, str(error), error.code)
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        return lost
