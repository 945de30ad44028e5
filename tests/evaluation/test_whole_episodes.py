"""Episodes outside a schedule, over an engine and an environment that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from raising import raises
from stretto.errors import EpisodeLostError
from stretto.evaluation.episode_generation import FinishedEpisode, completed_episodes
from stretto.rollout.base import Engine
from stretto.schedules.rollout import Rollout
from stretto.types import (
    FORKS,
    Chunk,
    Decoded,
    FinishReason,
    Message,
    Observation,
    Prompt,
    Response,
    Sampling,
    episode_of,
)

END = 0
SAMPLING = Sampling(20, max_turn_tokens=6)


class ScriptedEngine:
    """Every turn is as many tokens as the response had when it was admitted, plus two, and an
    end."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.at: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        self.admitted: list[tuple[int, list[int]]] = []

    def admit(self, responses: Sequence[Response]) -> None:
        for r in responses:
            assert self.parked.pop(r.id, 0) <= len(r)
            self.admitted.append((r.id, r.tokens.tolist()))
            self.held[r.id] = [*range(1, len(r) + 3), END]
            self.at[r.id] = len(r)

    def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        chunks = []
        for id_, left in list(self.held.items()):
            tokens, self.held[id_] = left[:max_tokens], left[max_tokens:]
            finish = None if self.held[id_] else FinishReason.TURN
            start = self.at[id_]
            self.at[id_] += len(tokens)
            if self.at[id_] >= SAMPLING.max_new_tokens:
                tokens = tokens[: SAMPLING.max_new_tokens - start]
                finish = FinishReason.LENGTH
            if finish:
                del self.held[id_]
                self.parked[id_] = self.at[id_]
            columns = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
            chunks.append(Chunk(id_, start, *columns, 1, finish))
        return Decoded(chunks, max_tokens)

    def release(self, rollout_ids: Sequence[int]) -> None:
        for id_ in rollout_ids:
            self.held.pop(id_, None)
            self.parked.pop(id_, None)


class ScriptedEnvironment:
    """Gives ``turns[id]`` answers of two tokens, then ends; forks an episode at a turn if asked."""

    def __init__(self, turns: dict[int, int], fork_at: int = -1, prompt: bool = True) -> None:
        self.turns, self.fork_at, self.prompt = turns, fork_at, prompt
        self.number: dict[int, int] = {}
        self.open_now = self.most_at_once = 0
        self.released: list[int] = []

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        self.number[response.id] = 0
        changed = Prompt(0, (9, 9), "changed") if response.id == 2 else None
        return Observation(response.id, 0, np.empty(0, np.int32), prompt=changed)

    async def step(self, response: Response) -> Observation:
        self.open_now += 1
        self.most_at_once = max(self.most_at_once, self.open_now)
        await asyncio.sleep(0)
        self.open_now -= 1
        episode = episode_of(response.id)
        self.number[episode] += 1
        number = self.number[episode]
        said = Message(role="assistant", content=f"turn {number}")
        more: dict[str, Any] = {"reward": 0.5, "messages": (said,)}
        if response.finish is FinishReason.LENGTH:
            return Observation(
                response.id, number, np.empty(0, np.int32), ended_by="tokens", **more
            )
        if number > self.turns[episode]:
            nothing = np.empty(0, np.int32)
            return Observation(response.id, number, nothing, ended_by="environment", **more)
        if number == self.fork_at:
            prompt = Prompt(0, (7, 7, 7), "fork") if self.prompt else None
            return Observation(episode + FORKS, number, np.empty(0, np.int32), prompt, **more)
        return Observation(response.id, number, np.array([50, 51], np.int32), **more)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        self.released += rollout_ids


def run(
    engine: ScriptedEngine, environment: ScriptedEnvironment, ids: Sequence[int], chunk: int = 4
) -> list[FinishedEpisode]:
    rollouts = [Rollout(i, Prompt(i, (1,), ""), i) for i in ids]
    return list(completed_episodes(cast(Engine, engine), environment, rollouts, SAMPLING, chunk))


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_turns_are_answered_until_the_environment_ends_the_episode(chunk: int) -> None:
    engine, environment = ScriptedEngine(), ScriptedEnvironment({1: 0, 2: 1})
    first, second = sorted(run(engine, environment, [1, 2], chunk), key=lambda e: e.samples[0].id)
    (rollout,) = second.samples
    assert list(rollout.tokens) == [1, 2, END, 50, 51, *range(1, 8), END]
    assert rollout.sampled.tolist() == [True] * 3 + [False] * 2 + [True] * 8
    assert rollout.turns == [3, 13]
    assert rollout.prompt.text == "changed"
    assert (rollout.finish, rollout.ended_by) == (FinishReason.STOP, "environment")
    assert [m["content"] for m in second.messages] == ["turn 1", "turn 2"]
    assert (second.reward, first.reward) == (1.0, 0.5)
    assert second.failure == ""
    assert [o.number for o in second.log] == [0, 1, 2]
    assert sorted(environment.released) == [1, 2]
    assert not engine.held
    assert not engine.parked


def test_turns_that_end_together_are_answered_together() -> None:
    environment = ScriptedEnvironment(dict.fromkeys(range(5), 1))
    assert len(run(ScriptedEngine(), environment, range(5))) == 5
    assert environment.most_at_once == 5


def test_a_limit_of_tokens_ends_the_episode() -> None:
    (episode,) = run(ScriptedEngine(), ScriptedEnvironment({1: 9}), [1])
    (rollout,) = episode.samples
    assert len(rollout) == SAMPLING.max_new_tokens
    assert (rollout.finish, rollout.ended_by) == (FinishReason.LENGTH, "tokens")


def test_a_fork_is_a_further_sample_of_its_episode() -> None:
    engine = ScriptedEngine()
    (episode,) = run(engine, ScriptedEnvironment({1: 1}, fork_at=1), [1])
    root, fork = episode.samples
    assert (root.id, fork.id, fork.group) == (1, 1 + FORKS, root.group)
    assert fork.prompt.text == "fork"
    assert engine.admitted == [(1, []), (1 + FORKS, [])]
    assert [m["content"] for m in episode.messages] == ["turn 1", "turn 2"]
    with raises(EpisodeLostError, "episode-lost"):
        run(ScriptedEngine(), ScriptedEnvironment({1: 1}, fork_at=1, prompt=False), [1])


def test_episodes_are_closed_where_nobody_waits_for_their_ends() -> None:
    engine, environment = ScriptedEngine(), ScriptedEnvironment({1: 0, 2: 2, 3: 2})
    rollouts = [Rollout(i, Prompt(i, (1,), ""), i) for i in (1, 2, 3)]
    episodes = completed_episodes(cast(Engine, engine), environment, rollouts, SAMPLING)
    assert next(iter(episodes)).samples[0].id == 1
    episodes.close()  # type: ignore[attr-defined]
    assert sorted(environment.released) == [1, 2, 3]
    assert not engine.held
