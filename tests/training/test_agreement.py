"""How far engine and learner may be apart: what is measured, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from raising import raises
from stretto.algorithms.policy import SQUARES, SUM, TOKENS
from stretto.algorithms.reductions import Metrics
from stretto.errors import LearnerError
from stretto.training.agreement import Agreement, differences


def seen(rms: float, tokens: int) -> Metrics:
    numbers = {SUM: rms * tokens / 2, SQUARES: rms**2 * tokens, TOKENS: float(tokens)}
    return Metrics({name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()})


def test_the_tolerance_is_twice_what_the_first_thousand_tokens_measure() -> None:
    """0.03 and 0.05 over 500 tokens each: a mean square of 0.0017."""
    agreement = Agreement(torch.bfloat16, 0.0)
    agreement.check(seen(0.03, 500))
    assert agreement.tolerance == 0.2
    agreement.check(seen(0.05, 500))
    expected = 2 * math.sqrt(0.0017) + 0.01
    assert agreement.tolerance == pytest.approx(expected)
    agreement.check(seen(0.08, 5000))  # what comes later is compared, not learned from
    assert agreement.tolerance == pytest.approx(expected)
    with raises(LearnerError, "policies-disagree", 0.1, 0.04123):
        agreement.check(seen(0.1, 5000))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.2), (torch.float32, 1e-3)])
def test_no_measurement_raises_the_limit(dtype: torch.dtype, limit: float) -> None:
    agreement = Agreement(dtype, 0.0)
    agreement.check(seen(0.9 * limit, 1000))
    assert agreement.tolerance == limit
    with raises(LearnerError, "policies-disagree"):
        Agreement(dtype, 0.0).check(seen(1.1 * limit, 1000))


def test_an_outlier_among_few_tokens_passes() -> None:
    """Six times the root mean square of many: among 12 tokens that is sqrt(1 + 36 / 12) = 2."""
    agreement = Agreement(torch.bfloat16, 0.0)
    agreement.check(seen(0.02, 1000))
    agreement.check(seen(2 * 0.05 - 1e-6, 12))
    with raises(LearnerError, "policies-disagree", 12, "tolerance is 0.1)"):
        agreement.check(seen(2 * 0.05 + 1e-6, 12))


def test_a_tolerance_set_by_hand_wins() -> None:
    agreement = Agreement(torch.bfloat16, 0.5)
    agreement.check(seen(0.01, 10_000))
    agreement.check(seen(0.49, 10))
    with raises(LearnerError, "policies-disagree", "tolerance is 0.5)"):
        agreement.check(seen(0.51, 10))


def test_mean_and_root_mean_square_are_reported() -> None:
    found = differences(seen(0.2, 500))
    assert found == pytest.approx(
        {"sampling/logp_difference_mean": 0.1, "sampling/logp_difference_rms": 0.2}
    )


def test_what_was_measured_comes_back_with_the_state() -> None:
    agreement, other = (Agreement(torch.float32, 0.0) for _ in range(2))
    agreement.check(seen(1e-5, 2000))
    assert agreement.tolerance == pytest.approx(1.2e-4)
    other.load_state_dict(agreement.state_dict())
    assert other.tolerance == agreement.tolerance


def test_not_a_number_is_refused_and_nothing_is_passed_over() -> None:
    agreement = Agreement(torch.float32, 0.0)
    agreement.check(Metrics())
    assert differences(Metrics()) == {}
    with raises(LearnerError, "policies-disagree", "nan"):
        agreement.check(seen(float("nan"), 1000))
