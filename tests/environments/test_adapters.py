"""Environments by their shape, each in a process, over a few turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bridge_helpers import Player, call, places_of, role_of, said, text_of

from raising import raises
from stretto.config import EnvironmentConfig
from stretto.environments.executors import EnvironmentExecutor
from stretto.errors import ConfigError

Places = Any


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    """Processes by what they are of, shared by the tests of this file."""
    made: dict[Sequence[str], list[EnvironmentExecutor]] = {}

    def of(*names: str) -> list[EnvironmentExecutor]:
        if names not in made:
            made[names] = places_of(*names, config=EnvironmentConfig(timeout_s=5))
        return made[names]

    yield of
    for each in made.values():
        each[0].close()


def play(role: Any, *turns: str, **data: Any) -> list[Any]:
    """Play an episode; return its observations."""

    async def go() -> list[Any]:
        player = Player(role, **data)
        await player.open()
        for turn in turns:
            await player.say(turn)
        await role.release([player.id])
        return player.log

    return asyncio.run(go())


def test_functions_are_tools_whose_calls_are_run_side_by_side(places: Places) -> None:
    ready = places("add", "greet")
    schemas = [tool["function"] for tool in ready[0].ready["tools"]]
    assert [s["name"] for s in schemas] == ["add", "greet"]
    assert schemas[0]["parameters"]["required"] == ["a", "b"]
    turn = f"both {call('add', a=2, b=3)}{call('greet', name='you')}"
    opening, first, second = play(role_of(ready), turn, "5")
    assert opening.number == 0
    assert opening.prompt is None
    assert not len(opening.tokens)
    assert said(first) == ["5", '{"said": "hello you"}']
    assert [m["role"] for m in first.messages] == ["assistant", "tool", "tool"]
    assert text_of(first.tokens) == '\n[tool] 5\n[tool] {"said": "hello you"}\n'
    assert [(c["name"], c["status"]) for c in first.record["calls"]] == [
        ("add", "ok"),
        ("greet", "ok"),
    ]
    assert second.ended_by == "environment"
    assert second.number == 2
    assert second.reward is None


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        (call("add", a=1), "missing a required argument: 'b'"),
        (call("sub", a=1), "there is no tool 'sub'"),
        ("«not json»", "the call cannot be read: not json"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error_that_the_policy_reads(
    places: Places, turn: str, error: str
) -> None:
    _, seen, after = play(role_of(places("add", "greet")), turn, call("add", a=1, b=1))
    assert error in said(seen)[0]
    assert said(seen)[0].startswith('{"error"')
    assert "error" in seen.record["calls"][0]
    assert said(after) == ["2"]


def test_an_unfinished_call_is_not_run(places: Places) -> None:
    async def go() -> Any:
        player = Player(role_of(places("add", "greet")), most=12)
        await player.open()
        return await player.say("«{'name': 'a", cut=True)

    seen = asyncio.run(go())
    assert seen.ended_by == "tokens"
    assert not said(seen)
    assert not len(seen.tokens)


def test_own_protocol_opens_steps_and_closes(places: Places, monkeypatch: Any) -> None:
    opening, first, wrong, last = play(role_of(places("Counter")), "3", "bad", "6", start=1)
    assert opening.prompt.messages[-1]["content"] == "go from 1"
    assert said(first) == ["4"]
    assert first.reward == 0.5
    assert said(wrong) == ['{"error": "ValueError: no number"}']
    assert wrong.reward is None
    assert "worlds.py" in wrong.record["calls"][0]["error"]
    assert last.ended_by == "environment"
    assert last.reward == 0.5
    assert not len(last.tokens)


@pytest.mark.parametrize("factory", ["Vault", "vault"])
def test_trl_environments_have_tools_and_a_reward_at_the_end(places: Places, factory: str) -> None:
    ready = places(factory)
    assert [t["function"]["name"] for t in ready[0].ready["tools"]] == ["look"]
    for _ in range(2):  # the second one with the same object, reset
        opening, first, last = play(role_of(ready), call("look", lock=1), "8", secret=7)
        assert opening.prompt.messages[-1]["content"] == "go There are 1 locks."
        assert said(first) == ["8"]
        assert first.reward is None
        assert last.reward == 1.0
        assert last.ended_by == "environment"


def test_a_dict_of_environments_is_chosen_from_by_the_row(places: Places) -> None:
    role = role_of(places("WORLDS"))
    opening, seen = play(role, "3", environment="gym", goal=4)
    assert said(seen) == ["higher"]
    assert opening.prompt.messages[-1]["content"] == "go\nguess"
    opening, _ = play(role, "x", environment="vault", secret=4)
    assert opening.prompt.text.startswith("[tools")
    assert "look" in opening.prompt.text


@pytest.mark.parametrize("source", ["Vault", "WORLDS", "Counter"])
def test_tools_of_the_row_stay_in_a_prompt_that_an_environment_changes(
    places: Places, source: str
) -> None:
    brought = [{"type": "function", "function": {"name": "brought"}}]
    row = {"environment": "vault", "secret": 4, "start": 1, "tools": brought}
    (opening,) = play(role_of(places(source)), **row)
    own = [] if source == "Counter" else ["look"]
    told = json.loads(opening.prompt.text.removeprefix("[tools ").partition("][user]")[0])
    assert [tool["function"]["name"] for tool in told] == [*own, "brought"]


def test_gymnasium(places: Places) -> None:
    _, low, high, right = play(role_of(places("Gym")), "3", "9", "4", goal=4)
    assert (said(low), said(high), low.reward, right.reward) == (["higher"], ["lower"], 0.0, 1.0)
    assert right.ended_by == "environment"


def test_four_values_and_an_observation_that_is_no_text(places: Places) -> None:
    opening, first, last = play(role_of(places("OldGym")), "on", "end")
    assert opening.prompt is None
    assert said(first) == ["[1 2]"]
    assert first.record["read_as"] == "str() of numpy.ndarray"
    assert last.ended_by == "environment"
    assert last.reward == 0.25


def test_skyrl(places: Places) -> None:
    opening, first, last = play(role_of(places("Sky")), "1", "2", goal=2)
    assert [m["role"] for m in opening.prompt.messages] == ["system", "user"]
    assert said(first) == ["not 1"]
    assert last.reward == 1.0
    assert last.ended_by == "environment"


def test_openrlhf(places: Places) -> None:
    opening, first, last = play(role_of(places("Rlhf")), "1", "2", label="2")
    assert opening.prompt is None
    assert said(first) == ["again"]
    assert last.reward == 1.0
    assert last.ended_by == "environment"


def test_openenv_and_tinker(places: Places) -> None:
    opening, first, last = play(role_of(places("Open")), "on", "end")
    assert opening.prompt.messages[-1]["content"] == "go\nready"
    assert said(first) == ["did on"]
    assert last.ended_by == "environment"
    opening, first, last = play(role_of(places("Tink")), "on", "end")
    assert said(first) == ["more"]
    assert last.reward == 1.0
    assert last.ended_by == "environment"


def test_a_program_is_recognised_and_run(places: Places) -> None:
    (place,) = places("program")
    assert place.ready["kind"] == "program"
    arguments = {"data": {"n": 2}, "base_url": "abc", "api_key": ""}
    asked = {"do": "run", "episode": 1, "arguments": arguments}
    assert place.ask(asked).result(10) == {"result": 5.0}


@pytest.mark.parametrize(
    ("text", "names", "code"),
    [
        ("def f(a):\n    return a\n", ["f"], "tool-without-schema"),
        ("class A:\n    pass\n", ["A"], "unknown-environment"),
        ("A = 3\n", ["A"], "unknown-environment"),
        ("A = {}\n", ["A"], "unknown-environment"),
        ("def f() -> int:\n    'F.'\n    return 1\n", ["f", "g"], "unknown-function"),
        ("1 / 0\n", ["f"], "import-failed"),
        (
            "class A:\n    def reset(self): pass\ndef f() -> int:\n    'F.'\n",
            ["A", "f"],
            "environments-mixed",
        ),
        (
            "class A:\n    replay = 'maybe'\n    def reset(self): pass\n"
            "    def step(self, a): pass\n",
            ["A"],
            "unknown-replay",
        ),
        (
            "class A:\n    def __init__(self, x): pass\n    def reset(self): pass\n"
            "    def step(self, a): pass\n",
            ["A"],
            "environment-parameters",
        ),
        ("def f() -> str:\n    'F.'\n    yield ''\n", ["f"], "environment-generator"),
        (
            "class A:\n    def reset(self): pass\n    async def step(self, a): yield a\n",
            ["A"],
            "environment-generator",
        ),
    ],
)
def test_sources_of_no_known_shape_are_refused(
    tmp_path: Path, text: str, names: list[str], code: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with raises(ConfigError, code):
        places_of(*names, file=file)


def test_only_routines_of_a_trl_environment_are_tools(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class A:\n    kind = dict\n    class State: pass\n    def reset(self, **row): pass\n"
        "    def f(self) -> str:\n        'F.'\n        return ''\n"
        "    @staticmethod\n    def g() -> str:\n        'G.'\n        return ''\n"
    )
    (place,) = places_of("A", file=file)
    assert [tool["function"]["name"] for tool in place.ready["tools"]] == ["f", "g"]
    place.close()


def test_what_is_no_environment_is_named_in_words(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("A = 3\nclass B:\n    pass\ndef f(a):\n    return a\n")
    for name, says in (
        ("A", "'A' is an int of"),
        ("B", "'B' is a class of"),
        ("f", "docstring. G"),
    ):
        with raises(ConfigError, None, says):
            places_of(name, file=file)
