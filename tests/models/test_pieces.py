"""Parts of parameters, against small cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helpers import llama
from stretto.layout import Bounds, FullParameter, Layout
from stretto.models.shards import full_parameters, held_elements, index, overlap, within
from stretto.models.weights import fingerprint, fingerprint_of_parts

FLOAT = torch.float32


def test_slices_are_cut_first_and_their_rows_shared_out() -> None:
    """Of [5, 4]: cut by columns in two, each rank has 3 or 2 rows of one of them."""
    layout, whole = Layout(fsdp=2, tp=2), FullParameter((5, 4), FLOAT, dim=1)
    assert [layout.bounds(whole, rank) for rank in range(4)] == [
        ((0, 3), (0, 2)),
        ((0, 3), (2, 4)),
        ((3, 5), (0, 2)),
        ((3, 5), (2, 4)),
    ]
    by_rows = FullParameter((4, 3), FLOAT, dim=0)
    assert [layout.bounds(by_rows, rank)[0] for rank in range(4)] == [
        (0, 1),
        (2, 3),
        (1, 2),
        (3, 4),
    ]


def test_the_last_ranks_may_have_no_rows() -> None:
    layout = Layout(fsdp=4)
    rows = [layout.bounds(FullParameter((5,), FLOAT), rank)[0] for rank in range(4)]
    assert rows == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert layout.own({"a": FullParameter((5,), FLOAT)}, 3) == {}


def test_the_first_of_those_that_hold_the_same_owns_it() -> None:
    layout = Layout(fsdp=2, tp=2)

    def owned(full: FullParameter) -> list[Bounds | None]:
        return [layout.own({"a": full}, rank).get("a") for rank in range(4)]

    rows = ((0, 2),), ((2, 4),)
    by_rows = FullParameter((4,), FLOAT)
    assert owned(by_rows) == [rows[0], None, rows[1], None]
    alone = FullParameter((4,), FLOAT, by_rows=False)
    assert owned(alone) == [((0, 4),), None, None, None]
    cut = FullParameter((4,), FLOAT, dim=0, by_rows=False)
    assert owned(cut) == [*rows, None, None]


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(fsdp=3, tp=1), Layout(fsdp=1, tp=2), Layout(fsdp=2, tp=2)]
)
@pytest.mark.parametrize(
    "whole",
    [
        FullParameter((7, 4), FLOAT, 1),
        FullParameter((6,), FLOAT, 0),
        FullParameter((5, 3), FLOAT),
        FullParameter((4, 2), FLOAT, 0, by_rows=False),
    ],
)
def test_what_ranks_own_makes_the_whole_once(layout: Layout, whole: FullParameter) -> None:
    count = torch.zeros(whole.shape)
    for rank in range(layout.ranks):
        for box in layout.own({"a": whole}, rank).values():
            count[index(box)] += 1
    assert (count == 1).all()


def test_what_two_boxes_have_in_common() -> None:
    one, other = ((0, 3), (0, 4)), ((2, 5), (1, 2))
    assert overlap(one, other) == ((2, 3), (1, 2))
    assert overlap(one, ((3, 5), (0, 4))) is None
    assert within(((2, 3), (1, 2)), other) == (slice(0, 1), slice(0, 1))


def test_elements_of_a_box_are_found() -> None:
    """Of a flat [3, 4], the places 1, 6 and 11 are at (0, 1), (1, 2) and (2, 3)."""
    numbers, at = held_elements(np.array([1, 6, 11]), (3, 4), ((1, 3), (2, 4)))
    assert numbers.tolist() == [1, 2]
    assert at.tolist() == [0, 3]


@pytest.mark.parametrize(
    "layout",
    [Layout(fsdp=2), Layout(tp=2), Layout(fsdp=2, tp=2), Layout(fsdp=3, tp=2)],
)
def test_parts_have_the_fingerprint_of_the_whole(layout: Layout) -> None:
    """Each rank fills in what it owns; the sum of that is hashed."""
    model = llama()
    dims = {"model.layers.0.self_attn.q_proj.weight": 0, "model.layers.1.mlp.down_proj.weight": 1}
    wholes = full_parameters(model, dims)
    assert max(math.prod(w.shape) for w in wholes.values()) > 256
    named = dict(model.named_parameters())
    filled: list[torch.Tensor] = []
    marks = []

    def add_up(spread: torch.Tensor) -> torch.Tensor:
        filled.append(spread)
        return torch.stack(filled).sum(0)

    for rank in range(layout.ranks):
        parts = {n: p.detach()[index(layout.bounds(wholes[n], rank))] for n, p in named.items()}
        own = layout.own(wholes, rank)
        marks.append(fingerprint_of_parts(wholes, parts, own, add_up))
    assert marks[-1] == fingerprint(named.items()) != marks[0]
