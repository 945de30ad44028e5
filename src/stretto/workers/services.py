"""Services: workers that answer with what they did, and when. Executors call them.

A service stands where its worker is, in a thread or in a process of its own. Its methods are the
worker's, and return a :class:`~stretto.types.Reply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from stretto.clock import Clock, RealClock
from stretto.models.shelf import Shelf
from stretto.types import (
    Chunk,
    KVTransfer,
    Reply,
    Response,
    Score,
    ScorerInfo,
    TrainBatch,
    TrainOutput,
    WeightsRef,
    Work,
    short_name,
)
from stretto.workers.protocols import GeneratorWorker, LearnerWorker, ScorerWorker

T = TypeVar("T")


class Service:
    """The common part of all services.

    Attributes:
        shelf: tensors that rest in the host's memory while other services of the process work;
            ``None`` where all stay.
        reads: methods that leave the tensors of the shelf as they are; all others may change them.
        waits: methods that wait for the tensors themselves, when they come to need them.
    """

    shelf: Shelf | None = None
    reads: frozenset[str] = frozenset()
    waits: frozenset[str] = frozenset()

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()

    @property
    def light(self) -> frozenset[str]:
        """Return methods that need no tensors of the shelf, and next to no room on the device."""
        return frozenset({"now"})

    def now(self) -> Reply[float]:
        """The time by the worker's clock."""
        return Reply(self._clock.now())

    def _timed(
        self, name: str, call: Callable[[], T], about: Callable[[T], Mapping[str, Any]]
    ) -> Reply[T]:
        start_s = self._clock.now()
        value = call()
        attributes = about(value)
        return Reply(value, (Work(name, start_s, self._clock.now(), attributes),))


class GeneratorService(Service):
    """A generator's worker; see :class:`~stretto.protocols.Generator`."""

    def __init__(self, worker: GeneratorWorker, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._worker = worker

    @property
    def light(self) -> frozenset[str]:
        return super().light | {"admit", "release"}

    def admit(self, responses: Sequence[Response]) -> Reply[None]:
        self._worker.admit(responses)
        return Reply(None)

    def decode(self, max_tokens: int, stop_after: int = 0) -> Reply[Sequence[Chunk]]:
        worker = self._worker
        context, prefilled = worker.context_tokens, worker.prefilled_tokens

        def about(chunks: Sequence[Chunk]) -> Mapping[str, Any]:
            return {
                "rollouts": [c.rollout_id for c in chunks],
                "tokens": sum(len(c.tokens) for c in chunks),
                "steps": max((len(c.tokens) for c in chunks), default=0),
                "context": worker.context_tokens - context,
                "prefilled": worker.prefilled_tokens - prefilled,
                "version": worker.version,
            }

        return self._timed("gen", lambda: worker.decode(max_tokens, stop_after), about)

    def release(self, rollout_ids: Sequence[int]) -> Reply[None]:
        self._worker.release(rollout_ids)
        return Reply(None)

    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Reply[Sequence[KVTransfer]]:
        about = {"rollouts": list(rollout_ids)}
        return self._timed(
            "migrate", lambda: self._worker.export(rollout_ids, with_cache), lambda _: about
        )

    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> Reply[None]:
        about = {"rollouts": [r.id for r in responses]}
        return self._timed(
            "migrate", lambda: self._worker.accept(responses, transfers), lambda _: about
        )

    def load(self, weights: WeightsRef) -> Reply[None]:
        about = {"version": weights.version}
        return self._timed("load", lambda: self._worker.load(weights), lambda _: about)


class ScorerService(Service):
    """A scorer's worker; see :class:`~stretto.protocols.Scorer`.

    The facts that a schedule needs may change, as when memory runs out. So calls that could have
    changed them return them.
    """

    reads = frozenset({"admit", "extend", "finish"})

    def __init__(self, worker: ScorerWorker, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._worker, self._role = worker, short_name(worker.name)

    @property
    def light(self) -> frozenset[str]:
        reading = set() if self._worker.streaming else {"admit", "extend"}
        return super().light | {"info", "release"} | reading

    def info(self) -> ScorerInfo:
        """Return the facts about the scorer that a schedule needs."""
        w = self._worker
        return ScorerInfo(
            name=w.name,
            kind=w.kind,
            follows=w.follows,
            streams=w.streaming,
            reads_text=w.reads_text,
            worthwhile_tokens=w.worthwhile_tokens,
        )

    def admit(self, responses: Sequence[Response]) -> Reply[ScorerInfo]:
        self._worker.admit(responses)
        return Reply(self.info())

    def extend(self, chunks: Sequence[Chunk]) -> Reply[ScorerInfo]:
        ids = [c.rollout_id for c in chunks]
        reply = self._reading("prefill", lambda: self._worker.extend(chunks), ids)
        return Reply(self.info(), reply.work)

    def finish(self, rollout_ids: Sequence[int]) -> Reply[Sequence[Score]]:
        return self._reading("score", lambda: self._worker.finish(rollout_ids), rollout_ids)

    def release(self, rollout_ids: Sequence[int]) -> Reply[None]:
        self._worker.release(rollout_ids)
        return Reply(None)

    def load(self, weights: WeightsRef) -> Reply[None]:
        about = {"version": weights.version}
        return self._timed("load", lambda: self._worker.load(weights), lambda _: about)

    def _reading(self, name: str, call: Callable[[], T], rollout_ids: Sequence[int]) -> Reply[T]:
        """Make a call that reads tokens; their number is reported where the worker counts them."""
        before = getattr(self._worker, "read_tokens", None)

        def about(_: T) -> Mapping[str, Any]:
            told: dict[str, Any] = {"rollouts": list(rollout_ids)}
            if before is not None:
                told["tokens"] = getattr(self._worker, "read_tokens", 0) - before
            return told

        return self._timed(f"{name}/{self._role}", call, about)


class LearnerService(Service):
    """A learner's worker; see :class:`~stretto.protocols.Learner`."""

    waits = frozenset({"train"})

    def __init__(self, worker: LearnerWorker, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._worker = worker

    @property
    def light(self) -> frozenset[str]:
        return super().light | {"publish"}

    def train(self, batch: TrainBatch) -> Reply[TrainOutput]:
        about = {"rollouts": batch.ids.tolist(), "tokens": batch.total_tokens}
        return self._timed("update", lambda: self._worker.train(batch), lambda _: about)

    def publish(self) -> Reply[Mapping[str, WeightsRef]]:
        return self._timed("publish", self._worker.publish, lambda _: {})
