"""Plans of buckets: pure, and the same on both sides."""

from __future__ import annotations

import pytest
import torch

from stretto.layout import Bounds
from stretto.weights.buckets import BucketPlan, checksum, combined, pack, segments, size_of


def named(*shapes: tuple[str, tuple[int, ...], torch.dtype]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape, dtype in shapes
    }


MIXED = (
    ("a", (3,), torch.bfloat16),  # 6 bytes, rounded to 16
    ("b", (2, 2), torch.float32),  # 16
    ("c", (100,), torch.float32),  # 400: more than a bucket
    ("d", (), torch.float32),  # 4 -> 16
    ("e", (0,), torch.float32),
)


def test_tensors_keep_their_order_and_none_is_cut() -> None:
    found = BucketPlan.of(named(*MIXED).items(), 48)
    assert [[s.name for s in b] for b in found.buckets] == [["a", "b"], ["c"], ["d", "e"]]
    assert [size_of(b) for b in found.buckets] == [32, 400, 16]
    assert (found.size, found.largest) == (448, 400)
    assert [(s.start, s.end) for s in found.buckets[0]] == [(0, 6), (16, 32)]


def test_parts_of_several_sources_travel_parameter_by_parameter() -> None:
    """Two sources hold rows of [4, 4] float32 (32 bytes each), one holds [2]; buckets of 64 bytes.

    Of [10, 4], 80 bytes a source are cut into rows of 16 bytes: four to a bucket, and one.
    """
    sources: list[dict[str, Bounds]] = [
        {"a": ((0, 2), (0, 4)), "norm": ((0, 2),), "large": ((0, 5), (0, 4))},
        {"a": ((2, 4), (0, 4)), "large": ((5, 10), (0, 4))},
    ]
    dtypes = dict.fromkeys(("a", "norm", "large"), torch.float32)
    plan = BucketPlan.of_sources(sources, dtypes, 64)
    found = [[(p.name, p.source, p.bounds[0]) for p in bucket] for bucket in plan.buckets]
    assert found == [
        [("a", 0, (0, 2)), ("a", 1, (2, 4))],
        [("norm", 0, (0, 2))],
        [("large", 0, (0, 4))],
        [("large", 0, (4, 5))],
        [("large", 1, (5, 9))],
        [("large", 1, (9, 10))],
    ]
    assert plan.largest == 64
    assert segments(plan.buckets[0]) == {0: slice(0, 32), 1: slice(32, 64)}
    assert segments(plan.buckets[1]) == {0: slice(0, 16)}


def test_what_is_packed_is_seen_again_bit_for_bit() -> None:
    tensors = named(*MIXED)
    for bucket in BucketPlan.of(tensors.items(), 48).buckets:
        flat = torch.full((size_of(bucket),), 7, dtype=torch.uint8)
        pack(bucket, lambda part: tensors[part.name], flat)
        for place in bucket:
            seen = place.of(flat)
            assert seen.dtype == tensors[place.name].dtype
            assert torch.equal(seen, tensors[place.name])
        assert sum(flat[6:16].tolist()) == 0 or bucket[0].name != "a"  # gaps are zero


def test_plans_have_one_mark_if_they_are_the_same() -> None:
    mark = BucketPlan.of(named(*MIXED).items(), 48).mark
    assert BucketPlan.of(named(*MIXED).items(), 48).mark == mark
    others = [
        BucketPlan.of(named(*MIXED).items(), 16),
        BucketPlan.of(named(*MIXED[:-1]).items(), 48),
        BucketPlan.of(named(("x", (3,), torch.bfloat16), *MIXED[1:]).items(), 48),
        BucketPlan.of(named(("a", (3,), torch.float16), *MIXED[1:]).items(), 48),
    ]
    assert all(other.mark != mark for other in others)
    assert BucketPlan.of([], 48).largest == 0


@pytest.mark.parametrize("words", [1, 4096, 3 * 4096 + 5])
def test_a_checksum_sees_a_flipped_bit_and_blocks_that_changed_places(words: int) -> None:
    flat = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    found = int(checksum(flat))
    assert checksum(flat.clone()) == found
    other = flat.clone()
    other[-1] ^= 1
    assert checksum(other) != found
    if words > 2 * 4096:
        size = 8 * 4096
        swapped = torch.cat([flat[size : 2 * size], flat[:size], flat[2 * size :]])
        assert checksum(swapped) != found


def test_the_combined_mark_knows_the_order() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    assert combined([one, two]) == combined([one, two]) != combined([two, one])
    assert combined([]) == ""
