"""Confidence intervals against printed tables and cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from stretto.observe.significance import mean_interval, ratio_interval, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_printed_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


def test_other_levels() -> None:
    assert t_quantile(1, 0.5) == pytest.approx(1.0)  # a Cauchy distribution's quartile
    assert t_quantile(2, 0.99) == pytest.approx(9.925, abs=5e-4)
    assert t_quantile(10_000) == pytest.approx(1.960, abs=5e-4)  # all but a normal distribution


def test_the_interval_of_a_mean() -> None:
    """Of 1, 2, 3: 2 with a standard error of 1 / sqrt(3)."""
    half = 4.302653 / math.sqrt(3)
    found = mean_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))


def test_ratios_are_averaged_by_their_logarithms() -> None:
    """Twice as fast and half as fast are no difference; swapping the sides inverts the interval."""
    even, ahead, behind = (
        ratio_interval(r) for r in ([2, 0.5], [1.2, 1.5, 1.4], [1 / 1.2, 1 / 1.5, 1 / 1.4])
    )
    assert even is not None
    assert even.mean == pytest.approx(1.0)
    assert even.low == pytest.approx(1 / even.high)
    assert ahead is not None
    assert behind is not None
    assert ahead.mean == pytest.approx((1.2 * 1.5 * 1.4) ** (1 / 3))
    assert (behind.low, behind.high) == (
        pytest.approx(1 / ahead.high),
        pytest.approx(1 / ahead.low),
    )


def test_one_value_has_no_interval() -> None:
    assert mean_interval([]) is None
    assert mean_interval([1.0]) is None
    assert ratio_interval([2.0]) is None
