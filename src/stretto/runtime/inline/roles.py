"""The roles of this process behind the protocols: workers on lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from stretto.protocols import Tracer
from stretto.types import (
    Chunk,
    Parcel,
    Response,
    Score,
    ScoreKind,
    TrainBatch,
    TrainOutput,
    WeightsRef,
    short_name,
)
from stretto.workers.protocols import GeneratorWorker, LearnerWorker, ScorerWorker
from stretto.workers.threads import Lane

T = TypeVar("T")


class _Role:
    """Something that works on a lane and leaves spans."""

    def __init__(self, role: str, lane: Lane, tracer: Tracer) -> None:
        self._role, self._lane, self._tracer = role, lane, tracer

    async def _work(
        self,
        name: str,
        call: Callable[[], T],
        describe: Callable[[T], Mapping[str, Any]] | None = None,
    ) -> T:
        """Make a call on the lane; the span's attributes come from its result."""

        def traced() -> T:
            with self._tracer.span(self._role, name) as span:
                result = call()
                if describe is not None:
                    span.update(describe(result))
                return result

        return await self._lane.run(traced)


class InlineScorer(_Role):
    """A scorer of this process; see :class:`~stretto.protocols.Scorer`."""

    def __init__(self, scorer: ScorerWorker, lane: Lane, tracer: Tracer) -> None:
        super().__init__(short_name(scorer.name), lane, tracer)
        self._scorer = scorer

    @property
    def name(self) -> str:
        return self._scorer.name

    @property
    def kind(self) -> ScoreKind:
        return self._scorer.kind

    @property
    def follows(self) -> str:
        return self._scorer.follows

    @property
    def reads_text(self) -> bool:
        return self._scorer.reads_text

    @property
    def streams(self) -> bool:
        return self._scorer.streaming

    @property
    def worthwhile_tokens(self) -> int:
        return self._scorer.worthwhile_tokens

    async def admit(self, responses: Sequence[Response]) -> None:
        await self._lane.run(lambda: self._scorer.admit(responses))

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        ids = [c.rollout_id for c in chunks]
        await self._read("prefill", lambda: self._scorer.extend(chunks), ids)

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        return await self._read("score", lambda: self._scorer.finish(rollout_ids), rollout_ids)

    async def _read(self, name: str, call: Callable[[], T], rollout_ids: Sequence[int]) -> T:
        """Work that reads tokens, which the span tells of where the scorer counts them."""

        def read() -> tuple[T, Mapping[str, Any]]:
            before = getattr(self._scorer, "read_tokens", None)
            result = call()
            about: dict[str, Any] = {"rollouts": list(rollout_ids)}
            if before is not None:
                about["tokens"] = getattr(self._scorer, "read_tokens", 0) - before
            return result, about

        result, _ = await self._work(f"{name}/{self._role}", read, lambda both: both[1])
        return result

    async def release(self, rollout_ids: Sequence[int]) -> None:
        await self._lane.run(lambda: self._scorer.release(rollout_ids))

    async def load(self, weights: WeightsRef) -> None:
        about = {"version": weights.version}
        await self._work("load", lambda: self._scorer.load(weights), lambda _: about)


class InlineGenerator(_Role):
    """An engine of this process; see :class:`~stretto.protocols.Generator`."""

    def __init__(self, role: str, engine: GeneratorWorker, lane: Lane, tracer: Tracer) -> None:
        super().__init__(role, lane, tracer)
        self._engine = engine

    async def admit(self, responses: Sequence[Response]) -> None:
        await self._lane.run(lambda: self._engine.admit(responses))

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Sequence[Chunk]:
        engine = self._engine

        def decode() -> tuple[Sequence[Chunk], Mapping[str, Any]]:
            before = engine.context_tokens, engine.prefilled_tokens
            chunks = engine.decode(max_tokens, stop_after)
            return chunks, {
                "rollouts": [c.rollout_id for c in chunks],
                "tokens": sum(len(c.tokens) for c in chunks),
                "steps": max((len(c.tokens) for c in chunks), default=0),
                "context": engine.context_tokens - before[0],
                "prefilled": engine.prefilled_tokens - before[1],
                "version": engine.version,
            }

        chunks, _ = await self._work("gen", decode, lambda result: result[1])
        return chunks

    async def release(self, rollout_ids: Sequence[int]) -> None:
        await self._lane.run(lambda: self._engine.release(rollout_ids))

    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[Parcel]:
        about = {"rollouts": list(rollout_ids)}
        return await self._work(
            "migrate", lambda: self._engine.export(rollout_ids, with_cache), lambda _: about
        )

    async def accept(self, responses: Sequence[Response], parcels: Sequence[Parcel]) -> None:
        about = {"rollouts": [r.id for r in responses]}
        await self._work(
            "migrate", lambda: self._engine.accept(responses, parcels), lambda _: about
        )

    async def load(self, weights: WeightsRef) -> None:
        about = {"version": weights.version}
        await self._work("load", lambda: self._engine.load(weights), lambda _: about)


class InlineLearner(_Role):
    """A learner of this process; see :class:`~stretto.protocols.Learner`."""

    def __init__(self, learner: LearnerWorker, lane: Lane, tracer: Tracer) -> None:
        super().__init__("learner", lane, tracer)
        self._learner = learner

    async def train(self, batch: TrainBatch) -> TrainOutput:
        about = {
            "rollouts": batch.ids.tolist(),
            "tokens": batch.total_tokens,
        }
        return await self._work("update", lambda: self._learner.train(batch), lambda _: about)

    async def publish(self) -> Mapping[str, WeightsRef]:
        return await self._work("publish", self._learner.publish)
