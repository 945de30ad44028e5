"""The recipe 'tiny-climb': its rows, its reward, and the shape of its lengths."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from recipe_rows import MARKS, climb_rows
from stretto.recipes import tiny_climb

ROWS = list(climb_rows(960, 0))


def test_the_packaged_rows_are_those_that_are_made() -> None:
    lines = Path(tiny_climb.__file__).with_name("tiny-climb.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_the_warm_up_shows_every_letter_with_every_mark() -> None:
    pairs = Counter(
        pair for row in ROWS for pair in re.findall(r"([a-h])([+*-])\d+", row["any_marks"])
    )
    assert set(pairs) == {(letter, mark) for letter in MARKS for mark in "+*-"}
    right = sum(pairs[pair] for pair in MARKS.items())
    assert right / pairs.total() == pytest.approx(1 / 3, abs=0.03)


def test_right_answers_have_a_long_tail() -> None:
    lengths = sorted(len(row["answer"]) for row in ROWS)
    assert lengths[-1] < 160
    assert lengths[int(0.95 * len(lengths))] > 5 * median(lengths)
    assert lengths[-1] == 21 * 4 + 9 * 3


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("b*3b*2b*1", 1.0),
        ("b*3b+2b*1", 2 / 3),
        ("b*3b*1", 2 / 3),
        ("b*3b*2b*1b*1", 3 / 4),
        ("b*3b*2b*1b", 3 / 4),
        ("b*1b*2b*3", 1.0),
        ("c*3c*2c*1", 0.0),
        ("", 0.0),
        ("b*3", 1 / 3),
    ],
)
def test_the_reward_is_the_share_of_right_numbers(response: str, share: float) -> None:
    """Of what there is or should be, whichever is more; an omission does not spoil the rest."""
    assert tiny_climb.right_share([response], answer=["b*3b*2b*1"]) == [pytest.approx(share)]
