"""Controllers: what they learn from a round, and what all of them do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A decode call, as the schedule saw it.

    Attributes:
        rows: rollouts that were being decoded, on average over the call's steps.
        steps: tokens that the longest-lived of them got.
        seconds: how long the call took.
        first: whether it was its generator's first of a round, which prefills what was admitted.
        carried: with ``first``, rollouts with tokens of earlier rounds, which it may have to
            prefill again.
    """

    rows: float
    steps: int
    seconds: float
    first: bool = False
    carried: int = 0


@dataclass(frozen=True, slots=True)
class Feedback:
    """A round, from one hand-over of weights to the next, as controllers see it.

    Attributes:
        reward: mean of the batches trained on.
        lengths: response tokens of the rollouts that ended.
        decode: the decode calls.
        seconds: the whole round.
        overhead_s: the part of it in which nothing was being decoded.
        beyond: rollouts that were in flight beyond a round's when the newest round began.
    """

    reward: float
    lengths: Sequence[int]
    decode: Sequence[DecodeSample]
    seconds: float
    overhead_s: float
    beyond: int = 0


class Controller(Protocol):
    """A controller that decides one thing, step by step."""

    def observe(self, feedback: Feedback) -> None:
        """Learn from the step that has just ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the controller has learnt, as plain data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        ...


class Fixed:
    """A controller that learns nothing, and has no state."""

    def observe(self, feedback: Feedback) -> None:
        """Learn nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing: there is no state."""


class Replayed:
    """Decisions of another run, which serve one step each; the last one stays.

    State: the place.
    """

    def __init__(self, what: str, least: int, numbers: Sequence[int]) -> None:
        if not numbers or min(numbers) < least:
            raise ConfigError(
                f"{what} to replay are one or more, each at least {least}; got {tuple(numbers)}"
            )
        self._numbers, self._place = tuple(numbers), 0

    @property
    def _now(self) -> int:
        return self._numbers[min(self._place, len(self._numbers) - 1)]

    def observe(self, feedback: Feedback) -> None:
        self._place += 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]
