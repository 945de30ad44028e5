"""Scorers and the learner in virtual time: they take the time of a cost model and compute nothing.

Calls out of order (a wrong chunk, a score for an unfinished rollout) are errors as with real roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.errors import EngineError
from stretto.runtime.sim.cluster import LearnerRole, ScorerRole, known
from stretto.runtime.sim.costs import PrefillCost
from stretto.runtime.sim.resources import SimWorker
from stretto.types import (
    CONTEXT,
    Chunk,
    FinishReason,
    Response,
    Score,
    ScorerInfo,
    TrainBatch,
    TrainStepOutput,
    WeightsRef,
)

_NUMBERS = np.zeros(1 << 17, np.float32)
"""Zeros to slice per-token scores from, longer than any response."""
_NUMBERS.flags.writeable = False


@dataclass(slots=True)
class PendingRollout:
    """A rollout at a scorer: its tokens, how many are prefilled (``cached``), and ``sampled``. A
    teacher does not read those of other teachers' prompts.
    """

    prompt: int
    tokens: int
    sampled: int
    version: int
    ended: bool
    reads: bool
    cached: int = 0


class SimScorer:
    """A reward model, the reference, the critic, or a function, named like its worker's role. For
    kind ``reward``, ``reward`` maps a rollout id and the version of its last token to its reward.
    """

    def __init__(
        self,
        worker: SimWorker,
        role: ScorerRole,
        reward: Callable[[int, int], float] = lambda rollout_id, version: 0.0,
    ) -> None:
        self._worker = worker
        self._role = role
        self._reward = reward
        self.name = worker.role
        self._cost = role.cost or known(None)
        streams = role.streams and isinstance(self._cost, PrefillCost)
        least = role.worthwhile_tokens
        self.info = ScorerInfo(self.name, role.kind, role.follows, streams, worthwhile_tokens=least)
        self._begin()

    def _begin(self) -> None:
        self._pending: dict[int, PendingRollout] = {}
        self.version = 0

    async def admit(self, responses: Sequence[Response]) -> None:
        """Register responses, again if their episodes started again. Their prompts are prefilled
        with the first chunk.
        """
        async with self._worker.turn("admit", [r.id for r in responses]):
            for r in responses:
                sampled_tokens = len(r) if r.sampled is None else int(r.sampled.sum())
                sizes = len(r.prompt.tokens), len(r), sampled_tokens
                reads = self._role.reads(r.prompt.id)
                self._pending[r.id] = PendingRollout(*sizes, r.version, _has_ended(r.finish), reads)

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        ids = list(dict.fromkeys(c.rollout_id for c in chunks))
        async with self._worker.turn("extend", ids):
            for chunk in chunks:
                entry = self._pending.get(chunk.rollout_id)
                if entry is None or chunk.start != entry.tokens or entry.ended:
                    raise EngineError(
                        f"{self.name} cannot take a chunk of rollout {chunk.rollout_id} that "
                        f"starts at {chunk.start}; it holds {entry}",
                        "chunk-out-of-place",
                    )
                entry.tokens += len(chunk.tokens)
                entry.ended = _has_ended(chunk.finish)
                if chunk.version != CONTEXT:
                    entry.sampled += len(chunk.tokens)
                    entry.version = chunk.version
            if self.info.streams:
                await self._work("prefill", ids)

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        async with self._worker.turn("finish", rollout_ids):
            for id_ in rollout_ids:
                if id_ not in self._pending or not self._pending[id_].ended:
                    raise EngineError(
                        f"{self.name} is asked to score rollout {id_}, of which it holds "
                        f"{self._pending.get(id_)}; give it the last chunk first",
                        "rollout-unfinished",
                    )
            await self._work("score", rollout_ids)
            return [self._score(id_, self._pending.pop(id_)) for id_ in rollout_ids]

    async def release(self, rollout_ids: Sequence[int]) -> None:
        async with self._worker.turn("release", rollout_ids):
            for id_ in rollout_ids:
                self._pending.pop(id_, None)

    async def load(self, weights: WeightsRef) -> None:
        """Score with these weights from now on. Invalidates everything prefilled."""
        async with self._worker.turn("load", weights.version):
            if self._role.load_s:
                await self._worker.load(weights.version, self._role.load_s)
            self.version = weights.version
            for entry in self._pending.values():
                entry.cached = 0

    async def restart(self) -> None:
        async with self._worker.turn("restart"):
            self._begin()

    async def _work(self, name: str, rollout_ids: Sequence[int]) -> None:
        new = []
        ids = [id_ for id_ in rollout_ids if self._pending[id_].reads]
        if not ids:
            return
        for id_ in ids:
            entry = self._pending[id_]
            total = entry.prompt + entry.tokens
            new.append(total - entry.cached)
            entry.cached = total
        if isinstance(self._cost, PrefillCost):
            passes = self._passes(new)
            seconds = sum(map(self._cost.seconds, passes))
            await self._worker.work(name, seconds, rollouts=ids, tokens=sum(passes))
        else:
            await self._worker.work(name, self._cost.seconds(len(ids)), rollouts=ids)

    def _passes(self, new: Sequence[int]) -> list[int]:
        if not (limit := self._role.padded):
            return [sum(new)]
        parts = (new[i : i + limit] for i in range(0, len(new), limit))
        return [len(part) * max(part) for part in parts]

    def _score(self, rollout_id: int, entry: PendingRollout) -> Score:
        if self.info.kind == "reward":
            values = np.array([self._reward(rollout_id, entry.version)], np.float32)
        else:
            values = _NUMBERS[: entry.sampled if entry.reads else 0]
        return Score(rollout_id, self.name, self.info.kind, values)


def _has_ended(finish: FinishReason | None) -> bool:
    return finish not in (None, FinishReason.TURN)


class SimLearner:
    """A learner that only takes time. Its state is the version."""

    def __init__(self, worker: SimWorker, role: LearnerRole) -> None:
        self._worker = worker
        self._role = role
        self._cost = known(role.cost)
        self.version = 0
        self._accumulated_s = 0.0  # of the next step's first update

    async def accumulate(self, batch: TrainBatch) -> None:
        """Take the time of the first update's passes, whose optimizer step is left."""
        async with self._worker.turn("accumulate", batch.ids.tolist()):
            tokens = self._tokens(batch)
            seconds = self._cost.token_s * tokens / self._role.updates
            await self._worker.work("accumulate", seconds, tokens=tokens)
            self._accumulated_s += seconds

    async def train(self, batch: TrainBatch) -> TrainStepOutput:
        """Take one step. Return the mean reward, staleness and the responses' rewards."""
        async with self._worker.turn("train", batch.ids.tolist()):
            tokens = self._tokens(batch)
            seconds = self._cost.seconds(tokens) - self._accumulated_s
            self._accumulated_s = 0.0
            await self._worker.work("update", max(seconds, 0.0), tokens=tokens)
            rewards, now = batch.totals(), self.version
            stale = [now - int(v.min(initial=now)) for v in batch.split_sampled(batch.versions)]
            stats = {
                "objective/scores": sum(rewards.tolist()) / max(len(rewards), 1),
                "staleness/mean": sum(stale) / max(len(stale), 1),
                "staleness/max": float(max(stale, default=0)),
            }
            return TrainStepOutput(stats, rewards.astype(np.float32))

    def _tokens(self, batch: TrainBatch) -> int:
        if not self._role.padded:
            return batch.total_tokens
        prompt_lengths = map(len, batch.prompts)
        longest = max(
            (p + n for p, n in zip(prompt_lengths, batch.lengths.tolist(), strict=True)), default=0
        )
        return len(batch) * longest

    async def publish(self) -> Mapping[str, WeightsRef]:
        async with self._worker.turn("publish", self.version + 1):
            await self._worker.work("publish", self._cost.publish_s, version=self.version + 1)
            self.version += 1
            return {
                m: WeightsRef(m, self.version, f"{m} {self.version}") for m in self._role.trains
            }
