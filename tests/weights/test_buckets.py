"""Plans of buckets: pure, and the same on both sides."""

from __future__ import annotations

import pytest
import torch

from stretto.weights.buckets import BucketPlan, checksum, combined, pack, size_of


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
