"""A schedule that plays scripted turns, a bridge for bytes, and programs in this process."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stretto.environments.program import PlacedPrograms, ProgramEnvironment
from stretto.environments.sessions import EpisodeLimits, Sessions
from stretto.errors import EngineError
from stretto.models.tiny import byte_tokenizer
from stretto.saying import Say, silent
from stretto.schedules.rollout import Rollout
from stretto.tasks.encode import Encoder
from stretto.types import Chunk, FinishReason, Message, Observation, Prompt, Sampling

TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = "{{ messages }}"  # which the bridge has in place of
END: int = TOKENIZER.eos_token_id  # type: ignore[assignment]
CALL = "!"
"""What a turn that calls a tool begins with; a name and JSON follow."""

Program = Callable[[Mapping[str, Any], str, str], Awaitable[Any]]


@dataclass
class Said:
    message: Message


class ByteBridge:
    """Messages are '<role>content' and a line break; turns end with the end token.

    A message with 'rewrite' in its content cannot follow what stands.
    """

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], str]:
        offered = f"[{','.join(t['function']['name'] for t in tools)}]" if tools else ""
        text = offered + "".join(self._shown(m) for m in messages) + "<assistant>"
        return list(text.encode()), text

    def _shown(self, message: Message) -> str:
        said = message["content"]
        for call in message.get("tool_calls", []):
            function = call["function"]
            said += f"{CALL}{function['name']} {json.dumps(function['arguments'])}"
        return f"<{message['role']}>{said}\n"

    def of(self, *_: object) -> ByteBridge:
        return self

    def parse(self, ids: Sequence[int], *, ended: bool, tools: object = None) -> Said:
        text = bytes(i for i in ids if i < 256).decode(errors="replace")
        said, mark, call = text.partition(CALL)
        name, _, arguments = call.partition(" ")
        if not (mark and ended):
            return Said(Message(role="assistant", content=text))
        function = {"name": name, "arguments": json.loads(arguments)}
        made = {"id": "c1", "type": "function", "function": function}
        return Said(Message(role="assistant", content=said, tool_calls=[made]))

    def context(
        self, standing: Sequence[int], messages: Sequence[Message], *, prompt: object
    ) -> list[int] | None:
        if any("rewrite" in m["content"] for m in messages):
            return None
        return list(("\n" + "".join(map(self._shown, messages)) + "<assistant>").encode())


class Here(PlacedPrograms):
    """Runs a program as a task of this process."""

    def __init__(self, program: Program) -> None:
        self.program = program

    async def run(self, group: int, data: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        try:
            return await self.program(data, base_url, api_key)
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error


@dataclass
class Played:
    """What has come of an episode."""

    rollouts: dict[int, Rollout] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)

    @property
    def end(self) -> Observation:
        return self.observations[-1]

    def texts(self) -> list[str]:
        """Prompt and response of each sample: what the policy drew is in brackets, and an end token
        that it reads is a '|'.
        """
        found = []
        for r in self.rollouts.values():
            text, before = "".join("|" if t == END else chr(t) for t in r.prompt.tokens), False
            for token, drawn in zip(r.tokens, r.sampled.tolist(), strict=True):
                text += ("[" if drawn and not before else "") + (
                    "]" if token == END else chr(token)
                )
                before = drawn and token != END
            found.append(text)
        return found


def sessions(response: int = 400, prompt: int = 200, say: Say = silent, **options: Any) -> Sessions:
    bridges: Any = ByteBridge()
    return Sessions(bridges, Encoder(TOKENIZER), EpisodeLimits(prompt, response, **options), say)


async def played(
    environment: ProgramEnvironment,
    turns: Iterable[str],
    id_: int = 7,
    between: Callable[[], Awaitable[None]] | None = None,
    answer: str = "42",
) -> Played:
    """Play a schedule's part; a turn that ends with '…' was cut off by the limit, one that ends
    with '|' by a stop string.
    """
    asked = Prompt(id_, tuple(b"Q"), "Q", data={"answer": answer})
    sampling = Sampling(400, max_turn_tokens=100)
    found, script = Played(), iter(turns)
    before: Rollout | None = None
    found.rollouts[id_] = Rollout(id_, asked, 0, sampling=sampling)
    observation = await environment.open(found.rollouts[id_].response(text=True))
    while True:
        found.observations.append(observation)
        if observation.ended_by:
            found.rollouts[observation.rollout_id].log.append(observation)
            break
        if observation.prompt:
            known = found.rollouts.get(observation.rollout_id)
            rollout = known or Rollout(observation.rollout_id, asked, 0, sampling=sampling)
            rollout.prompt = observation.prompt
            found.rollouts[observation.rollout_id] = rollout
        if before:
            before.left = observation.left
        before = rollout = found.rollouts[observation.rollout_id]
        rollout.append(rollout.observe(observation))
        if between:
            await between()
        text = next(script)
        cut = text.endswith("…")
        whole = not (cut or text.endswith("|"))
        tokens = list(text.rstrip("…|").encode()) + ([END] if whole else [])
        logprobs = (np.arange(len(tokens)) / -8).astype(np.float32)
        finish = FinishReason.LENGTH if cut else FinishReason.TURN
        start = len(rollout)
        rollout.append(Chunk(rollout.id, start, np.array(tokens, "i4"), logprobs, 3, finish))
        response = rollout.response(text=True)
        ended = replace(response, finish=FinishReason.LENGTH) if cut else response
        observation = await environment.step(ended)
    await environment.release(list(found.rollouts))
    return found
