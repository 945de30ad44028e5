"""Controllers: their protocol and base classes, their feedback, and the meter that makes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from stretto.errors import ConfigError
from stretto.protocols import Clock
from stretto.schedules.rollout import Rollout
from stretto.stateful import Stateful
from stretto.types import Stats

REWARD = "objective/scores"  # the learner's mean reward of a batch


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Measurements of one decode call."""

    rows: float  # tokens per step, which is the mean number of rollouts without speculation
    steps: int
    seconds: float
    first: bool = False  # its generator's first of a round, which prefills admitted rollouts
    carried: int = 0  # with ``first``, rollouts that it may have to prefill again


@dataclass(frozen=True, slots=True)
class Feedback:
    """Measurements of a round, from one weight sync to the next."""

    reward: float  # mean of the batches trained on
    lengths: Sequence[int]  # response tokens of the rollouts that ended
    decode: Sequence[DecodeSample]
    seconds: float  # of the full round
    overhead_s: float  # the part without decoding
    beyond: int = 0  # rollouts in flight beyond a round's size when the newest round started
    trained: Sequence[Rollout] = ()  # that the learner trained on


class Controller(Protocol):
    """Decides one value per step. For controllers a step is a round."""

    def observe(self, feedback: Feedback) -> None:
        """Learn from the step that has just ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state as plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


def check_least(least: int, **numbers: float) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ConfigError(f"{name} is at least {least}; got {number}", "number-too-small")


class Fixed(Stateful):
    """Controller that learns nothing. It uses one number per step, and the last one stays."""

    saved = ("_place",)

    def __init__(self, name: str, least: int, numbers: Sequence[int]) -> None:
        check_least(1, **{f"how many times {name} is given": len(numbers)})
        check_least(least, **{name: min(numbers)})
        self._numbers, self._place = tuple(numbers), 0

    @property
    def _now(self) -> int:
        return self._numbers[min(self._place, len(self._numbers) - 1)]

    def observe(self, feedback: Feedback) -> None:
        self._place += 1


class Meter(Stateful):
    """Measures steps for metrics, and rounds for controllers. Times are not saved."""

    saved = ("_rewards", "_lengths", "_beyond")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step_start_s = self._round_start_s = clock.now()
        self._generated_s = 0.0
        self._generating_since_s: float | None = None
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._trained: list[Rollout] = []
        self._beyond = 0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count the body of a ``with`` statement as decoding time."""
        self._generating_since_s = self._clock.now()
        try:
            yield
        finally:
            self._generated_s += self._clock.now() - self._generating_since_s
            self._generating_since_s = None

    def began(self, beyond: int) -> None:
        self._beyond = beyond

    def ended(self, rollout: Rollout) -> None:
        self._lengths.append(len(rollout))

    def trained(self, batch: Sequence[Rollout], stats: Stats) -> None:
        self._trained += batch
        self._rewards.append(stats[REWARD])

    def feedback(self, decode: Sequence[DecodeSample]) -> Feedback:
        """Return the measurements since the last call, and reset them."""
        now_s = self._clock.now()
        generated_s, self._generated_s = self._generated_s, 0.0
        if self._generating_since_s is not None:
            generated_s += now_s - self._generating_since_s
            self._generating_since_s = now_s
        seconds, self._round_start_s = now_s - self._round_start_s, now_s
        overhead_s = max(seconds - generated_s, 0.0)
        reward = fmean(self._rewards)
        feedback = Feedback(
            reward, self._lengths, decode, seconds, overhead_s, self._beyond, self._trained
        )
        self._rewards, self._lengths = [], []
        self._trained = []
        return feedback

    def metrics(self, batch: Sequence[Rollout]) -> dict[str, float]:
        now_s = self._clock.now()
        step_s, self._step_start_s = now_s - self._step_start_s, now_s
        tokens = sum(r.total_tokens for r in batch)
        return {
            "timing_s/step": step_s,
            "perf/throughput": tokens / step_s if step_s else 0.0,
            "perf/samples_per_s": len(batch) / step_s if step_s else 0.0,
        }
