"""The way of rollouts' keys and values from one generator's process to another's, point to point.

The giver keeps them under a ticket. The ticket goes through the schedule, as a transfer without
them would; when it comes to the taker, the giver sends them there, on a group of the two. Where
that fails the taker prefills the tokens, as it would without keys and values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stretto.errors import RankError, TransferError
from stretto.models.cached import RowCache
from stretto.types import KVTransfer, Reply, Response
from stretto.weights.buckets import BucketPlan
from stretto.weights.transfer import Meeting, Route, Transfers
from stretto.workers.threads import Executor

BUCKET_BYTES = 16 << 20  # of keys and values that travel at a time
SAMPLE_BYTES = 8 << 20  # by which the way between two generators is measured


@dataclass(frozen=True, slots=True)
class KVHandle:
    """The ticket of one rollout's keys and values, in place of them."""

    giver: str  # the generator that keeps them
    bundle: int  # number of what travels together, unique with one giver
    what: BucketPlan  # by which the bundle travels
    version: int  # of the weights under which they were begun
    route: Route | None = None  # the taker's way to the group, once the bundle is under way


class KVStore:
    """The keys and values that a generator's rank keeps for others, and fetches from them."""

    def __init__(self, name: str, device: torch.device, rank: int = 0) -> None:
        self._name, self._device, self._rank, self._count = name, device, rank, 0
        self._giving, self._taking = Transfers(device), Transfers(device)
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, transfers: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Keep what transfers bring along, and put tickets in its place."""
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
        self._kept[self._count] = tensors
        return self._count, BucketPlan.of(tensors.items(), BUCKET_BYTES)

    def ship(self, bundle: int, route: Route) -> None:
        tensors = self._kept.pop(bundle, None)
        if tensors is None:
            raise TransferError(f"{self._name} does not keep the bundle {bundle}")
        self._giving.send(self._own(route), BucketPlan.of(tensors.items(), BUCKET_BYTES), tensors)

    def fetch(self, transfers: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Put keys and values in the place of tickets; nothing where they do not come."""
        came: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        found = []
        for transfer in transfers:
            cache, ticket = None, transfer.cache
            if ticket is not None:
                bundle = ticket.giver, ticket.bundle
                if bundle not in came:
                    came[bundle] = self._fetched(ticket)
                cache = _cache_of(transfer.rollout_id, came[bundle], ticket)
            kept = transfer.cached_tokens if cache else 0
            found.append(replace(transfer, cache=cache, cached_tokens=kept))
        return found

    def sample(self) -> tuple[int, BucketPlan]:
        """Keep a bundle of :data:`SAMPLE_BYTES` bytes; return its number and plan."""
        sample = torch.zeros(SAMPLE_BYTES, dtype=torch.uint8, device=self._device)
        return self._bundle({"sample": sample})

    def measure(self, route: Route, what: BucketPlan) -> float:
        start_s = time.perf_counter()
        for _ in self._taking.receive(self._own(route), what, []):
            pass
        return time.perf_counter() - start_s

    def _own(self, route: Route) -> Route:
        return replace(route, channel=f"{route.channel}/{self._rank}")

    def _fetched(self, ticket: KVHandle) -> dict[str, torch.Tensor]:
        if ticket.route is None:
            return {}
        try:
            arriving = self._taking.receive(self._own(ticket.route), ticket.what, [])
            return {name: tensor.to(self._device, copy=True) for name, tensor in arriving}
        except TransferError:
            return {}


def _cache_of(id_: int, tensors: dict[str, torch.Tensor], ticket: KVHandle) -> RowCache | None:
    layers = range(sum(name.startswith(f"{id_}/k/") for name in tensors))
    if not layers:
        return None
    keys, values = (tuple(tensors[f"{id_}/{kind}/{i}"] for i in layers) for kind in "kv")
    return RowCache(keys, values, ticket.version)


class KVRouter:
    """The driver's side: it has bundles sent when their tickets come to a taker."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._count = meeting, 0
        self._generators: dict[str, Executor] = {}
        self._takers: dict[str, asyncio.Lock] = {}

    def serve(self, name: str, generator: Executor) -> partial[Any]:
        """Take up a generator; return the call by which it accepts rollouts."""
        self._generators[name] = generator
        self._takers[name] = asyncio.Lock()
        return partial(self.accept, name)

    async def accept(
        self, name: str, responses: Sequence[Response], transfers: Sequence[KVTransfer]
    ) -> Reply[None]:
        """Have bundles sent while the taker of that name waits for them."""
        # Those of one giver in the order in which the taker asks for them: they share a channel.
        by_giver: dict[str, dict[int, list[Route]]] = {}
        told = []
        for transfer in transfers:
            if (ticket := transfer.cache) is not None:
                bundles = by_giver.setdefault(ticket.giver, {})
                if ticket.bundle not in bundles:
                    bundles[ticket.bundle] = self._new_routes(ticket.giver, name)
                ticket = replace(ticket, route=bundles[ticket.bundle][1])
            told.append(replace(transfer, cache=ticket))
        async with self._takers[name]:
            shipping = [asyncio.to_thread(self._ship, *sent) for sent in by_giver.items()]
            reply, *_ = await asyncio.gather(
                self._generators[name].call("accept", responses, told), *shipping
            )
        accepted: Reply[None] = reply
        return accepted

    def bytes_per_s(self, giver: str, taker: str) -> float:
        """Measure how fast keys and values travel from one generator to another. Blocks."""
        ways, seconds = self._new_routes(giver, taker), 0.0
        for _ in range(2):  # in the first they meet
            bundle, what = self._generators[giver].ask("sample")
            with ThreadPoolExecutor(1) as pool:
                shipped = pool.submit(self._ship, giver, {bundle: ways})
                seconds = self._generators[taker].ask("measure", ways[1], what)
                shipped.result()
        return SAMPLE_BYTES / seconds

    def _ship(self, giver: str, bundles: Mapping[int, Sequence[Route]]) -> None:
        limit_s = self._meeting.timeout_s + 1.0
        for bundle, (route, _) in bundles.items():
            with suppress(RankError, TransferError):
                self._generators[giver].aside_on_all("ship", bundle, route, timeout_s=limit_s)

    def _new_routes(self, giver: str, taker: str) -> list[Route]:
        self._count += 1
        return self._meeting.routes(f"bundles/{giver}/{taker}", self._count, 2)
