"""The roles of a schedule, whose work is done wherever an executor carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from stretto.observe.spans import SWAPS
from stretto.protocols import Tracer
from stretto.types import (
    Chunk,
    KVTransfer,
    Response,
    Score,
    ScoreKind,
    ScorerInfo,
    TrainBatch,
    TrainOutput,
    WeightsRef,
    short_name,
)
from stretto.workers.executor import Executor


class _Client:
    """A role that asks a worker, and hands the worker's spans to the tracer."""

    def __init__(self, role: str, executor: Executor, tracer: Tracer) -> None:
        self._role, self._executor, self._tracer = role, executor, tracer

    async def _ask(self, method: str, *args: Any, work: str = "") -> Any:
        """Make a call and return its value; ``work`` names its work while it is under way."""
        open_span = self._tracer.awaiting(self._role, work) if work else nullcontext()
        with open_span:
            reply = await self._executor.call(method, *args)
        for w in reply.work:
            role = SWAPS if w.beside else self._role
            self._tracer.add(role, w.name, w.start_s, w.end_s, **w.attributes)
        return reply.value


class GeneratorClient(_Client):
    """A generator whose work an executor carries; see :class:`~stretto.protocols.Generator`."""

    async def admit(self, responses: Sequence[Response]) -> None:
        await self._ask("admit", responses)

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Sequence[Chunk]:
        chunks: Sequence[Chunk] = await self._ask("decode", max_tokens, stop_after, work="gen")
        return chunks

    async def release(self, rollout_ids: Sequence[int]) -> None:
        await self._ask("release", rollout_ids)

    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[KVTransfer]:
        transfers: Sequence[KVTransfer] = await self._ask("export", rollout_ids, with_cache)
        return transfers

    async def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        await self._ask("accept", responses, transfers)

    async def load(self, weights: WeightsRef) -> None:
        await self._ask("load", weights, work="load")

    async def restart(self) -> None:
        await self._executor.restart()


class ScorerClient(_Client):
    """A scorer whose work an executor carries; see :class:`~stretto.protocols.Scorer`.

    Args:
        info: the facts about the scorer, at the start.
        role: of one of several replicas, in traces; the scorer's short name by default.
    """

    def __init__(
        self, info: ScorerInfo, executor: Executor, tracer: Tracer, role: str = ""
    ) -> None:
        self._scorer = short_name(info.name)
        super().__init__(role or self._scorer, executor, tracer)
        self._info = info

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def kind(self) -> ScoreKind:
        return self._info.kind

    @property
    def follows(self) -> str:
        return self._info.follows

    @property
    def streams(self) -> bool:
        return self._info.streams

    @property
    def reads_text(self) -> bool:
        return self._info.reads_text

    @property
    def worthwhile_tokens(self) -> int:
        return self._info.worthwhile_tokens

    async def admit(self, responses: Sequence[Response]) -> None:
        self._info = await self._ask("admit", responses)

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        self._info = await self._ask("extend", chunks, work=f"prefill/{self._scorer}")

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        work = f"score/{self._scorer}"
        scores: Sequence[Score] = await self._ask("finish", rollout_ids, work=work)
        return scores

    async def release(self, rollout_ids: Sequence[int]) -> None:
        await self._ask("release", rollout_ids)

    async def load(self, weights: WeightsRef) -> None:
        await self._ask("load", weights, work="load")

    async def restart(self) -> None:
        await self._executor.restart()


class LearnerClient(_Client):
    """A learner whose work an executor carries; see :class:`~stretto.protocols.Learner`."""

    async def train(self, batch: TrainBatch) -> TrainOutput:
        output: TrainOutput = await self._ask("train", batch, work="update")
        return output

    async def publish(self) -> Mapping[str, WeightsRef]:
        refs: Mapping[str, WeightsRef] = await self._ask("publish", work="publish")
        return refs
