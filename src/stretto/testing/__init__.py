"""Scripted roles in virtual time, for tests of schedules and controllers. Imports no torch.

A :class:`World` gives each response a length. Its roles take exactly the scripted time, log their
calls with times, and check that a schedule follows the protocols (:mod:`stretto.protocols`). Run
code that uses them with :func:`stretto.runtime.sim.loop.run`: a full run takes milliseconds and is
deterministic. docs/schedules.md has an example.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from stretto.errors import EpisodeLostError
from stretto.runtime.sim.loop import VirtualClock
from stretto.types import (
    Chunk,
    Decoded,
    FinishReason,
    Hold,
    KVTransfer,
    Observation,
    Prompt,
    Response,
    Score,
    ScoreKind,
    ScorerInfo,
    TrainBatch,
    TrainOutput,
    WeightsRef,
    episode_of,
)


def make_chunk(
    rollout_id: int,
    start: int,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    version: int = 0,
    finish: FinishReason | None = None,
) -> Chunk:
    """Make a chunk from plain numbers. See :class:`~stretto.types.Chunk`."""
    columns = np.array(tokens, np.int32), np.array(logprobs, np.float32)
    return Chunk(rollout_id, start, *columns, version, finish)


class World:
    """The script, the log with times and the clock that the roles of a run share.

    It is a schedule's :class:`~stretto.protocols.Tracer`. :meth:`next_prompt` gives it prompts.

    Args:
        lengths: response tokens by rollout id, repeated if there are more rollouts.
        turns: tokens of each turn by rollout id, instead of ``lengths`` with an environment.
        fails: ids of rollouts on which reward scorers fail.

    Attributes:
        log: the roles' calls in order, as lines "<seconds> <role> <call> <ids>".
        spans: (role, cause or name, start, end) of each recorded wait and call.
        places: number of prompts drawn so far.
        loaded: version of the weights, by generator and scorer.
        clock: virtual clock of the running loop.
    """

    def __init__(
        self, lengths: Sequence[int], fails: Sequence[int] = (), turns: Sequence[Sequence[int]] = ()
    ) -> None:
        self.lengths = lengths
        self.fails = set(fails)
        self.turns = turns
        self.log: list[str] = []
        self.spans: list[tuple[str, str, float, float]] = []
        self.places = 0
        self.loaded: dict[str, int] = {}
        self.clock = VirtualClock()

    def length(self, rollout_id: int) -> int:
        """Return the total tokens of the response."""
        if self.turns:
            return self.turn_ends(rollout_id)[-1]
        return self.lengths[rollout_id % len(self.lengths)]

    def turn_ends(self, rollout_id: int) -> list[int]:
        """Return the length of the response at the end of each of its turns."""
        turns = self.turns[rollout_id % len(self.turns)]
        return list(accumulate(turns, lambda end, tokens: end + CONTEXT_TOKENS + tokens))

    def write(self, text: str) -> None:
        """Add a line to the log, after the time."""
        self.log.append(f"{self.clock.now():g} {text}")

    def prompt(self, place: int) -> Prompt:
        """Return the prompt at a place of the order. It has ``place + 1`` tokens."""
        return Prompt(place, tuple(range(place + 1)), f"p{place}")

    def next_prompt(self) -> Prompt:
        self.places += 1
        return self.prompt(self.places - 1)

    @contextmanager
    def span(self, role: str, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        yield attributes

    @contextmanager
    def awaiting(self, role: str, name: str) -> Iterator[None]:
        yield

    def add(self, role: str, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """Add the work to :attr:`spans`. See :class:`~stretto.protocols.Tracer`."""
        self.spans.append((role, attributes.get("cause", name), start_s, end_s))


def token(rollout_id: int, place: int) -> int:
    return 100 * episode_of(rollout_id) + place


CONTEXT_TOKENS = 2
"""Tokens of each answer of a :class:`FakeEnvironment`."""


class FakeEnvironment:
    """An environment that answers each turn but the last with two tokens, after fixed seconds.

    Its methods are those of :class:`~stretto.protocols.Environment`. Opening takes a second. Turn n
    of a rollout, counted from 1, earns n. :class:`World` determines the last turn.

    Args:
        seconds: duration of answers by rollout id, repeated.

    Attributes:
        log: answers so far, by episode.
        lost: ids of rollouts whose next answer is that their environment is lost.
    """

    def __init__(self, world: World, seconds: Sequence[float] = (3.0,)) -> None:
        self.world, self.seconds = world, seconds
        self.log: dict[int, list[Observation]] = {}
        self.lost: set[int] = set()

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        self.world.write(f"env open {response.id} {len(log)}")
        await asyncio.sleep(1.0)
        nothing = Observation(response.id, 0, np.empty(0, np.int32))
        self.log[response.id] = list(log) or [nothing]
        return self.log[response.id][-1]

    async def step(self, response: Response) -> Observation:
        id_, log = response.id, self.log[response.id]
        await asyncio.sleep(self.seconds[id_ % len(self.seconds)])
        if id_ in self.lost:
            self.lost.discard(id_)
            raise EpisodeLostError(f"the environment of {id_} is lost", [id_])
        over = len(response) == self.world.length(id_) or response.finish is FinishReason.LENGTH
        tokens = [token(id_, len(response) + t) for t in range(CONTEXT_TOKENS)]
        answer = Observation(
            id_,
            len(log),
            np.array([] if over else tokens, np.int32),
            reward=float(len(log)),
            ended_by="environment" if over else "",
            messages=({"role": "tool", "content": f"answer {len(log)}"},),
        )
        log.append(answer)
        self.world.write(f"env step {id_} turn {len(log) - 1}")
        return answer

    async def release(self, rollout_ids: Sequence[int]) -> None:
        for id_ in rollout_ids:
            self.log.pop(id_, None)


class FakeGenerator:
    """A generator with a token a second for all rollouts. Token t of rollout i is ``100 i + t``.

    Its methods are those of :class:`~stretto.protocols.Generator`. Accepting rollouts of another
    generator takes a second.

    Attributes:
        done: tokens of each rollout that is decoding here.
        parked: tokens of rollouts whose turn, or last turn, has ended here.
        idle: if set, :meth:`decode` returns nothing.
    """

    def __init__(self, world: World, name: str = "gen") -> None:
        self.world, self.name = world, name
        self.done: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        self.idle = False
        self._turn = asyncio.Lock()  # answers calls in their order
        world.loaded[name] = 0

    async def admit(self, responses: Sequence[Response]) -> None:
        async with self._turn:
            self.world.write(f"{self.name} admit {[r.id for r in responses]}")
            self.done |= {r.id: len(r) for r in responses}
            self.parked = {i: n for i, n in self.parked.items() if i not in self.done}

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        async with self._turn:
            tokens_left = {i: self._end(i, n) - n for i, n in self.done.items()}
            ends = sorted(tokens_left.values())
            steps = min(max_tokens, ends[-1]) if ends else 0
            if stop_after and len(ends) >= stop_after:
                steps = min(steps, ends[stop_after - 1])
            version = self.world.loaded[self.name]
            await asyncio.sleep(steps)
            if self.idle:
                return Decoded([], steps)
            chunks = []
            for i in list(tokens_left):
                start, n = self.done[i], min(steps, tokens_left[i])
                tokens = [token(i, t) for t in range(start, start + n)]
                finish = None
                if n == tokens_left[i]:
                    finish = FinishReason.TURN if self.world.turns else FinishReason.STOP
                chunks.append(make_chunk(i, start, tokens, [-0.5] * n, version, finish))
                self.done[i] += n
                if finish:
                    self.parked[i] = self.done.pop(i)
            chunks.sort(key=lambda c: (c.finish is None, len(c.tokens), c.rollout_id))
            return Decoded(chunks, steps)

    def _end(self, rollout_id: int, tokens: int) -> int:
        if not self.world.turns:
            return self.world.length(rollout_id)
        return next(end for end in self.world.turn_ends(rollout_id) if end > tokens)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        async with self._turn:
            for i in rollout_ids:
                self.done.pop(i, None)
                self.parked.pop(i, None)

    async def hold(self, rollout_ids: Sequence[int], how: Hold) -> None:
        async with self._turn:
            self.world.write(f"{self.name} hold {list(rollout_ids)} {how}")

    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> list[KVTransfer]:
        async with self._turn:
            self.world.write(f"{self.name} export {list(rollout_ids)} {with_cache}")
            lengths = self.parked | self.done
            for i in rollout_ids:
                self.done.pop(i, None)
                self.parked.pop(i, None)
            return [KVTransfer(i, cached_tokens=lengths[i]) for i in rollout_ids]

    async def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        async with self._turn:
            await asyncio.sleep(1)
            self.world.write(f"{self.name} accept {[r.id for r in responses]}")
            for r in responses:
                (self.parked if r.finish is FinishReason.TURN else self.done)[r.id] = len(r)

    async def load(self, weights: WeightsRef) -> None:
        async with self._turn:
            self.world.loaded[self.name] = weights.version
            self.world.write(f"{self.name} load {weights.version}")

    async def restart(self) -> None:
        self.done.clear()
        self.world.loaded[self.name] = 0
        self.world.write(f"{self.name} restart")


class FakeScorer:
    """A scorer that takes ``seconds`` per call plus a tenth of a second per new token.

    Its methods are those of :class:`~stretto.protocols.Scorer`. The score of rollout i is ``i +
    0.5``. If it follows a model, the score is its version for each token. It checks that chunks are
    in order, all tokens precede the score, and no new weights arrive within a call.

    Args:
        name: name in the log and of its scores.
        follows: the trained model whose weights it loads. Empty for none.
        worthwhile_tokens: number of tokens that make a call worth its cost.
        seconds: fixed duration of a call.

    Attributes:
        hangs: if set, :meth:`finish` takes 30 years.
    """

    def __init__(
        self,
        world: World,
        name: str,
        kind: ScoreKind = "reward",
        follows: str = "",
        worthwhile_tokens: int = 0,
        seconds: float = 0.5,
    ) -> None:
        self.info = ScorerInfo(name, kind, follows, worthwhile_tokens=worthwhile_tokens)
        self.world, self.name = world, name
        self.tokens: dict[int, list[int]] = {}
        self.new: dict[int, int] = {}
        self.seconds, self.hangs = seconds, False
        world.loaded[name] = 0

    async def admit(self, responses: Sequence[Response]) -> None:
        for r in responses:
            self.tokens[r.id] = r.tokens.tolist()
            self.new[r.id] = len(r)

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        await asyncio.sleep(self.seconds + 0.1 * sum(len(c.tokens) for c in chunks))
        for c in chunks:
            assert c.start == len(self.tokens[c.rollout_id])
            self.tokens[c.rollout_id] += c.tokens.tolist()

    async def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
        version = self.world.loaded[self.name]
        takes_s = self.seconds + 0.1 * sum(self.new[i] for i in rollout_ids)
        await asyncio.sleep(1e9 if self.hangs else takes_s)
        assert version == self.world.loaded[self.name]
        self.world.write(f"{self.name} finish {list(rollout_ids)}")
        return [self._score(i, version) for i in rollout_ids]

    def _score(self, i: int, version: int) -> Score:
        length, values = self.world.length(i), [i + 0.5]
        sampled = length
        if self.world.turns:
            sampled = sum(self.world.turns[i % len(self.world.turns)])
        assert self.tokens.pop(i) == [token(i, t) for t in range(length)]
        failure = None
        if self.info.follows:
            values = [float(version)] * sampled
        elif self.info.kind == "reward" and i in self.world.fails:
            values, failure = [], f"no verdict on {i}"
        return Score(i, self.name, self.info.kind, np.array(values, np.float32), failure)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        for i in rollout_ids:
            self.tokens.pop(i, None)

    async def load(self, weights: WeightsRef) -> None:
        self.world.loaded[self.name] = weights.version

    async def restart(self) -> None:
        self.tokens.clear()
        self.world.loaded[self.name] = 0
        self.world.write(f"{self.name} restart")


class FakeLearner:
    """A learner that learns nothing, takes fixed seconds per step, and publishes versions 1, 2, ...

    Its methods are those of :class:`~stretto.protocols.Learner`.

    Attributes:
        seconds: duration of a step.
        version: the last published version.
        mean_score: the mean reward that it reports to controllers. It may be changed between steps.
    """

    def __init__(self, world: World, seconds: float = 2.0) -> None:
        self.world = world
        self.seconds = seconds
        self.version = 0
        self.mean_score = 1.25

    async def train(self, batch: TrainBatch) -> TrainOutput:
        self.world.write(f"train {batch.ids.tolist()}")
        await asyncio.sleep(self.seconds)
        rewards = batch.totals().astype(np.float32)
        return TrainOutput({"objective/scores": self.mean_score}, rewards)

    async def publish(self) -> Mapping[str, WeightsRef]:
        self.version += 1
        self.world.write(f"publish {self.version}")
        return {m: WeightsRef(m, self.version, "x") for m in ("actor", "critic")}
