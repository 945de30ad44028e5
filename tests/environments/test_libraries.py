"""Results and classes as OpenEnv, SkyRL-gym, verl and TRL have them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import library_worlds
import pytest
from bridge_helpers import Player, call, close, role_of, said
from library_worlds import Solver

from raising import raises
from stretto.config import EnvironmentConfig
from stretto.environments.executors import LocalEnvironment, settings_of
from stretto.errors import ConfigError

FILE = Path(library_worlds.__file__)


def played(
    *names: str, turns: tuple[str, ...], settings: Any = None, **row: Any
) -> tuple[LocalEnvironment, list[Any]]:
    """Play an episode with objects of the module; return what was observed."""
    objects = {name: getattr(library_worlds, name) for name in names}
    config = EnvironmentConfig(settings=settings or {})
    place = LocalEnvironment(objects, settings_of(config))
    place.start()
    role = role_of([place])

    async def go() -> list[Any]:
        player = Player(role, **row)
        await player.open()
        for turn in turns if "failure" not in player.log[0].record else ():
            await player.say(turn)
        await role.release([player.id])
        return player.log

    log = asyncio.run(go())
    close(role)
    return place, log


def begun(opening: Any) -> str:
    """The end of the prompt that an environment has changed."""
    return str(opening.prompt.messages[-1]["content"])


def test_openenv_observations_with_fields_of_their_own_are_read() -> None:
    _, (opening, first, last) = played("Grid", turns=("on", "end"))
    assert begun(opening) == 'go\n{"x": 0, "y": 1, "message": "go"}'
    assert said(first) == ['{"x": 1, "y": 0, "message": "on"}']
    assert (first.reward, first.ended_by) == (0.5, "")
    assert (last.reward, last.ended_by) == (0.5, "environment")
    _, (opening, first, last) = played("Remote", turns=("on", "end"))
    assert begun(opening) == "go\nready"  # a single field that is text
    assert said(first) == ['{"x": 1, "y": 0, "message": "on"}']
    assert (first.reward, last.ended_by) == (0.25, "environment")


def test_a_dict_without_a_name_for_its_observation_is_the_observation() -> None:
    _, (opening, first, last) = played("Dicts", turns=("on", "end"))
    assert begun(opening) == 'go\n{"x": 1, "y": 2}'
    assert (said(first), first.reward) == (['{"x": 3}'], 1.0)
    assert last.ended_by == "environment"


@pytest.mark.parametrize(
    ("kind", "content"),
    [("text", "go Look up."), ("messages", "Hello"), ("dict", 'go{"room": 3, "door": "open"}')],
)
def test_what_a_trl_reset_returns_is_read(kind: str, content: str) -> None:
    _, (opening,) = played("Blocks", turns=(), kind=kind)
    assert begun(opening) == content  # text is put behind the prompt as TRL does


def test_an_image_of_reset_is_a_failure() -> None:
    _, (opening,) = played("Blocks", turns=("on",), kind="image")
    assert "'image'; models read text alone" in opening.record["failure"]


def test_skyrl_environments_get_a_configuration_with_attributes() -> None:
    for settings, expected in (
        ({}, "http://127.0.0.1:8000 3"),
        ({"topk": 5}, "http://127.0.0.1:8000 5"),
    ):
        _, (_, first) = played("Search", turns=("on",), settings=settings)
        assert said(first) == [expected]
    _, (_, first) = played("Sql", turns=("on",), settings={"db": {"path": "/data"}, "topk": 2})
    assert said(first) == ["/data 2 None"]
    _, (opening,) = played("Sql", turns=("on",))
    assert "environment.settings has no 'db'" in opening.record["failure"]
    with raises(ConfigError, "environment-settings", "unexpected keyword argument 'top_k'"):
        played("Search", turns=("on",), settings={"top_k": 5})


def test_results_of_verls_functions_have_a_reward_and_metrics() -> None:
    names = ("scored", "responds", "pair", "model", "row")
    calls = "".join(call(name, **({"n": 3} if name == "scored" else {})) for name in names)
    place, (_, first, last) = played(*names, turns=(calls + call("scored", n=1), "done"))
    assert place.ready["rewards"]
    read = ["hi 3", "hi!", '["AAPL", 187.2]']
    cell = '[{"done": false, "reward": null, "metadata": {}, "x": 1, "y": 2, "message": "m"}]'
    assert said(first) == [*read, cell, '[1, 2, "c"]', "hi 1"]
    assert first.reward == 2.0
    assert first.record["calls"][0]["metrics"] == {"hits": 3}
    assert last.reward is None
    place, _ = played("pair", turns=())
    assert not place.ready["rewards"]


@pytest.mark.parametrize("nested", [True, False])
def test_a_tool_of_verl_has_an_instance_for_each_episode(nested: bool) -> None:
    kwargs = {"check": {"create_kwargs": {"ground_truth": "8"}}}
    row = {"extra_info": {"tools_kwargs": kwargs}} if nested else {"tools_kwargs": kwargs}
    turns = (call("check", answer="7"), call("check", answer="8"), "8")
    place, (_, wrong, right, last) = played("Solver", turns=turns, settings={"scale": 1}, **row)
    assert place.ready["tools"][0]["function"]["name"] == "check"
    assert (said(wrong), wrong.reward) == (["0.0 of 1"], -0.05)
    assert (said(right), right.reward) == (["1.0 of 1"], 0.0)
    assert (last.reward, last.ended_by) == (1.0, "environment")


def test_a_tool_of_verl_as_an_object_is_released() -> None:
    tool = Solver({"scale": 2}, None)
    place = LocalEnvironment({"tool": tool}, settings_of(EnvironmentConfig()))
    place.start()
    role = role_of([place])

    async def go() -> int:
        player = Player(role)
        await player.open()
        assert said(await player.say(call("check", answer="7"))) == ["0.0 of 2"]
        held = len(tool.instances)
        await role.release([player.id])
        return held

    assert asyncio.run(go()) == 1
    assert tool.instances == {}
    close(role)
