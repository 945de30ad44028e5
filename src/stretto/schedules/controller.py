"""Controllers: what they learn from a round, and what all of them do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A decode call, as the schedule saw it."""

    rows: float  # rollouts that were being decoded, on average over the call's steps
    steps: int  # tokens that the longest-lived of them got
    seconds: float
    first: bool = False  # its generator's first of a round, which prefills what was admitted
    carried: int = 0  # with ``first``, rollouts that it may have to prefill again


@dataclass(frozen=True, slots=True)
class Feedback:
    """A round, from one weight sync to the next, as controllers see it."""

    reward: float  # mean of the batches trained on
    lengths: Sequence[int]  # response tokens of the rollouts that ended
    decode: Sequence[DecodeSample]
    seconds: float  # the whole round
    overhead_s: float  # the part of it in which nothing was being decoded
    beyond: int = 0  # rollouts that were in flight beyond the newest round's when it began


class Controller(Protocol):
    """A controller that decides one thing, step by step."""

    def observe(self, feedback: Feedback) -> None:
        """Learn from the step that has just ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the controller has learnt, as plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""


class Stateful:
    """An object whose state is plain data in private attributes, or in other such objects."""

    saved: ClassVar[tuple[str, ...]]  # names of these attributes, without the underscore

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, by name."""
        found = {name: getattr(self, f"_{name}") for name in self.saved}
        return {
            name: part.state_dict() if isinstance(part, Stateful) else deepcopy(part)
            for name, part in found.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        for name in self.saved:
            part = getattr(self, f"_{name}")
            if isinstance(part, Stateful):
                part.load_state_dict(state[name])
            else:
                setattr(self, f"_{name}", deepcopy(state[name]))


class Fixed:
    """A controller that learns nothing: its numbers serve one step each, and the last one stays.

    State: the place among several numbers; none with a single one.
    """

    def __init__(self, what: str, least: int, numbers: Sequence[int]) -> None:
        if not numbers or min(numbers) < least:
            got = ", ".join(map(str, numbers)) or "none"
            raise ConfigError(f"{what} is at least {least}; got {got}", "number-too-small")
        self._numbers, self._place = tuple(numbers), 0

    @property
    def _now(self) -> int:
        return self._numbers[min(self._place, len(self._numbers) - 1)]

    def observe(self, feedback: Feedback) -> None:
        """Go to the next number."""
        self._place += 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place} if len(self._numbers) > 1 else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place = state.get("place", 0)
