"""The channel of weights that are broadcast: the learner's end, and each follower's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import EngineError
from stretto.models.shards import Bounds, TensorPart, full_bounds, overlap, within
from stretto.types import WeightsRef
from stretto.weights.buckets import BucketPlan, combined
from stretto.weights.channel import SharedChannel
from stretto.weights.transfer import Route, Transfers


class WeightSender(SharedChannel):
    """The learner's end: a channel whose tensors are sent when the driver says so. It keeps some
    versions of each model, for followers that are behind or new.
    """

    name = "broadcast"

    def __init__(self, device: torch.device, bucket_bytes: int, keep: int) -> None:
        super().__init__()
        self._bucket_bytes, self._count, self._transfers = bucket_bytes, keep, Transfers(device)

    def put(self, ref: WeightsRef, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors for their followers, and forget the oldest."""
        super().put(ref, tensors)
        versions = self._offered[ref.model]
        self._keep(ref.model, {v: versions[v] for v in sorted(versions)[-self._count :]})

    def plan(self, ref: WeightsRef) -> tuple[str, int]:
        """Return the mark of the plan by which a ticket's tensors travel, and its bytes."""
        found = BucketPlan.of(self.kept(ref).items(), self._bucket_bytes)
        return found.mark, found.size

    def send(self, ref: WeightsRef, route: Route) -> str:
        """Send a ticket's tensors; return the mark of what was sent, empty for nothing."""
        tensors = self.kept(ref)
        plan = BucketPlan.of(tensors.items(), self._bucket_bytes)
        return self._transfers.send(route, plan, tensors) if plan.buckets else ""


class WeightReceiver:
    """A follower's end: a channel whose tensors arrive while they are read.

    The tensors are the parameters that travel, as they are held here; only their shapes and types
    are looked at. Each of the ``sources`` is a rank of the learner with the parts that it sends;
    without any, one sends all. ``own`` are the parts held here, of parameters that are not held
    whole. ``mark`` is of what was received last.
    """

    name = "broadcast"

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        bucket_bytes: int,
        sources: Sequence[Mapping[str, Bounds]] = (),
        own: Mapping[str, Bounds] | None = None,
    ) -> None:
        self._own = {name: full_bounds(tensor.shape) for name, tensor in tensors.items()}
        self._sources = sources or [self._own]
        self._own |= own or {}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._plans = [
            BucketPlan.of_boxes(source, dtypes, bucket_bytes) for source in self._sources
        ]
        self._transfers = Transfers(device)
        self._expected: tuple[WeightsRef, Sequence[Route]] | None = None
        self.mark = ""

    def expect(self, ref: WeightsRef, marks: Sequence[str], routes: Sequence[Route]) -> None:
        """Prepare to receive a ticket's tensors from each rank of the learner, by plans with these
        marks; raises EngineError if this side has others.
        """
        own = [plan.mark for plan in self._plans]
        if list(marks) != own:
            raise EngineError(
                f"version {ref.version} of the {ref.model} travels by the plan {' '.join(marks)}, "
                f"and the receiver has {' '.join(own)}: both sides must hold the same model, "
                "with the same adapters and types",
                "other-plan",
            )
        self._expected = ref, routes

    def get(self, ref: WeightsRef) -> Mapping[str, Any]:
        """Return parts of the expected ticket's tensors, which arrive as they are read."""
        if self._expected is None or self._expected[0] != ref:
            raise EngineError(
                f"version {ref.version} of the {ref.model} was not announced to the receiver",
                "version-not-announced",
            )
        (_, routes), self._expected = self._expected, None
        return Arriving(self._own, lambda: self._receive(routes))

    def _receive(self, routes: Sequence[Route]) -> Iterator[tuple[str, TensorPart]]:
        marks: list[str] = []
        for source, plan, route in zip(self._sources, self._plans, routes, strict=True):
            sums: list[int] = []
            for name, tensor in self._transfers.receive(route, plan, sums) if plan.buckets else ():
                sent, own = source[name], self._own[name]
                if common := overlap(sent, own):
                    yield name, TensorPart(tensor[within(common, sent)], within(common, own))
            marks.append(combined(sums) if plan.buckets else "")
        self.mark = " ".join(marks)

    def abort(self) -> None:
        """Break off a transfer that may be under way; from any thread."""
        self._transfers.abort()


class Arriving(Mapping[str, TensorPart]):
    """Parts of tensors by name that arrive in order, once; of one name there may be several."""

    def __init__(
        self, names: Collection[str], receive: Callable[[], Iterator[tuple[str, TensorPart]]]
    ) -> None:
        self._names, self._receive = names, receive

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> TensorPart:
        raise KeyError(f"'{name}': tensors that arrive are read in order, by items()")

    def items(self) -> Any:
        """Return names and parts, as they come; once."""
        return self._receive()
