"""The environment role: runs episodes, enforces their limits, and restores them after a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from stretto.config import EnvironmentConfig
from stretto.environments.executors import EnvironmentExecutor, answer_of, close_all
from stretto.environments.results import CHARACTERS_PER_TOKEN, error_text, summed
from stretto.errors import ConfigError, EpisodeLostError, RewardError, TaskError
from stretto.plain import plain
from stretto.scoring.conventions import Verdict
from stretto.scoring.functions import FunctionScorer
from stretto.tasks.messages import TOOLS, arguments_in, tools_in
from stretto.tasks.task import INDEX_KEY
from stretto.types import (
    FORKS,
    FinishReason,
    Message,
    Observation,
    Prompt,
    Response,
    episode_of,
    fork_id,
    sampled_of,
)
from stretto.workers.child import ProcessLostError

if TYPE_CHECKING:
    from stretto.environments.bridge import Bridge, Turn
    from stretto.tasks.encode import Encoder

LOSSES = 5
"""Processes of one place that may be lost in a row. Any answer resets the count."""

_NO_TOKENS = np.empty(0, np.int32)
_log = logging.getLogger(__name__)

Answer = Mapping[str, Any]


@dataclass
class _Live:
    """State of a live episode: its process, transcript and replay log."""

    id: int
    place: int
    row: dict[str, Any]
    messages: list[Message]
    began_s: float
    prompt: Prompt  # after the environment's opening
    bridge: Bridge  # with the row's template arguments
    asked: list[Message] = field(default_factory=list)  # messages passed to the environment
    begun: list[Message] = field(default_factory=list)  # messages after its opening
    starts: int = -1  # ``EnvironmentExecutor.starts`` when the episode was opened
    number: int = 0
    turns: int = 0
    forks: int = 0
    tools: Any = None  # schemas of this episode; None: those of the bridge
    samples: set[int] = field(default_factory=set)
    history: list[tuple[dict[str, Any], Answer]] = field(default_factory=list)


class EnvironmentRole:
    """Answers the turns of episodes (see :class:`stretto.protocols.Environment`).

    An error of user code, or a call that timed out, becomes an observation for the policy, and is
    recorded. If the process of an episode is lost, another one starts, and the episode is restored
    in it as ``environment.replay`` says.

    Args:
        places: started places for episodes. All episodes of a group share one.
        max_prompt_tokens: limit of a prompt that an environment changes or a fork begins with.
        judges: reward functions that take environments. The places must have them, too.

    Attributes:
        tools_column: column of rows that bring their own tool schemas.
    """

    tools_column = TOOLS

    def __init__(
        self,
        config: EnvironmentConfig,
        places: Sequence[EnvironmentExecutor],
        bridge: Bridge,
        encoder: Encoder,
        max_prompt_tokens: int,
        judges: Sequence[FunctionScorer] = (),
    ) -> None:
        self._config = config
        self._places = places
        self._bridge = bridge
        self._encoder, self._max_prompt_tokens = encoder, max_prompt_tokens
        self._judges = judges
        self._episodes: dict[int, _Live] = {}
        self._losses = [0] * len(places)
        self._lost_starts = [0] * len(places)  # ``starts`` at the last counted loss
        ready = places[0].ready
        self._functions = ready["kind"] == "functions"
        default_replay = ready["replay"] or ("recorded" if self._functions else "pure")
        self._replay = default_replay if config.replay == "auto" else config.replay

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        """Open the episode of a response, or restore it from its log in a new environment."""
        prompt = response.prompt
        data = {key: value for key, value in prompt.data.items() if key != INDEX_KEY}
        said = _conversation(prompt)
        live = _Live(
            id=episode_of(response.id),
            place=response.group % len(self._places),
            row=cast(dict[str, Any], plain(data)),
            messages=said,
            began_s=time.monotonic(),
            prompt=log[0].prompt or prompt if log else prompt,
            bridge=self._bridge.of(arguments_in(data)),
            asked=list(said),
            samples={response.id},
        )
        if log:
            live.begun = _conversation(live.prompt)
            live.messages = list(live.begun)
            try:
                await self._reopen(live)
                self._take_up(live, response, log)
                await self._replayed(live)
            except ProcessLostError as error:
                raise self._lost(response.id, str(error)) from error
            self._episodes[live.id] = live
            return log[-1]
        opening = await self._ask(live, None)
        if "error" in opening:
            said = opening.get("place") or opening["error"]
            why = f"the environment could not be opened: {said}; {_columns(live.row)}"
            return Observation(
                response.id, 0, _NO_TOKENS, ended_by="environment", record={"failure": why}
            )
        self._episodes[live.id] = live
        new_prompt = self._changed(live, prompt, opening)
        live.prompt = new_prompt or prompt
        return Observation(response.id, 0, _NO_TOKENS, prompt=new_prompt)

    async def step(self, response: Response) -> Observation:
        """Answer the last turn of a response.

        Raises ConfigError if the template would rewrite earlier tokens and ``on_break = 'refuse'``.
        """
        live = self._episodes.get(episode_of(response.id))
        if live is None:
            raise self._lost(response.id, "it was not opened")
        live.samples.add(response.id)
        cut = response.finish is FinishReason.LENGTH
        turn_tokens = response.tokens[response.turn_start :].tolist()
        turn = live.bridge.parse(turn_tokens, ended=not cut, tools=live.tools)
        why = limit_of(response, live.turns, live.began_s, self._config)
        turn_data = _as_plain(turn, live.turns, response, cut=cut)
        live.turns += 1
        answer: Answer = {"messages": [], "done": not turn.calls, "reward": None, "calls": []}
        if not self._functions or (turn.calls and not why):
            answer = self._read(await self._ask(live, turn_data))
        reward, failure = answer["reward"], answer.get("failure")
        if why and not (answer["done"] or self._functions):
            final = await self._ask(live, {"do": "finish"})
            reward, failure = summed(reward, final.get("reward")), final.get("failure", failure)
        live.history.append((turn_data, answer))
        if answer["done"] and not cut:
            why = "environment"
        record = {"calls": answer["calls"], "read_as": answer.get("read_as"), "failure": failure}
        observation = Observation(
            response.id,
            live.number + 1,
            _NO_TOKENS,
            reward=reward,
            ended_by=why,
            messages=(turn.message, *answer["messages"]),
            record={key: value for key, value in record.items() if value},
        )
        observation = await self._appended(live, response, observation)
        if observation.ended_by and self._judges:
            observation = await self._judged(live, response, observation)
        live.number = observation.number
        live.messages += (*observation.left, *observation.messages)
        return observation

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Drop samples, and close the episodes that have none left. Unknown ids are ignored."""
        closing = []
        for rollout_id in rollout_ids:
            live = self._episodes.get(episode_of(rollout_id))
            if live is None:
                continue
            live.samples.discard(rollout_id)
            if not live.samples:
                del self._episodes[live.id]
                if live.starts == self._places[live.place].starts:
                    closing.append(self._close(live))
        await asyncio.gather(*closing)

    def close(self) -> None:
        close_all(self._places)

    async def _appended(self, live: _Live, response: Response, reply: Observation) -> Observation:
        if reply.ended_by:
            return reply
        standing = [*response.prompt.tokens, *response.tokens.tolist()]
        new_messages = reply.messages[1:]
        context = live.bridge.context(standing, new_messages, prompt=_conversation(response.prompt))
        if context is None:
            if self._config.on_break == "refuse":
                raise ConfigError(
                    f"environment.on_break = 'refuse': {live.bridge.breaks}",
                    "template-rewrites-history",
                )
            prompt = self._rendered(live, response.prompt, [*live.messages, *reply.messages])
            if len(prompt.tokens) <= self._max_prompt_tokens:
                live.forks += 1
                fork = fork_id(live.id, live.forks)
                live.samples.add(fork)
                return replace(
                    reply, rollout_id=fork, prompt=prompt, messages=(), left=reply.messages
                )
        elif response.sampling is None or (
            len(response) + len(context) < response.sampling.max_new_tokens
        ):
            return replace(reply, tokens=np.array(context, np.int32))
        # The answer does not fit the context: end without it, because the policy cannot read it.
        final = await self._ask(live, {"do": "finish"})
        reward = summed(reply.reward, final.get("reward"))
        failure = {"failure": final["failure"]} if "failure" in final else {}
        return replace(
            reply,
            reward=reward,
            ended_by="tokens",
            messages=reply.messages[:1],
            record={**reply.record, **failure},
        )

    async def _judged(self, live: _Live, response: Response, reply: Observation) -> Observation:
        messages = (*live.messages[len(live.begun) :], *reply.messages)
        cut = response.finish is FinishReason.LENGTH
        finish = FinishReason.LENGTH if cut else FinishReason.STOP
        episode_response = replace(response, prompt=live.prompt, finish=finish, messages=messages)
        scores: dict[str, Verdict] = {}
        samples = {}
        for judge in self._judges:
            try:
                samples[judge.name] = judge.sample(episode_response)
            except RewardError as error:
                scores[judge.name] = {"error": str(error)}
        answer = await self._ask(live, {"do": "score", "samples": samples})
        failed = {"error": answer.get("error")}
        scores |= answer.get("scores") or dict.fromkeys(samples, failed)
        for judge in self._judges:
            if (why := scores[judge.name].get("error")) is not None:
                scores[judge.name] = {"error": judge.failure(episode_response, why)}
        return replace(reply, record={**reply.record, "scores": scores})

    def _changed(self, live: _Live, prompt: Prompt, opening: Answer) -> Prompt | None:
        """Return the prompt after the environment's opening, or ``None`` if it is unchanged."""
        live.begun = _begun(live, opening)
        live.messages = list(live.begun)
        if live.messages == live.asked and not opening["tools"]:
            return None
        new_prompt = self._rendered(live, prompt, live.messages)
        if len(new_prompt.tokens) > self._max_prompt_tokens:
            raise TaskError(
                f"an environment made a prompt of {len(new_prompt.tokens)} tokens, and "
                f"task.max_prompt_tokens = {self._max_prompt_tokens}; raise that limit (in a "
                "trainer in TRL's form, the longest prompt and some more), or let the environment "
                "say less when it is opened",
                "prompts-too-long",
            )
        return new_prompt

    def _rendered(self, live: _Live, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        ids, text = live.bridge.prompt(messages, live.tools)
        return replace(prompt, tokens=tuple(ids), text=text, messages=tuple(messages))

    def _read(self, answer: Answer) -> Answer:
        """Shorten the messages of an answer. An error of the environment becomes a message."""
        if "error" in answer:
            message = {"role": "user", "content": error_text(answer["error"])}
            calls = [{"name": "step", "status": "ok", "error": answer["place"]}]
            answer = {"messages": [message], "done": False, "reward": None, "calls": calls}
        return {**answer, "messages": list(map(self._shortened, answer["messages"]))}

    def _shortened(self, message: Mapping[str, Any]) -> Message:
        limit, text = self._config.max_observation_tokens, message["content"]
        excess, content = message.get("left_out", 0), text[: CHARACTERS_PER_TOKEN * limit]
        excess += len(text) - len(content)
        while count := len(self._encoder.ids(self._encoder.escape(content))):
            if count <= limit:
                break
            shorter = content[: min(len(content) * limit // count, len(content) - 1)]
            excess, content = excess + len(content) - len(shorter), shorter
        if excess:
            content = f"{content}\n[{excess} more characters were left out]"
        other_fields = {key: value for key, value in message.items() if key != "left_out"}
        return cast(Message, {**other_fields, "content": content})

    async def _ask(self, live: _Live, body: Mapping[str, Any] | None) -> Answer:
        """Return the answer to a body (None: the opening). After a loss, restore and retry once."""
        reason = ""
        for _ in range(2):
            try:
                if body is None:
                    return await self._opened(live)
                await self._start(live)
                if live.starts != self._places[live.place].starts:
                    await self._reopen(live)
                    await self._replayed(live)
                request = body if "do" in body else {"do": "step", "turn": body}
                return await self._answer(live, request)
            except ProcessLostError as error:
                live.starts, reason = -1, str(error)
            except asyncio.CancelledError:
                live.starts = -1  # its state is unknown: the step may have run
                raise
        if body is not None and body.get("do") == "score":
            return {"error": reason}
        if body is None or not self._functions:
            raise self._lost(live.id, reason)
        failure = f"the process of the tools was lost: {reason}"
        messages = [
            {"role": "tool", "name": call["name"], "content": error_text(failure)}
            | ({"tool_call_id": call["id"]} if call["id"] else {})
            for call in body["calls"]
        ]
        records = [
            {key: call[key] for key in ("name", "arguments", "status")} | {"error": failure}
            for call in body["calls"]
        ]
        return {"messages": messages, "done": False, "reward": None, "calls": records}

    async def _start(self, live: _Live) -> int:
        place = self._places[live.place]
        try:
            await asyncio.to_thread(place.start)
        except ProcessLostError as error:
            self._count_loss(live, place.starts, error)
            raise
        return place.starts

    async def _opened(self, live: _Live) -> Answer:
        starts = await self._start(live)
        request = {"do": "open", "row": live.row, "messages": live.asked}
        opening = await self._answer(live, request)
        live.starts, live.tools = starts, opening.get("tools")
        if row_tools := tools_in(live.row, self.tools_column):
            episode_tools = self._places[0].ready["tools"] if live.tools is None else live.tools
            live.tools = [*episode_tools, *row_tools]
        return opening

    async def _answer(self, live: _Live, body: Mapping[str, Any]) -> Answer:
        """Wait for an answer. Raises ProcessLostError, or RewardError after too many losses."""
        place = self._places[live.place]
        starts = place.starts
        try:
            answer = await answer_of(place, {**body, "episode": live.id})
        except ProcessLostError as error:
            self._count_loss(live, starts, error)
            raise
        self._losses[live.place] = 0
        return answer

    def _count_loss(self, live: _Live, starts: int, error: ProcessLostError) -> None:
        """Count a lost process once, not per call. RewardError after more than :data:`LOSSES`."""
        if starts <= self._lost_starts[live.place]:
            return
        self._lost_starts[live.place] = starts
        self._losses[live.place] += 1
        _log.warning("a process of environments was lost: %s", error)
        if self._losses[live.place] > LOSSES:
            raise RewardError(
                f"{self._losses[live.place]} processes of environments were lost in a row; the "
                f"last: {error}. See standard error for the cause, and the machine's log if it "
                "was out of memory",
                [live.id],
                "environment-keeps-ending",
            ) from error

    async def _close(self, live: _Live) -> None:
        try:
            answer = await self._answer(live, {"do": "close"})
        except ProcessLostError:
            return
        if "error" in answer:
            _log.warning("an episode of rollout %d did not close: %s", live.id, answer["place"])

    async def _reopen(self, live: _Live) -> None:
        """Open an episode again, before :meth:`_replayed` repeats its turns."""
        if self._replay == "no":
            raise self._lost(live.id, "environment.replay = 'no'")
        opening = await self._opened(live)
        if "error" in opening:
            raise self._lost(live.id, str(opening["error"]))
        if self._replay == "pure" and _begun(live, opening) != live.begun:
            live.starts = -1
            raise self._lost(live.id, "it has another opening than it had")

    async def _replayed(self, live: _Live) -> None:
        if self._replay == "recorded":
            return
        for number, (turn_data, expected) in enumerate(live.history, 1):
            answer = self._read(await self._answer(live, {"do": "step", "turn": turn_data}))
            if any(answer[key] != expected[key] for key in ("messages", "reward")):
                live.starts = -1
                raise self._lost(live.id, f"turn {number} has another answer than it had")

    def _take_up(self, live: _Live, response: Response, log: Sequence[Observation]) -> None:
        live.turns, live.number = len(log) - 1, log[-1].number
        live.messages += [message for entry in log for message in (*entry.left, *entry.messages)]
        live.samples |= {entry.rollout_id for entry in log}
        live.forks = max(abs(sample - live.id) for sample in live.samples) // FORKS
        if self._replay == "recorded":
            return
        turns = _turns(response)
        if len(turns) < len(log) - 1:
            raise self._lost(response.id, "some of its turns are in other samples")
        for at, entry in enumerate(log[1:]):
            turn = live.bridge.parse(turns[at], ended=True, tools=live.tools)
            answer = {"messages": list((*entry.left, *entry.messages)[1:]), "reward": entry.reward}
            turn_data = _as_plain(turn, at, response, cut=False, tokens=turns[at])
            live.history.append((turn_data, answer))

    def _lost(self, rollout_id: int, reason: str) -> EpisodeLostError:
        return EpisodeLostError(
            f"the episode of rollout {rollout_id} cannot go on in another environment: {reason}",
            [rollout_id],
            "episode-lost",
        )


def limit_of(response: Response, turns: int, began_s: float, config: EnvironmentConfig) -> str:
    """Return the limit that makes the last turn of a response the episode's last, or ``''``.

    ``turns`` were answered before this one. ``began_s`` is by the monotonic clock.
    """
    if response.finish is FinishReason.LENGTH:
        sampling = response.sampling
        is_full = sampling is None or len(response) >= sampling.max_new_tokens
        return "tokens" if is_full else "turn_tokens"
    if turns + 1 >= config.max_turns:
        return "turns"
    over = config.max_seconds and time.monotonic() - began_s > config.max_seconds
    return "seconds" if over else ""


def _columns(row: Mapping[str, Any]) -> str:
    names = [f"'{name}'" for name in row]
    return f"its row has {'only ' if len(names) == 1 else ''}{', '.join(names) or 'no columns'}"


def _conversation(prompt: Prompt) -> list[Message]:
    if prompt.messages is not None:
        return list(prompt.messages)
    return [Message(role="user", content=prompt.text)]


def _begun(live: _Live, opening: Answer) -> list[Message]:
    messages = live.asked if opening["conversation"] is None else opening["conversation"]
    if text := opening["text"]:
        messages = _joined(messages, text)
    return [*messages, *opening["messages"]]


def _joined(messages: Sequence[Message], text: str) -> list[Message]:
    """Append a text to the last message if it is the user's, or else add a user message."""
    if messages and messages[-1]["role"] == "user":
        last = Message(**{**messages[-1], "content": messages[-1]["content"] + text})
        return [*messages[:-1], last]
    return [*messages, Message(role="user", content=text)]


def _turns(response: Response) -> list[list[int]]:
    """Return the tokens of each turn of a response, including an unfinished one."""
    mask = sampled_of(response)
    starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
    ends = np.flatnonzero(np.diff(mask, append=False) & mask) + 1
    return [response.tokens[a:b].tolist() for a, b in zip(starts, ends, strict=True)]


def _as_plain(
    turn: Turn, index: int, response: Response, *, cut: bool, tokens: list[int] | None = None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": turn.text,
        "tokens": response.tokens[response.turn_start :].tolist() if tokens is None else tokens,
        "calls": [{**asdict(call), "arguments": dict(call.arguments)} for call in turn.calls],
        "message": dict(turn.message),
        "finish": "length" if cut else "stop",
    }
