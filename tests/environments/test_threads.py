"""The threads in which users' objects and tools are called, with eight episodes at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bound_worlds
import pytest
from bound_worlds import Alarmed, Stepped, Table, query, swallows, waits
from bridge_helpers import ENCODER, Player, call, places_of, role_of, said

from stretto.config import EnvironmentConfig, TaskConfig
from stretto.config.sections import reward_source
from stretto.environments.executors import EnvironmentExecutor, LocalEnvironment, settings_of
from stretto.environments.object_threads import ObjectThread, needs_main_thread
from stretto.environments.objects import named_objects
from stretto.environments.running import CallError, Runner
from stretto.scoring.functions import FunctionScorer

FILE = Path(bound_worlds.__file__)


def places(where: str, *names: str) -> list[EnvironmentExecutor]:
    """The process of what is named, or this one for the same as objects."""
    if where == "process":
        return places_of(*names, file=FILE)
    objects = {name: getattr(bound_worlds, name) for name in names}
    if where == "factory":
        objects = named_objects(None, partial(*objects.values()))
    place = LocalEnvironment(objects, settings_of(EnvironmentConfig()))
    place.start()
    return [place]


def played(
    ready: Sequence[EnvironmentExecutor], *turns: str, judges: Any = (), **row: Any
) -> list[list[Any]]:
    """Play eight episodes side by side; return what each saw, by turns."""
    role = role_of(ready, judges=judges)

    async def one(number: int) -> list[Any]:
        player = Player(role, number, **row)
        await player.open()
        assert "failure" not in player.log[0].record
        seen = [await player.say(turn) for turn in turns]
        await role.release([number])
        return seen

    async def eight() -> list[list[Any]]:
        return await asyncio.gather(*map(one, range(8)))

    return asyncio.run(eight())


@pytest.mark.parametrize("where", ["process", "objects", "factory"])
@pytest.mark.parametrize("kind", ["Table", "Alarmed"])
def test_a_connection_of_reset_is_used_by_tools_in_its_thread(where: str, kind: str) -> None:
    ready = places(where, kind)
    for _ in range(2):  # the second time with the same objects
        episodes = played(ready, call("total", n=1), call("total", n=2), "done", start=7)
        assert [[said(seen) for seen in each] for each in episodes] == [[["8"], ["10"], []]] * 8
        assert [each[-1].reward for each in episodes] == [3.0] * 8
    ready[0].close()


@pytest.mark.parametrize("where", ["process", "objects"])
def test_an_environment_is_made_reset_stepped_and_closed_in_one_thread(where: str) -> None:
    Stepped.closed.clear()
    ready = places(where, "Stepped")
    episodes = played(ready, "a", "b")
    assert [[said(seen) for seen in each] for each in episodes] == [[["a"], ["a,b"]]] * 8
    assert [[seen.reward for seen in each] for each in episodes] == [[1.0, 1.0]] * 8
    ready[0].close()
    assert Stepped.closed == ([True] * 8 if where == "objects" else [])


def test_a_reward_function_looks_at_an_environment_in_its_thread() -> None:
    source = reward_source(f"{FILE}:rows")
    judge = FunctionScorer(source, TaskConfig(), 0, ENCODER.tokenizer, columns=(), environment=True)
    ready = places_of("Table", file=FILE, judges=["rows"])
    episodes = played(ready, call("total", n=1), "done", judges=[judge], start=7)
    scores = [each[-1].record["scores"] for each in episodes]
    assert scores == [{f"{FILE}:rows": {"value": 20.0}}] * 8
    ready[0].close()


@pytest.mark.parametrize("where", ["process", "objects"])
def test_tools_that_set_an_alarm_run_in_the_main_thread(where: str) -> None:
    names = ("query", "guarded", "swallows", "waits", "where", "marked", "slow")
    ready = places(where, *names)
    calls = (
        call("query", sql="select 1, 'a'")
        + call("guarded", n=1)
        + call("swallows", n=3)
        + call("waits", n=4)
        + call("marked")
    )
    expected = ['[[1, "a"]]', "2", "alarm 3", "4", "MainThread"]
    episodes = played(ready, calls, call("where") + call("slow", seconds=0.0))
    for first, second in episodes:
        assert said(first) == expected
        thread, name = said(second)
        assert thread != "MainThread"
        assert name == "SIGKILL"
    ready[0].close()


def test_a_tool_in_the_main_thread_may_run_event_loops() -> None:
    async def main() -> Any:
        runner = Runner(1, 5.0)
        runner.main = asyncio.get_running_loop()
        return await runner(marked)

    def marked() -> int:
        return asyncio.run(asyncio.sleep(0, 7))

    marked.main_thread = True  # type: ignore[attr-defined]
    assert asyncio.run(main()) == 7


def test_code_shows_whether_it_needs_the_main_thread() -> None:
    assert all(map(needs_main_thread, (query, swallows, waits, Alarmed, bound_worlds.marked)))
    others = (Table, Stepped, bound_worlds.slow, bound_worlds.guarded, bound_worlds.where, len)
    assert not any(map(needs_main_thread, others))


def test_a_call_behind_one_that_was_given_up_waits_for_its_thread() -> None:
    """It neither runs beside it nor counts as another lost thread, and is not made later."""
    calls: list[str] = []

    async def go() -> None:
        end = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hang() -> None:
            asyncio.run_coroutine_threadsafe(end.wait(), loop).result()
            calls.append("hung")

        run = Runner(4, 0.05, most_lost=2)
        thread = ObjectThread()
        for made in (hang, lambda: calls.append("never")):
            with pytest.raises(CallError, match="longer than"):
                await run(made, thread=thread)
        assert (run._lost, thread.hangs, run.is_worn) == (1, True, False)
        end.set()
        run.timeout_s = 5.0
        await run(lambda: calls.append("then"), thread=thread)
        assert (run._lost, thread.hangs) == (0, False)

    asyncio.run(go())
    assert calls == ["hung", "then"]
