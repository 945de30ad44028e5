"""A bridge of plain text for tests of environments, and episodes of a made-up policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scorer_helpers import byte_tokenizer
from stretto.config import EnvironmentConfig
from stretto.config.sections import reward_source
from stretto.environments.executors import (
    EnvironmentExecutor,
    EnvironmentProcess,
    close_all,
    settings_of,
)
from stretto.environments.role import EnvironmentRole
from stretto.scoring.functions import FunctionScorer, locate
from stretto.tasks.encode import Encoder
from stretto.types import FinishReason, Message, Observation, Prompt, Response, Sampling

WORLDS = Path(__file__).parent / "worlds.py"
ENCODER = Encoder(byte_tokenizer())
END = 1


def ids(text: str) -> list[int]:
    return ENCODER.ids(ENCODER.escape(text))


def text_of(tokens: Sequence[int]) -> str:
    return str(ENCODER.tokenizer.decode([t for t in tokens if t != END]))


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]
    status: str
    raw: str
    id: str = ""


@dataclass(frozen=True)
class Turn:
    text: str
    message: Message
    calls: tuple[Call, ...]


class PlainBridge:
    """Turns as '[role] content' and calls as '{"name": ..., "arguments": ...}' in brackets «»."""

    breaks: str | None = None

    def of(self, _: object) -> PlainBridge:
        return self

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], str]:
        told = f"[tools {json.dumps(tools)}]" if tools else ""
        text = told + "".join(f"[{m['role']}] {m['content']}\n" for m in messages)
        return ids(text), text

    def parse(self, tokens: Sequence[int], *, ended: bool, tools: Any = None) -> Turn:
        text = text_of(tokens)
        calls = []
        for raw in re.findall(r"«([^«»]*)»?", text):
            try:
                call = json.loads(raw)
                calls.append(Call(call["name"], call["arguments"], "ok", raw))
            except ValueError:
                calls.append(Call("", {}, "invalid" if ended else "unclosed", raw))
        return Turn(text, Message(role="assistant", content=text), tuple(calls))

    def context(
        self, standing: Sequence[int], messages: Sequence[Message], *, prompt: Any = None
    ) -> list[int] | None:
        if any("break" in m["content"] for m in messages):
            return None
        return ids("".join(f"\n[{m['role']}] {m['content']}" for m in messages) + "\n")


def call(name: str, /, **arguments: Any) -> str:
    return f"«{json.dumps({'name': name, 'arguments': arguments})}»"


def places_of(
    *names: str,
    file: Path = WORLDS,
    config: EnvironmentConfig | None = None,
    judges: Sequence[str] = (),
    reward_timeout_s: float = 5.0,
) -> list[EnvironmentExecutor]:
    """The started process of what is named in a file, and of reward functions of that file."""
    config = config or EnvironmentConfig()
    sources = {name: locate(reward_source(f"{file}:{name}")) for name in names}
    settings = {**settings_of(config), "reward_timeout_s": reward_timeout_s}
    judged = {f"{file}:{name}": locate(reward_source(f"{file}:{name}")) for name in judges}
    opening = {"sources": sources, "settings": settings, "judges": judged}
    places: list[EnvironmentExecutor] = [
        EnvironmentProcess(opening) for _ in range(config.processes)
    ]
    for place in places:
        place.start()
    return places


def role_of(
    places: Sequence[EnvironmentExecutor],
    config: EnvironmentConfig | None = None,
    bridge: Any = None,
    judges: Sequence[FunctionScorer] = (),
) -> EnvironmentRole:
    made: Any = bridge or PlainBridge()
    return EnvironmentRole(config or EnvironmentConfig(), places, made, ENCODER, 400, judges)


def close(role: EnvironmentRole) -> None:
    close_all([client.executor for client in role._clients])


class Player:
    """An episode, whose turns are given as text."""

    def __init__(
        self,
        role: EnvironmentRole,
        id_: int = 1,
        *,
        most: int = 5000,
        asked: str = "go",
        **data: Any,
    ) -> None:
        tokens, text = PlainBridge().prompt([Message(role="user", content=asked)])
        self.prompt = Prompt(
            id_,
            tuple(tokens),
            text,
            (Message(role="user", content=asked),),
            data={**data, "_index": 0},
        )
        self.role, self.id, self.most, self.asked = role, id_, most, self.prompt
        self.tokens: list[int] = []
        self.sampled: list[bool] = []
        self.log: list[Observation] = []

    def response(self, finish: FinishReason | None = None) -> Response:
        return Response(
            self.id,
            0,
            self.prompt,
            np.array(self.tokens, np.int32),
            0,
            finish,
            np.array(self.sampled, np.bool_),
            Sampling(self.most, max_turn_tokens=100),
        )

    async def open(self) -> Observation:
        return self._take(await self.role.open(self.response()))

    async def resume(self, role: EnvironmentRole) -> Observation:
        """Go on with another role, as a run does that was started again."""
        self.role = role
        return await role.open(replace(self.response(), prompt=self.asked), self.log)

    async def say(self, text: str, *, cut: bool = False) -> Observation:
        drawn = ids(text) + ([] if cut else [END])
        self.tokens += drawn
        self.sampled += [True] * len(drawn)
        finish = FinishReason.LENGTH if cut else FinishReason.TURN
        return self._take(await self.role.step(self.response(finish)))

    def _take(self, seen: Observation) -> Observation:
        self.log.append(seen)
        if seen.prompt is not None and seen.rollout_id == self.id:
            self.prompt = seen.prompt
        self.tokens += seen.tokens.tolist()
        self.sampled += [False] * len(seen.tokens)
        return seen


def said(seen: Observation) -> list[str]:
    """What answered a turn."""
    return [m["content"] for m in seen.messages[1:]]
