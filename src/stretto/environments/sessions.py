"""Sessions: match each request of a program to the sample it continues.

A program that runs its own loop sends complete conversations or token ids. Known tokens are never
tokenised again. A request *extends* the sample whose tokens are its prefix. Without such a sample
(another conversation, or an edited past) it begins a new one, a *fork*.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from stretto.config.sections import ARGUMENTS
from stretto.environments.bridge import Bridge
from stretto.environments.renderer import open_bridge
from stretto.environments.templates import Tools
from stretto.errors import EngineError
from stretto.saying import Say, silent
from stretto.scoring.response_buffer import before_stop, response_text
from stretto.tasks.encode import Encoder
from stretto.tasks.messages import arguments_in
from stretto.types import (
    Chunk,
    FinishReason,
    FloatArray,
    Message,
    Observation,
    Response,
    Sampling,
    fork_id,
)


class Bridges:
    """Bridges of a chat template, made on first use: one with tools and one without."""

    def __init__(self, encoder: Encoder, ends: frozenset[int], stop: Sequence[str] = ()) -> None:
        self._encoder = encoder
        self._ends = ends
        self._stop = stop
        self._made: dict[bool, Bridge] = {}

    def of(
        self,
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Bridge:
        """Return the bridge for conversations with or without tools, and with these arguments.

        Raises ConfigError if the template does not work, TaskError if only not with the arguments.
        """
        with_tools = bool(tools)
        if with_tools not in self._made:
            self._made[with_tools] = open_bridge(self._encoder, tools, self._ends, self._stop)
        return self._made[with_tools].of(arguments)


class _Read(NamedTuple):
    """A rendered conversation: all its messages, the new ones, and its tools."""

    messages: tuple[Message, ...]
    new: tuple[Message, ...]
    tools: Tools


_PLAIN = Sampling(1).distribution  # of requests without sampling parameters


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits and sampling settings of an episode.

    Attributes:
        prompt, response: most tokens of a sample's prompt, and of the rest.
        on_break: as in the settings ``environment``.
        distribution: the run's, as in :class:`Sampling`. Every turn is drawn from it.
        stop: the run's strings that end a turn. They are not part of its text.
    """

    prompt: int
    response: int
    on_break: Literal["fork", "refuse"] = "fork"
    distribution: tuple[float, int, float] = _PLAIN
    stop: tuple[str, ...] = ()


class Asked:
    """A pending request, and the stream of its answer, which is one chunk."""

    def __init__(
        self, session: Session, tokens: tuple[int, ...], most: int, stop: tuple[str, ...]
    ) -> None:
        self.tokens = tokens
        self.most = most
        self.stop = stop
        self.is_open = True
        self._session = session
        self._answer: asyncio.Future[Chunk] = asyncio.get_running_loop().create_future()

    def answer(self, chunk: Chunk) -> None:
        if not self._answer.done():
            self._answer.set_result(chunk)

    def refuse(self, error: EngineError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    @property
    def turn(self) -> Chunk | None:
        answer = self._answer
        return answer.result() if answer.done() and not answer.exception() else None

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Yield the turn. Raises EngineError if the request was refused."""
        chunk = await asyncio.shield(self._answer)
        self.is_open = False
        yield 0, chunk

    def abort(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        """Give up the request, unless its answer was read."""
        if self.is_open:
            self.is_open = False
            self._session.gone(self)
        if self._answer.done() and not self._answer.cancelled():
            self._answer.exception()  # retrieved, so that asyncio does not warn


class _Known:
    """A conversation with known tokens: up to the end of a turn, or up to a turn's header."""

    def __init__(
        self, messages: Sequence[str], tools: str, tokens: tuple[int, ...], after_turn: bool
    ) -> None:
        self.messages = list(messages)
        self.tools = tools
        self.tokens = tokens
        self.after_turn = after_turn

    def rest_of(self, messages: Sequence[str], tools: str) -> int | None:
        """Return how many messages a conversation adds to this one, or ``None`` if it does not."""
        length = len(self.messages)
        if tools != self.tools or list(messages[:length]) != self.messages:
            return None
        rest = len(messages) - length
        return rest if (rest > 0) == self.after_turn else None


class Session:
    """One episode of a program: its samples and its pending requests.

    It is the server's engine for this program (``longest``, ``version``, :meth:`submit`), and the
    schedule's view of the program (:meth:`next`, :meth:`deliver`).

    Attributes:
        key: unguessable part of its URL.
        root: id of the episode, and of its first sample.
        longest: most tokens of prompt and answer together.
        most: answers per request.
        note: reports fields of requests that have no effect.
        version: of the weights that sampled the last turn.
        answers: ids of the answers so far, in order.
        stop: strings that end a turn. They are not part of its text.
        limit: the limit that ended the episode, or empty.
        turns: number of turns answered.
    """

    def __init__(
        self,
        key: str,
        response: Response,
        bridges: Bridges,
        encoder: Encoder,
        limits: EpisodeLimits,
        note: Callable[[Collection[str]], None],
    ) -> None:
        self.key, self.root = key, response.id
        self.longest, self.version = limits.prompt + limits.response, response.version
        self.answers: list[str] = []
        self.most = 1
        self.stop = limits.stop
        self.limit = ""
        self.turns = 0
        self._refused = False
        self._asked_prompt = response.prompt
        self._bridges = bridges
        self._encoder = encoder
        self._limits, self.note = limits, note
        self._arguments = arguments_in(response.prompt.data)
        self._standing: dict[int, tuple[int, ...]] = {}
        self._responses: dict[int, int] = {}  # number of tokens after the prompt
        self._known: list[_Known] = []
        self._read: dict[tuple[int, ...], _Read] = {}
        self._unsaid: dict[int, Message] = {}  # turns not yet in an observation
        self._last = response.id  # whose turn was sampled last
        self._waiting: list[Asked] = []
        self._current: Asked | None = None
        self._lost: tuple[tuple[int, ...], Chunk] | None = None
        self._came = asyncio.Event()
        self._number, self._forks = -1, 0
        self._closed: EngineError | None = None

    # -- for the server ----------------------------------------------------------------------------

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation. Tokens of a known beginning are reused.

        Raises EngineError if the template rewrites those and ``on_break = 'refuse'``, and
        ConfigError if it cannot render conversations.
        """
        bridge = self._bridges.of(tools, self._arguments)
        keys, tools_key = [_key(m) for m in messages], _canonical(list(tools))
        for conversation in sorted(self._known, key=lambda k: len(k.messages), reverse=True):
            rest = conversation.rest_of(keys, tools_key)
            if rest is None:
                continue
            context: list[int] | None = []
            new = tuple(messages[len(messages) - rest :]) if rest else ()
            if rest:
                context = bridge.context(conversation.tokens, new, prompt=messages)
            if context is not None:
                tokens = (*conversation.tokens, *context)
                self._read[tokens] = _Read(tuple(messages), new, tools)
                return tokens
            if self._limits.on_break == "refuse":
                raise _broken_off(new)
        tokens = tuple(bridge.prompt(messages, tools)[0])
        self._read[tokens] = _Read(tuple(messages), (), tools)
        return tokens

    def arguments_of(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row's template arguments. Those of a request are ignored, and noted."""
        template_arguments = {**self._encoder.arguments, **self._arguments}
        if {**template_arguments, **arguments} != template_arguments:
            self.note([ARGUMENTS])
        return self._arguments

    def said(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        message: Message,
        tokens: Sequence[int],
        turn: Sequence[int],
    ) -> None:
        """Remember a turn with its message, as the program received it."""
        keys = [_key(m) for m in messages]
        tools_key = _canonical(list(tools))
        before = tuple(tokens)
        after = _Known([*keys, _key(message)], tools_key, (*before, *turn), True)
        self._known += [_Known(keys, tools_key, before, False), after]

    def submit(self, requests: Sequence[tuple[Sequence[int], Sampling]]) -> Asked:
        """Queue a request. Requests of one session are answered in order, one at a time.

        If the client gave up an equal request, this takes over its place or its answer. Raises
        EngineError if the episode is over.
        """
        (request,) = requests
        tokens, sampling = tuple(request[0]), request[1]
        if sampling.distribution not in (self._limits.distribution, _PLAIN) or sampling.seed:
            self.note(["temperature, top_p, top_k or seed"])
        self.note(["top_logprobs"] if sampling.top_logprobs else [])
        pending = Asked(self, tokens, sampling.max_new_tokens, sampling.stop)
        if self._lost and self._lost[0] == tokens:
            pending.answer(self._lost[1])
            self._lost = None
        elif self._closed:
            self._refused = True
            raise self._closed
        elif self._current and not self._current.is_open and self._current.tokens == tokens:
            self._current = pending
        else:
            self._waiting.append(pending)
            self._came.set()
        return pending

    def gone(self, asked: Asked) -> None:
        """Drop a request whose client has gone. Its turn is kept for a retry."""
        if asked in self._waiting:
            self._waiting.remove(asked)
        elif chunk := asked.turn:
            self._lost = asked.tokens, chunk

    # -- for the schedule --------------------------------------------------------------------------

    async def next(self) -> Observation:
        """Wait for a request that can be answered, and return it as an observation."""
        observation = await self._next()
        turn = self._unsaid.pop(self._last, None)
        return replace(observation, left=(turn,)) if turn else observation

    async def _next(self) -> Observation:
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            pending = self._waiting.pop(0)
            try:
                observation = self._observation(pending.tokens)
                if pending.stop:
                    observation = replace(observation, stop=pending.stop)
                if pending.most < self._limits.response:
                    observation = replace(observation, max_turn_tokens=pending.most)
            except EngineError as error:
                pending.refuse(error)
                continue
            self._current = pending
            return observation

    def deliver(self, response: Response, ended_by: str = "") -> None:
        """Answer the request in progress. ``ended_by`` is the limit that the turn reached."""
        start = response.turn_start
        turn = response.tokens[start:]
        logprobs: FloatArray = np.zeros(len(turn), np.float32)
        if response.logprobs is not None:
            logprobs = response.logprobs[start:]
        cut = response.finish is FinishReason.LENGTH
        finish = FinishReason.LENGTH if cut else FinishReason.STOP
        chunk = Chunk(response.id, 0, turn, logprobs, response.version, finish)
        self._standing[response.id] = (*response.prompt.tokens, *response.tokens.tolist())
        self._responses[response.id] = len(response.tokens)
        self._last = response.id
        self._unsaid[response.id] = self._message(turn.tolist(), ended=not cut)
        self.version, self.turns = response.version, self.turns + 1
        pending, self._current = self._current, None
        if pending and not pending.is_open:  # the client may have sent it again
            tokens = pending.tokens
            pending = next((a for a in self._waiting if a.tokens == tokens), None)
            if pending:
                self._waiting.remove(pending)
            else:
                self._lost = tokens, chunk
        if pending:
            pending.answer(chunk)
        if ended_by:
            self._over(ended_by)

    @property
    def ended_by(self) -> str:
        """The limit that ended the episode, or ``environment`` if the program ended it itself."""
        met = self._refused or self.limit in ("tokens", "turn_tokens")
        return self.limit if self.limit and met else "environment"

    def end(self, rollout_id: int, **fields: Any) -> Observation:
        """Return the observation that ends the episode, after the last turn of a sample."""
        self._number += 1
        self.close()
        messages = tuple(m for m in (self._unsaid.pop(rollout_id, None),) if m)
        empty = np.empty(0, np.int32)
        return Observation(rollout_id, self._number, empty, messages=messages, **fields)

    def close(self) -> None:
        """Refuse all open and later requests."""
        self._closed = self._closed or _over("the episode is over")
        waiting, self._waiting = self._waiting, []
        for pending in [*waiting, *([self._current] if self._current else [])]:
            pending.refuse(self._closed)

    def _over(self, limit: str) -> None:
        self.limit = limit
        self._closed = _over(f"the episode has no more turns; it reached its limit of {limit}")
        for pending in self._waiting:
            self._refused = True
            pending.refuse(self._closed)
        self._waiting.clear()

    def _observation(self, tokens: tuple[int, ...]) -> Observation:
        """Convert a request: to an opening, to context for a sample, or to a fork."""
        read = self._read.get(tokens)
        sample = self._extended(tokens)
        if sample is None:
            return self._begun(tokens, read.messages if read else None)
        context = tokens[len(self._standing[sample]) :]
        room = self._limits.response - self._responses[sample] - len(context)
        if room < 1:
            raise _too_long(len(tokens) + 1, len(tokens) + room)
        new_messages = read.new if read else (Message(role="user", content=self._text(context)),)
        turn = self._unsaid.pop(sample, None)
        self._number += 1
        return Observation(
            sample,
            self._number,
            np.array(context, np.int32),
            messages=(*((turn,) if turn else ()), *new_messages),
        )

    def _extended(self, tokens: tuple[int, ...]) -> int | None:
        """Return the sample whose tokens are the longest proper prefix of these."""
        matches = [
            (len(standing), sample)
            for sample, standing in self._standing.items()
            if len(standing) < len(tokens) and tokens[: len(standing)] == standing
        ]
        return max(matches)[1] if matches else None

    def _begun(self, tokens: tuple[int, ...], messages: tuple[Message, ...] | None) -> Observation:
        """Return the opening of the episode's first sample, or of a fork."""
        if len(tokens) > self._limits.prompt:
            raise _too_long(len(tokens), self._limits.prompt)
        sample = self.root
        if self._number >= 0:
            self._forks += 1
            sample = fork_id(self.root, self._forks)
        self._number += 1
        prompt = replace(
            self._asked_prompt, tokens=tokens, text=self._text(tokens), messages=messages
        )
        return Observation(sample, self._number, np.empty(0, np.int32), prompt)

    def _message(self, turn: Sequence[int], *, ended: bool) -> Message:
        read = self._read.get(self._current.tokens) if self._current else None
        if read is not None:
            bridge = self._bridges.of(read.tools, self._arguments)
            message = bridge.parse(turn, ended=ended, tools=read.tools).message
        else:
            finish, tokenizer = FinishReason.STOP if ended else None, self._encoder.tokenizer
            text = response_text(tokenizer, turn, finish, self.stop)
            message = Message(role="assistant", content=text)
        if ended and self._current:
            message["content"] = before_stop(message["content"], self._current.stop)
        return message

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._encoder.tokenizer.decode(list(tokens)))


class Sessions:
    """The sessions of a run, by key.

    Attributes:
        api_key: required of all requests.
        base_url: of the server, without a session. Empty while it is not running.
        bridges: from messages to tokens.
    """

    def __init__(
        self, bridges: Bridges, encoder: Encoder, limits: EpisodeLimits, say: Say = silent
    ) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self.base_url = ""
        self.bridges = bridges
        self._encoder = encoder
        self._limits = limits
        self._by_key: dict[str, Session] = {}
        self._say, self._noted = say, set[str]()

    def open(self, response: Response) -> Session:
        """Begin the session of an episode."""
        key = secrets.token_urlsafe(12)
        session = Session(key, response, self.bridges, self._encoder, self._limits, self._note)
        self._by_key[key] = session
        return session

    def find(self, key: str) -> Session | None:
        return self._by_key.get(key)

    def _note(self, names: Collection[str]) -> None:
        if new := sorted(set(names) - self._noted):
            self._noted.update(new)
            self._say(
                f"the program's requests set {', '.join(new)[:500]}, without effect: turns are "
                "rendered and sampled as the settings of the run, task and rollout, say"
            )

    def close(self, session: Session) -> None:
        session.close()
        self._by_key.pop(session.key, None)

    def url(self, session: Session) -> str:
        return f"{self.base_url}/e/{session.key}/v1"


def _over(why: str) -> EngineError:
    return EngineError(f"{why}; return the program's reward", "episode-over")


def _too_long(length: int, room: int) -> EngineError:
    return EngineError(
        f"a sample would have {length} tokens where there is room for {room}", "context-length"
    )


def _broken_off(new: Sequence[Message]) -> EngineError:
    why = "the chat template rewrites the conversation so far"
    if any(message["role"] == "assistant" for message in new):
        why = "the request appends a message of the assistant that is no turn of the policy"
    return EngineError(
        f"{why}, and a sample may not be broken off with environment.on_break = 'refuse'",
        "template-breaks",
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _key(message: Mapping[str, Any]) -> str:
    """Return a canonical text of a message. Equivalent messages have the same one."""
    calls = [
        {"id": call.get("id"), **call.get("function", {})}
        for call in message.get("tool_calls") or ()
    ]
    keys = ("name", "tool_call_id", "reasoning_content")
    other_fields = {k: message[k] for k in keys if message.get(k)}
    content = message.get("content") or ""
    return _canonical({"role": message["role"], "content": content, "calls": calls, **other_fields})
