"""The recipe 'calculator': its rows show what a run would hold."""

from __future__ import annotations

import json

from stretto.config.recipes import PACKAGED
from stretto.environments.calls import HERMES
from stretto.recipes.calculator import multiply


def test_demonstrations_are_what_the_tool_would_answer() -> None:
    rows = [json.loads(line) for line in (PACKAGED / "calculator.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        call, result, answer = row["shown"]
        asked = json.loads(call["content"].split("\n")[1])
        product = str(multiply(**asked["arguments"]))
        assert call["content"] == HERMES.write([asked])
        assert row["prompt"] == "What is {a} times {b}?".format(**asked["arguments"])
        assert row["answer"] == result["content"] == product
        assert answer["content"].endswith(f" is {product}.")
