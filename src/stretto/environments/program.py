"""Episodes of users' programs, which hold their own loop and ask the policy over HTTP.

A program's request is an observation: what the policy reads next, for a sample that stands or for a
new one. The turn that is sampled then is the request's answer, and the program's result the
episode's reward. So a schedule sees an environment like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any, Protocol

from stretto.config import EnvironmentConfig
from stretto.environments.processes import Place, ProcessLostError, answer_of
from stretto.environments.role import limit_of
from stretto.environments.sessions import Session, Sessions
from stretto.errors import EpisodeLostError, RewardError, StrettoError
from stretto.plain import plain
from stretto.scoring.conventions import as_number
from stretto.tasks.base import INDEX_KEY
from stretto.types import Observation, Response, episode_of

REWARD = "reward"
"""Name of the reward in a program's result with several numbers."""


class ProgramRunner(Protocol):
    """Where programs run."""

    def run(
        self, group: int, data: Mapping[str, Any], base_url: str, api_key: str
    ) -> Coroutine[Any, Any, Any]:
        """Run a program to its end; return what it returned. Cancelled, it ends the program.

        Raises StrettoError if it has raised, with the place, and ProcessLostError if the process
        that it was in has ended.
        """


class Server(Protocol):
    """The server that programs ask."""

    async def start(self) -> None:
        """Listen, if it does not yet."""


class PlacedPrograms:
    """Runs programs in the processes of environments; those of a group in the same one."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places, self._number = places, count()

    async def run(self, group: int, data: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """Run a program; see :class:`ProgramRunner`."""
        place, number = self._places[group % len(self._places)], next(self._number)
        await asyncio.to_thread(place.start)  # if it was lost
        arguments = {"data": plain(dict(data)), "base_url": base_url, "api_key": api_key}
        asked = {"do": "run", "episode": number, "arguments": arguments}
        try:
            found = await answer_of(place, asked)
        except asyncio.CancelledError:
            place.ask({"do": "stop", "episode": number})
            raise
        if "error" in found:
            raise RewardError(str(found.get("place") or found["error"]), code="program-raised")
        return found["result"]


@dataclass
class _Episode:
    session: Session
    program: asyncio.Task[Any]
    began: float
    sample: int  # whose turn it was last
    samples: set[int]  # that are not released


class ProgramEnvironment:
    """The environment of a program, over sessions that a server answers."""

    def __init__(
        self, runner: ProgramRunner, sessions: Sessions, server: Server, config: EnvironmentConfig
    ) -> None:
        self._runner, self._sessions, self._config = runner, sessions, config
        self._server = server
        self._episodes: dict[int, _Episode] = {}

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        """Start a program; return its first request as the opening. See the protocol.

        A program that was lost is started anew with its episode: it may have done anything.
        """
        if log:
            raise _lost(response.id)
        await self._server.start()
        session = self._sessions.open(response)
        data = {k: v for k, v in response.prompt.data.items() if k != INDEX_KEY}
        if response.prompt.messages is None:
            data.setdefault("prompt", response.prompt.text)
        else:
            data.setdefault("messages", [dict(m) for m in response.prompt.messages])
        url, key = self._sessions.url(session), self._sessions.api_key
        program = asyncio.ensure_future(self._runner.run(response.group, data, url, key))
        episode = _Episode(session, program, monotonic(), response.id, {response.id})
        self._episodes[episode_of(response.id)] = episode
        return await self._next(episode)

    async def step(self, response: Response) -> Observation:
        """Answer a program with a turn; return its next request, or the end."""
        episode = self._episodes.get(episode_of(response.id))
        if episode is None:
            raise _lost(response.id)
        episode.sample = response.id
        why = limit_of(response, episode.session.turns, episode.began, self._config)
        episode.session.deliver(response, why)
        return await self._next(episode)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """End the programs of episodes of which these are the last samples."""
        for rollout_id in rollout_ids:
            if episode := self._episodes.get(episode_of(rollout_id)):
                episode.samples.discard(rollout_id)
                if not episode.samples:
                    del self._episodes[episode_of(rollout_id)]
                    await self._stop(episode)

    async def _next(self, episode: _Episode) -> Observation:
        limit = self._config.timeout_s
        asked = asyncio.ensure_future(episode.session.next())
        waited: tuple[asyncio.Future[Any], ...] = (episode.program, asked)
        try:
            await asyncio.wait(waited, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not episode.program.done():
                observation = asked.result()
                episode.samples.add(observation.rollout_id)
                return observation
        finally:
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
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
            if isinstance(error, ProcessLostError):  # perhaps by another episode's program
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
        self._sessions.close(episode.session)
        self._episodes.pop(episode_of(episode.session.root), None)

    async def _stop(self, episode: _Episode) -> None:
        self._sessions.close(episode.session)
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
    """Return the reward that a program has returned, and what it returned besides.

    A number is the reward. Of several numbers by name, ``reward`` is; where the names are those of
    answers (their ``id``), it is the sum. Raises RewardError for anything else.
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
    except ValueError:  # Python does not write numbers of so many digits
        return "a number of too many digits"
