"""The workers behind roles, wherever a runtime has put them: plain functions, called one by one.

The roles' docstrings in :mod:`stretto.protocols` say what the methods do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from stretto.types import (
    Capabilities,
    Chunk,
    KVTransfer,
    Response,
    Score,
    ScorerInfo,
    TrainBatch,
    TrainOutput,
    WeightsRef,
)


class ScorerWorker(Protocol):
    """The worker of a scorer."""

    @property
    def info(self) -> ScorerInfo: ...

    def admit(self, responses: Sequence[Response]) -> None: ...
    def extend(self, chunks: Sequence[Chunk]) -> None: ...
    def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]: ...
    def release(self, rollout_ids: Sequence[int]) -> None: ...
    def load(self, weights: WeightsRef) -> None: ...


class FunctionWorker(ScorerWorker, Protocol):
    """The worker of a scorer in a process of its own, which can be ended from another thread."""

    def close(self) -> None: ...


class GeneratorWorker(Protocol):
    """The worker of a generator."""

    capabilities: Capabilities
    version: int
    context_tokens: int
    prefilled_tokens: int

    def admit(self, responses: Sequence[Response]) -> None: ...
    def decode(self, max_tokens: int, stop_after: int = 0) -> Sequence[Chunk]: ...
    def release(self, rollout_ids: Sequence[int]) -> None: ...
    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[KVTransfer]: ...
    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None: ...
    def load(self, weights: WeightsRef) -> None: ...


class LearnerWorker(Protocol):
    """The worker of a learner."""

    def train(self, batch: TrainBatch) -> TrainOutput: ...
    def publish(self) -> Mapping[str, WeightsRef]: ...
