"""Episodes of user programs, which run their own loop and call the policy over HTTP.

A program's request is an observation: context for an existing sample, or the prompt of a new one.
The turn sampled for it answers the request, and the program's result is the episode's reward. So
the schedule treats a program like any other environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any

from stretto.config import EnvironmentConfig
from stretto.environments.executors import EnvironmentExecutor, answer_of
from stretto.environments.role import limit_of
from stretto.environments.sessions import Session, Sessions
from stretto.errors import EpisodeLostError, RewardError, StrettoError
from stretto.plain import plain
from stretto.scoring.conventions import as_number
from stretto.tasks.task import INDEX_KEY
from stretto.types import Observation, Response, episode_of
from stretto.workers.child import ProcessLostError

REWARD = "reward"
"""Key of the reward in a result that is a dict."""


class PlacedPrograms:
    """Runs programs in environment processes. All programs of a group share one."""

    def __init__(self, places: Sequence[EnvironmentExecutor]) -> None:
        self._places, self._number = places, count()

    async def run(self, group: int, data: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """Run a program and return its result. Cancelling this stops the program.

        Raises StrettoError, with the location, if the program raised, or ProcessLostError.
        """
        place, number = self._places[group % len(self._places)], next(self._number)
        await asyncio.to_thread(place.start)  # restarts a lost process
        arguments = {"data": plain(dict(data)), "base_url": base_url, "api_key": api_key}
        request = {"do": "run", "episode": number, "arguments": arguments}
        try:
            answer = await answer_of(place, request)
        except asyncio.CancelledError:
            place.ask({"do": "stop", "episode": number})
            raise
        if "error" in answer:
            raise RewardError(str(answer.get("place") or answer["error"]), code="program-raised")
        return answer["result"]


@dataclass
class _Episode:
    session: Session
    program: asyncio.Task[Any]
    began: float
    sample: int  # whose turn was sampled last
    samples: set[int]  # not yet released


@dataclass(eq=False)
class ProgramEnvironment:
    """An environment of programs, which reach the policy through sessions of a server. ``listen``
    starts it, unless it already listens.
    """

    runner: PlacedPrograms
    sessions: Sessions
    listen: Callable[[], Awaitable[None]]
    config: EnvironmentConfig
    episodes: dict[int, _Episode] = field(default_factory=dict)

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        """Start a program and return its first request as the opening (see the protocol).

        Raises EpisodeLostError for a log, because side effects of a program cannot be replayed.
        """
        if log:
            raise _lost(response.id)
        await self.listen()
        session = self.sessions.open(response)
        data = {k: v for k, v in response.prompt.data.items() if k != INDEX_KEY}
        if response.prompt.messages is None:
            data.setdefault("prompt", response.prompt.text)
        else:
            data.setdefault("messages", [dict(m) for m in response.prompt.messages])
        url, key = self.sessions.url(session), self.sessions.api_key
        program = asyncio.ensure_future(self.runner.run(response.group, data, url, key))
        episode = _Episode(session, program, monotonic(), response.id, {response.id})
        self.episodes[episode_of(response.id)] = episode
        return await self._next(episode)

    async def step(self, response: Response) -> Observation:
        """Pass a turn to the program. Return its next request, or the end of the episode."""
        episode = self.episodes.get(episode_of(response.id))
        if episode is None:
            raise _lost(response.id)
        episode.sample = response.id
        why = limit_of(response, episode.session.turns, episode.began, self.config)
        episode.session.deliver(response, why)
        return await self._next(episode)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Drop samples, and stop the programs of episodes that have none left."""
        for rollout_id in rollout_ids:
            if episode := self.episodes.get(episode_of(rollout_id)):
                episode.samples.discard(rollout_id)
                if not episode.samples:
                    del self.episodes[episode_of(rollout_id)]
                    await self._stop(episode)

    async def _next(self, episode: _Episode) -> Observation:
        limit = self.config.timeout_s
        request = asyncio.ensure_future(episode.session.next())
        futures: tuple[asyncio.Future[Any], ...] = (episode.program, request)
        try:
            await asyncio.wait(futures, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if request.done() and not episode.program.done():
                observation = request.result()
                episode.samples.add(observation.rollout_id)
                return observation
        finally:
            request.cancel()
            with suppress(asyncio.CancelledError):
                await request
        if not episode.program.done():
            await self._stop(episode)
            why = f"the program asked for nothing and did not end in {limit:g} s"
            return self._failed(episode, why)
        return self._ended(episode)

    def _ended(self, episode: _Episode) -> Observation:
        session, program = episode.session, episode.program
        self._forget(episode)
        if program.cancelled():
            return self._failed(episode, "the program was ended")
        if error := program.exception():
            if isinstance(error, ProcessLostError):  # perhaps killed by another episode's program
                raise _lost(session.root, str(error)) from error
            if not isinstance(error, StrettoError):
                raise error
            return self._failed(episode, str(error))
        if not session.turns:
            return self._failed(episode, "the program ended without a request")
        try:
            reward, extra = reward_of(program.result(), session.answers)
        except RewardError as error:
            return self._failed(episode, str(error))
        record = {"extra": extra} if extra else {}
        return session.end(episode.sample, reward=reward, ended_by=session.ended_by, record=record)

    def _failed(self, episode: _Episode, why: str) -> Observation:
        self._forget(episode)
        session = episode.session
        if (limit := session.ended_by) != "environment":
            why = f"{why} (the episode had reached its limit of {limit})"
        return session.end(episode.sample, ended_by=limit, record={"failure": why})

    def _forget(self, episode: _Episode) -> None:
        self.sessions.close(episode.session)
        self.episodes.pop(episode_of(episode.session.root), None)

    async def _stop(self, episode: _Episode) -> None:
        self.sessions.close(episode.session)
        episode.program.cancel()
        await asyncio.gather(episode.program, return_exceptions=True)


def _lost(rollout_id: int, how: str = "") -> EpisodeLostError:
    why = f"{how}; a program" if how else "a program"
    return EpisodeLostError(
        f"{why} cannot go on in the middle, and its episode is begun anew",
        [rollout_id],
        "program-lost",
    )


def reward_of(result: Any, answers: Sequence[str] = ()) -> tuple[float, dict[str, Any]]:
    """Return the reward in a program's result, and the remaining entries of the result.

    A number is the reward itself. Of a dict, the reward is the entry ``reward``, or the sum if all
    keys are ids of answers. Raises RewardError for anything else.
    """
    extra: dict[str, Any] = {}
    if isinstance(result, Mapping) and REWARD in result:
        extra = {str(k): v for k, v in result.items() if k != REWARD}
        result = result[REWARD]
        numbers = [result]
    elif isinstance(result, Mapping) and result and set(result) <= set(answers):
        numbers = list(result.values())
    else:
        numbers = [result]
    try:
        return as_number(sum(map(as_number, numbers))), extra
    except (RewardError, ValueError) as error:
        raise RewardError(
            f"the program returned {_shown(result)}; return a finite number, or a dict with one as "
            f"{REWARD!r}",
            code="program-result",
        ) from error


def _shown(result: Any) -> str:
    try:
        return repr(str(result)[:200])
    except ValueError:  # Python refuses to print huge integers
        return "a number of too many digits"
