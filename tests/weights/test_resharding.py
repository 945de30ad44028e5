"""Weights that go from shards to slices in the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resharding_workers import WHOLES, Resharder, tensors
from stretto.layout import FullParameter, Layout
from stretto.models.shards import index
from stretto.weights.resharding import transfers
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

FLOAT = torch.float32


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    "shards",
    [Layout(fsdp=3), Layout(fsdp=2), Layout(fsdp=2, tp=2), Layout(tp=2)],
)
def test_slices_are_bit_for_bit_those_of_the_whole(shards: Layout, bucket_bytes: int) -> None:
    slices, version = Layout(tp=shards.ranks), 3
    ranks = RankGroup(GroupSpec(shards.ranks), Resharder, (shards, slices, bucket_bytes)).start()
    try:
        got = ranks.call(Resharder.load, version)
    finally:
        ranks.close()
    for rank, (held, _) in enumerate(got):
        for name, whole in tensors(version).items():
            assert held[name].equal(whole[index(slices.bounds(WHOLES[name], rank))]), name


def test_a_rank_that_has_what_it_needs_gets_nothing() -> None:
    """Of [4, 2] in two shards of rows: its slice of rows is its shard, of columns the other half.

    Two ranks send each other [2, 1] of the latter: 16 bytes in all.
    """
    by_rows, by_columns = FullParameter((4, 2), FLOAT, 0), FullParameter((4, 2), FLOAT, 1)
    wholes: dict[str, FullParameter] = {"rows": by_rows, "columns": by_columns}
    shards, slices = Layout(fsdp=2), Layout(tp=2)
    (one,) = transfers(wholes, shards, slices, 0, 1)
    assert (one.name, one.box, one.size) == ("columns", ((0, 2), (1, 2)), 8)
    (other,) = transfers(wholes, shards, slices, 1, 0)
    assert (other.name, other.box, other.size) == ("columns", ((2, 4), (0, 1)), 8)
    ranks = RankGroup(GroupSpec(2), Resharder, (shards, slices, 100, wholes)).start()
    try:
        assert [moved for _, moved in ranks.call(Resharder.load, 0)] == [16, 16]
    finally:
        ranks.close()


def test_what_is_whole_on_each_comes_from_its_first_owner() -> None:
    alone = {"a": FullParameter((3,), FLOAT, by_rows=False)}
    layout = Layout(fsdp=2)

    def names(source: int, target: int) -> list[Any]:
        return [m.name for m in transfers(alone, layout, Layout(tp=2), source, target)]

    assert names(0, 1) == ["a"]
    assert not names(1, 0)
