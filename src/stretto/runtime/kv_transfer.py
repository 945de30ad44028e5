"""Point-to-point transfer of rollouts' KV caches between the processes of two generators.

The giver stores the caches and passes a ticket through the schedule. When the ticket reaches the
taker, the giver sends the caches over a process group of the two. If that fails, the taker prefills
the tokens instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stretto.errors import RankError, TransferError
from stretto.models.cached import RowCache
from stretto.types import KVTransfer, Reply, Response
from stretto.weights.buckets import BucketPlan
from stretto.weights.transfer import Meeting, Route, Transfers, choose_wires
from stretto.workers.threads import Executor

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


class KVRouter:
    """The driver's side: makes givers send bundles when tickets reach a taker."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._count = meeting, 0
        self._groups: dict[tuple[str, str], tuple[int, tuple[int, int]]] = {}
        self._generators: dict[str, Executor] = {}
        self._takers: dict[str, asyncio.Lock] = {}

    def serve(self, name: str, generator: Executor) -> partial[Any]:
        self._generators[name] = generator
        self._takers[name] = asyncio.Lock()
        return partial(self.accept, name)

    async def accept(
        self, name: str, responses: Sequence[Response], transfers: Sequence[KVTransfer]
    ) -> Reply[None]:
        """Let the taker ``name`` accept rollouts while the givers send their bundles."""
        # A giver sends in the order in which the taker asks, because its bundles share a channel.
        by_giver: dict[str, dict[int, list[Route]]] = {}
        told = []
        for transfer in transfers:
            if (ticket := transfer.cache) is not None:
                bundles = by_giver.setdefault(ticket.giver, {})
                if ticket.bundle not in bundles:
                    bundles[ticket.bundle] = self._routes(ticket.giver, name)
                ticket = replace(ticket, route=bundles[ticket.bundle][1])
            told.append(replace(transfer, cache=ticket))
        async with self._takers[name]:
            shipping = [asyncio.to_thread(self._ship, name, *sent) for sent in by_giver.items()]
            reply, *_ = await asyncio.gather(
                self._generators[name].call("accept", responses, told), *shipping
            )
        accepted: Reply[None] = reply
        return accepted

    def bytes_per_s(self, giver: str, taker: str) -> float:
        """Measure the bandwidth from one generator to another. Blocks."""
        ways, seconds = self._routes(giver, taker), 0.0
        for _ in range(2):  # the first also sets up the group
            bundle, what = self._generators[giver].ask("sample")
            with ThreadPoolExecutor(1) as pool:
                shipped = pool.submit(self._ship, taker, giver, {bundle: ways})
                seconds = self._generators[taker].ask("measure", ways[1], what)
                shipped.result()
        return SAMPLE_BYTES / seconds

    def _ship(self, taker: str, giver: str, bundles: Mapping[int, Sequence[Route]]) -> None:
        limit_s = self._meeting.timeout_s + 1.0
        for bundle, (route, _) in bundles.items():
            try:
                self._generators[giver].aside_on_all("ship", bundle, route, timeout_s=limit_s)
            except (RankError, TransferError):
                self._groups.pop((giver, taker), None)  # the next bundle uses a new group

    def _routes(self, giver: str, taker: str) -> list[Route]:
        """Return the giver's and taker's routes. Their group lasts until one of them restarts."""
        one, two = self._generators[giver], self._generators[taker]
        lives = one.generation, two.generation
        epoch, before = self._groups.get((giver, taker), (0, None))
        if lives != before:
            self._count += 1
            epoch = self._count
            self._groups[giver, taker] = epoch, lives
        pairs = [([g], {"taker": [t]}) for g, t in zip(one.facts, two.facts, strict=True)]
        wires = {choose_wires(*pair)["taker"][0] for pair in pairs}
        wire = wires.pop() if len(wires) == 1 else "gloo"
        sends, takes = self._meeting.routes(f"bundles/{giver}/{taker}", epoch, 2, wire)
        return [sends, replace(takes, beside=(0,))]
