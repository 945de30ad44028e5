"""JSON from outside, and the JSON form of values."""

import datetime
import json
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

from stretto.plain import MOST_DEPTH, dumps, parse, plain


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.datetime(2026, 1, 2, 3, 4), "2026-01-02T03:04:00"),
        (b"caf\xc3\xa9", "café"),
        (b"\xff\x00", "/wA="),
        (Decimal("7.50"), "7.50"),
        (PurePosixPath("a/b"), "a/b"),
        (datetime.timedelta(minutes=1), "0:01:00"),
        ({"b", "a"}, ["a", "b"]),
        ((1, (2,)), [1, [2]]),
        (np.arange(3), [0, 1, 2]),
        (np.float32(0.5), 0.5),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        ([{"at": datetime.date(2026, 1, 2)}], [{"at": "2026-01-02"}]),
    ],
)
def test_a_value_without_a_json_form_is_text_or_a_list(value: Any, form: Any) -> None:
    assert plain(value) == form
    assert json.loads(dumps(value)) == form


def test_numbers_that_are_not_finite_are_none_unless_they_are_to_stay() -> None:
    assert plain([float("nan"), float("inf"), 1.0]) == [None, None, 1.0]
    assert plain([float("inf")], finite=False) == [float("inf")]


@pytest.mark.parametrize(
    "text",
    [
        "9" * 5000,
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * (MOST_DEPTH + 1) + "1" + "}" * (MOST_DEPTH + 1),
        b"\xff",
        "{",
        "",
    ],
)
def test_json_that_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"too long|100 deep|Expecting|decode"):
        parse(text)


def test_json_is_read_to_the_greatest_depth() -> None:
    assert parse("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    assert len(parse("[" + "[]," * 500 + "[]]")) == 501


@pytest.mark.parametrize(
    "value", [{("a",): 1}, object(), 10**5000, [object()]], ids=["key", "object", "digits", "list"]
)
def test_what_has_no_json_form_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"keys must be|got <object|digits"):
        dumps(value)


def test_values_in_each_other_without_end_are_value_errors() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (cycle, deep):
        with pytest.raises(ValueError, match=r"Circular|100 deep"):
            dumps(value)


def test_half_a_surrogate_pair_is_written_as_its_escape() -> None:
    assert dumps("é\ud800") == '"\\u00e9\\ud800"'
    assert dumps("é") == '"é"'
