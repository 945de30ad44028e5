"""Controllers: what they learn from a round, and what all of them do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A decode call, as the schedule saw it.

    Attributes:
        rows: rollouts that were being decoded, on average over the call's steps.
        steps: tokens that the longest-lived of them got.
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
    """A round, from one weight sync to the next, as controllers see it.

    Attributes:
        reward: mean of the batches trained on.
        lengths: response tokens of the rollouts that ended.
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        ...


class Stateful:
    """An object whose state is plain data in private attributes, or in other such objects.

    Attributes:
        saved: names of these attributes, without the underscore.
    """

    saved: ClassVar[tuple[str, ...]]

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

    Raises ConfigError if there is no number, or one is below the least.
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
