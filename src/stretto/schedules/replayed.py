"""Controllers that decide as those of another run did, so that it can be followed step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.errors import ConfigError
from stretto.schedules.feedback import Feedback


class _Replayed:
    """Numbers that serve one step each, whatever the steps are like; the last one stays.

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
        """Move on to the next number."""
        self._place += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._place = state["place"]


class ReplayedChunk(_Replayed):
    """Sizes of chunks, in tokens.

    Raises:
        ConfigError: there is none, or one is not positive.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__("chunk sizes", 1, sizes)

    @property
    def tokens(self) -> int:
        """The size for the coming step."""
        return self._now


class ReplayedOvercommit(_Replayed):
    """Numbers of responses in flight beyond the batch.

    Raises:
        ConfigError: there is none, or one is negative.
    """

    def __init__(self, deltas: Sequence[int]) -> None:
        super().__init__("deltas", 0, deltas)

    @property
    def delta(self) -> int:
        """The number for the coming step."""
        return self._now
