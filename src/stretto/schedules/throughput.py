"""Delta from measurement: over-commitment that maximises the samples a second it predicts."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import ConfigError
from stretto.schedules.feedback import Feedback
from stretto.schedules.latency import LatencyModel, drain_seconds
from stretto.schedules.lengths import LengthModel, under_way

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SHARES = (0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4, 6, 8)
"""Deltas that are tried, as shares of the batch."""
SIMULATED = 512
"""Responses in a simulated step, over all its replicas."""
WARMUP_STEPS, MEASURED_STEPS = 6, 16
"""Steps that are simulated before, and while, the rate is measured."""
SLACK = 1.02
"""Deltas whose predicted times are within this factor of the best are equally fast."""
EARLY_STEPS = 8
"""First steps of a run, after each of which delta is decided anew."""
OVERHEADS = 32
"""Steps that the typical overhead is taken from."""


class ThroughputOvercommit:
    """A controller that chooses delta for the most predicted samples a second.

    The prediction simulates the buffer: ``batch + delta`` responses in flight, those carried
    ``max_carries`` times and then the first to end make the batch, the others are carried. (With
    delta above the batch the buffer waits for some a little earlier than that.) It takes
    lengths from the recent ones (:class:`LengthModel`), seconds of a decode step from the recent
    calls (:class:`LatencyModel`), and adds what a step costs besides: the time in which nothing is
    decoded, and what its first decode call takes beyond its decode steps, which is prefill, and
    grows with delta if carried rollouts are prefilled again under new weights. A larger delta is
    more off-policy, so of deltas about equally fast the smallest is taken. From one decision to
    the next delta grows to its double or by half a batch at most, so that the latency curve is not
    trusted far beyond what was measured. Delta never exceeds ``max_carries`` batches: with more in
    flight, some rollouts would have to be carried more often than that.

    State: delta, steps seen, lengths, decode calls, overheads. The simulation's random numbers
    depend on the seed and the step alone.

    Args:
        batch: responses that a step trains on.
        max_carries: how often a rollout may be carried; the step then waits for it.
        group: responses to one prompt, which are carried or trained on together.
        generators: that share the responses in flight evenly.
        every: steps from one decision to the next.

    Raises:
        ConfigError: a number is out of range, or the batch is no multiple of the group.
    """

    def __init__(
        self,
        batch: int,
        high: int,
        max_carries: int,
        *,
        low: int = 0,
        group: int = 1,
        generators: int = 1,
        every: int = 2,
        seed: int = 0,
    ) -> None:
        if min(batch, group, generators, every) < 1 or max_carries < 0 or not 0 <= low <= high:
            raise ConfigError(
                "batch, group, generators and every are at least 1, max_carries at least 0, and "
                f"0 <= low <= high; got {batch}, {group}, {generators}, {every}, {max_carries}, "
                f"low = {low} and high = {high}"
            )
        if batch % group:
            raise ConfigError(
                f"the batch holds whole groups; got batch = {batch} and groups of {group}"
            )
        self._batch, self._max_carries = batch, max_carries
        self._high = min(high, max_carries * batch) // group * group
        self._low = min(-(-low // group) * group, self._high)
        self._group, self._generators = group, generators
        self._every, self._seed = every, seed
        self._delta, self._steps = self._low, 0
        self._lengths = LengthModel(max(1024, 32 * batch))
        self._latency = LatencyModel()
        self._overheads: list[float] = []

    @property
    def delta(self) -> int:
        """The present delta, in responses."""
        return self._delta

    def observe(self, feedback: Feedback) -> None:
        """Take in the step's metrics, and decide anew if it is time."""
        self._lengths.observe(feedback.lengths)
        self._latency.observe(feedback.decode)
        self._overheads = [*self._overheads, feedback.overhead_s][-OVERHEADS:]
        self._steps += 1
        due = self._steps < EARLY_STEPS or self._steps % self._every == 0
        if due and len(self._lengths) and len(self._latency):
            self._delta = self._best()

    def state_dict(self) -> dict[str, Any]:
        """Return delta, steps seen, lengths, decode calls and overheads, as plain data."""
        return {
            "delta": self._delta,
            "steps": self._steps,
            "lengths": self._lengths.state_dict(),
            "latency": self._latency.state_dict(),
            "overheads": list(self._overheads),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._delta, self._steps = state["delta"], state["steps"]
        self._lengths.load_state_dict(state["lengths"])
        self._latency.load_state_dict(state["latency"])
        self._overheads = list(state["overheads"])

    def _best(self) -> int:
        """Return the smallest of the deltas that are predicted to be about equally fast."""
        tried = {round(share * self._batch / self._group) * self._group for share in SHARES}
        bounds = {self._low, self._high}
        deltas = sorted({d for d in tried if self._low <= d <= self._high} | bounds)
        rows = np.arange(1, self._batch + deltas[-1] + 1) / self._generators
        step_seconds = self._latency.step_seconds(np.maximum(1.0, rows))
        replicas = max(1, SIMULATED // self._batch)
        responses = deltas[-1] + self._batch * (WARMUP_STEPS + MEASURED_STEPS)
        rng = np.random.default_rng([self._seed, self._steps])
        strata = rng.permuted(np.tile(np.arange(responses), (replicas, 1)), axis=1)
        lengths = self._lengths.sample((strata + 0.5) / responses)  # the same ones for every delta
        seconds = np.array([self._seconds(delta, lengths, step_seconds) for delta in deltas])
        fast = [d for d, s in zip(deltas, seconds, strict=True) if s <= SLACK * seconds.min()]
        growth = max(self._delta, self._batch // 2 // self._group * self._group, self._group)
        return min(fast[0], self._delta + growth)

    def _seconds(self, delta: int, lengths: IntArray, step_seconds: FloatArray) -> float:
        """Seconds that a step is predicted to take.

        Args:
            lengths: of the responses, in dispatch order; shape [replicas, responses].
            step_seconds: of a decode step of 1, 2, ... rows.
        """
        replicas, n = len(lengths), self._group
        wanted, slots = self._batch // n, (self._batch + delta) // n
        draws = lengths[:, : lengths.shape[1] // n * n].reshape(replicas, -1, n)
        _, left, carries = under_way(draws, wanted, slots - wanted, self._max_carries)
        places = np.arange(replicas)[:, None] * slots  # of each replica's first group
        fresh, drawn = np.zeros((replicas, wanted), np.int64), 0
        seconds = 0.0
        for step in range(WARMUP_STEPS + MEASURED_STEPS):
            left = np.concatenate([left, draws[:, drawn : drawn + wanted]], axis=1)
            carries = np.concatenate([carries, fresh], axis=1)
            drawn += wanted
            ends = left.max(axis=2)  # a group ends with its last response
            rank = np.where(carries >= self._max_carries, -1, ends).argsort(axis=1, kind="stable")
            taken, kept = places + rank[:, :wanted], places + rank[:, wanted:]
            steps = ends.ravel()[taken].max(axis=1)
            ran = np.minimum(left, steps[:, None, None])
            if step >= WARMUP_STEPS:
                ran_rows = np.sort(ran.reshape(replicas, -1), axis=1)
                seconds += float(drain_seconds(step_seconds, ran_rows).mean())
            left = (left - ran).reshape(-1, n)[kept]
            carries = carries.ravel()[kept] + 1
        starting = self._latency.start_seconds(delta / self._generators)
        return seconds / MEASURED_STEPS + starting + median(self._overheads)
