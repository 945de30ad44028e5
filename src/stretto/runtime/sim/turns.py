"""Episodes in virtual time: turns with token counts, and an environment that takes time to answer.

Turns, answers and waits are a pure function of (seed, rollout id), like response lengths, so that
all schedules can be compared on identical episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist
from typing import NamedTuple, Self

import numpy as np
from pydantic import model_validator

from stretto.config.sections import NonNegative, NonNegativeInt, PositiveInt, Section
from stretto.errors import RuleError
from stretto.runtime.sim.lengths import Distribution, Lengths, Lognormal, Uniform, uniform
from stretto.types import FinishReason, Observation, Response, episode_of

_NORMAL = NormalDist()
PLACEHOLDERS = np.zeros(1 << 17, np.int32)
"""Placeholders for sampled and answered tokens, more than any response has."""
PLACEHOLDERS.flags.writeable = False


class SimTurn(NamedTuple):
    """A turn and the environment's answer.

    Attributes:
        tokens: sampled by the policy.
        wait_s: seconds until the environment has answered.
        answer: tokens of the answer. 0 if the episode is over.
    """

    tokens: int
    wait_s: float
    answer: int


class AnswerLatency(Section):
    """Seconds until an environment answers: a lognormal with the given median and p95."""

    median: NonNegative = 0.5
    """Seconds. With 0, answers are immediate."""
    p95: NonNegative = 5.0
    """Seconds that one answer in twenty exceeds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.p95 < self.median:
            percentiles = f"median = {self.median}, p95 = {self.p95}"
            raise RuleError(
                f"p95 must not be below the median; got {percentiles}", "p95-below-median"
            )
        return self

    def quantile(self, u: float) -> float:
        if not self.median:
            return 0.0
        sigma = log(self.p95 / self.median) / _NORMAL.inv_cdf(0.95)
        return self.median * exp(sigma * _NORMAL.inv_cdf(u))


class SimEpisodes(Section):
    """Responses of several turns, each of which an environment answers after a while."""

    turns: Distribution = Uniform(low=2, high=4)
    """Turns of an episode, by rollout id. The last one ends it."""
    answer_tokens: Distribution = Lognormal(median=40, p95=160)
    """Tokens of an answer, by rollout id. They become part of the response."""
    wait_s: AnswerLatency = AnswerLatency()
    """Seconds until a turn is answered. The last turn is answered at once."""
    max_turn_tokens: NonNegativeInt = 0
    """Token limit of a turn, which ends the episode. 0: only the response's limit."""
    rewarded: bool = False
    """Whether the environment gives the workload's rewards."""
    recorded: tuple[tuple[tuple[PositiveInt, NonNegative, NonNegativeInt], ...], ...] = ()
    """Turns of a recorded run, which replace all these settings, by rollout id. Each turn has its
    tokens, seconds until the answer, and tokens of the answer. Beyond the last episode they repeat.
    """
    work_s: NonNegative = 0.0
    """Seconds in which one of the ``cores`` works for a call, one call after the other. They come
    before the wait."""
    openings_s: tuple[NonNegative, ...] = ()
    """Seconds until an episode is open, by rollout id, again from the first after the last. Empty:
    none."""

    def at_once(self) -> SimEpisodes:
        recorded = tuple(tuple((n, 0.0, answer) for n, _, answer in e) for e in self.recorded)
        return self.model_copy(
            update={
                "wait_s": AnswerLatency(median=0, p95=0),
                "recorded": recorded,
                "openings_s": (),
            }
        )


class Turns:
    """The turns of each rollout, whose token counts come from :class:`Lengths`."""

    def __init__(self, episodes: SimEpisodes, lengths: Distribution, seed: int) -> None:
        self._episodes = episodes
        self._lengths = lengths
        self._seed = seed
        self._first = Lengths(lengths, seed)

    def opening_s(self, rollout_id: int) -> float:
        openings_s = self._episodes.openings_s
        return openings_s[rollout_id % len(openings_s)] if openings_s else 0.0

    def __call__(self, rollout_id: int) -> Sequence[SimTurn]:
        """Return all turns of a rollout's episode, at least one, without token limits."""
        e = self._episodes
        if e.recorded:
            return [SimTurn(*turn) for turn in e.recorded[rollout_id % len(e.recorded)]]
        u = uniform(self._seed, "turns", rollout_id)
        last = max(1, round(e.turns.quantile(u, rollout_id))) - 1
        return [self._turn(rollout_id, k, k == last) for k in range(last + 1)]

    def _turn(self, rollout_id: int, k: int, last: bool) -> SimTurn:
        tokens = self._first(rollout_id) if not k else self._tokens(self._lengths, rollout_id, k)
        if last:
            return SimTurn(tokens, 0.0, 0)
        wait_s = self._episodes.wait_s.quantile(uniform(self._seed, "wait", rollout_id, k))
        return SimTurn(
            tokens, wait_s, self._tokens(self._episodes.answer_tokens, rollout_id, -1 - k)
        )

    def _tokens(self, distribution: Distribution, rollout_id: int, place: int) -> int:
        u = uniform(self._seed, "length", rollout_id, place)
        return max(1, round(distribution.quantile(u, rollout_id)))


def turn_of(response: Response) -> int:
    """Return the index of the turn that a response is in, or ends with, from 0."""
    if response.sampled is None:
        return 0
    is_sampled = np.concatenate([[True], response.sampled])  # a prompt precedes the first turn
    return int((is_sampled[:-1] & ~is_sampled[1:]).sum())


@dataclass(eq=False)
class SimEnvironment:
    """An environment that opens episodes and answers turns as ``turns`` define, each after its
    wait. Calls wait in parallel and occupy no device. At its end an episode earns ``reward``, a
    function of the rollout id and the version of its last tokens.
    """

    turns: Callable[[int], Sequence[SimTurn]]
    max_new_tokens: int
    reward: Callable[[int, int], float | None] = lambda rollout_id, version: None
    opening_s: Callable[[int], float] = lambda rollout_id: 0.0
    work: Callable[[], Awaitable[object]] | None = None  # of each call, before its wait

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        if self.work:
            await self.work()
        if seconds := self.opening_s(episode_of(response.id)):
            await asyncio.sleep(seconds)
        return log[-1] if log else Observation(response.id, 0, PLACEHOLDERS[:0])

    async def step(self, response: Response) -> Observation:
        k, turns = turn_of(response), self.turns(episode_of(response.id))
        if response.finish is FinishReason.LENGTH:
            at_limit = len(response) >= self.max_new_tokens
            return self._end(response, k, "tokens" if at_limit else "turn_tokens")
        turn = turns[min(k, len(turns) - 1)]
        if self.work:
            await self.work()
        if turn.wait_s:
            await asyncio.sleep(turn.wait_s)
        if k + 1 >= len(turns):
            return self._end(response, k, "environment")
        if len(response) + turn.answer >= self.max_new_tokens:
            return self._end(response, k, "tokens")
        record = {"seconds": turn.wait_s}
        return Observation(response.id, k + 1, PLACEHOLDERS[: turn.answer], record=record)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Do nothing, as no environment is open."""

    def _end(self, response: Response, k: int, because: str) -> Observation:
        reward = self.reward(episode_of(response.id), response.version)
        return Observation(response.id, k + 1, PLACEHOLDERS[:0], reward=reward, ended_by=because)
