"""Models for the simulations of controllers: response lengths, and the time of decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from stretto.errors import StateError
from stretto.schedules.controller import DecodeSample, Feedback, check_least
from stretto.stateful import Stateful

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

HALF_LIVES = 4  # per window of lengths, at whose far end a length counts 1/16
GOLDEN = (5**0.5 - 1) / 2  # the golden ratio minus 1. Its multiples modulo 1 are spread evenly
WINDOW = 512  # decode calls remembered
KNEES = 24  # candidates for the knee of the curve
ROUNDS = 4  # fits of the curve, each with less weight on outliers of the last
TIE = 0.5  # criteria that differ by less are equal, so the simpler curve is chosen
HUBER = 1.345  # standard deviations beyond which a call loses weight (Huber 1981)


class LengthModel(Stateful):
    """The distribution of response lengths in tokens, from recently finished responses.

    The newest lengths count most, because lengths drift as a policy learns. A length counts half as
    much as one a quarter of the window later. The window is the least number of lengths remembered.
    Lengths of one step count the same, because they come in order of finishing.

    While the number of unfinished responses grows, long ones are missing among the finished. While
    it is constant, as many long ones start as end, so the lengths have no bias.
    """

    saved = ("_steps",)

    def __init__(self, window: int) -> None:
        check_least(1, window=window)
        self._window = window
        self._steps: list[list[int]] = []
        self._table: tuple[IntArray, FloatArray] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._steps))

    def observe(self, lengths: Sequence[int]) -> None:
        self._steps.append([int(length) for length in lengths])
        while len(self) - len(self._steps[0]) >= self._window:
            del self._steps[0]
        self._table = None

    def mean(self) -> float:
        lengths, weights = self._weighted()
        return float(lengths @ weights)

    def quantile(self, share: float) -> float:
        """Return the shortest length that at least ``share`` of the responses do not exceed."""
        lengths, weights = self._weighted()
        place = int(np.searchsorted(np.cumsum(weights), share - 1e-12))
        return float(lengths[min(place, len(lengths) - 1)])

    def sample(self, uniform: FloatArray) -> IntArray:
        """Draw lengths by inversion from numbers of any shape, uniform in [0, 1)."""
        lengths, weights = self._weighted()
        places = np.searchsorted(np.cumsum(weights), uniform, side="right")
        return lengths[np.minimum(places, len(lengths) - 1)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._table = None

    def _weighted(self) -> tuple[IntArray, FloatArray]:
        if self._table is None:
            if not len(self):
                raise StateError(
                    "no response has finished yet; ask after the first step", "no-data"
                )
            counts = np.array([len(step) for step in self._steps])
            newer = counts[::-1].cumsum()[::-1] - counts
            weight_per_step = 0.5 ** (newer * HALF_LIVES / self._window)
            lengths = np.concatenate([np.array(step, np.int64) for step in self._steps])
            order = np.argsort(lengths, kind="stable")
            weights = np.repeat(weight_per_step, counts)[order]
            self._table = lengths[order], weights / weights.sum()
        return self._table


def under_way(
    draws: IntArray, wanted: int, carried: int, max_carries: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Draw groups as met at a random moment, so that a simulation starts in its steady state.

    Lengths are [replicas, groups drawn, group]. Returns tokens so far and tokens left, [replicas,
    carried, group], and times carried, [replicas, carried]. Points spread over all groups laid end
    to end hit a group in proportion to its length, and give its progress. Times carried follow from
    a round's steps: the tokens of a batch over the rows that decode them.
    """
    replicas, _, n = draws.shape
    groups = draws.reshape(-1, n)
    lengths = groups.max(axis=1)
    ends = lengths.cumsum()
    points = (np.arange(replicas * carried) * GOLDEN % 1.0) * ends[-1]
    rows = np.searchsorted(ends, points, side="right")
    offset = points - (ends[rows] - lengths[rows])
    remaining = np.maximum(0, np.ceil(groups[rows] - offset[:, None])).astype(np.int64)
    steps = lengths.mean() * wanted / (carried + wanted / 2)
    carries = 1 + np.minimum(offset / steps, offset / lengths[rows] * max_carries).astype(np.int64)
    shape = replicas, carried, n
    return (
        (groups[rows] - remaining).reshape(shape),
        remaining.reshape(shape),
        carries.reshape(shape[:2]),
    )


class LatencyModel(Stateful):
    """Seconds of decode calls, and from them seconds of a decode step.

    A call takes ``steps (a + b rows + c max(0, rows - knee))`` seconds. A generator's first call of
    a round takes ``p + q carried`` more, for prefill. Up to the knee a step is bound by memory
    bandwidth (``a`` reads the weights, ``b`` a row's cache), beyond it by arithmetic, or by a cache
    that overflows. No coefficient is negative. The least-squares fit is robust, so that occasional
    pauses do no harm. Each term must improve the Bayesian information criterion. For example, calls
    that all have the same number of rows give a flat curve.
    """

    saved = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[list[float]] = []  # rows, steps, seconds, first or not, carried
        self._fitted: tuple[FloatArray, float] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def observe(self, calls: Sequence[DecodeSample]) -> None:
        for call in calls:
            if call.steps and call.rows > 0:
                start = [1.0, float(call.carried)] if call.first else [0.0, 0.0]
                self._calls.append([call.rows, call.steps, call.seconds, *start])
        del self._calls[:-WINDOW]
        self._fitted = None

    def step_seconds(self, rows: npt.ArrayLike) -> FloatArray:
        """Return the seconds per decode step, in the shape of ``rows``."""
        (a, b, c, _, _), knee = self._curve()
        n = np.asarray(rows, float)
        seconds: FloatArray = a + b * n + c * np.maximum(0.0, n - knee)
        return seconds

    def start_seconds(self, carried: float) -> float:
        """Return the seconds that a generator's first call takes in addition to decode steps."""
        (_, _, _, p, q), _ = self._curve()
        return float(p + q * carried)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._fitted = None

    def _curve(self) -> tuple[FloatArray, float]:
        if self._fitted is None:
            if not self._calls:
                raise StateError(
                    "no decode call has been observed yet; ask after the first step", "no-data"
                )
            self._fitted = _fit(np.array(self._calls))
        return self._fitted


def drain_seconds(step_seconds: FloatArray, remaining: npt.NDArray[Any]) -> FloatArray:
    """Return the seconds until all rows of a decode batch have ended.

    ``step_seconds`` are of a step with 1, 2, ... rows, [n] or longer, and ``remaining`` the tokens
    left per row, ascending, [..., n]. Row i of n shares its last steps with the n - i rows after
    it. Summed by parts, each of its tokens costs the seconds that a row adds to these n - i rows.
    """
    added = np.diff(step_seconds[: remaining.shape[-1]], prepend=0.0)
    seconds: FloatArray = remaining @ added[::-1]
    return seconds


def drain_times(step_seconds: FloatArray, remaining: npt.NDArray[Any]) -> FloatArray:
    """Return the seconds until each row of a decode batch ends, shape [n]."""
    times: FloatArray = np.cumsum(
        np.diff(remaining, prepend=0) * step_seconds[: len(remaining)][::-1]
    )
    return times


def _fit(calls: FloatArray) -> tuple[FloatArray, float]:
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
        residuals = np.abs(terms @ solution - seconds) * np.sqrt(base)
        spread = np.median(residuals) / 0.6745 + 1e-12 * seconds.mean() + 1e-300
        weights = base * np.minimum(1.0, HUBER * spread / np.maximum(residuals, 1e-300))
    solution = np.divide(solution, scale, out=np.zeros_like(solution), where=scale > 0)
    bend = int(np.argmax(solution[4:]))
    return solution[[0, 1, 4 + bend, 2, 3]], float(knees[bend])


def _select(terms: FloatArray, seconds: FloatArray, weights: FloatArray) -> FloatArray:
    n, columns = terms.shape
    gram = terms.T @ (terms * weights[:, None])
    moments, total = terms.T @ (seconds * weights), float(seconds @ (seconds * weights))
    floor = 1e-10 * total + 1e-300  # otherwise a perfect fit is infinitely good
    curves = [(0,), (1,), (0, 1)]
    curves += [(*flat, k) for k in range(4, columns) for flat in ((0,), (1,), (0, 1))]
    best, solution = np.inf, np.zeros(columns)
    for size in range(1, min(5, max(1, n - 1)) + 1):
        pairs = product(curves, ((), (2,), (3,), (2, 3)))
        trials = np.array([curve + start for curve, start in pairs if len(curve + start) == size])
        grams = gram[trials[:, :, None], trials[:, None, :]] + 1e-10 * np.eye(size)
        solutions = np.linalg.solve(grams, moments[trials][..., None])[..., 0]
        squares = np.maximum(0.0, total - (solutions * moments[trials]).sum(axis=1)) + floor
        parameters = size + (trials >= 4).any(axis=1)  # the knee is one too
        criteria = n * np.log(squares) + parameters * np.log(n)
        criteria[(solutions < 0).any(axis=1)] = np.inf
        place = int(np.argmax(criteria <= criteria.min() + TIE))
        if criteria[place] < best - TIE:
            best, solution = criteria[place], np.zeros(columns)
            solution[trials[place]] = solutions[place]
    return solution


class Simulating(Stateful):
    """Base class of controllers that simulate steps: lengths, decode calls, steps seen."""

    saved: ClassVar[tuple[str, ...]] = ("_lengths", "_latency", "_steps")

    def __init__(self, window: int) -> None:
        self._lengths = LengthModel(window)
        self._latency = LatencyModel()
        self._steps = 0

    def _learn(self, feedback: Feedback) -> None:
        self._lengths.observe(feedback.lengths)
        self._latency.observe(feedback.decode)
        self._steps += 1

    @property
    def _knows_enough(self) -> bool:
        return bool(len(self._lengths) and len(self._latency))
