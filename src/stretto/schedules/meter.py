"""Metrics of a step for people, and of a round for controllers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from stretto.protocols import Clock
from stretto.schedules.controller import DecodeSample, Feedback
from stretto.schedules.rollout import Rollout
from stretto.types import Stats

REWARD = "objective/scores"
"""The learner's metric that controllers follow: the mean reward of the batch."""


class Meter:
    """A meter of steps for people, and of rounds for controllers.

    State: rewards and lengths of the round so far, and rollouts beyond it. Times are of this
    process alone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step_start_s = self._round_start_s = clock.now()
        self._generated_s = 0.0
        self._generating_since_s: float | None = None
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._beyond = 0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count the time of the body of a ``with`` statement as decoding."""
        self._generating_since_s = self._clock.now()
        try:
            yield
        finally:
            self._generated_s += self._clock.now() - self._generating_since_s
            self._generating_since_s = None

    def began(self, beyond: int) -> None:
        """Note that a round has begun, with so many rollouts in flight beyond its own."""
        self._beyond = beyond

    def ended(self, rollout: Rollout) -> None:
        """Note that a response has ended."""
        self._lengths.append(len(rollout))

    def trained(self, stats: Stats) -> None:
        """Note that a batch has been trained on."""
        self._rewards.append(stats[REWARD])

    def feedback(self, decode: Sequence[DecodeSample]) -> Feedback:
        """Return the metrics since the last call, and start anew."""
        now_s = self._clock.now()
        generated_s, self._generated_s = self._generated_s, 0.0
        if self._generating_since_s is not None:
            generated_s += now_s - self._generating_since_s
            self._generating_since_s = now_s
        seconds, self._round_start_s = now_s - self._round_start_s, now_s
        overhead_s = max(seconds - generated_s, 0.0)
        reward = fmean(self._rewards)
        feedback = Feedback(reward, self._lengths, decode, seconds, overhead_s, self._beyond)
        self._rewards, self._lengths = [], []
        return feedback

    def metrics(self, batch: Sequence[Rollout]) -> dict[str, float]:
        """Return the metrics of the step that ends now, for people."""
        now_s = self._clock.now()
        step_s, self._step_start_s = now_s - self._step_start_s, now_s
        tokens = sum(r.total_tokens for r in batch)
        return {
            "timing_s/step": step_s,
            "perf/throughput": tokens / step_s if step_s else 0.0,
            "perf/samples_per_s": len(batch) / step_s if step_s else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return rewards, lengths and rollouts beyond the round, as plain data."""
        return {
            "rewards": list(self._rewards),
            "lengths": list(self._lengths),
            "beyond": self._beyond,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._rewards, self._lengths = list(state["rewards"]), list(state["lengths"])
        self._beyond = state["beyond"]
