"""The channel of broadcast weights: the learner's end, and each follower's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import EngineError
from stretto.layout import Bounds, FullParameter, Owners, full_bounds
from stretto.models.shards import TensorPart, overlap, within
from stretto.types import WeightsRef
from stretto.weights.buckets import BucketPlan, PackedTensor, combined
from stretto.weights.channel import SharedChannel
from stretto.weights.transfer import Route, Transfers


class WeightSender(SharedChannel):
    """The learner's end: keeps tensors and sends them when the driver asks. It keeps some versions
    of each model, for late or new followers.
    """

    name = "broadcast"

    def __init__(self, device: torch.device, bucket_bytes: int, keep: int) -> None:
        super().__init__()
        self._bucket_bytes = bucket_bytes
        self._count = keep
        self._transfers = Transfers(device)
        self._sources: dict[str, tuple[list[dict[str, Bounds]], dict[str, torch.dtype]]] = {}
        self._begun: dict[tuple[str, int], Any] = {}  # device work that produced each version

    def divide(self, model: str, trained: Mapping[str, FullParameter], owners: Owners) -> None:
        bounds_by_rank = [owners.own(trained, rank) for rank in range(owners.ranks)]
        self._sources[model] = bounds_by_rank, {name: full.dtype for name, full in trained.items()}

    def put(self, ref: WeightsRef, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors for their followers and drop the oldest versions."""
        super().put(ref, tensors)
        self._begun[ref.model, ref.version] = self._transfers.begun()
        versions = self._offered[ref.model]
        for version in sorted(versions)[: -self._count]:
            self._begun.pop((ref.model, version), None)
        self._keep(ref.model, {v: versions[v] for v in sorted(versions)[-self._count :]})

    def plan(self, ref: WeightsRef) -> BucketPlan:
        return self._planned(ref)[0]

    def send(self, ref: WeightsRef, route: Route) -> str:
        """Send this rank's parts of a ticket's tensors and return their checksum mark."""
        (plan, sources), tensors = self._planned(ref), self.kept(ref)
        rank_bounds = sources[route.rank]

        def tensor_of(part: PackedTensor) -> Tensor:
            return tensors[part.name][within(part.bounds, rank_bounds[part.name])]

        device_work = self._begun.get((ref.model, ref.version))
        return self._transfers.send(route, plan, tensor_of, device_work)

    def _planned(self, ref: WeightsRef) -> tuple[BucketPlan, Sequence[Mapping[str, Bounds]]]:
        if ref.model in self._sources:
            sources, dtypes = self._sources[ref.model]
        else:
            tensors = self.kept(ref)
            sources = [{name: full_bounds(tensor.shape) for name, tensor in tensors.items()}]
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return BucketPlan.of_sources(sources, dtypes, self._bucket_bytes), sources


class WeightReceiver:
    """A follower's end: a channel whose tensors arrive while they are read.

    ``tensors`` are the local copies of the parameters that travel, of which only shapes and types
    are read. Each entry of ``sources`` holds the parts that one rank of the learner sends. If it is
    empty, one rank sends everything. ``own`` has the local parts of parameters divided
    here. ``mark`` is the checksum of the last transfer.
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
        sources = sources or [self._own]
        self._own |= own or {}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._plan = BucketPlan.of_sources(sources, dtypes, bucket_bytes)
        self._count = len(sources)
        self._transfers = Transfers(device)
        self._expected: tuple[WeightsRef, Route] | None = None
        self.mark = ""

    def expect(self, ref: WeightsRef, mark: str, route: Route) -> None:
        """Prepare for a ticket's tensors. EngineError if this side's plan has another mark."""
        if mark != self._plan.mark:
            raise EngineError(
                f"version {ref.version} of the {ref.model} travels by the plan {mark}, and the "
                f"receiver has {self._plan.mark}: both sides must hold the same model, with the "
                "same adapters and types",
                "other-plan",
            )
        self._expected = ref, route

    def get(self, ref: WeightsRef) -> Mapping[str, Any]:
        """Return parts of the expected ticket's tensors, which arrive as they are read."""
        if self._expected is None or self._expected[0] != ref:
            raise EngineError(
                f"version {ref.version} of the {ref.model} was not announced to the receiver",
                "version-not-announced",
            )
        (_, route), self._expected = self._expected, None
        return Arriving(self._own, lambda: self._receive(route))

    def _receive(self, route: Route) -> Iterator[tuple[str, TensorPart]]:
        sums: list[list[Tensor]] = [[] for _ in range(self._count)]
        for part, tensor in self._transfers.receive(route, self._plan, sums):
            bounds = self._own[part.name]
            if common := overlap(part.bounds, bounds):
                yield (
                    part.name,
                    TensorPart(tensor[within(common, part.bounds)], within(common, bounds)),
                )
        self.mark = " ".join(map(combined, sums))

    def abort(self) -> None:
        self._transfers.abort()


class Arriving(Mapping[str, TensorPart]):
    """Parts of tensors by name, which arrive once, in order. A name may come several times."""

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
        return self._receive()
