"""Point-to-point transfer of rollouts' KV caches between the processes of two generators.

The giver stores the caches and passes a ticket through the schedule. When the ticket reaches the
taker, the giver sends the caches over a process group of the two. If that fails, the taker prefills
the tokens instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.errors import TransferError
from stretto.models.cached import RowCache
from stretto.types import KVTransfer
from stretto.weights.buckets import BucketPlan
from stretto.weights.transfer import Route, Transfers

BUCKET_BYTES = 16 << 20  # of KV cache sent at a time
SAMPLE_BYTES = 8 << 20  # sent to measure the bandwidth between two generators


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A ticket that replaces one rollout's KV cache in a transfer."""

    giver: str  # the generator that stores the cache
    bundle: int  # number of caches sent together, unique per giver
    what: BucketPlan  # bucket layout of the bundle
    version: int  # of the weights that computed the first keys and values
    route: Route | None = None  # the taker's route, set once the bundle is being sent


class KVStore:
    """KV caches that a generator's rank stores for other generators or fetches from them."""

    def __init__(self, name: str, device: torch.device, rank: int = 0) -> None:
        self._name = name
        self._device = device
        self._rank = rank
        self._count = 0
        self._giving, self._taking = Transfers(device), Transfers(device)
        self._kept: dict[int, tuple[dict[str, torch.Tensor], Any]] = {}

    def keep(self, transfers: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Store the transfers' caches and replace them by tickets."""
        caches = {t.rollout_id: t.cache for t in transfers if t.cache is not None}
        if not caches:
            return list(transfers)
        bundle, what = self._bundle(
            {
                f"{id_}/{kind}/{i}": tensor
                for id_, cache in caches.items()
                for kind, layers in (("k", cache.keys), ("v", cache.values))
                for i, tensor in enumerate(layers)
            }
        )
        tickets = {
            id_: KVHandle(self._name, bundle, what, cache.version) for id_, cache in caches.items()
        }
        return [replace(t, cache=tickets.get(t.rollout_id)) for t in transfers]

    def _bundle(self, tensors: dict[str, torch.Tensor]) -> tuple[int, BucketPlan]:
        self._count += 1
        self._kept[self._count] = tensors, self._giving.begun()
        return self._count, BucketPlan.of(tensors.items(), BUCKET_BYTES)

    def ship(self, bundle: int, route: Route) -> None:
        if bundle not in self._kept:
            raise TransferError(f"{self._name} does not keep the bundle {bundle}")
        tensors, begun = self._kept.pop(bundle)
        what = BucketPlan.of(tensors.items(), BUCKET_BYTES)
        self._giving.send(self._own(route), what, lambda part: tensors[part.name], begun)

    def fetch(self, transfers: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Replace tickets by their caches, or by None if a cache does not arrive."""
        tensors_by_bundle: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        filled_transfers = []
        for transfer in transfers:
            cache, ticket = None, transfer.cache
            if ticket is not None:
                bundle = ticket.giver, ticket.bundle
                if bundle not in tensors_by_bundle:
                    tensors_by_bundle[bundle] = self._fetched(ticket)
                cache = _cache_of(transfer.rollout_id, tensors_by_bundle[bundle], ticket)
            cached_tokens = transfer.cached_tokens if cache else 0
            filled_transfers.append(replace(transfer, cache=cache, cached_tokens=cached_tokens))
        return filled_transfers

    def sample(self) -> tuple[int, BucketPlan]:
        sample = torch.zeros(SAMPLE_BYTES, dtype=torch.uint8, device=self._device)
        return self._bundle({"sample": sample})

    def measure(self, route: Route, what: BucketPlan) -> float:
        start_s = time.perf_counter()
        for _ in self._taking.receive(self._own(route), what):
            pass
        return time.perf_counter() - start_s

    def _own(self, route: Route) -> Route:
        return replace(route, channel=f"{route.channel}/{self._rank}")

    def _fetched(self, ticket: KVHandle) -> dict[str, torch.Tensor]:
        if ticket.route is None:
            return {}
        try:
            arriving = self._taking.receive(self._own(ticket.route), ticket.what)
            return {part.name: tensor.to(self._device, copy=True) for part, tensor in arriving}
        except TransferError:
            return {}


def _cache_of(id_: int, tensors: dict[str, torch.Tensor], ticket: KVHandle) -> RowCache | None:
    layers = range(sum(name.startswith(f"{id_}/k/") for name in tensors))
    if not layers:
        return None
    keys, values = (tuple(tensors[f"{id_}/{kind}/{i}"] for i in layers) for kind in "kv")
    return RowCache(keys, values, ticket.version)
