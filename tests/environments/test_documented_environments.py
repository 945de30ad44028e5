"""The environments of the page on episodes, each played as it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from bridge_helpers import Player, call, close, places_of, role_of, said

from docs_helpers import blocks

Played = list[tuple[list[str], float | None, str]]
END = "environment"

EPISODES: list[tuple[list[str], dict[str, Any], list[str], Played]] = [
    (
        ["population", "add"],
        {},
        [call("population", country="Malta") + call("add", a=2, b=3), "5"],
        [(['{"people": 550000}', "5"], None, ""), ([], None, END)],
    ),
    (
        ["Safe"],
        {"code": 4},
        [call("turn", to=3), call("turn", to=4), "done"],
        [(["still closed"], None, ""), (["open"], None, ""), ([], 1.0, END)],
    ),
    (
        ["Guess"],
        {"goal": 3},
        ["1", "7", "3"],
        [(["higher"], 0.0, ""), (["lower"], 0.0, ""), (["right"], 1.0, END)],
    ),
    (["Riddle"], {"answer": "fire"}, ["ice", "fire"], [(["No. Again."], 0.0, ""), ([], 1.0, END)]),
    (
        ["Check"],
        {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "8"}}}},
        [call("check", answer="7"), call("check", answer="8"), "8"],
        [(["wrong"], -0.05, ""), (["right"], 0.0, ""), ([], 1.0, END)],
    ),
    (
        ["Critic"],
        {"label": "7"},
        ["8", "7"],
        [(["Look again."], 0.0, ""), (["Look again."], 1.0, END)],
    ),
    (
        ["Ladder"],
        {"top": 3},
        ["up", "up up"],
        [(["You are at 1."], 0.1, ""), (["You are at 3."], 0.1, END)],
    ),
]


@pytest.mark.parametrize(("names", "row", "turns", "expected"), EPISODES, ids=lambda v: str(v)[:20])
def test_each_shape_is_played_as_documented(
    names: list[str], row: dict[str, Any], turns: list[str], expected: Played, tmp_path: Path
) -> None:
    (code,) = (b for b in blocks("episodes", "python") if f" {names[0]}" in b.split(":\n")[0])
    file = tmp_path / "games.py"
    file.write_text(code)
    role = role_of(places_of(*names, file=file))

    async def go() -> Played:
        player = Player(role, **row)
        await player.open()
        seen = [await player.say(turn) for turn in turns]
        await role.release([player.id])
        return [(said(each), each.reward, each.ended_by) for each in seen]

    assert asyncio.run(go()) == expected
    close(role)
