"""A model of a decode step's time, as a function of the rows that are decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import StateError
from stretto.schedules.feedback import DecodeSample

FloatArray = npt.NDArray[np.float64]

WINDOW = 512
"""Decode calls remembered."""
KNEES = 24
"""Places that are tried for the knee of the curve, at most."""
ROUNDS = 4
"""Times that the curve is fitted, each time with less weight on calls far from the one before."""
TIE = 0.5
"""Criteria that differ by less are equal, and the simpler curve is taken."""
HUBER = 1.345
"""A call farther than this many standard deviations from the curve loses weight (Huber 1981)."""


class LatencyModel:
    """Seconds of decode calls, and from them seconds of a decode step.

    A call takes ``steps (a + b rows + c max(0, rows - knee))`` seconds; a generator's first call of
    a round takes ``p + q carried`` more, for prefill. Up to the knee a step is bound by
    memory bandwidth (``a`` reads the weights, ``b`` a row's cache), beyond it by arithmetic, or by
    a cache that overflows. No coefficient is negative. The curve is a robust least-squares fit, so
    that a pause now and then does no harm, and each term has to earn its place by the Bayesian
    information criterion: with calls at one number of rows alone, the curve is flat.

    State: the calls remembered.
    """

    def __init__(self) -> None:
        self._calls: list[list[float]] = []  # rows, steps, seconds, first or not, carried
        self._fitted: tuple[FloatArray, float] | None = None

    def __len__(self) -> int:
        """Calls remembered."""
        return len(self._calls)

    def observe(self, calls: Sequence[DecodeSample]) -> None:
        """Take in decode calls; those without a step or a row say nothing."""
        for call in calls:
            if call.steps and call.rows > 0:
                start = [1.0, float(call.carried)] if call.first else [0.0, 0.0]
                self._calls.append([call.rows, call.steps, call.seconds, *start])
        del self._calls[:-WINDOW]
        self._fitted = None

    def step_seconds(self, rows: npt.ArrayLike) -> FloatArray:
        """Seconds of one decode step for each number of rows, in the shape of ``rows``.

        Raises:
            StateError: no call has been observed.
        """
        (a, b, c, _, _), knee = self._curve()
        n = np.asarray(rows, float)
        seconds: FloatArray = a + b * n + c * np.maximum(0.0, n - knee)
        return seconds

    def start_seconds(self, carried: float) -> float:
        """Seconds that a generator's first call of a round takes besides its decode steps.

        Raises:
            StateError: no call has been observed.
        """
        (_, _, _, p, q), _ = self._curve()
        return float(p + q * carried)

    def state_dict(self) -> dict[str, Any]:
        """Return the remembered calls, as plain data."""
        return {"calls": [list(call) for call in self._calls]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._calls = [list(call) for call in state["calls"]]
        self._fitted = None

    def _curve(self) -> tuple[FloatArray, float]:
        if self._fitted is None:
            if not self._calls:
                raise StateError("no decode call has been observed yet; ask after the first step")
            self._fitted = _fit(np.array(self._calls))
        return self._fitted


def drain_seconds(step_seconds: FloatArray, remaining: npt.NDArray[Any]) -> FloatArray:
    """Seconds until rows that are decoded together have all ended.

    Row i of n, in ascending order, shares its last steps with the n - i rows after it. Summed by
    parts, it costs its tokens times what one more row adds to a step of n - i rows.

    Args:
        step_seconds: of a decode step of 1, 2, ... rows; shape [n] or longer.
        remaining: tokens that each row still gets, in ascending order; shape [..., n].
    """
    added = np.diff(step_seconds[: remaining.shape[-1]], prepend=0.0)
    seconds: FloatArray = remaining @ added[::-1]
    return seconds


def drain_times(step_seconds: FloatArray, remaining: npt.NDArray[Any]) -> FloatArray:
    """Return when each of some rows ends that are decoded together: seconds from now, shape [n].

    Args:
        step_seconds: of a decode step of 1, 2, ... rows; shape [n] or longer.
        remaining: tokens that each row still gets, in ascending order; shape [n].
    """
    times: FloatArray = np.cumsum(
        np.diff(remaining, prepend=0) * step_seconds[: len(remaining)][::-1]
    )
    return times


def _fit(calls: FloatArray) -> tuple[FloatArray, float]:
    """The coefficients a, b, c, p, q and the knee; calls have shape [n, 5]."""
    rows, steps, seconds, first, carried = calls.T
    knees = np.unique(np.linspace(rows.min(), rows.max(), KNEES + 2)[1:-1])
    hinges = np.maximum(0.0, rows[:, None] - knees) * steps[:, None]
    terms = np.column_stack([steps, steps * rows, first, first * carried, hinges])
    scale = np.abs(terms).max(axis=0)
    terms = np.divide(terms, scale, out=np.zeros_like(terms), where=scale > 0)
    base = weights = 1.0 / steps  # a call's variance grows with its steps
    solution = np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        solution = _select(terms, seconds, weights / weights.mean())
        off = np.abs(terms @ solution - seconds) * np.sqrt(base)
        spread = np.median(off) / 0.6745 + 1e-12 * seconds.mean() + 1e-300
        weights = base * np.minimum(1.0, HUBER * spread / np.maximum(off, 1e-300))
    solution = np.divide(solution, scale, out=np.zeros_like(solution), where=scale > 0)
    bend = int(np.argmax(solution[4:]))
    return solution[[0, 1, 4 + bend, 2, 3]], float(knees[bend])


def _select(terms: FloatArray, seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-negative weighted least-squares solution with the best information criterion.

    Args:
        terms: a, b, p, q, and then c for each knee; shape [n, 4 + knees].
    """
    n, columns = terms.shape
    gram = terms.T @ (terms * weights[:, None])
    moments, total = terms.T @ (seconds * weights), float(seconds @ (seconds * weights))
    floor = 1e-10 * total + 1e-300  # a perfect fit would be infinitely good
    curves = [(0,), (1,), (0, 1)]
    curves += [(*flat, k) for k in range(4, columns) for flat in ((0,), (1,), (0, 1))]
    best, chosen = np.inf, np.zeros(columns)
    for size in range(1, min(5, max(1, n - 1)) + 1):
        pairs = product(curves, ((), (2,), (3,), (2, 3)))
        trials = np.array([curve + start for curve, start in pairs if len(curve + start) == size])
        grams = gram[trials[:, :, None], trials[:, None, :]] + 1e-10 * np.eye(size)
        found = np.linalg.solve(grams, moments[trials][..., None])[..., 0]
        squares = np.maximum(0.0, total - (found * moments[trials]).sum(axis=1)) + floor
        parameters = size + (trials >= 4).any(axis=1)  # the knee is one too
        criteria = n * np.log(squares) + parameters * np.log(n)
        criteria[(found < 0).any(axis=1)] = np.inf
        place = int(np.argmax(criteria <= criteria.min() + TIE))
        if criteria[place] < best - TIE:
            best, chosen = criteria[place], np.zeros(columns)
            chosen[trials[place]] = found[place]
    return chosen
