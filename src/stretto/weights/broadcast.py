"""The channel of weights that are broadcast: the learner's outbox, and each follower's inbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.errors import EngineError
from stretto.types import WeightsRef
from stretto.weights.buckets import Plan, combined, plan
from stretto.weights.transfer import Route, Transfers


class Outbox:
    """The learner's side: a channel whose tensors are sent when the driver says so.

    State: the tensors of the newest versions.

    Args:
        device: that the tensors are on.
        bucket_bytes: that travel at a time.
        keep: versions of each model that stay, for followers that are behind or new.
    """

    name = "broadcast"

    def __init__(self, device: torch.device, bucket_bytes: int, keep: int) -> None:
        self._bucket_bytes, self._keep = bucket_bytes, keep
        self._transfers = Transfers(device)
        self._offered: dict[str, dict[int, Mapping[str, Tensor]]] = {}

    def put(self, ref: WeightsRef, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors for their followers, and forget the oldest."""
        versions = {**self._offered.get(ref.model, {}), ref.version: tensors}
        newest = sorted(versions)[-self._keep :]
        # Replaced, not changed: a transfer may be reading it.
        self._offered[ref.model] = {v: versions[v] for v in newest}

    def get(self, ref: WeightsRef) -> Mapping[str, Tensor]:
        """Return the tensors of a ticket; see :class:`~stretto.weights.channel.WeightChannel`."""
        versions = self._offered.get(ref.model, {})
        if ref.version not in versions:
            raise EngineError(
                f"version {ref.version} of the {ref.model} is not kept any more; there are "
                f"{sorted(versions) or 'none'}"
            )
        return versions[ref.version]

    def plan(self, ref: WeightsRef) -> tuple[str, int]:
        """Return the mark of the plan by which a ticket's tensors travel, and its bytes."""
        found = plan(self.get(ref).items(), self._bucket_bytes)
        return found.mark, found.size

    def send(self, ref: WeightsRef, route: Route) -> str:
        """Send a ticket's tensors; return the mark of what was sent."""
        tensors = self.get(ref)
        return self._transfers.send(route, plan(tensors.items(), self._bucket_bytes), tensors)


class Inbox:
    """A follower's side: a channel whose tensors arrive while they are read.

    Args:
        tensors: the parameters that travel, by name; only their shapes and types are looked at.
        device: that they are on.
        bucket_bytes: that travel at a time.

    Attributes:
        mark: of what was received last.
    """

    name = "broadcast"

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, bucket_bytes: int
    ) -> None:
        self._plan = plan(tensors.items(), bucket_bytes)
        self._transfers = Transfers(device)
        self._expected: tuple[WeightsRef, Route] | None = None
        self.mark = ""

    def expect(self, ref: WeightsRef, mark: str, route: Route) -> None:
        """Prepare to receive a ticket's tensors.

        Raises:
            EngineError: they travel by another plan than this side has.
        """
        if mark != self._plan.mark:
            raise EngineError(
                f"version {ref.version} of the {ref.model} travels by the plan {mark}, and who is "
                f"to load it has {self._plan.mark}: both sides must hold the same model, with the "
                "same adapters and types"
            )
        self._expected = ref, route

    def get(self, ref: WeightsRef) -> Mapping[str, Tensor]:
        """Return the tensors of the ticket that is expected; they arrive as they are read."""
        if self._expected is None or self._expected[0] != ref:
            raise EngineError(
                f"version {ref.version} of the {ref.model} was not announced to who is to load it"
            )
        (_, route), self._expected = self._expected, None
        return _Arriving(self._plan, lambda: self._receive(route))

    def _receive(self, route: Route) -> Iterator[tuple[str, Tensor]]:
        sums: list[int] = []
        yield from self._transfers.receive(route, self._plan, sums)
        self.mark = combined(sums)

    def put(self, ref: WeightsRef, tensors: Mapping[str, Tensor]) -> None:
        """Refuse: this side only receives."""
        raise EngineError(f"a follower publishes no weights; got version {ref.version}")

    def abort(self) -> None:
        """Break off a transfer that may be under way; from any thread."""
        self._transfers.abort()


class _Arriving(Mapping[str, Tensor]):
    """Tensors by name that arrive in order, once."""

    def __init__(self, what: Plan, receive: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._plan, self._receive = what, receive

    def __iter__(self) -> Iterator[str]:
        return (s.name for bucket in self._plan.buckets for s in bucket.slices)

    def __len__(self) -> int:
        return sum(len(bucket.slices) for bucket in self._plan.buckets)

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(f"'{name}': tensors that arrive are read in order, by items()")

    def items(self) -> Any:
        return self._receive()
