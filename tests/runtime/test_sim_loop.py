"""The virtual-time event loop: time, order, deadlock, replay, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from raising import raises
from stretto.errors import StalledError
from stretto.runtime.sim.loop import VirtualClock, VirtualLoop, run, spend


def test_time_passes_only_by_timers() -> None:
    clock = VirtualClock()

    async def main() -> list[float]:
        seen = [clock.now()]
        await asyncio.sleep(3600.0)
        seen.append(clock.now())
        await asyncio.gather(asyncio.sleep(2.0), asyncio.sleep(5.0))
        seen.append(clock.now())
        sum(range(1000))  # work costs no virtual time
        seen.append(clock.now())
        return seen

    assert run(main()) == [0.0, 3600.0, 3605.0, 3605.0]


def test_timers_fire_in_time_order_and_ties_as_they_were_made() -> None:
    async def main() -> list[str]:
        loop, log = asyncio.get_running_loop(), []
        for i, when in enumerate([2.0, 1.0, 2.0, 1.0, 0.5, 2.0, 1.0]):
            loop.call_at(when, log.append, f"{when}/{i}")
        loop.call_at(1.0, log.append, "cancelled").cancel()
        await asyncio.sleep(3)
        return log

    assert run(main()) == ["0.5/4", "1.0/1", "1.0/3", "1.0/6", "2.0/0", "2.0/2", "2.0/5"]


def test_a_cancelled_timer_makes_no_time_pass() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(1000.0):
            await asyncio.sleep(1.0)
        for i in range(2000):
            loop.call_later(50.0 + i, int).cancel()
        assert isinstance(loop, VirtualLoop)
        assert len(loop._timers) < 2000  # swept up, not kept until their time
        await asyncio.sleep(2.0)
        return loop.time()

    assert run(main()) == 3.0


def test_timeouts_and_wait_for_fire_in_virtual_time() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7.0)
        first = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):
                await asyncio.sleep(10.0)
        return first, loop.time()

    assert run(main()) == (7.0, 7.25)


def test_what_a_callback_spends_makes_timers_late() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()

        async def sleep(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return loop.time()

        tasks = [asyncio.create_task(sleep(s)) for s in (1.0, 2.0, 4.0)]
        await asyncio.sleep(0.5)
        spend(2.0)  # until 2.5: nobody is woken before
        return await asyncio.gather(*tasks)

    assert run(main()) == [2.5, 2.5, 4.0]


def test_a_deadlock_raises_and_names_who_waits() -> None:
    async def waits_for_ever(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        event = asyncio.Event()
        task = asyncio.create_task(waits_for_ever(event), name="scorer")
        await asyncio.sleep(1.5)
        await task

    with raises(StalledError, "nothing-to-wait-for", "at 1.5 s", "scorer (", "waits_for_ever at "):
        run(main())


def test_polling_without_end_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.runtime.sim.loop._ROUNDS_AT_ONE_INSTANT", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with raises(StalledError, "no-time-passes"):
        run(main())


def test_exceptions_come_out_and_tasks_left_behind_are_cancelled() -> None:
    log: list[str] = []

    async def background(name: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)  # cleaning up may take (virtual) time
            log.append(name)

    async def main() -> None:
        kept = [asyncio.create_task(background(n)) for n in "abc"]
        await asyncio.sleep(1)
        raise ValueError(f"{len(kept)} left")

    with pytest.raises(ValueError, match="3 left"):
        run(main())
    assert log == ["a", "b", "c"]


def interleaving(*, shuffle: bool = False, seed: int = 0) -> list[str]:
    """Six tasks take turns at shared instants, pass a lock around, and are waited for in sets."""

    async def worker(name: str, lock: asyncio.Lock, log: list[str]) -> str:
        for i in range(3):
            async with lock:
                log.append(f"{name}{i}")
            await asyncio.sleep(1.0)
        return name

    async def main() -> list[str]:
        log: list[str] = []
        lock = asyncio.Lock()
        tasks = {asyncio.create_task(worker(n, lock, log)) for n in "abcdef"}
        done, _ = await asyncio.wait(tasks)
        return [*log, *(t.result() for t in done)]  # a set's order is part of the replay

    return run(main(), seed=seed, shuffle=shuffle)


def test_without_shuffling_tasks_take_turns_in_the_order_they_were_made() -> None:
    assert interleaving() == [f"{n}{i}" for i in range(3) for n in "abcdef"] + list("abcdef")


def test_a_seed_replays_exactly_and_seeds_differ() -> None:
    runs = [interleaving(shuffle=True, seed=s) for s in range(10)]
    assert [interleaving(shuffle=True, seed=s) for s in range(10)] == runs
    assert len({tuple(r) for r in runs}) == 10
    for log in runs:  # each is a legal interleaving: every worker's own turns are in order
        assert sorted(log) == sorted(interleaving())
        for n in "abcdef":
            assert [x for x in log if x[0] == n and len(x) == 2] == [f"{n}{i}" for i in range(3)]


def test_a_race_is_found_by_some_seed() -> None:
    """A lost update that first-in-first-out order hides."""

    async def main() -> int:
        value = 0

        async def add() -> None:
            nonlocal value
            seen = value
            await asyncio.sleep(0)
            value = seen + 1

        first = asyncio.create_task(add())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await add()
        await first
        return value

    assert run(main()) == 2
    assert {run(main(), seed=s, shuffle=True) for s in range(20)} == {1, 2}
