"""Episodes in this process, outside a schedule: an engine decodes, an environment answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from stretto.assembly.controllers import turn_sampling
from stretto.assembly.environments import bridge_for, open_places
from stretto.config import Config, EnvironmentConfig, RolloutConfig
from stretto.environments.executors import close_all
from stretto.environments.role import EnvironmentRole
from stretto.errors import ConfigError, EpisodeLostError, RewardError
from stretto.observe.progress import on_stderr
from stretto.observe.recorder import LIMITS
from stretto.protocols import Environment
from stretto.rollout.base import Engine
from stretto.saying import working
from stretto.schedules.episode_metrics import calls
from stretto.schedules.episodes import TOKEN_LIMITS
from stretto.schedules.rollout import Rollout
from stretto.tasks.encode import Encoder
from stretto.types import FinishReason, Message, Observation, Prompt, Sampling, episode_of


class FinishedEpisode(NamedTuple):
    """A finished episode: its samples and its observations."""

    samples: Sequence[Rollout]  # the first one, and its forks
    log: Sequence[Observation]  # all observations, the opening first

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for o in self.log for message in (*o.left, *o.messages))

    @property
    def last(self) -> Rollout:
        return next(r for r in self.samples if r.id == self.log[-1].rollout_id)

    @property
    def reward(self) -> float:
        return sum(o.reward or 0.0 for o in self.log)

    def told(self) -> str:
        """Format it for a terminal: the policy's text, its calls, and their results."""
        lines: list[str] = []
        for o in self.log:
            for message in (*o.left, *o.messages):
                if message["role"] == "assistant" and message["content"].strip():
                    lines.append(message["content"].strip())
                elif message["role"] not in ("assistant", "tool"):
                    lines.append(f"{message['role']}: {message['content']}")
            results = [m["content"] for m in (*o.left, *o.messages) if m["role"] == "tool"]
            for i, call in enumerate(calls(o)):
                arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
                result = results[i] if i < len(results) else call.get("error", "")
                lines.append(f"{call.get('name') or 'a call'}({arguments}) -> {result}")
        if (why := self.log[-1].ended_by) in LIMITS:
            lines.append(f"(ended by a limit: {LIMITS[why]})")
        if self.failure:
            lines.append(f"(failed: {self.failure})")
        return "\n".join(lines)

    @property
    def failure(self) -> str:
        """Why the environment's reward does not count, or empty."""
        return str(self.log[-1].record.get("failure") or "")


class Tools:
    """Tools or an environment, in processes that the stack ends.

    Raises ConfigError if a source is missing or unknown, or the template cannot continue turns.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        encoder: Encoder,
        stack: ExitStack,
        stop: Sequence[str] = (),
    ) -> None:
        self._config, self._encoder = config, encoder
        with working(on_stderr, "starting the environment"):
            self._places = open_places(config, {})
        stack.callback(close_all, self._places)
        ready = self._places[0].ready
        if ready["kind"] == "program":
            raise ConfigError(
                f"'{config.sources[0]}' is a program, which asks a server for its turns: start one "
                "with `stretto serve MODEL`, and run the program with its address",
                "program-holds-the-loop",
            )
        self._schemas: Sequence[Mapping[str, Any]] = ready["tools"]
        self._bridge = bridge_for(ready, encoder, config, on_stderr, stop=stop)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> tuple[list[int], str]:
        return self._bridge.of(arguments).prompt(messages, [*self._schemas, *tools])

    def episodes(
        self,
        engine: Engine,
        rollouts: Sequence[Rollout],
        options: RolloutConfig,
        max_prompt_tokens: int,
    ) -> Iterator[FinishedEpisode]:
        """Decode rollouts turn by turn (see :func:`completed_episodes`)."""
        role = EnvironmentRole(
            self._config, self._places, self._bridge, self._encoder, max_prompt_tokens
        )
        sampling = turn_sampling(options, self._config)
        yield from completed_episodes(engine, role, rollouts, sampling)


def played(
    engine: Engine, environment: Environment, prompts: Sequence[Prompt], config: Config
) -> list[FinishedEpisode]:
    """Return an episode for each prompt, in order. RewardError if one has no valid reward."""
    rollouts = [Rollout(n, prompt, prompt.id) for n, prompt in enumerate(prompts)]
    sampling = turn_sampling(config.rollout, config.environment)
    episodes = dict[int, FinishedEpisode]()
    with working(on_stderr, "playing episodes", len(rollouts)) as advance:
        for episode in completed_episodes(engine, environment, rollouts, sampling):
            advance(1)
            episodes[episode.samples[0].id] = episode
            if episode.failure:
                raise RewardError(episode.failure, [episode.samples[0].id], "reward-failed")
    return [episodes[n] for n in sorted(episodes)]


def completed_episodes(
    engine: Engine,
    environment: Environment,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    chunk_tokens: int = 16,
) -> Iterator[FinishedEpisode]:
    """Decode rollouts with different ids turn by turn. Yield each episode once it has ended.

    Turns that end together are answered together, while the engine is idle. The engine must hold no
    other live rollouts. Closing the iterator closes the remaining episodes. EpisodeLostError
    passes.

    Args:
        sampling: of all responses. Its ``max_turn_tokens`` must be above 0.
        chunk_tokens: tokens between checks for finished turns.
    """
    episodes = _Episodes(engine, environment, sampling)
    with asyncio.Runner() as runner:
        try:
            due = episodes.begin(rollouts)
            while due or episodes.decoding:
                yield from runner.run(episodes.answer(due))
                due = episodes.decode(chunk_tokens) if episodes.decoding else []
        finally:
            runner.run(episodes.close())


class _Episodes:
    def __init__(self, engine: Engine, environment: Environment, sampling: Sampling) -> None:
        self._engine = engine
        self._environment = environment
        self._sampling = sampling
        self._samples: dict[int, list[Rollout]] = {}  # by episode
        self._logs: dict[int, list[Observation]] = {}
        self.decoding: dict[int, Rollout] = {}

    def begin(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Add rollouts, and return them, because their openings are due."""
        for rollout in rollouts:
            rollout.sampling = self._sampling
            self._samples[rollout.id], self._logs[rollout.id] = [rollout], []
        return list(rollouts)

    def decode(self, chunk_tokens: int) -> list[Rollout]:
        """Decode a chunk of each rollout. Return those whose turn has ended."""
        due = []
        for chunk in self._engine.decode(chunk_tokens).chunks:
            rollout = self.decoding[chunk.rollout_id]
            rollout.append(chunk)
            if chunk.finish:
                due.append(self.decoding.pop(rollout.id))
        return due

    async def answer(self, due: Sequence[Rollout]) -> list[FinishedEpisode]:
        """Open episodes or have their turns answered. Return those that have ended."""
        observations = await asyncio.gather(*map(self._asked, due))
        episodes, next_samples = list[FinishedEpisode](), list[Rollout]()
        for rollout, o in zip(due, observations, strict=True):
            self._logs[episode_of(rollout.id)].append(o)
            if rollout.turns:
                rollout.turn_rewards.append(o.reward or 0.0)
            if o.ended_by:
                rollout.log.append(o)
                episodes.append(self._end(o))
            else:
                next_samples.append(self._next(rollout, o))
        await self._environment.release([r.id for e in episodes for r in e.samples])
        self.decoding |= {rollout.id: rollout for rollout in next_samples}
        self._engine.admit([rollout.response() for rollout in next_samples])
        return episodes

    async def close(self) -> None:
        rollout_ids = [rollout.id for samples in self._samples.values() for rollout in samples]
        self._engine.release(rollout_ids)
        await self._environment.release(rollout_ids)

    async def _asked(self, rollout: Rollout) -> Observation:
        if not self._logs[episode_of(rollout.id)]:
            return await self._environment.open(rollout.response(text=True))
        finish = FinishReason.LENGTH if rollout.ended_by else FinishReason.TURN
        return await self._environment.step(replace(rollout.response(text=True), finish=finish))

    def _next(self, rollout: Rollout, o: Observation) -> Rollout:
        rollout.left = o.left[:1]
        samples = self._samples[episode_of(rollout.id)]
        sample = next((r for r in samples if r.id == o.rollout_id), None)
        if sample is None:
            if o.prompt is None:
                raise EpisodeLostError(
                    f"the environment answered rollout {rollout.id} with rollout {o.rollout_id}, "
                    "which has not begun, and has no prompt",
                    [rollout.id],
                    "episode-lost",
                )
            sample = Rollout(o.rollout_id, o.prompt, rollout.group, sampling=self._sampling)
            samples.append(sample)
        elif o.prompt is not None:
            sample.prompt = o.prompt
        context = sample.observe(o)
        if len(context.tokens):
            sample.append(context)
        return sample

    def _end(self, last: Observation) -> FinishedEpisode:
        episode = episode_of(last.rollout_id)
        samples = self._samples.pop(episode)
        for rollout in samples:
            rollout.ended_by = last.ended_by
            cut = last.ended_by in TOKEN_LIMITS
            rollout.finish = FinishReason.LENGTH if cut else FinishReason.STOP
        self._engine.release([rollout.id for rollout in samples])
        return FinishedEpisode(samples, self._logs.pop(episode))
