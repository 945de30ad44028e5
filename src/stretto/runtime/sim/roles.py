"""Scorers and the learner in virtual time: they cost what a cost model says, and compute nothing.

Rewards come from a model of learning, so that controllers that follow rewards have some to follow.
Calls that break the order of things (a chunk out of place, a score for a rollout that has not
ended) are errors here as with real roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from stretto.config.sections import NonNegative, Section
from stretto.errors import EngineError
from stretto.runtime.sim.costs import PrefillCost, SampleCost, TrainCost
from stretto.runtime.sim.devices import SimWorker
from stretto.runtime.sim.lengths import uniform
from stretto.types import (
    Chunk,
    Response,
    Score,
    ScoreKind,
    ScorerInfo,
    TrainBatch,
    TrainOutput,
    WeightsRef,
)

_NUMBERS = np.zeros(1 << 17, np.float32)
"""Zeros that per-token scores are slices of; longer than any response."""
_NUMBERS.flags.writeable = False


class LearningCurve(Section):
    """A model of what training does to rewards; no claim about any task.

    The mean reward of version v is ``last + (first - last) * exp(-v / versions)``; a response's own
    reward is spread evenly around it.
    """

    first: float = 0.0
    """Mean reward of the untrained policy."""
    last: float = 1.0
    """Mean reward that training converges to."""
    versions: NonNegative = 50.0
    """Hand-overs after which the distance to ``last`` has fallen to 37 %; 0: converged at once."""
    spread: NonNegative = 0.5
    """Largest distance of a response's reward from the mean."""

    def reward(self, seed: int, rollout_id: int, version: int) -> float:
        """Return the reward of a response whose last token this version sampled."""
        left = exp(-version / self.versions) if self.versions else 0.0
        noise = self.spread * (2 * uniform(seed, "reward", rollout_id) - 1)
        return self.last + (self.first - self.last) * left + noise


@dataclass(slots=True)
class _Pending:
    """A rollout at a scorer: prompt and response tokens, of which ``cached`` are prefilled."""

    prompt: int
    tokens: int
    version: int
    ended: bool
    cached: int = 0


class SimScorer:
    """A reward model, the reference, the critic, or a function."""

    def __init__(
        self,
        worker: SimWorker,
        cost: PrefillCost | SampleCost,
        kind: ScoreKind,
        *,
        reward: Callable[[int, int], float] = lambda rollout_id, version: 0.0,
        follows: str = "",
        streams: bool = True,
        padded: int = 0,
        worthwhile_tokens: int = 0,
        load_s: float = 0.0,
    ) -> None:
        """Make a scorer that knows no rollouts.

        Args:
            worker: its devices; the worker's role is its name.
            cost: by tokens for a model, by responses for a function.
            reward: of a rollout id and the version of its last token; for kind ``reward``.
            follows: the trained model whose weights it loads.
            streams: whether tokens are prefilled as they come; else all in :meth:`finish`.
            padded: rollouts that are worked on at a time, each padded to the longest of them; 0
                pads nothing.
            worthwhile_tokens: that make a call worth its fixed cost.
        """
        self._worker, self._cost, self._reward = worker, cost, reward
        self._padded, self._load_s, self.name = padded, load_s, worker.role
        streams = streams and isinstance(cost, PrefillCost)
        self.info = ScorerInfo(
            self.name, kind, follows, streams, worthwhile_tokens=worthwhile_tokens
        )
        self._pending: dict[int, _Pending] = {}

    async def admit(self, responses: Sequence[Response]) -> None:
        """Learn of responses; their prompts are worked on with their first chunk.

        Raises:
            EngineError: one is here already.
        """
        async with self._worker.turn:
            for r in responses:
                if r.id in self._pending:
                    raise EngineError(f"{self.name} has rollout {r.id} already; release it first")
                prompt_tokens = len(r.prompt.tokens)
                self._pending[r.id] = _Pending(prompt_tokens, len(r), r.version, bool(r.finish))

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        """Take more tokens of admitted rollouts.

        Raises:
            EngineError: a chunk's rollout is unknown, or the chunk leaves a gap or comes twice.
        """
        async with self._worker.turn:
            for chunk in chunks:
                entry = self._pending.get(chunk.rollout_id)
                if entry is None or chunk.start != entry.tokens or entry.ended:
                    raise EngineError(
                        f"{self.name} cannot take a chunk of rollout {chunk.rollout_id} that "
                        f"starts at {chunk.start}; it holds {entry}"
                    )
                entry.tokens += len(chunk.tokens)
                entry.version, entry.ended = chunk.version, chunk.finish is not None
            if self.info.streams:
                ids = list(dict.fromkeys(c.rollout_id for c in chunks))
                await self._work("prefill", ids)

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        """Score rollouts, in the order asked, and forget them.

        Raises:
            EngineError: a rollout is unknown, or its last chunk has not come.
        """
        async with self._worker.turn:
            for id_ in rollout_ids:
                if id_ not in self._pending or not self._pending[id_].ended:
                    raise EngineError(
                        f"{self.name} is asked to score rollout {id_}, of which it holds "
                        f"{self._pending.get(id_)}; give it the last chunk first"
                    )
            await self._work("score", rollout_ids)
            return [self._score(id_, self._pending.pop(id_)) for id_ in rollout_ids]

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts without a score; unknown ids are ignored."""
        async with self._worker.turn:
            for id_ in rollout_ids:
                self._pending.pop(id_, None)

    async def load(self, weights: WeightsRef) -> None:
        """Score with these weights from now on; what is prefilled is void."""
        async with self._worker.turn:
            if self._load_s:
                await self._worker.work("load", self._load_s, version=weights.version)
            for entry in self._pending.values():
                entry.cached = 0

    async def restart(self) -> None:
        """Forget all rollouts; the time it takes is not this role's."""
        async with self._worker.turn:
            self._pending.clear()

    async def _work(self, name: str, rollout_ids: Sequence[int]) -> None:
        new = []
        for id_ in rollout_ids:
            entry = self._pending[id_]
            total = entry.prompt + entry.tokens
            new.append(total - entry.cached)
            entry.cached = total
        ids = list(rollout_ids)
        if isinstance(self._cost, PrefillCost):
            passes = self._passes(new)
            seconds = sum(map(self._cost.seconds, passes))
            await self._worker.work(name, seconds, rollouts=ids, tokens=sum(passes))
        else:
            await self._worker.work(name, self._cost.seconds(len(ids)), rollouts=ids)

    def _passes(self, new: Sequence[int]) -> list[int]:
        if not self._padded:
            return [sum(new)]
        parts = (new[i : i + self._padded] for i in range(0, len(new), self._padded))
        return [len(part) * max(part) for part in parts]

    def _score(self, rollout_id: int, entry: _Pending) -> Score:
        if self.info.kind == "reward":
            values = np.array([self._reward(rollout_id, entry.version)], np.float32)
        else:
            values = _NUMBERS[: entry.tokens]
        return Score(rollout_id, self.name, self.info.kind, values)


class SimLearner:
    """A learner that only takes time; the :class:`LearningCurve` says how rewards change.

    State: the version.
    """

    def __init__(
        self,
        worker: SimWorker,
        cost: TrainCost,
        models: Sequence[str] = ("actor",),
        *,
        padded: bool = False,
    ) -> None:
        """Make an untrained learner of these models, which may pad a batch to its longest."""
        self._worker, self._cost, self._models = worker, cost, tuple(models)
        self._padded = padded
        self.version = 0

    async def train(self, batch: TrainBatch) -> TrainOutput:
        """Take one step; return the mean reward, staleness and the responses' rewards."""
        async with self._worker.turn:
            tokens = self._tokens(batch)
            await self._worker.work("update", self._cost.seconds(tokens), tokens=tokens)
            rewards, now = batch.totals(), self.version
            stale = [now - int(v.min(initial=now)) for v in batch.split(batch.versions)]
            stats = {
                "objective/scores": sum(rewards.tolist()) / max(len(rewards), 1),
                "staleness/mean": sum(stale) / max(len(stale), 1),
                "staleness/max": float(max(stale, default=0)),
            }
            return TrainOutput(stats, rewards.astype(np.float32))

    def _tokens(self, batch: TrainBatch) -> int:
        if not self._padded:
            return batch.total_tokens
        each = map(len, batch.prompts)
        longest = max((p + n for p, n in zip(each, batch.lengths.tolist(), strict=True)), default=0)
        return len(batch) * longest

    async def publish(self) -> Mapping[str, WeightsRef]:
        """Publish the next version of every model."""
        async with self._worker.turn:
            await self._worker.work("publish", self._cost.publish_s, version=self.version + 1)
            self.version += 1
            return {m: WeightsRef(m, self.version, f"{m} {self.version}") for m in self._models}
