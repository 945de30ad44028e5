"""Scripted roles in virtual time, for tests of schedules and controllers. Imports no torch.

A :class:`World` gives each response a length. Its roles are those of the simulator with round
costs. They take exactly the scripted time, log their calls with times, and check that a schedule
follows the protocols (:mod:`stretto.protocols`). Run code that uses them with
:func:`stretto.runtime.sim.loop.run`: a full run takes milliseconds and is deterministic.
docs/schedules.md has an example.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from stretto.errors import EpisodeLostError
from stretto.runtime.sim.cluster import GeneratorRole, LearnerRole, ScorerRole
from stretto.runtime.sim.costs import (
    DecodeCost,
    GeneratorCost,
    PrefillCost,
    TrainCost,
    TransferCost,
)
from stretto.runtime.sim.generator import SimGenerator
from stretto.runtime.sim.loop import VirtualClock
from stretto.runtime.sim.resources import SimWorker
from stretto.runtime.sim.sim_roles import PendingRollout, SimLearner, SimScorer
from stretto.runtime.sim.turns import SimEnvironment, SimTurn
from stretto.types import (
    Chunk,
    Decoded,
    FinishReason,
    IntArray,
    Observation,
    Prompt,
    Response,
    Score,
    ScoreKind,
    TrainBatch,
    TrainStepOutput,
    WeightsRef,
    episode_of,
)

CONTEXT_TOKENS = 2
"""Tokens of each answer of a :class:`FakeEnvironment`."""
NO_LIMIT = 1 << 30
"""A token limit that no scripted response reaches."""


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
        return self.turn_ends(rollout_id)[-1]

    def turns_of(self, rollout_id: int) -> Sequence[int]:
        """Return the tokens of each turn. Without scripted turns the response is the only one."""
        if self.turns:
            return self.turns[rollout_id % len(self.turns)]
        return [self.lengths[rollout_id % len(self.lengths)]]

    def turn_ends(self, rollout_id: int) -> list[int]:
        """Return the length of the response at the end of each of its turns."""
        turns = self.turns_of(rollout_id)
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


def script_tokens(rollout_id: int, start: int, stop: int) -> IntArray:
    """Return tokens ``start`` to ``stop`` of a response: token t of rollout i is ``100 i + t``."""
    return 100 * episode_of(rollout_id) + np.arange(start, stop, dtype=np.int32)


class _LoggedWorker(SimWorker):
    """Answers a role's calls in order, without devices. Logs those named in ``logged`` when they
    have been answered.
    """

    def __init__(self, world: World, role: str, *logged: str) -> None:
        super().__init__(role, [], world)
        self._world = world
        self._logged = logged

    @asynccontextmanager
    async def turn(self, call: str, *arguments: object) -> AsyncIterator[None]:
        async with super().turn(call, *arguments):
            yield
            if call in self._logged:
                self._world.write(" ".join(map(str, (self.role, call, *arguments))).lstrip())

    async def work(self, name: str, seconds: float, **attributes: Any) -> None:
        """Take the time. The schedule's own spans are enough for tests."""
        if seconds:
            await asyncio.sleep(seconds)


class _SecondPerMove(TransferCost):
    def seconds(self, size_bytes: float) -> float:
        return 1.0


class _EveryCall(PrefillCost):
    def seconds(self, tokens: int) -> float:
        return self.call_s + self.token_s * tokens


class FakeEnvironment(SimEnvironment):
    """An environment that answers each turn but the last with two tokens, after fixed seconds.

    Opening takes a second. Turn n of a rollout, counted from 1, earns n. :class:`World` determines
    the last turn.

    Args:
        seconds: duration of answers by rollout id, repeated.

    Attributes:
        lost: ids of rollouts whose next answer is that their environment is lost.
    """

    def __init__(self, world: World, seconds: Sequence[float] = (3.0,)) -> None:
        super().__init__(self._turns_of, NO_LIMIT)
        self.world = world
        self.seconds = seconds
        self.lost: set[int] = set()

    def _turns_of(self, rollout_id: int) -> Sequence[SimTurn]:
        wait_s = self.seconds[rollout_id % len(self.seconds)]
        return [SimTurn(n, wait_s, CONTEXT_TOKENS) for n in self.world.turns_of(rollout_id)]

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        self.world.write(f"env open {response.id} {len(log)}")
        await asyncio.sleep(1.0)
        return await super().open(response, log)

    async def step(self, response: Response) -> Observation:
        answer = await super().step(response)
        if response.id in self.lost:
            self.lost.discard(response.id)
            raise EpisodeLostError(f"the environment of {response.id} is lost", [response.id])
        self.world.write(f"env step {response.id} turn {answer.number}")
        start = len(response)
        return replace(
            answer,
            tokens=script_tokens(response.id, start, start + len(answer.tokens)),
            reward=float(answer.number),
            messages=({"role": "tool", "content": f"answer {answer.number}"},),
        )


class _Versioned:
    """A role whose version is in its world, from where a test can restore it."""

    world: World
    name: str

    @property
    def version(self) -> int:
        return self.world.loaded[self.name]

    @version.setter
    def version(self, version: int) -> None:
        self.world.loaded[self.name] = version


class FakeGenerator(_Versioned, SimGenerator):
    """A generator with a token a second for all rollouts. Token t of rollout i is ``100 i + t``.

    Accepting rollouts of another generator takes a second.

    Attributes:
        idle: if set, :meth:`decode` returns nothing.
    """

    def __init__(self, world: World, name: str = "gen") -> None:
        self.world = world
        self.name = name
        self.idle = False
        calls = "admit", "hold", "export", "accept", "load", "restart"
        worker = _LoggedWorker(world, name, *calls)
        cost = GeneratorCost(decode=DecodeCost(step_s=1.0), transfer=_SecondPerMove())
        super().__init__(worker, GeneratorRole(cost=cost), world.length, max_new_tokens=NO_LIMIT)

    @property
    def done(self) -> dict[int, int]:
        """Tokens of each rollout that is decoding here, without those of a call in progress."""
        rows = (row for r in self._replicas for row in (*r.waiting, *r.rows.values()))
        return {row.id: row.tokens for row in rows}

    @property
    def parked(self) -> dict[int, int]:
        """Tokens, with the prompt's, of rollouts whose turn has ended here."""
        return {id_: tokens for r in self._replicas for id_, tokens in r.parked.items()}

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        decoded = await super().decode(max_tokens, stop_after)
        return Decoded([], decoded.steps) if self.idle else decoded

    def _end_of(self, response: Response) -> tuple[int, FinishReason]:
        ends = self.world.turn_ends(response.id)
        end = next((end for end in ends if end > len(response)), ends[-1])
        return end, FinishReason.TURN if self.world.turns else FinishReason.STOP

    def _tokens(self, rollout_id: int, start: int, stop: int) -> IntArray:
        return script_tokens(rollout_id, start, stop)


class FakeScorer(_Versioned, SimScorer):
    """A scorer that takes ``seconds`` per call plus a tenth of a second per new token. Prompts cost
    nothing, and tokens of an admitted response are read when it is finished.

    The score of rollout i is ``i + 0.5``. If it follows a model, the score is its version for each
    token. It checks that chunks are in order, all tokens precede the score, and no new weights
    arrive within a call.

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
        self.world = world
        self.name = name
        self.hangs = False
        self._unread: dict[int, int] = {}  # tokens that were admitted, read by finish
        role = ScorerRole(
            name=name,
            kind=kind,
            cost=_EveryCall(call_s=seconds, token_s=0.1),
            follows=follows,
            worthwhile_tokens=worthwhile_tokens,
        )
        worker = _LoggedWorker(world, name, "finish", "restart")
        super().__init__(worker, role, lambda rollout_id, version: rollout_id + 0.5)

    async def admit(self, responses: Sequence[Response]) -> None:
        for r in responses:
            assert np.array_equal(r.tokens, script_tokens(r.id, 0, len(r)))
        await super().admit(responses)
        for r in responses:
            self._pending[r.id].cached = r.total_tokens
            self._unread[r.id] = len(r)

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        for c in chunks:
            scripted = script_tokens(c.rollout_id, c.start, c.start + len(c.tokens))
            assert np.array_equal(c.tokens, scripted)
        await super().extend(chunks)

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        version = self.version
        if self.hangs:
            await asyncio.sleep(1e9)
        for id_ in rollout_ids:
            self._pending[id_].cached -= self._unread.pop(id_)
        scores = await super().finish(rollout_ids)
        assert version == self.version
        return scores

    def _score(self, rollout_id: int, entry: PendingRollout) -> Score:
        assert entry.tokens == self.world.length(rollout_id)
        score = super()._score(rollout_id, entry)
        if self.info.follows:
            return replace(score, values=np.full(entry.sampled, self.version, np.float32))
        if rollout_id in self.world.fails and self.info.kind == "reward":
            none, failure = np.zeros(0, np.float32), f"no verdict on {rollout_id}"
            return replace(score, values=none, failure=failure)
        return score

    async def load(self, weights: WeightsRef) -> None:
        """Use the weights at once, so that :meth:`finish` notices if the schedule did not wait."""
        self.version = weights.version


class FakeLearner(SimLearner):
    """A learner that learns nothing, takes fixed seconds per step, and publishes versions 1, 2, ...

    Args:
        seconds: duration of a step.

    Attributes:
        version: the last published version.
        mean_score: the mean reward that it reports to controllers. It may be changed between steps.
    """

    def __init__(self, world: World, seconds: float = 2.0) -> None:
        role = LearnerRole(trains=("actor", "critic"), cost=TrainCost(step_s=seconds))
        super().__init__(_LoggedWorker(world, "", "accumulate", "publish"), role)
        self.world = world
        self.mean_score = 1.25

    async def train(self, batch: TrainBatch) -> TrainStepOutput:
        self.world.write(f"train {batch.ids.tolist()}")
        output = await super().train(batch)
        return TrainStepOutput({"objective/scores": self.mean_score}, output.rewards)
