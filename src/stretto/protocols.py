"""Protocols of the roles that a schedule calls, of the tracer and of the clock.

Methods are coroutines, so that one schedule works in a single process, on a cluster and in virtual
time. A role answers calls in their order. Generators and scorers that lost their process raise
:class:`~stretto.errors.RoleLostError` until they are restarted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from stretto.types import (
    Chunk,
    Decoded,
    Hold,
    KVTransfer,
    Observation,
    Response,
    Score,
    ScorerInfo,
    TrainBatch,
    TrainStepOutput,
    WeightsRef,
)

DRIVER = "driver"
"""The role of the schedule's own process in traces."""

RECORDS = "driver/records"
"""Name of the spans in which the driver records a step, before it starts the next one."""


class Replaceable(Protocol):
    """Base of generators and scorers: roles whose process may be replaced."""

    async def load(self, weights: WeightsRef) -> None:
        """Use these weights from now on, after verification. Never called on a frozen scorer.

        Results that a scorer computed with older weights become void. Raises EngineError if the
        fingerprint after loading differs from that of ``weights``.
        """

    async def restart(self) -> None:
        """End the role's process and start a new one in its place.

        The new process has no rollouts, and no weights until the next :meth:`load`. Calls in
        progress on the old one end with an error, or with an answer that must be ignored. Roles in
        the schedule's own process are never restarted. RoleLostError if the new one dies or cannot
        start.
        """


class Generator(Replaceable, Protocol):
    """Decodes rollouts with the actor."""

    async def admit(self, responses: Sequence[Response]) -> None:
        """Queue responses for decoding. A response that already has tokens continues after them."""

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        """Add up to ``max_tokens`` tokens to every admitted rollout, plus accepted speculative ones
        (``speculative_tokens``).

        Returns once ``stop_after`` rollouts have finished (0: never early) or none is still
        decoding. Chunks of finished rollouts come first, in the order in which they ended, and
        these rollouts are removed. In an episode a turn may end (``FinishReason.TURN``): its chunk
        is among the first, does not count for ``stop_after``, and the rollout is parked until it is
        admitted again with additional tokens.
        """

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Drop rollouts, finished or not. Unknown ids are ignored."""

    async def hold(self, rollout_ids: Sequence[int], how: Hold) -> None:
        """Choose the treatment of parked rollouts' KV cache, kept until then. Ignores others."""

    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[KVTransfer]:
        """Give up rollouts that continue on another generator, in the requested order. Their tokens
        are in the rollouts, because ``decode`` has returned every chunk.
        """

    async def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        """Continue rollouts that another generator exported, with one transfer each."""


class Scorer(Replaceable, Protocol):
    """Scores rollouts: a reward model, the reference, the critic, or a function."""

    @property
    def info(self) -> ScorerInfo:
        """Facts about the scorer. They may change with a call."""

    async def admit(self, responses: Sequence[Response]) -> None:
        """Announce responses whose chunks will follow. The scorer may start on their prompts."""

    async def extend(self, chunks: Sequence[Chunk]) -> None:
        """Add tokens to admitted rollouts, in order for each rollout."""

    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        """Score rollouts whose last chunk was added, in the requested order, and drop them."""

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Drop rollouts without a score. Unknown ids are ignored."""


class Environment(Protocol):
    """Answers the turns of episodes: tools, an environment, or a program.

    Episodes run concurrently. Raises EpisodeLostError if an episode must start again, because its
    process has ended and it cannot be replayed.
    """

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        """Start the episode of a response, or replay its log in a new environment. Returns the
        opening, or the last observation of the log.
        """

    async def step(self, response: Response) -> Observation:
        """Answer the turn that a response ends with. ``finish`` is LENGTH if a token limit ended
        the turn, and with it the episode. Calls for one episode must not overlap.
        """

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Close the episodes of these samples, ended or not. Closed ones are ignored."""


class Learner(Protocol):
    """Owns and trains the trained weights."""

    async def train(self, batch: TrainBatch) -> TrainStepOutput:
        """Take one step on scored responses. The metrics must include ``objective/scores``, the
        mean reward, which controllers follow.
        """

    async def accumulate(self, batch: TrainBatch) -> None:
        """Prepare the next step with complete groups of its batch. Changes no result of
        :meth:`train` beyond rounding, whose batch must hold these groups again.
        """

    async def publish(self) -> Mapping[str, WeightsRef]:
        """Publish the next version of each trained model: ``actor``, and ``critic`` if any."""


class Tracer(Protocol):
    """Records which role worked on what, and when, for the coordinating code."""

    def span(
        self, role: str, name: str, **attributes: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        """Record the body of a ``with`` statement, which may add attributes to the yielded dict."""

    def awaiting(self, role: str, name: str) -> AbstractContextManager[None]:
        """Show work as in progress during a ``with`` statement. :meth:`add` records it later."""

    def add(self, role: str, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """Record past work, in seconds of the run's clock."""


class Clock(Protocol):
    """The clock of coordinating code, which must not read the wall clock itself."""

    def now(self) -> float:
        """Return the seconds since an arbitrary origin. Never decreases."""


class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.perf_counter)
