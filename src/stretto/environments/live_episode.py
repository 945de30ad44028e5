"""Live episodes: their requests to environments, and their restoration after a crash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from stretto.environments.bridge import Bridge, Turn
from stretto.environments.executors import Answer, EnvironmentExecutor, answer_of
from stretto.environments.results import error_text
from stretto.errors import EpisodeLostError, RewardError
from stretto.types import FORKS, Message, Observation, Prompt, Response, sampled_of
from stretto.workers.child import ProcessLostError

LOSSES = 5
"""Processes of one executor that may be lost in a row. Any answer resets the count."""

_log = logging.getLogger(__name__)


class ExecutorClient:
    """Sends requests to an executor, restarts its process and counts losses.

    Attributes:
        read: converts the answer to a turn to messages for the policy.
        replay: how episodes are restored, as in the settings ``environment``.
        losses: processes lost since the last answer.
    """

    def __init__(
        self, executor: EnvironmentExecutor, replay: str, read: Callable[[Answer], Answer]
    ) -> None:
        self.executor = executor
        self.read = read
        self.functions = executor.ready["kind"] == "functions"
        default_replay = executor.ready["replay"] or ("recorded" if self.functions else "pure")
        self.replay = default_replay if replay == "auto" else replay
        self.losses = 0
        self._lost_starts = 0  # ``EnvironmentExecutor.starts`` at the last counted loss

    async def start(self, episode: int) -> None:
        """Start the process unless it runs (see :class:`EnvironmentExecutor`)."""
        try:
            await asyncio.to_thread(self.executor.start)
        except ProcessLostError as error:
            self._count_loss(episode, self.executor.starts, error)
            raise

    async def answer(self, episode: int, body: Mapping[str, Any]) -> Answer:
        """Wait for an answer. Raises ProcessLostError, or RewardError after too many losses."""
        starts = self.executor.starts
        try:
            answer = await answer_of(self.executor, {**body, "episode": episode})
        except ProcessLostError as error:
            self._count_loss(episode, starts, error)
            raise
        self.losses = 0
        return answer

    def _count_loss(self, episode: int, starts: int, error: ProcessLostError) -> None:
        """Count a lost process once, not per call. RewardError after more than :data:`LOSSES`."""
        if starts <= self._lost_starts:
            return
        self._lost_starts = starts
        self.losses += 1
        _log.warning("a process of environments was lost: %s", error)
        if self.losses > LOSSES:
            raise RewardError(
                f"{self.losses} processes of environments were lost in a row; the last: {error}. "
                "See standard error for the cause, and the machine's log if it was out of memory",
                [episode],
                "environment-keeps-ending",
            ) from error


@dataclass
class LiveEpisode:
    """State of a live episode: its process, transcript and replay log."""

    id: int
    client: ExecutorClient
    row: dict[str, Any]
    row_tools: Sequence[Mapping[str, Any]]
    asked: list[Message]  # messages passed to the environment
    began_s: float
    prompt: Prompt  # after the environment's opening
    bridge: Bridge  # with the row's template arguments
    samples: set[int]
    messages: list[Message] = field(default_factory=list)
    begun: list[Message] = field(default_factory=list)  # messages after the opening
    starts: int = -1  # ``EnvironmentExecutor.starts`` when the episode was opened
    number: int = 0
    turns: int = 0
    forks: int = 0
    tools: Any = None  # schemas of this episode; None: those of the bridge
    history: list[tuple[dict[str, Any], Answer]] = field(default_factory=list)

    async def request(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a request. If the process is lost, restore the episode and retry
        once.
        """
        reason = ""
        for _ in range(2):
            try:
                if body["do"] == "open":
                    return await self._open()
                await self.client.start(self.id)
                if self.starts != self.client.executor.starts:
                    await self._reopen()
                    await self._replay()
                return await self.client.answer(self.id, body)
            except ProcessLostError as error:
                self.starts, reason = -1, str(error)
            except asyncio.CancelledError:
                self.starts = -1  # its state is unknown: the step may have run
                raise
        if body["do"] == "score":
            return {"error": reason}
        if body["do"] != "step" or not self.client.functions:
            raise episode_lost(self.id, reason)
        return _failed_calls(body["turn"]["calls"], f"the process of the tools was lost: {reason}")

    async def restore(self, response: Response, log: Sequence[Observation]) -> None:
        """Open the episode again and repeat the turns of its log. Raises EpisodeLostError."""
        self.messages = list(self.begun)
        try:
            await self._reopen()
            self._take_up(response, log)
            await self._replay()
        except ProcessLostError as error:
            raise episode_lost(self.id, str(error)) from error

    async def close(self) -> None:
        """Close the episode, unless its process is gone."""
        if self.starts != self.client.executor.starts:
            return
        try:
            answer = await self.client.answer(self.id, {"do": "close"})
        except ProcessLostError:
            return
        if "error" in answer:
            _log.warning("an episode of rollout %d did not close: %s", self.id, answer["place"])

    def opened_with(self, opening: Answer) -> list[Message]:
        """Return the messages after the environment's opening."""
        messages = self.asked if opening["conversation"] is None else opening["conversation"]
        if text := opening["text"]:
            messages = _joined(messages, text)
        return [*messages, *opening["messages"]]

    async def _open(self) -> Answer:
        await self.client.start(self.id)
        starts = self.client.executor.starts
        request = {"do": "open", "row": self.row, "messages": self.asked}
        opening = await self.client.answer(self.id, request)
        self.starts, self.tools = starts, opening.get("tools")
        if self.row_tools:
            ready = self.client.executor.ready
            self.tools = [*(ready["tools"] if self.tools is None else self.tools), *self.row_tools]
        return opening

    async def _reopen(self) -> None:
        """Open the episode again, before :meth:`_replay` repeats its turns."""
        if self.client.replay == "no":
            raise episode_lost(self.id, "environment.replay = 'no'")
        opening = await self._open()
        if "error" in opening:
            raise episode_lost(self.id, str(opening["error"]))
        if self.client.replay == "pure" and self.opened_with(opening) != self.begun:
            self.starts = -1
            raise episode_lost(self.id, "it has another opening than it had")

    async def _replay(self) -> None:
        if self.client.replay == "recorded":
            return
        for number, (turn_data, expected) in enumerate(self.history, 1):
            request = {"do": "step", "turn": turn_data}
            answer = self.client.read(await self.client.answer(self.id, request))
            if any(answer[key] != expected[key] for key in ("messages", "reward")):
                self.starts = -1
                raise episode_lost(self.id, f"turn {number} has another answer than it had")

    def _take_up(self, response: Response, log: Sequence[Observation]) -> None:
        self.turns, self.number = len(log) - 1, log[-1].number
        self.messages += [message for entry in log for message in (*entry.left, *entry.messages)]
        self.samples |= {entry.rollout_id for entry in log}
        self.forks = max(abs(sample - self.id) for sample in self.samples) // FORKS
        if self.client.replay == "recorded":
            return
        mask = sampled_of(response)
        starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
        ends = np.flatnonzero(np.diff(mask, append=False) & mask) + 1
        # Tokens of each turn, including an unfinished one.
        turns = [response.tokens[a:b].tolist() for a, b in zip(starts, ends, strict=True)]
        if len(turns) < len(log) - 1:
            raise episode_lost(self.id, "some of its turns are in other samples")
        for at, entry in enumerate(log[1:]):
            turn = self.bridge.parse(turns[at], ended=True, tools=self.tools)
            answer = {"messages": list((*entry.left, *entry.messages)[1:]), "reward": entry.reward}
            self.history.append((turn_request(turn, at, turns[at], cut=False), answer))


def episode_lost(rollout_id: int, reason: str) -> EpisodeLostError:
    """Return the error of an episode whose process is gone."""
    return EpisodeLostError(
        f"the episode of rollout {rollout_id} cannot go on in another environment: {reason}",
        [rollout_id],
        "episode-lost",
    )


def turn_request(turn: Turn, index: int, tokens: list[int], *, cut: bool) -> dict[str, Any]:
    """Return a turn as plain data, for the environment."""
    return {
        "index": index,
        "text": turn.text,
        "tokens": tokens,
        "calls": [{**asdict(call), "arguments": dict(call.arguments)} for call in turn.calls],
        "message": dict(turn.message),
        "finish": "length" if cut else "stop",
    }


def _joined(messages: Sequence[Message], text: str) -> list[Message]:
    """Append a text to the last message if it is the user's, or else add a user message."""
    if messages and messages[-1]["role"] == "user":
        last = Message(**{**messages[-1], "content": messages[-1]["content"] + text})
        return [*messages[:-1], last]
    return [*messages, Message(role="user", content=text)]


def _failed_calls(calls: Sequence[Mapping[str, Any]], failure: str) -> Answer:
    messages = [
        {"role": "tool", "name": call["name"], "content": error_text(failure)}
        | ({"tool_call_id": call["id"]} if call["id"] else {})
        for call in calls
    ]
    records = [
        {key: call[key] for key in ("name", "arguments", "status")} | {"error": failure}
        for call in calls
    ]
    return {"messages": messages, "done": False, "reward": None, "calls": records}
