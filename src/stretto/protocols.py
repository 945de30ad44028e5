"""The roles a schedule talks to: generator, scorer, environment, learner; the tracer and the clock.

The methods are coroutines so that one schedule serves a single process, a cluster and virtual time
alike. A role answers its calls in the order they were made. Generators and scorers whose process is
lost raise :class:`~stretto.errors.RoleLostError` from then on, until they are restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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
    TrainOutput,
    WeightsRef,
)

DRIVER = "driver"
"""The role of the process that runs the schedule, in traces of its own work."""

RECORDS = "driver/records"
"""Name of the spans in which the driver records a step, before it begins the next one."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """How a role's method is called through an executor; clients and services follow from it.

    Attributes:
        span: name of its work in traces; empty where it takes no time worth recording.
        light: it needs no offloaded tensors, and next to no room on the device.
        reads: it leaves offloaded tensors as they are.
        waits: it waits for offloaded tensors itself, when it comes to need them.
        alike: all ranks with slices of a model return the same.
    """

    span: str = ""
    light: bool = False
    reads: bool = False
    waits: bool = False
    alike: bool = False


def remote(
    span: str = "",
    *,
    light: bool = False,
    reads: bool = False,
    waits: bool = False,
    alike: bool = False,
) -> Callable[[F], F]:
    """Mark a method of a role's protocol as one that an executor carries."""

    def mark(method: F) -> F:
        vars(method)["remote"] = RemoteMethod(span, light, reads, waits, alike)
        return method

    return mark


def remote_methods(role: type) -> dict[str, RemoteMethod]:
    """Return the methods of a role's protocol that executors carry, by name."""
    found = {name: getattr(getattr(role, name), "remote", None) for name in dir(role)}
    return {name: method for name, method in found.items() if method}


class Replaceable(Protocol):
    """The part that generators and scorers have in common: roles whose process may be replaced."""

    @remote("load")
    async def load(self, weights: WeightsRef) -> None:
        """Work with these weights from now on, and prove it; never called on a frozen scorer.

        What a scorer computed with older weights is void. Raises EngineError if the fingerprint
        after loading is not that of ``weights``.
        """

    async def restart(self) -> None:
        """End what is left of the role's process and start a new one in its place.

        The new one holds no rollouts, and no weights until the next :meth:`load`. Calls to the old
        one that are under way end with an error, or with an answer that counts for nothing. Roles
        that share the schedule's process are never asked. Raises RoleLostError if the new process
        has died, or could not start.
        """


class Generator(Replaceable, Protocol):
    """The role that decodes rollouts with the actor."""

    @remote(light=True)
    async def admit(self, responses: Sequence[Response]) -> None:
        """Queue responses for decoding. One that already has tokens goes on after them."""

    @remote("gen", alike=True)
    async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        """Give every admitted rollout up to ``max_tokens`` more tokens, and proposed ones besides
        (``speculative_tokens``).

        Returns as soon as ``stop_after`` rollouts have finished (0 does not look), or none is left
        that goes on. Chunks of finished rollouts come first, in the order in which they ended;
        these leave by themselves. In an episode a turn may end (``FinishReason.TURN``), which
        counts for nothing: its chunk is among those, and the rollout is parked until it is admitted
        again, with the tokens that it has and more.
        """

    @remote(light=True)
    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts, finished or not; unknown ids are ignored."""

    @remote(light=True)
    async def hold(self, rollout_ids: Sequence[int], how: Hold) -> None:
        """Say what becomes of the keys and values of parked rollouts, which are kept until then;
        others are ignored.
        """

    @remote("migrate")
    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[KVTransfer]:
        """Let go of rollouts that go on elsewhere, in the order asked.

        Their tokens are in the rollouts themselves: every chunk has been returned by ``decode``.
        """

    @remote("migrate")
    async def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        """Go on with rollouts that another generator exported, one transfer each."""


class Scorer(Replaceable, Protocol):
    """A role that scores rollouts: a reward model, the reference, the critic, or a function."""

    @property
    def info(self) -> ScorerInfo:
        """The facts about it; they may change with a call."""

    @remote(reads=True)
    async def admit(self, responses: Sequence[Response]) -> None:
        """Learn of responses whose chunks will follow; their prompts may be worked on already."""

    @remote("prefill", reads=True)
    async def extend(self, chunks: Sequence[Chunk]) -> None:
        """Take more tokens of admitted rollouts, in order for each rollout."""

    @remote("score", reads=True, alike=True)
    async def finish(self, rollout_ids: Sequence[int]) -> Sequence[Score]:
        """Score rollouts whose last chunk has been given, in the order asked, and forget them."""

    @remote(light=True)
    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts without a score; unknown ids are ignored."""


class Environment(Protocol):
    """The role that answers the turns of episodes: tools, an environment, or a program.

    Episodes go on side by side. Raises EpisodeLostError where an episode cannot go on, as the
    process that it was in has ended and it cannot be replayed: it is begun anew.
    """

    async def open(self, response: Response, log: Sequence[Observation] = ()) -> Observation:
        """Begin the episode of a response, or bring a new environment to the end of its log.

        Returns the opening, or the last observation of the log.
        """

    async def step(self, response: Response) -> Observation:
        """Answer the turn that a response ends with; its ``finish`` is LENGTH where a limit of
        tokens ended it, and the episode with it. One call at a time for an episode.
        """

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Close the episodes of these samples, ended or not; those closed before are ignored."""


class Learner(Protocol):
    """The role that owns the trained weights, and trains them."""

    @remote("update", waits=True)
    async def train(self, batch: TrainBatch) -> TrainOutput:
        """Take one step on scored responses.

        Among the metrics must be ``objective/scores``, the mean reward, which controllers follow.
        """

    @remote("publish", light=True)
    async def publish(self) -> Mapping[str, WeightsRef]:
        """Publish the next version of each trained model: ``actor``, and ``critic`` if any."""


class Tracer(Protocol):
    """The record of which role worked on what, and when; the code that coordinates gets it."""

    def span(
        self, role: str, name: str, **attributes: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        """Record the body of a ``with`` statement; it may add attributes to what is yielded."""

    def awaiting(self, role: str, name: str) -> AbstractContextManager[None]:
        """Show work as under way during a ``with`` statement; :meth:`add` records it later."""

    def add(self, role: str, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """Record what has happened, in seconds of the run's clock."""


class Clock(Protocol):
    """The clock that coordination code reads, which never reads the wall clock by itself."""

    def now(self) -> float:
        """Return the seconds since an arbitrary origin; never goes back."""


class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.perf_counter)
