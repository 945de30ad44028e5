"""The way of rollouts' keys and values from one generator's process to another's, point to point.

The giver keeps them under a ticket. The ticket goes through the schedule, as a transfer without
them would; when it comes to the taker, the giver sends them there, on a group of the two. Where
that fails the taker prefills the tokens, as it would without keys and values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stretto.errors import RankError, TransferError
from stretto.rollout.rows import RowCache
from stretto.types import KVTransfer, Reply, Response
from stretto.weights.buckets import BucketPlan
from stretto.weights.transfer import Meeting, Route, Transfers
from stretto.workers.executor import Executor

BUCKET_BYTES = 16 << 20
"""Bytes of keys and values that travel at a time."""


SAMPLE_BYTES = 8 << 20
"""Bytes by which the way between two generators is measured."""


@dataclass(frozen=True, slots=True)
class KVHandle:
    """The ticket of one rollout's keys and values, in place of them.

    Attributes:
        giver: the generator that keeps them.
        bundle: number of what travels together, unique with one giver.
        what: the plan by which the bundle travels.
        version: of the weights under which they were begun.
        route: the taker's way to the group, once the bundle is under way.
    """

    giver: str
    bundle: int
    what: BucketPlan
    version: int
    route: Route | None = None


class KVStore:
    """The keys and values that a generator's process keeps for others, and fetches from them.

    Args:
        rank: of this process, of several that hold slices of it.
    """

    def __init__(self, name: str, device: torch.device, rank: int = 0) -> None:
        self._name, self._device, self._rank, self._count = name, device, rank, 0
        self._giving, self._taking = Transfers(device), Transfers(device)
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, transfers: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Keep what transfers bring along, and put tickets in its place."""
        tensors: dict[str, torch.Tensor] = {}
        for transfer in transfers:
            if transfer.cache is not None:
                cache: RowCache = transfer.cache
                for kind, layers in (("k", cache.keys), ("v", cache.values)):
                    tensors |= {
                        f"{transfer.rollout_id}/{kind}/{i}": t for i, t in enumerate(layers)
                    }
        if not tensors:
            return list(transfers)
        self._count += 1
        self._kept[self._count] = tensors
        what = BucketPlan.of(tensors.items(), BUCKET_BYTES)
        return [
            t if t.cache is None
            else replace(t, cache=KVHandle(self._name, self._count, what, t.cache.version))
            for t in transfers
        ]  # fmt: skip

    def ship(self, bundle: int, route: Route) -> None:
        """Send a bundle, and forget it."""
        tensors = self._kept.pop(bundle, None)
        if tensors is None:
            raise TransferError(f"{self._name} does not keep the bundle {bundle}")
        self._giving.send(self._own(route), BucketPlan.of(tensors.items(), BUCKET_BYTES), tensors)

    def fetch(self, transfers: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Put keys and values in the place of tickets; nothing where they do not come."""
        tickets = {
            (t.cache.giver, t.cache.bundle): t.cache for t in transfers if t.cache is not None
        }
        came = {where: self._fetched(ticket) for where, ticket in tickets.items()}
        found = []
        for transfer in transfers:
            cache = None
            if (ticket := transfer.cache) is not None:
                cache = _cache_of(transfer.rollout_id, came[ticket.giver, ticket.bundle], ticket)
            kept = transfer.cached_tokens if cache else 0
            found.append(replace(transfer, cache=cache, cached_tokens=kept))
        return found

    def sample(self) -> tuple[int, BucketPlan]:
        """Keep a bundle of :data:`SAMPLE_BYTES` bytes; return its number and plan."""
        self._count += 1
        tensors = {"sample": torch.zeros(SAMPLE_BYTES, dtype=torch.uint8, device=self._device)}
        self._kept[self._count] = tensors
        return self._count, BucketPlan.of(tensors.items(), BUCKET_BYTES)

    def measure(self, route: Route, what: BucketPlan) -> float:
        """Receive a sample; return how long that took, in seconds."""
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
    """The driver's side: it has bundles sent when their tickets come to a taker.

    Args:
        meeting: where the groups meet.
    """

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
        bundles = dict.fromkeys(
            (t.cache.giver, t.cache.bundle) for t in transfers if t.cache is not None
        )
        routes = {(g, bundle): self._new_routes(g, name) for g, bundle in bundles}
        told = [
            t if t.cache is None
            else replace(t, cache=replace(t.cache, route=routes[t.cache.giver, t.cache.bundle][1]))
            for t in transfers
        ]  # fmt: skip
        # Those of one giver in the order in which the taker asks for them: they share a channel.
        by_giver: dict[str, list[tuple[int, Route]]] = {}
        for (giver, bundle), ways in routes.items():
            by_giver.setdefault(giver, []).append((bundle, ways[0]))
        async with self._takers[name]:
            shipping = [asyncio.to_thread(self._ship, g, sent) for g, sent in by_giver.items()]
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
                shipped = pool.submit(self._ship, giver, [(bundle, ways[0])])
                seconds = self._generators[taker].ask("measure", ways[1], what)
                shipped.result()
        return SAMPLE_BYTES / seconds

    def _ship(self, giver: str, bundles: Sequence[tuple[int, Route]]) -> None:
        limit_s = self._meeting.timeout_s + 1.0
        for bundle, route in bundles:
            with suppress(RankError, TransferError):
                self._generators[giver].aside_on_all("ship", bundle, route, timeout_s=limit_s)

    def _new_routes(self, giver: str, taker: str) -> list[Route]:
        self._count += 1
        return self._meeting.routes(f"bundles/{giver}/{taker}", self._count, 2)
