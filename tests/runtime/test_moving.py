"""Keys and values on their way from one generator's process to another's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stretto.errors import TransferError
from stretto.models.cached import RowCache
from stretto.runtime.clients import KVRouter
from stretto.runtime.kv_transfer import SAMPLE_BYTES, KVHandle, KVStore
from stretto.runtime.role_services import GeneratorService
from stretto.types import KVTransfer, Prompt, Reply, Response
from stretto.weights.transfer import Meeting, open_store
from stretto.workers.rank import Facts

CPU = torch.device("cpu")


def cache(seed: int, tokens: int) -> RowCache:
    generator = torch.Generator().manual_seed(seed)
    layers = [torch.randn(2, tokens, 4, generator=generator).bfloat16() for _ in range(4)]
    return RowCache(tuple(layers[:2]), tuple(layers[2:]), version=7)


class FakeGenerator:
    """A generator's process, in this one."""

    generation: int = 0
    facts = (Facts("here", 1, {}, 1, ""),)

    def __init__(self, name: str) -> None:
        self.kv_store = KVStore(name, CPU)
        self.accepted: list[KVTransfer] = []
        self.gone = self.fails = False

    def aside_on_all(self, method: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        if self.fails:
            raise TransferError("broken off")
        return [None if self.gone else getattr(self.kv_store, method.__name__)(*args)]

    def ask(self, method: Callable[..., Any], *args: Any) -> Any:
        return getattr(self.kv_store, method.__name__)(*args)

    async def call(self, method: Callable[..., Any], *args: Any) -> Reply[Any]:
        if method == GeneratorService.accept:
            _, transfers = args
            self.accepted = await asyncio.to_thread(self.kv_store.fetch, transfers)
        return Reply(None)

    async def restart(self) -> None:
        raise NotImplementedError


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, port = open_store("127.0.0.1")
    yield Meeting("127.0.0.1", port, 2.0)
    del store


def responses(ids: Sequence[int]) -> list[Response]:
    return [Response(i, i, Prompt(i, (1, 2), ""), np.array([3, 4], np.int32)) for i in ids]


def moved(meeting: Meeting, transfers: Sequence[KVTransfer], *, gone: bool = False) -> list[Any]:
    """Send transfers from one generator to another; return what the other gets."""
    giver, taker = FakeGenerator("generator 0"), FakeGenerator("generator 1")
    kv_router = KVRouter(meeting)
    kv_router.add("generator 0", giver)  # type: ignore[arg-type]
    kv_router.add("generator 1", taker)  # type: ignore[arg-type]
    tickets = giver.kv_store.keep(transfers)
    assert all(t.cache is None or isinstance(t.cache, KVHandle) for t in tickets)
    giver.gone = gone
    asyncio.run(
        kv_router.accept("generator 1", responses([t.rollout_id for t in tickets]), tickets)
    )
    return taker.accepted


def test_keys_and_values_arrive_bit_for_bit(meeting: Meeting) -> None:
    sent = [KVTransfer(4, cache(0, 3), 3), KVTransfer(5), KVTransfer(6, cache(1, 9), 9)]
    got = moved(meeting, sent)
    assert [t.rollout_id for t in got] == [4, 5, 6]
    assert [t.cached_tokens for t in got] == [3, 0, 9]
    assert got[1].cache is None
    for before, after in ((sent[0], got[0]), (sent[2], got[2])):
        assert after.cache.version == 7
        for one, two in zip(
            (*before.cache.keys, *before.cache.values),
            (*after.cache.keys, *after.cache.values),
            strict=True,
        ):
            assert torch.equal(one, two)


def test_without_caches_nothing_is_sent(meeting: Meeting) -> None:
    assert moved(meeting, [KVTransfer(4), KVTransfer(5)]) == [KVTransfer(4), KVTransfer(5)]


def test_where_a_giver_is_gone_tokens_are_prefilled_again(meeting: Meeting) -> None:
    got = moved(meeting, [KVTransfer(4, cache(0, 3), 3)], gone=True)
    assert got == [KVTransfer(4, None, 0)]


def test_a_pair_of_generators_has_one_group_until_one_is_another_or_it_breaks(
    meeting: Meeting,
) -> None:
    giver, taker = FakeGenerator("generator 0"), FakeGenerator("generator 1")
    kv_router = KVRouter(meeting)
    kv_router.add("generator 0", giver)  # type: ignore[arg-type]
    kv_router.add("generator 1", taker)  # type: ignore[arg-type]

    def moved_once() -> int:
        tickets = giver.kv_store.keep([KVTransfer(4, cache(0, 3), 3)])
        asyncio.run(kv_router.accept("generator 1", responses([4]), tickets))
        return kv_router._count

    assert [moved_once(), moved_once()] == [1, 1]
    assert taker.accepted[0].cache is not None
    taker.generation = 1
    taker.kv_store = KVStore("generator 1", CPU)
    assert moved_once() == 2
    giver.fails = True
    assert moved_once() == 2  # it breaks
    giver.fails = False
    assert moved_once() == 3
    assert taker.accepted[0].cache is not None


def test_the_way_between_two_generators_is_measured(meeting: Meeting) -> None:
    kv_router = KVRouter(meeting)
    for name in ("generator 0", "generator 1"):
        generator: Any = FakeGenerator(name)
        kv_router.add(name, generator)
    assert kv_router.bytes_per_s("generator 0", "generator 1") > SAMPLE_BYTES / 60
