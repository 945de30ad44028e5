"""Delta, the number of responses in flight beyond the batch (OPPO, inter-step overlap)."""

from __future__ import annotations

from statistics import median
from typing import Protocol, runtime_checkable

import numpy as np

from stretto.bounds import ceil_div
from stretto.errors import ConfigError
from stretto.schedules.controller import Controller, Feedback, Fixed, check_least
from stretto.schedules.predictors import FloatArray, IntArray, Simulating, drain_seconds, under_way
from stretto.stateful import Stateful

SHARES = (0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4, 6, 8)
"""Candidates for delta, as shares of the batch."""
SIMULATED = 512  # responses in a simulated step, over all its replicas
WARMUP_STEPS, MEASURED_STEPS = 6, 16  # simulated before and during the measurement
SLACK = 1.02  # deltas whose predicted times are within this factor of the best are equally fast
EARLY_STEPS = 8  # before this step, delta is decided after each step
OVERHEADS = 32  # latest steps, for the median overhead


@runtime_checkable
class Overcommit(Controller, Protocol):
    """Controller that sets delta for each step."""

    @property
    def delta(self) -> int:
        """Responses to keep in flight beyond the batch in the next step."""


class FixedOvercommit(Fixed):
    """Given deltas, one per step. The last one stays."""

    def __init__(self, *deltas: int) -> None:
        super().__init__("delta", 0, deltas)

    @property
    def delta(self) -> int:
        return self._now


class _RewardRule(Stateful):
    """Base class of OPPO's two rules: a delta between bounds, and the latest rewards."""

    saved = ("_delta", "_rewards")

    def __init__(self, start: int, low: int, high: int, window: int) -> None:
        check_least(0, low=low)
        check_least(low, start=start)
        check_least(start, high=high)
        check_least(1, window=window)
        self._low = low
        self._high = high
        self._window = window
        self._delta = start
        self._rewards: list[float] = []

    @property
    def delta(self) -> int:
        return self._delta

    def _move_by(self, change: int) -> None:
        self._delta = min(self._high, max(self._low, self._delta + change))


class Equation4(_RewardRule):
    """A delta that grows while the reward improves, and shrinks otherwise (OPPO, equation 4).

    The slope is the mean of ``R_i - R_(i-1)`` over the last ``window`` steps. If it is positive,
    ``delta = min(high, delta + inc)``, else ``delta = max(low, delta - dec)``. So delta decays to
    its lower bound as training converges, as the paper's text says. Its :class:`Algorithm1` moves
    the other way.
    """

    def __init__(
        self, start: int, low: int, high: int, window: int, inc: int = 1, dec: int = 1
    ) -> None:
        super().__init__(start, low, high, window)
        check_least(0, inc=inc, dec=dec)
        self._inc = inc
        self._dec = dec

    def observe(self, feedback: Feedback) -> None:
        self._rewards = [*self._rewards, feedback.reward][-1 - self._window :]
        if len(self._rewards) > self._window:
            slope = (self._rewards[-1] - self._rewards[0]) / self._window  # the sum telescopes
            self._move_by(self._inc if slope > 0 else -self._dec)


class Algorithm1(_RewardRule):
    """A delta that shrinks while the reward improves, and grows when it falls (OPPO, algorithm 1).

    With ``2 window`` rewards, ``d`` is the mean of the last ``window`` minus that of the ``window``
    before, and ``delta = clip(delta - sign(d) max(1, floor(delta / 4)), low, high)``. The last
    ``window`` are kept, so delta then changes once per ``window`` steps. In sign this
    contradicts the paper's equation 4 and its text (:class:`Equation4`).
    """

    def observe(self, feedback: Feedback) -> None:
        self._rewards.append(feedback.reward)
        if len(self._rewards) < 2 * self._window:
            return
        before, last = sum(self._rewards[: self._window]), sum(self._rewards[self._window :])
        change = max(1, self._delta // 4)
        self._move_by(-change if last > before else change if last < before else 0)
        self._rewards = self._rewards[self._window :]


class ThroughputOvercommit(Simulating):
    """Controller that chooses the delta with the most predicted samples per second.

    Simulates the buffer with ``batch + delta`` responses in flight. Responses carried
    ``max_carries`` times and then the first to end make the batch, and the rest is carried. Lengths
    come from recent responses, decode seconds from recent calls. A step also costs its time without
    decoding, and prefill in its first call, which grows with delta if carried rollouts are
    prefilled again under new weights. Of deltas about equally fast the smallest is chosen, because
    a larger one is more off-policy. Delta grows to no more than its double, or by half a batch, per
    decision, because the latency curve is uncertain beyond measured sizes. It never exceeds
    ``max_carries`` batches, because then some rollouts would be carried more often.
    """

    saved = (*Simulating.saved, "_delta", "_overheads")

    def __init__(
        self,
        batch: int,  # responses that a step trains on
        high: int,
        max_carries: int,  # carries of a rollout, after which the step waits for it
        *,
        low: int = 0,
        group: int = 1,  # responses to one prompt, which are carried or trained on together
        generators: int = 1,  # that share the responses in flight evenly
        every: int = 2,  # steps from one decision to the next
        seed: int = 0,
    ) -> None:
        check_least(1, batch=batch, group=group, generators=generators, every=every)
        check_least(0, max_carries=max_carries, low=low)
        check_least(low, high=high)
        if batch % group:
            raise ConfigError(
                f"the batch holds whole groups; got batch = {batch} and groups of {group}",
                "batch-not-groups",
            )
        self._batch, self._max_carries = batch, max_carries
        self._high = min(high, max_carries * batch) // group * group
        self._low = min(ceil_div(low, group) * group, self._high)
        self._group, self._generators = group, generators
        self._every, self._seed = every, seed
        super().__init__(max(1024, 32 * batch))
        self._delta = self._low
        self._overheads: list[float] = []

    @property
    def delta(self) -> int:
        return self._delta

    def observe(self, feedback: Feedback) -> None:
        self._learn(feedback)
        self._overheads = [*self._overheads, feedback.overhead_s][-OVERHEADS:]
        due = self._steps < EARLY_STEPS or self._steps % self._every == 0
        if due and self._knows_enough:
            self._delta = self._best()

    def _best(self) -> int:
        candidates = {round(share * self._batch / self._group) * self._group for share in SHARES}
        bounds = {self._low, self._high}
        deltas = sorted({d for d in candidates if self._low <= d <= self._high} | bounds)
        rows = np.arange(1, self._batch + deltas[-1] + 1) / self._generators
        step_seconds = self._latency.step_seconds(np.maximum(1.0, rows))
        replicas = max(1, SIMULATED // self._batch)
        responses = deltas[-1] + self._batch * (WARMUP_STEPS + MEASURED_STEPS)
        rng = np.random.default_rng([self._seed, self._steps])
        strata = rng.permuted(np.tile(np.arange(responses), (replicas, 1)), axis=1)
        lengths = self._lengths.sample((strata + 0.5) / responses)  # the same ones for every delta
        seconds = np.array([self._seconds(delta, lengths, step_seconds) for delta in deltas])
        fast_deltas = [
            d for d, s in zip(deltas, seconds, strict=True) if s <= SLACK * seconds.min()
        ]
        growth = max(self._delta, self._batch // 2 // self._group * self._group, self._group)
        return min(fast_deltas[0], self._delta + growth)

    def _seconds(self, delta: int, lengths: IntArray, step_seconds: FloatArray) -> float:
        """Predict the seconds of a step from lengths [replicas, responses] in dispatch order."""
        replicas, n = len(lengths), self._group
        quota, slots = self._batch // n, (self._batch + delta) // n
        draws = lengths[:, : lengths.shape[1] // n * n].reshape(replicas, -1, n)
        _, remaining, carries = under_way(draws, quota, slots - quota, self._max_carries)
        places = np.arange(replicas)[:, None] * slots  # of each replica's first group
        fresh, offset = np.zeros((replicas, quota), np.int64), 0
        seconds = 0.0
        for step in range(WARMUP_STEPS + MEASURED_STEPS):
            remaining = np.concatenate([remaining, draws[:, offset : offset + quota]], axis=1)
            carries = np.concatenate([carries, fresh], axis=1)
            offset += quota
            ends = remaining.max(axis=2)  # a group ends with its last response
            rank = np.where(carries >= self._max_carries, -1, ends).argsort(axis=1, kind="stable")
            batch_places, open_places = places + rank[:, :quota], places + rank[:, quota:]
            steps = ends.ravel()[batch_places].max(axis=1)
            decoded_tokens = np.minimum(remaining, steps[:, None, None])
            if step >= WARMUP_STEPS:
                row_tokens = np.sort(decoded_tokens.reshape(replicas, -1), axis=1)
                seconds += float(drain_seconds(step_seconds, row_tokens).mean())
            remaining = (remaining - decoded_tokens).reshape(-1, n)[open_places]
            carries = carries.ravel()[open_places] + 1
        start_s = self._latency.start_seconds(delta / self._generators)
        return seconds / MEASURED_STEPS + start_s + median(self._overheads)
