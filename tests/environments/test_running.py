"""Calls of users' code in this process, by runners and hosts: what they raise, take and hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

import numpy as np
import pytest
from bridge_helpers import Player, close, role_of

from raising import raises
from stretto.config import EnvironmentConfig
from stretto.environments.executors import LocalEnvironment, settings_of
from stretto.environments.host import EnvironmentHost
from stretto.environments.results import bounded
from stretto.environments.running import CallError, Runner
from stretto.errors import EpisodeLostError
from stretto.types import Observation
from stretto.workers.child import ProcessLostError

SHORT = EnvironmentConfig(timeout_s=0.2, parallel=4, max_observation_tokens=2)


def host_of(**named: Any) -> EnvironmentHost:
    return EnvironmentHost(named, settings_of(SHORT))


def turn(*calls: Mapping[str, Any]) -> dict[str, Any]:
    made = [{"status": "ok", "raw": "", "id": "", "arguments": {}, **call} for call in calls]
    return {"finish": "stop", "calls": made}


def asked(host: EnvironmentHost, *bodies: Mapping[str, Any]) -> list[dict[str, Any]]:
    async def go() -> list[dict[str, Any]]:
        return [await host.answer({"episode": 1, **body}) for body in bodies]

    return asyncio.run(go())


OPEN: dict[str, Any] = {"do": "open", "row": {}, "messages": []}


async def cancelled() -> None:
    raise asyncio.CancelledError


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task
    task.cancel()
    await asyncio.sleep(0)


def raises_cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("function", [cancelled, cancels_itself, raises_cancelled])
def test_users_code_that_is_cancelled_by_itself_has_raised(function: Any) -> None:
    async def go() -> None:
        run = Runner(1, 5.0)
        for _ in range(2):  # its place is free again
            with pytest.raises(CallError, match="CancelledError"):
                await asyncio.wait_for(run(function), 5.0)

    asyncio.run(go())


def test_a_thread_whose_call_was_cancelled_is_lost_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.environments.running.GRACE_S", 0.0)
    end = Event()

    async def go() -> None:
        run = Runner(100, 60.0, most_lost=2)
        tasks = [asyncio.ensure_future(run(end.wait)) for _ in range(2)]
        await asyncio.sleep(0.01)
        for task in tasks:
            assert not run.is_worn
            task.cancel()
            await asyncio.sleep(0.01)
        assert run.is_worn
        end.set()
        while run._lost:
            await asyncio.sleep(0.01)

    asyncio.run(go())


class Log:
    """TRL's environment that notes when its calls begin and end."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def reset(self, **row: Any) -> None:
        self.said = []

    def slow(self) -> str:
        """Take a while."""
        self.said.append("slow")
        time.sleep(0.05)
        self.said.append("done")
        return "slow"

    def quick(self) -> list[str]:
        """Take no time."""
        return self.said

    def wait(self) -> None:
        """Take longer than a call may."""
        time.sleep(0.4)

    def refuse(self) -> str:
        """Raise an error."""
        raise ValueError("the game was given up")

    def get_reward(self) -> float:
        time.sleep(0.4)
        return 1.0


class Brief(Log):
    def get_reward(self) -> float:
        return 1.0


def test_calls_of_an_object_are_run_in_their_order() -> None:
    both = turn({"name": "slow"}, {"name": "quick"})
    _, step = asked(host_of(Log=Log), OPEN, {"do": "step", "turn": both})
    assert [m["content"] for m in step["messages"]] == ["slow", '["slow", "done"]']


def test_an_object_whose_reward_is_given_up_is_not_used_again() -> None:
    host = host_of(Log=Log)
    _, step, _ = asked(host, OPEN, {"do": "step", "turn": turn()}, {"do": "close"})
    assert "longer than 0.2 s" in step["failure"]
    assert host.source.make({})._pool._idle == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("tool", "kept"), [("refuse", 1), ("wait", 0)])
def test_an_object_whose_call_timed_out_is_not_used_again(tool: str, kept: int) -> None:
    """The text of an error does not decide."""
    host = host_of(Brief=Brief)
    asked(host, OPEN, {"do": "step", "turn": turn({"name": tool})}, {"do": "close"})
    assert len(host.source.make({})._pool._idle) == kept  # type: ignore[attr-defined]


def derive(function: str, of: int, self: str = "") -> str:
    """Take names that callers use for themselves.

    Args:
        function: any text
        of: any number
        self: any text
    """
    return f"{function} {of} {self}"


class Box:
    """TRL's environment with such names."""

    def reset(self, function: str, of: int, **columns: Any) -> str:
        return f"{function} {of} {sorted(columns)}"

    def look(self, function: str, name: str, call: str) -> str:
        """Look.

        Args:
            function: any text
            name: any text
            call: any text
        """
        return f"{function} {name} {call}"


class Wide:
    """gymnasium's that takes all columns."""

    def reset(self, **columns: Any) -> str:
        return str(sorted(columns))

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return action, 0.0, False, {}


def test_parameters_have_any_name() -> None:
    names = {"function": "x^2", "of": 3, "self": "me", "name": "n", "args": 1, "call": "c"}
    said = turn({"name": "derive", "arguments": {"function": "x^2", "of": 3, "self": "me"}})
    _, step = asked(host_of(derive=derive), OPEN, {"do": "step", "turn": said})
    assert [m["content"] for m in step["messages"]] == ["x^2 3 me"]
    said = turn({"name": "look", "arguments": {"function": "f", "name": "n", "call": "c"}})
    opening, step = asked(host_of(Box=Box), {**OPEN, "row": names}, {"do": "step", "turn": said})
    assert opening["text"] == "x^2 3 ['args', 'call', 'name']"  # none can be called self
    assert [m["content"] for m in step["messages"]] == ["f n c"]
    (opening,) = asked(host_of(Wide=Wide), {**OPEN, "row": names})
    assert opening["text"] == "['args', 'call', 'function', 'name', 'of', 'prompt']"


class Odd:
    def __str__(self) -> str:
        raise LookupError("no text")


def odd() -> Odd:
    """Return what has no text."""
    return Odd()


def long() -> None:
    """Raise a long text."""
    raise ValueError("x" * 10_000)


def test_a_result_without_text_is_an_error_of_its_call() -> None:
    both = turn({"name": "odd"}, {"name": "long"})
    _, step = asked(host_of(odd=odd, long=long), OPEN, {"do": "step", "turn": both})
    first, second = step["calls"]
    assert first["error"] == "LookupError: no text"
    assert len(second["error"]) < 200  # 64 characters a token, and how many were left out
    assert "more characters were left out" in second["error"]


def test_what_users_code_says_is_bounded() -> None:
    assert bounded({"text": "abcdef", "reward": 1.0}, 14) == {
        "text": "ab [4 more characters were left out]",
        "reward": 1.0,
    }
    assert bounded([1, 2, 3], 2) == [1, 2]
    assert bounded([["ab"], None], 5) == [["ab"], None]


class Closed:
    """Cannot be opened."""

    def reset(self) -> None:
        raise ValueError("no world")

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        raise AssertionError


def test_an_opening_that_raises_ends_the_episode_as_a_failure() -> None:
    place = LocalEnvironment({"Closed": Closed}, settings_of(EnvironmentConfig()))
    place.start()
    role = role_of([place])
    seen = asyncio.run(Player(role).open())
    assert (seen.ended_by, seen.number, len(seen.tokens)) == ("environment", 0, 0)
    assert "could not be opened: ValueError: no world" in seen.record["failure"]
    close(role)


class Gone(LocalEnvironment):
    """A place whose process ends whenever it is asked."""

    def ask(self, body: Mapping[str, Any]) -> Future[Mapping[str, Any]]:
        future: Future[Mapping[str, Any]] = Future()
        future.set_exception(ProcessLostError("it had ended"))
        return future


def test_a_process_that_ends_while_an_episode_is_resumed_loses_the_episode() -> None:
    place = Gone({"Closed": Closed}, settings_of(EnvironmentConfig()))
    place.start()
    role = role_of([place])
    log: Sequence[Observation] = [Observation(1, 0, np.empty(0, np.int32))]
    with raises(EpisodeLostError, "episode-lost", "it had ended"):
        asyncio.run(role.open(Player(role).response(), log))
    close(role)
