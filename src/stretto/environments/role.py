"""The environment role: turns answers of environments into context tokens, and enforces limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from stretto.config import EnvironmentConfig
from stretto.environments.bridge import Bridge
from stretto.environments.executors import Answer, EnvironmentExecutor
from stretto.environments.live_episode import (
    ExecutorClient,
    LiveEpisode,
    episode_lost,
    turn_request,
)
from stretto.environments.results import CHARACTERS_PER_TOKEN, error_text, summed
from stretto.errors import ConfigError, RewardError, TaskError
from stretto.plain import plain
from stretto.scoring.conventions import Verdict
from stretto.scoring.functions import FunctionScorer
from stretto.tasks.encode import Encoder
from stretto.tasks.messages import TOOLS, arguments_in, tools_in
from stretto.tasks.task import INDEX_KEY
from stretto.types import FinishReason, Message, Observation, Prompt, Response, episode_of, fork_id

_NO_TOKENS = np.empty(0, np.int32)


class EnvironmentRole:
    """Answers the turns of episodes (see :class:`stretto.protocols.Environment`).

    An error of user code, or a call that timed out, becomes an observation for the policy, and is
    recorded. If the process of an episode is lost, another one starts, and the episode is restored
    in it as ``environment.replay`` says.

    Args:
        places: started places for episodes. All episodes of a group share one.
        max_prompt_tokens: limit of a prompt that an environment changes or a fork begins with.
        judges: reward functions that take environments. The places must have them, too.
        tools_column: column of rows that bring their own tool schemas.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        places: Sequence[EnvironmentExecutor],
        bridge: Bridge,
        encoder: Encoder,
        max_prompt_tokens: int,
        judges: Sequence[FunctionScorer] = (),
        tools_column: str = TOOLS,
    ) -> None:
        self._config = config
        self._clients = [ExecutorClient(place, config.replay, self._read) for place in places]
        self._functions = self._clients[0].functions
        self._bridge = bridge
        self._encoder, self._max_prompt_tokens = encoder, max_prompt_tokens
        self._judges = judges
        self._episodes: dict[int, LiveEpisode] = {}
        self._tools_column = tools_column

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        """Open the episode of a response, or restore it from its log in a new environment."""
        prompt = response.prompt
        data = {key: value for key, value in prompt.data.items() if key != INDEX_KEY}
        row = cast(dict[str, Any], plain(data))
        live = LiveEpisode(
            id=episode_of(response.id),
            client=self._clients[response.group % len(self._clients)],
            row=row,
            row_tools=tools_in(row, self._tools_column),
            asked=_conversation(prompt),
            began_s=time.monotonic(),
            prompt=log[0].prompt or prompt if log else prompt,
            bridge=self._bridge.of(arguments_in(data)),
            samples={response.id},
        )
        if log:
            live.begun = _conversation(live.prompt)
            await live.restore(response, log)
            self._episodes[live.id] = live
            return log[-1]
        opening = await live.request({"do": "open"})
        if "error" in opening:
            said, names = opening.get("place") or opening["error"], [f"'{name}'" for name in row]
            columns = ("only " if len(names) == 1 else "") + (", ".join(names) or "no columns")
            why = f"the environment could not be opened: {said}; its row has {columns}"
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
            raise episode_lost(response.id, "it was not opened")
        live.samples.add(response.id)
        cut = response.finish is FinishReason.LENGTH
        turn_tokens = response.tokens[response.turn_start :].tolist()
        turn = live.bridge.parse(turn_tokens, ended=not cut, tools=live.tools)
        why = limit_of(response, live.turns, live.began_s, self._config)
        turn_data = turn_request(turn, live.turns, turn_tokens, cut=cut)
        live.turns += 1
        answer: Answer = {"messages": [], "done": not turn.calls, "reward": None, "calls": []}
        if not self._functions or (turn.calls and not why):
            answer = self._read(await live.request({"do": "step", "turn": turn_data}))
        live.history.append((turn_data, answer))
        record = {key: answer.get(key) for key in ("calls", "read_as", "failure")}
        observation = Observation(
            response.id,
            live.number + 1,
            _NO_TOKENS,
            reward=answer["reward"],
            ended_by="environment" if answer["done"] and not cut else why,
            messages=(turn.message, *answer["messages"]),
            record={key: value for key, value in record.items() if value},
        )
        if why and not (answer["done"] or self._functions):
            observation = await self._finished(live, observation)
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
                closing.append(live.close())
        await asyncio.gather(*closing)

    async def _appended(
        self, live: LiveEpisode, response: Response, reply: Observation
    ) -> Observation:
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
        return await self._finished(
            live, replace(reply, ended_by="tokens", messages=reply.messages[:1])
        )

    async def _finished(self, live: LiveEpisode, reply: Observation) -> Observation:
        """Add the environment's reward for the final state, or its failure."""
        final = await live.request({"do": "finish"})
        failure = {"failure": final["failure"]} if "failure" in final else {}
        reward = summed(reply.reward, final.get("reward"))
        return replace(reply, reward=reward, record={**reply.record, **failure})

    async def _judged(
        self, live: LiveEpisode, response: Response, reply: Observation
    ) -> Observation:
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
        answer = await live.request({"do": "score", "samples": samples})
        failed = {"error": answer.get("error")}
        scores |= answer.get("scores") or dict.fromkeys(samples, failed)
        for judge in self._judges:
            if (why := scores[judge.name].get("error")) is not None:
                scores[judge.name] = {"error": judge.failure(episode_response, why)}
        return replace(reply, record={**reply.record, "scores": scores})

    def _changed(self, live: LiveEpisode, prompt: Prompt, opening: Answer) -> Prompt | None:
        """Return the prompt after the environment's opening, or ``None`` if it is unchanged."""
        live.begun = live.opened_with(opening)
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

    def _rendered(self, live: LiveEpisode, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
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


def _conversation(prompt: Prompt) -> list[Message]:
    if prompt.messages is not None:
        return list(prompt.messages)
    return [Message(role="user", content=prompt.text)]
