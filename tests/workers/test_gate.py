"""Outcomes pass the gate one at a time, in order, and only when nothing else is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from stretto.workers.gate import EventGate, GatedLoop


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=GatedLoop) as runner:
        runner.run(work)


def test_each_outcome_has_had_all_its_effects_before_the_next_passes() -> None:
    log, gate = list[str](), EventGate()

    async def caller(name: str, ready: asyncio.Event) -> None:
        async def work() -> str:
            await ready.wait()
            return name

        log.append(await gate.outcome(name, "call", work))
        for i in range(3):  # effects that take turns of the event loop
            await asyncio.sleep(0)
            log.append(f"{name} {i} {gate.now():.6f}")

    async def main() -> None:
        first, other = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(caller("a", first))
            group.create_task(caller("b", other))
            for _ in range(5):  # until both wait
                await asyncio.sleep(0)
            other.set()
            first.set()

    run(main())
    names = [line.split()[0] for line in log]
    assert names == ["b"] * 4 + ["a"] * 4  # both had arrived at once, b first
    assert len({line.split()[2] for line in log[1:4]}) == 1  # the clock stands still
    assert log[1].split()[2] <= log[5].split()[2]


def test_a_call_that_is_given_up_is_cancelled_and_passes_no_more() -> None:
    gate, ended = EventGate(), list[str]()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await gate.outcome("role", "call", forever)
        assert await gate.outcome("role", "call", lambda: asyncio.sleep(0, 3)) == 3

    run(main())
    assert ended == ["cancelled"]


def test_errors_pass_and_other_event_loops_need_no_gate() -> None:
    gate = EventGate()

    async def failing() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await gate.outcome("role", "call", failing)
        assert await gate.outcome("role", "call", lambda: asyncio.sleep(0, 3)) == 3

    run(main())
    asyncio.run(main())
