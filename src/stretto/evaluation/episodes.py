"""Episodes in this process, outside a schedule: an engine decodes turns, an environment answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from stretto.errors import EpisodeLostError
from stretto.protocols import Environment
from stretto.rollout.base import Engine
from stretto.schedules.rollout import Rollout
from stretto.types import FinishReason, Message, Observation, Sampling, episode_of

LIMITS = ("turn_tokens", "tokens", "turns", "seconds")
"""Ends of episodes that a limit brought about."""


class Episode(NamedTuple):
    """An episode that has ended: its samples, and what its environment gave."""

    samples: Sequence[Rollout]  # the first one, and its forks
    log: Sequence[Observation]  # all answers, the opening first

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns and what answered them, without the prompt."""
        return tuple(message for o in self.log for message in o.messages)

    @property
    def reward(self) -> float:
        """The sum of the environment's rewards."""
        return sum(o.reward or 0.0 for o in self.log)

    @property
    def failure(self) -> str:
        """Why the environment's reward does not count; empty where it does."""
        return str(self.log[-1].record.get("failure") or "")


def completed_episodes(
    engine: Engine,
    environment: Environment,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    chunk_tokens: int = 16,
) -> Iterator[Episode]:
    """Decode rollouts, with ids of their own, turn by turn; yield each episode once it has ended.

    Turns that end together are answered together, and the engine rests meanwhile. Whatever else it
    holds must have ended. The episodes left are closed if the iterator is. Raises EpisodeLostError
    as the environment does.

    Args:
        sampling: of all responses; its ``max_turn_tokens`` are more than 0.
        chunk_tokens: between two looks at what has ended.
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
    """The episodes under way."""

    def __init__(self, engine: Engine, environment: Environment, sampling: Sampling) -> None:
        self._engine, self._environment, self._sampling = engine, environment, sampling
        self._samples: dict[int, list[Rollout]] = {}  # by episode
        self._logs: dict[int, list[Observation]] = {}
        self.decoding: dict[int, Rollout] = {}

    def begin(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Take rollouts in; return them, whose openings are due."""
        for rollout in rollouts:
            rollout.sampling = self._sampling
            self._samples[rollout.id], self._logs[rollout.id] = [rollout], []
        return list(rollouts)

    def decode(self, chunk_tokens: int) -> list[Rollout]:
        """Decode a chunk of each; return those whose turn has ended."""
        due = []
        for chunk in self._engine.decode(chunk_tokens).chunks:
            rollout = self.decoding[chunk.rollout_id]
            rollout.append(chunk)
            if chunk.finish:
                due.append(self.decoding.pop(rollout.id))
        return due

    async def answer(self, due: Sequence[Rollout]) -> list[Episode]:
        """Have turns answered, or episodes opened; return those that have ended."""
        observations = await asyncio.gather(*map(self._asked, due))
        ended, go_on = list[Episode](), list[Rollout]()
        for rollout, o in zip(due, observations, strict=True):
            self._logs[episode_of(rollout.id)].append(o)
            if rollout.turns:
                rollout.turn_rewards.append(o.reward or 0.0)
            if o.ended_by:
                rollout.log.append(o)
                ended.append(self._end(o))
            else:
                go_on.append(self._next(rollout, o))
        await self._environment.release([r.id for e in ended for r in e.samples])
        self.decoding |= {rollout.id: rollout for rollout in go_on}
        self._engine.admit([rollout.response() for rollout in go_on])
        return ended

    async def close(self) -> None:
        """Close the episodes that are left."""
        left = [rollout.id for samples in self._samples.values() for rollout in samples]
        self._engine.release(left)
        await self._environment.release(left)

    async def _asked(self, rollout: Rollout) -> Observation:
        if not self._logs[episode_of(rollout.id)]:
            return await self._environment.open(rollout.response(text=True))
        finish = FinishReason.LENGTH if rollout.ended_by else FinishReason.TURN
        return await self._environment.step(replace(rollout.response(text=True), finish=finish))

    def _next(self, rollout: Rollout, o: Observation) -> Rollout:
        """Return the sample that goes on, with the context that it was given."""
        samples = self._samples[episode_of(rollout.id)]
        goes_on = next((r for r in samples if r.id == o.rollout_id), None)
        if goes_on is None:
            if o.prompt is None:
                raise EpisodeLostError(
                    f"the environment answered rollout {rollout.id} with rollout {o.rollout_id}, "
                    "which has not begun, and has no prompt",
                    [rollout.id],
                    "episode-lost",
                )
            goes_on = Rollout(o.rollout_id, o.prompt, rollout.group, sampling=self._sampling)
            samples.append(goes_on)
        elif o.prompt is not None:
            goes_on.prompt = o.prompt
        context = goes_on.observe(o)
        if len(context.tokens):
            goes_on.append(context)
        return goes_on

    def _end(self, last: Observation) -> Episode:
        episode = episode_of(last.rollout_id)
        samples = self._samples.pop(episode)
        for rollout in samples:
            rollout.ended_by = last.ended_by
            limited = last.ended_by in LIMITS
            rollout.finish = FinishReason.LENGTH if limited else FinishReason.STOP
        self._engine.release([rollout.id for rollout in samples])
        return Episode(samples, self._logs.pop(episode))
