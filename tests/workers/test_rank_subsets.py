"""Services on some of a group's ranks: they work at the same time, in turns, or jointly."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers import ManualClock
from raising import raises
from rank_helpers import deaths_of
from stretto.errors import EngineError, LifecycleError, RankError, RoleLostError
from stretto.types import Reply, Work
from stretto.workers import services as services_module
from stretto.workers.group_executor import GroupExecutor, ServiceGroup
from stretto.workers.rank import GroupSpec
from stretto.workers.rank_turns import RankTurns
from stretto.workers.services import Makes, Remote, Service

RANKS = {"left": (0, 1), "right": (2, 3), "last": (3,)}
MINUTE = timedelta(seconds=60)
calls: list[str] = []
"""The calls that this rank got."""


class Part(Service):
    """A service of some ranks, which can wait for others, and misbehave."""

    def __init__(self) -> None:
        super().__init__(None)
        services_module.ALONE_S = 0.2
        self._store = dist.distributed_c10d._get_default_store()
        self._held, self._released = threading.Event(), threading.Event()

    @Remote("work", alike=True)
    def meet(self, key: str, other: str) -> Reply[str]:
        """Return once another service has been called with the keys swapped."""
        self._store.set(key, "here")
        self._store.wait([other], MINUTE)
        return Reply(key)

    def note(self, name: str) -> Reply[list[str]]:
        calls.append(name)
        return Reply(calls)

    def hold(self) -> Reply[None]:
        """Be at work until :meth:`release`."""
        self._held.set()
        self._released.wait(60)
        return Reply(None)

    def holding(self) -> bool:
        return self._held.wait(60)

    def release(self) -> None:
        self._released.set()

    @Remote("sum", collective=True)
    def sum(self, how: str = "") -> Reply[tuple[int, float]]:
        """Return the rank, and the sum of the numbers of all ranks of the group."""
        rank, total = dist.get_rank(), torch.tensor([1.0 + dist.get_rank()])
        if how == "one refuses early" and rank == 2:
            raise EngineError("not so", "refused")
        dist.all_reduce(total)
        if how == "right refuses" and rank >= 2:
            raise EngineError("not so", "refused")
        return Reply((rank, total.item()))

    @Remote("work", alike=True)
    def rank_of_group(self) -> Reply[int]:
        return Reply(dist.get_rank())

    def place(self) -> tuple[int, int, int]:
        """Return the rank among the service's ranks, that of the group, and the process."""
        return self.rank, dist.get_rank(), os.getpid()

    def refuse(self) -> Reply[None]:
        raise EngineError("not so", "refused")

    def stumble(self) -> Reply[None]:
        raise ValueError("a bug")


def executors(group: ServiceGroup) -> list[GroupExecutor]:
    return [GroupExecutor(group, name) for name in ("all", "left", "right", "last")]


@pytest.fixture
def group() -> Iterator[ServiceGroup]:
    makes: Makes = dict.fromkeys(("all", *RANKS), (Part, ()))
    group = ServiceGroup(GroupSpec(4), makes, RANKS, name="parts").start()
    yield group
    group.close()


def test_services_on_disjoint_ranks_work_at_the_same_time(group: ServiceGroup) -> None:
    _, left, right, last = executors(group)

    async def body() -> None:
        pairs = [left.call(Part.meet, "a", "b"), right.call(Part.meet, "b", "a")]
        assert [reply.value for reply in await asyncio.gather(*pairs)] == ["a", "b"]
        pairs = [left.call(Part.meet, "c", "d"), last.call(Part.meet, "d", "c")]
        assert [reply.value for reply in await asyncio.gather(*pairs)] == ["c", "d"]

    asyncio.run(body())


def test_each_service_knows_its_ranks(group: ServiceGroup) -> None:
    every, left, right, last = executors(group)
    pids = [facts.pid for facts in group.facts]
    places = {"all": tuple(range(4)), **RANKS}
    for executor, ranks in zip((every, left, right, last), places.values(), strict=True):
        expected = [(i, rank, pids[rank]) for i, rank in enumerate(ranks)]
        assert executor.aside_on_all(Part.place, timeout_s=60.0) == expected
        assert [facts.pid for facts in executor.facts] == [pids[rank] for rank in ranks]
        assert executor.shares_ranks(left)


def test_ranks_of_a_service_that_differ_are_named(group: ServiceGroup) -> None:
    _, _, right, last = executors(group)
    assert last.ask(Part.rank_of_group).value == 3
    with raises(RankError, "rank-failed", "rank 3 has decoded or scored otherwise than rank 2"):
        right.ask(Part.rank_of_group)


def test_calls_that_share_a_rank_come_in_the_order_of_their_requests(group: ServiceGroup) -> None:
    every, left, right, last = executors(group)

    async def body() -> None:
        holding = asyncio.ensure_future(left.call(Part.hold))
        await asyncio.to_thread(lambda: left.aside_on_all(Part.holding, timeout_s=60.0))
        order = [(left, "1"), (every, "2"), (right, "3"), (last, "4"), (left, "5"), (every, "6")]
        tasks = [asyncio.ensure_future(e.call(Part.note, name)) for e, name in order]
        await asyncio.sleep(0)  # all are requested
        tasks.pop(2).cancel()
        tasks.append(asyncio.ensure_future(right.call(Part.note, "7")))
        holding.cancel()  # it is at work, and ends as if it were not
        await asyncio.sleep(0)
        await asyncio.to_thread(lambda: left.aside_on_all(Part.release, timeout_s=60.0))
        await asyncio.gather(*tasks)

    asyncio.run(body())
    assert every.ask(Part.note, "8").value == ["1", "2", "5", "6", "8"]
    assert right.ask(Part.note, "9").value == ["2", "6", "7", "8", "9"]
    assert last.ask(Part.note, "10").value == ["2", "4", "6", "7", "8", "9", "10"]


def test_all_ranks_meet_in_a_joint_call(group: ServiceGroup) -> None:
    every, left, right, last = executors(group)

    async def body() -> None:
        replies = await left.call_jointly([right], Part.sum)
        assert [reply.value for reply in replies] == [(0, 10.0), (2, 10.0)]
        with raises(EngineError, "refused"):  # on all its ranks, after they have met
            await left.call_jointly([right], Part.sum, "right refuses")

    asyncio.run(body())
    assert [r.value for r in right.ask_jointly([left], Part.sum)] == [(2, 10.0), (0, 10.0)]
    assert every.ask(Part.sum).value == (0, 10.0)
    for other in (last, every):
        with raises(LifecycleError, None, "do not divide the ranks of the parts"):
            left.ask_jointly([other], Part.sum)
    with raises(RankError, "rank-failed", "not so"):  # the other services wait for it for ever
        left.ask_jointly([right], Part.sum, "one refuses early")


async def held(executor: GroupExecutor) -> asyncio.Future[Any]:
    """A call that is under way."""
    task = asyncio.ensure_future(executor.call(Part.hold))
    await asyncio.to_thread(lambda: executor.aside_on_all(Part.holding, timeout_s=60.0))
    return task


async def require_restarted(group: ServiceGroup, ended: Iterable[GroupExecutor]) -> None:
    for executor in ended:
        with raises(RoleLostError, None):
            await executor.call(Part.refuse)
        await executor.restart()
    assert group.generation == 1
    every, left, right, _ = executors(group)
    calls = (left.call(Part.meet, "e", "f"), right.call(Part.meet, "f", "e"))
    await asyncio.gather(*calls)
    assert (await every.call(Part.sum)).value == (0, 10.0)


def test_an_idle_rank_that_dies_ends_the_calls_on_other_ranks(group: ServiceGroup) -> None:
    every, left, right, last = executors(group)
    deaths = deaths_of(group)

    async def body() -> None:
        task = await held(left)
        os.kill(right.facts[0].pid, signal.SIGKILL)
        with raises(RoleLostError, "ranks-ended", "its work (left): rank 2", "SIGKILL"):
            await task
        death = await asyncio.to_thread(deaths.get, timeout=60)
        assert (death.rank, death.code) == (2, "rank-died")
        with raises(RoleLostError, "rank-died", "rank 2", "between two calls"):
            await right.call(Part.sum)
        await require_restarted(group, (left, right, every, last))

    asyncio.run(body())
    assert deaths.empty()


def test_a_rank_that_dies_at_work_ends_the_calls_on_other_ranks(group: ServiceGroup) -> None:
    every, left, right, last = executors(group)

    async def body() -> None:
        tasks = [await held(left), await held(right)]
        os.kill(right.facts[1].pid, signal.SIGKILL)
        with raises(RoleLostError, "rank-died", "rank 3", "in the middle of its work (") as lost:
            await tasks[1]
        assert lost.value.role == "right"
        with raises(RoleLostError, "ranks-ended", "in the middle of its work (") as lost:
            await tasks[0]
        assert lost.value.role == "left"
        await require_restarted(group, (right, last, left, every))

    asyncio.run(body())


def test_an_error_ends_the_calls_on_other_ranks_if_it_is_a_bug(group: ServiceGroup) -> None:
    every, left, right, last = executors(group)

    async def body() -> None:
        task = await held(left)
        with raises(EngineError, "refused"):
            await last.call(Part.refuse)
        assert not task.done()
        stumbling = asyncio.ensure_future(right.call(Part.stumble))
        waiting = asyncio.ensure_future(every.call(Part.note, "1"))
        with raises(RoleLostError, "rank-failed", "of the parts failed", "ValueError: a bug"):
            await stumbling
        for future in (task, waiting):
            with raises(RoleLostError, "ranks-ended"):
                await future
        await require_restarted(group, (every, left, right, last))

    asyncio.run(body())


class Skewed(ServiceGroup):
    """Ranks in this process, whose clocks differ, and which answer at once."""

    _clock: ManualClock

    def _run(self, doing: str, *_: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        self._clock.advance(1.0)
        now_s = [self._clock.now() + 100.0 * rank for rank in ranks or ()]
        self._clock.advance(1.0)
        if doing == "'now'":
            return now_s
        return [Reply(None, (Work("work", s - 0.5, s + 0.5, {}),)) for s in now_s]


def test_times_of_each_service_are_by_this_clock() -> None:
    clock = ManualClock()
    group = Skewed(GroupSpec(4), {}, RANKS, clock=clock)
    group._opened()
    for name in ("all", "left", "right", "last"):
        sent_s = clock.now()
        (reply,) = group.ask([name], Part.rank_of_group)
        (work,) = reply.work
        assert (work.start_s, work.end_s) == (sent_s + 0.5, sent_s + 1.5)
    group.close()


def test_turns_are_taken_by_rank() -> None:
    turns, order = RankTurns(), list[str]()
    first, second = turns.request([0, 1]), turns.request([1, 2])
    apart, third, fourth = turns.request([3]), turns.request([2]), turns.request([1])

    def take(turn: Any, name: str) -> None:
        with turn:
            order.append(name)

    waiting = [(third, "third"), (second, "second")]
    threads = [threading.Thread(target=take, args=arguments) for arguments in waiting]
    with first:
        for thread in threads:
            thread.start()
        take(apart, "apart")
        first.withdraw()  # too late
        fourth.withdraw()
        order.append("first")
    for thread in threads:
        thread.join()
    assert order == ["apart", "first", "second", "third"]
    with pytest.raises(CancelledError):
        take(fourth, "fourth")
    take(turns.request(range(4)), "all")
    assert order[-1] == "all"
