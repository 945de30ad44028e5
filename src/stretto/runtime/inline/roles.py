"""The roles of this process behind the protocols, and what drives a coroutine that never waits."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from stretto.types import Batch, Chunk, Rollout, Score, ScoreKind, Stats, Weights

T = TypeVar("T")


class PlainScorer(Protocol):
    """A scorer whose methods are plain functions."""

    name: str
    kind: ScoreKind

    def admit(self, rollouts: Sequence[Rollout]) -> None: ...
    def extend(self, chunks: Sequence[Chunk]) -> None: ...
    def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]: ...
    def release(self, rollout_ids: Sequence[int]) -> None: ...


class PlainGenerator(Protocol):
    """A generator whose methods are plain functions."""

    def admit(self, rollouts: Sequence[Rollout]) -> None: ...
    def decode(self, max_tokens: int) -> Sequence[Chunk]: ...
    def release(self, rollout_ids: Sequence[int]) -> None: ...
    def load(self, weights: Weights) -> None: ...


class PlainLearner(Protocol):
    """A learner whose methods are plain functions."""

    def train(self, batch: Batch) -> Stats: ...
    def publish(self) -> Weights: ...


class InlineScorer:
    """A scorer that works while it is called."""

    def __init__(self, scorer: PlainScorer) -> None:
        self._scorer = scorer

    @property
    def name(self) -> str:
        """See :class:`~stretto.protocols.Scorer`; so for all methods."""
        return self._scorer.name

    @property
    def kind(self) -> ScoreKind:
        """What its scores are."""
        return self._scorer.kind

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Learn of rollouts."""
        self._scorer.admit(rollouts)

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        """Take more tokens."""
        self._scorer.extend(chunks)

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        """Score finished rollouts."""
        return self._scorer.finish(rollout_ids)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts."""
        self._scorer.release(rollout_ids)


class InlineGenerator:
    """A generator that works while it is called."""

    def __init__(self, engine: PlainGenerator) -> None:
        self._engine = engine

    async def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Queue rollouts."""
        self._engine.admit(rollouts)

    async def decode(self, max_tokens: int) -> Sequence[Chunk]:
        """Decode further."""
        return self._engine.decode(max_tokens)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts."""
        self._engine.release(rollout_ids)

    async def load(self, weights: Weights) -> None:
        """Take new weights."""
        self._engine.load(weights)


class InlineLearner:
    """A learner that works while it is called."""

    def __init__(self, learner: PlainLearner) -> None:
        self._learner = learner

    async def train(self, batch: Batch) -> Stats:
        """Take a step."""
        return self._learner.train(batch)

    async def publish(self) -> Weights:
        """The next version."""
        return self._learner.publish()


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits to its end, on the caller's stack.

    Every role here answers before its call returns, so there is nothing for an event loop to do;
    and Ctrl-C reaches the work itself, not a loop around it.

    Raises:
        RuntimeError: it waited for something.
    """
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("an inline role waited for something outside this process")
