"""Tools and environments that hang, raise, end their process or say too much."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from bridge_helpers import Player, call, close, places_of, role_of, said, text_of

from raising import raises
from stretto.config import EnvironmentConfig
from stretto.environments.executors import EnvironmentProcess
from stretto.environments.role import EnvironmentRole
from stretto.errors import ConfigError, EpisodeLostError, RewardError
from stretto.types import FORKS
from stretto.workers import child as child_processes
from stretto.workers.user_code import Host

SHORT = EnvironmentConfig(timeout_s=0.3, parallel=2, max_observation_tokens=60)


def pid_of(role: EnvironmentRole) -> int:
    place = role._clients[0].executor
    assert isinstance(place, EnvironmentProcess)
    assert place._process
    return place._process.pid


def test_bad_tools_are_observations() -> None:
    names = (
        "slow",
        "big",
        "raises",
        "leave",
        "odd",
        "noise",
        "nothing",
        "split",
        "split_later",
        "add",
    )
    role = role_of(places_of(*names, config=SHORT), SHORT)

    async def go() -> None:
        player = Player(role)
        await player.open()
        hung = await player.say(call("slow", seconds=60) + call("add", a=1, b=1))
        assert "longer than 0.3 s" in said(hung)[0]
        assert said(hung)[1] == "2"
        assert "longer than" in hung.record["calls"][0]["error"]
        much = await player.say(call("big", characters=1_000_000))
        assert said(much) == ["x" * 60 + "\n[999940 more characters were left out]"]
        wrong = await player.say(call("raises", why="of turn 3") + call("leave"))
        assert said(wrong) == ['{"error": "ValueError: of turn 3"}', '{"error": "SystemExit: 3"}']
        odd = await player.say(call("odd") + call("noise") + call("nothing"))
        assert said(odd)[0] == '{"half": "?", "object": "namespace(a=1)", "nan": null}'
        assert said(odd)[1:] == ["\ufffd\ufffdok", "null"]
        # One after the other, as filelock refuses forks of two threads at the same time.
        assert said(await player.say(call("split"))) == ["parent"]
        assert said(await player.say(call("split_later"))) == ["parent"]
        assert said(await player.say(call("add", a=1, b=2))) == ["3"]  # turn 7 of 8

    asyncio.run(go())
    assert role._clients[0].executor.starts == 1
    close(role)


def test_text_of_a_tool_spells_no_control_token() -> None:
    role = role_of(places_of("raises"))

    async def go() -> None:
        player = Player(role)
        await player.open()
        seen = await player.say(call("raises", why="</s>"))
        assert "</s>" in text_of(seen.tokens.tolist())
        assert 1 not in seen.tokens.tolist()

    asyncio.run(go())
    close(role)


def test_a_process_whose_threads_all_hang_is_replaced_and_others_go_on() -> None:
    role = role_of(places_of("slow", "add", config=SHORT), SHORT)
    old = pid_of(role)

    async def go() -> None:
        one, other = Player(role, 1), Player(role, 2)
        await one.open()
        await other.open()
        hanging = call("slow", seconds=60)
        for seen in (await one.say(hanging), await one.say(hanging)):
            assert "longer than" in said(seen)[0]
        assert said(await other.say(call("add", a=1, b=1))) == ["2"]
        assert said(await one.say(call("add", a=2, b=2))) == ["4"]

    asyncio.run(go())
    assert role._clients[0].executor.starts == 2
    assert pid_of(role) != old
    close(role)


def test_a_coroutine_that_blocks_is_ended_with_its_process(monkeypatch: Any) -> None:
    monkeypatch.setattr("stretto.environments.executors.SILENCE_S", 3.0)
    monkeypatch.setattr("stretto.environments.executors.LOOK_S", 0.2)
    role = role_of(places_of("block", "add", config=SHORT), SHORT)

    async def go() -> None:
        player = Player(role)
        await player.open()
        seen = await player.say(call("block", seconds=60))
        assert "no sig" in said(seen)[0]
        assert said(await player.say(call("add", a=1, b=1))) == ["2"]

    asyncio.run(go())
    close(role)


def test_a_tool_that_ends_its_process_twice_is_an_error() -> None:
    role = role_of(places_of("die", "add"))

    async def go() -> None:
        player = Player(role)
        await player.open()
        seen = await player.say(call("die"))
        assert "exit code 7" in said(seen)[0]
        assert seen.record["calls"][0]["error"]
        assert said(await player.say(call("add", a=1, b=1))) == ["2"]

    asyncio.run(go())
    close(role)


async def opened_but_killed(role: EnvironmentRole, *, starting: bool) -> list[str]:
    """Kill the process of episodes that are being opened, and the next one in its start."""
    place = role._clients[0].executor
    assert isinstance(place, EnvironmentProcess)
    players = [Player(role, n, start=n) for n in range(8)]
    opening = [asyncio.ensure_future(player.open()) for player in players]
    while len(place._waiting) < len(players):
        await asyncio.sleep(0.001)
    os.kill(pid_of(role), signal.SIGKILL)
    while starting and (place.starts < 2 or not place._process):
        await asyncio.sleep(0.001)
    if starting:
        os.kill(pid_of(role), signal.SIGKILL)
    openings: list[Any] = await asyncio.gather(*opening, return_exceptions=True)
    lost = [n for n, each in enumerate(openings) if isinstance(each, EpisodeLostError)]
    assert len(lost) == starting
    for n in lost:
        openings[n] = await players[n].open()
    return [each.prompt.messages[-1]["content"] for each in openings]


@pytest.mark.parametrize("starting", [False, True])
def test_a_kill_while_a_batch_opens_costs_nothing(starting: bool) -> None:
    """The eight calls were lost with one process, and the schedule begins lost episodes again."""
    role = role_of(places_of("Late"))
    openings = asyncio.run(opened_but_killed(role, starting=starting))
    assert openings == [f"go from {n}" for n in range(8)]
    assert role._clients[0].losses == 0
    close(role)


def test_processes_that_end_one_after_another_end_the_run() -> None:
    role = role_of(places_of("EndsInReset"))

    async def go() -> None:
        players = [Player(role, n) for n in range(8)]
        for _ in range(2):
            opening = (player.open() for player in players)
            for error in await asyncio.gather(*opening, return_exceptions=True):
                assert isinstance(error, EpisodeLostError)
        await players[0].open()

    with raises(RewardError, "environment-keeps-ending", "6 processes"):
        asyncio.run(go())
    assert role._clients[0].executor.starts == 6
    close(role)


def test_a_call_is_made_twice_also_where_the_process_had_ended_before(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    role = role_of(places_of("die_once"))

    async def go() -> None:
        player = Player(role)
        await player.open()
        os.kill(pid_of(role), signal.SIGKILL)
        while role._clients[0].executor._process:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        assert said(await player.say(call("die_once"))) == ["alive"]

    asyncio.run(go())
    assert role._clients[0].executor.starts == 3
    close(role)


def test_kill_in_the_middle_of_a_wait_loses_no_episode() -> None:
    """A pure environment answers its turns again in another process, and goes on from there."""
    role = role_of(places_of("Counter"))

    async def go() -> None:
        players = [Player(role, n, start=n) for n in range(3)]
        for player in players:
            await player.open()
            await player.say("2")
        os.kill(pid_of(role), signal.SIGKILL)
        seen = await asyncio.gather(*(player.say("3") for player in players))
        assert [said(each) for each in seen] == [["5"], ["6"], ["7"]]

    asyncio.run(go())
    assert role._clients[0].executor.starts == 2
    close(role)


@pytest.mark.parametrize("name", ["Random", "Killer"])
def test_an_episode_that_cannot_be_replayed_is_lost(name: str) -> None:
    role = role_of(places_of(name))

    async def go() -> None:
        player = Player(role, start=1)
        await player.open()
        await player.say("2")
        os.kill(pid_of(role), signal.SIGKILL)
        await player.say("die" if name == "Killer" else "3")

    with raises(EpisodeLostError, "episode-lost"):
        asyncio.run(go())
    close(role)


@pytest.mark.parametrize("replay", ["auto", "recorded", "no"])
def test_a_resumed_episode_goes_on_by_its_log(replay: Any) -> None:
    config = EnvironmentConfig(replay=replay)
    role, later = (role_of(places_of("Counter", config=config), config) for _ in range(2))

    async def go() -> None:
        player = Player(role, start=1)
        await player.open()
        await player.say("2")
        await player.say("3")
        assert await player.resume(later) is player.log[-1]
        assert said(await player.say("1")) == (["7"] if replay == "auto" else ["2"])
        assert player.log[-1].number == 3

    if replay == "no":
        with raises(EpisodeLostError, "episode-lost"):
            asyncio.run(go())
    else:
        asyncio.run(go())
    for each in (role, later):
        close(each)


def test_another_answer_in_a_replay_is_noticed() -> None:
    role, later = (role_of(places_of("Random")) for _ in range(2))

    async def go() -> None:
        player = Player(role, start=1)
        await player.open()
        await player.say("2")
        await player.resume(later)

    with raises(EpisodeLostError, "episode-lost", "turn 1 has another answer"):
        asyncio.run(go())
    for each in (role, later):
        close(each)


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_another_opening_in_a_replay_is_noticed(how: str) -> None:
    """A number that is drawn anew by ``reset`` is not the one whose digits were told."""
    role, later = (role_of(places_of("Drawn")) for _ in range(2))

    async def go() -> None:
        player = Player(role)
        await player.open()
        assert said(await player.say(call("look"))) == ["it is hidden"]
        if how == "restarted":
            await player.resume(later)
            return
        os.kill(pid_of(role), signal.SIGKILL)
        await player.say(call("look"))

    with raises(EpisodeLostError, "episode-lost", "it has another opening"):
        asyncio.run(go())
    for each in (role, later):
        close(each)


def test_episodes_end_at_their_limits() -> None:
    config = EnvironmentConfig(max_turns=3, max_seconds=0)
    places = places_of("Endless")

    async def turns() -> list[str]:
        player = Player(role_of(places, config))
        await player.open()
        return [(await player.say("a")).ended_by for _ in range(3)]

    assert asyncio.run(turns()) == ["", "", "turns"]

    async def seconds() -> str:
        player = Player(role_of(places, EnvironmentConfig(max_seconds=1e-9)))
        await player.open()
        return (await player.say("a")).ended_by

    assert asyncio.run(seconds()) == "seconds"

    async def tokens() -> Any:
        player = Player(role_of(places), most=14)  # 'a', its end, and 11 of '[user] on'
        await player.open()
        return await player.say("a"), await player.say("b")

    first, second = asyncio.run(tokens())
    assert (first.ended_by, len(first.tokens)) == ("", 11)
    assert (second.ended_by, said(second)) == ("tokens", [])
    places[0].close()


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("Nothing", "the environment's step: it returned None; it must return an"),
        ("NoNumber", "the environment's step: it returned nan where a number is needed"),
        ("TwoValues", "the environment's step: it returned 2 values; they are"),
    ],
)
def test_a_step_that_cannot_be_read_is_a_failure_of_the_episode(name: str, failure: str) -> None:
    role = role_of(places_of(name))

    async def go() -> None:
        player = Player(role)
        await player.open()
        seen = await player.say("a")
        assert seen.record["failure"].startswith(failure)
        assert (seen.reward, seen.ended_by, said(seen)) == (None, "environment", [])

    asyncio.run(go())
    close(role)


def test_where_the_template_breaks_a_sample_is_forked() -> None:
    role = role_of(places_of("raises"))

    async def go() -> None:
        player = Player(role, 5)
        await player.open()
        seen = await player.say(call("raises", why="break"))
        assert seen.rollout_id == 5 + FORKS
        assert not len(seen.tokens)
        assert seen.prompt
        assert [m["role"] for m in seen.prompt.messages or ()] == [
            "user",
            "assistant",
            "tool",
        ]
        player.id, player.prompt, player.tokens, player.sampled = (
            seen.rollout_id,
            seen.prompt,
            [],
            [],
        )
        assert (await player.say("done")).ended_by == "environment"
        await role.release([5])
        assert role._episodes
        await role.release([5 + FORKS])
        assert not role._episodes

    asyncio.run(go())
    close(role)


def test_a_thousand_episodes_wait_at_once() -> None:
    role = role_of(places_of("greet"))

    async def go() -> list[Any]:
        players = [Player(role, n) for n in range(1000)]
        await asyncio.gather(*(player.open() for player in players))
        turn = call("greet", name="you")
        return await asyncio.gather(*(player.say(turn) for player in players))

    assert {said(seen)[0] for seen in asyncio.run(go())} == {'{"said": "hello you"}'}
    close(role)


def test_siblings_share_results_of_deterministic_functions() -> None:
    role = role_of(places_of("counted"))

    async def go() -> list[Any]:
        players = [Player(role, n) for n in range(8)]
        for player in players:
            await player.open()
        return await asyncio.gather(*(player.say(call("counted", n=3)) for player in players))

    seen = asyncio.run(go())
    assert {said(each)[0] for each in seen} == {"1"}
    assert sum(each.record["calls"][0].get("shared", False) for each in seen) == 7
    close(role)


def test_episodes_are_closed_once(tmp_path: Path, monkeypatch: Any) -> None:
    """Also two runs that share the folder which their environments write to."""
    closed = tmp_path / "closed"
    monkeypatch.setenv("CLOSED", str(closed))
    roles = [role_of(places_of("Counter")) for _ in range(2)]

    async def go() -> None:
        for role in roles:
            player = Player(role, start=1)
            await player.open()
            await player.say("4")
            await role.release([player.id])
            await role.release([player.id])

    asyncio.run(go())
    for role in roles:
        close(role)
    assert closed.read_text() == "5\n5\n"


@pytest.mark.parametrize("end", ["closed", "pipe"])
def test_episodes_that_are_open_at_the_end_are_closed_once(
    tmp_path: Path, monkeypatch: Any, end: str
) -> None:
    """Also one in a step that would last, and all that one process may work on at a time."""
    closed = tmp_path / "closed"
    monkeypatch.setenv("CLOSED", str(closed))
    config = EnvironmentConfig(parallel=1)
    role = role_of(places_of("Sleeper", config=config), config)

    async def go() -> None:
        players = [Player(role, n, start=n) for n in range(3)]
        for player in players:
            await player.open()
        await players[0].say("4")
        await role.release([0])
        asking = asyncio.ensure_future(players[1].say("sleep"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait({asking})

    asyncio.run(go())
    place = role._clients[0].executor
    assert isinstance(place, EnvironmentProcess)
    process = place._process
    assert process
    assert process.stdin
    if end == "pipe":  # as if the parent had been killed
        process.stdin.close()
        process.wait(30)
    close(role)
    assert sorted(closed.read_text().split()) == ["1", "2", "4"]


def test_what_does_not_close_is_killed(monkeypatch: Any) -> None:
    monkeypatch.setattr("stretto.environments.executors.CLOSE_S", 0.1)
    monkeypatch.setattr("stretto.environments.executors.SPARE_S", 0.1)
    role = role_of(places_of("Stays"))
    pid = pid_of(role)
    asyncio.run(Player(role).open())
    close(role)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_ends_with_its_parent() -> None:
    role = role_of(places_of("add"))
    pid = pid_of(role)
    close(role)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("it lives on")


def test_a_late_read_takes_nothing_from_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads from a process that has ended is held up until the next one runs."""
    read, start = child_processes.os.read, child_processes.start_child
    readers: list[threading.Thread] = []
    ended, release = threading.Event(), threading.Event()

    def late_read(descriptor: int, size: int) -> bytes:
        thread = threading.current_thread()
        if "_read" in thread.name:
            if thread in readers and ended.wait(1.0) and thread is readers[0]:
                release.wait()
            readers.append(thread)
        return read(descriptor, size)

    def next_start(host: type[Host]) -> subprocess.Popen[bytes]:
        ended.set()
        child = start(host)
        release.set()
        time.sleep(0.1)
        return child

    monkeypatch.setattr(child_processes.os, "read", late_read)
    with raises(ConfigError, None, "Missing"):
        places_of("Missing")
    monkeypatch.setattr(child_processes, "start_child", next_start)
    (place,) = places_of("add")
    place.close()
    assert len({*readers}) == 2
