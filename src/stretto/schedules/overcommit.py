"""The number of responses in flight beyond the batch, delta: OPPO's inter-step overlap.

With ``batch + delta`` responses in flight the first ``batch`` to finish are trained on, and the
others go on in the next step.
"""

from __future__ import annotations

from typing import Any, Protocol

from stretto.errors import ConfigError
from stretto.schedules.feedback import Feedback


class Overcommit(Protocol):
    """A controller that decides delta, step by step."""

    @property
    def delta(self) -> int:
        """Responses to keep in flight beyond the batch in the coming step."""
        ...

    def observe(self, feedback: Feedback) -> None:
        """Learn from the step that has just ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the controller has learnt, as plain data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        ...


class FixedOvercommit:
    """A delta that never changes. There is no state.

    Raises:
        ConfigError: delta is negative.
    """

    def __init__(self, delta: int) -> None:
        if delta < 0:
            raise ConfigError(f"delta counts responses and is at least 0; got {delta}")
        self._delta = delta

    @property
    def delta(self) -> int:
        """The fixed delta, in responses."""
        return self._delta

    def observe(self, feedback: Feedback) -> None:
        """Learn nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing: there is no state."""


class _RewardRule:
    """The common part of OPPO's two rules: a delta between bounds, and the latest rewards."""

    def __init__(self, start: int, low: int, high: int, window: int) -> None:
        if not 0 <= low <= start <= high:
            raise ConfigError(
                f"delta starts between its bounds: 0 <= low <= start <= high; "
                f"got low = {low}, start = {start}, high = {high}"
            )
        if window < 1:
            raise ConfigError(f"a window of rewards spans at least 1 step; got {window}")
        self._low, self._high, self._window = low, high, window
        self._delta = start
        self._rewards: list[float] = []

    @property
    def delta(self) -> int:
        """The present delta, in responses."""
        return self._delta

    def state_dict(self) -> dict[str, Any]:
        """Return delta and the latest rewards, as plain data."""
        return {"delta": self._delta, "rewards": list(self._rewards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._delta, self._rewards = state["delta"], list(state["rewards"])

    def _move_by(self, change: int) -> None:
        self._delta = min(self._high, max(self._low, self._delta + change))


class Equation4(_RewardRule):
    """A delta that grows while the reward improves, and shrinks otherwise (OPPO, equation 4).

    The slope is the mean of ``R_i - R_(i-1)`` over the last ``window`` steps. If it is positive,
    ``delta = min(high, delta + inc)``, else ``delta = max(low, delta - dec)``. So delta decays to
    its lower bound as training converges, which is what the paper's text describes. Its algorithm 1
    (:class:`Algorithm1`) moves the other way.

    State: delta, the rewards of the last ``window + 1`` steps at most, and the steps to wait.

    Args:
        start, low, high: delta at the start, and its bounds; responses.
        window: differences of rewards that the slope is the mean of.
        inc, dec: responses that delta grows or shrinks by.
        every: steps from one change to the next, once there is a slope.

    Raises:
        ConfigError: the bounds contradict each other, or a number is out of range.
    """

    def __init__(
        self,
        start: int,
        low: int,
        high: int,
        window: int,
        inc: int = 1,
        dec: int = 1,
        every: int = 1,
    ) -> None:
        super().__init__(start, low, high, window)
        if inc < 0 or dec < 0 or every < 1:
            raise ConfigError(
                f"inc and dec are at least 0 and every is at least 1; got {inc}, {dec} and {every}"
            )
        self._inc, self._dec, self._every = inc, dec, every
        self._wait = 0

    def observe(self, feedback: Feedback) -> None:
        """Take in the step's reward, and move delta if it is time."""
        self._rewards = [*self._rewards, feedback.reward][-1 - self._window :]
        self._wait = max(0, self._wait - 1)
        if self._wait or len(self._rewards) <= self._window:
            return
        slope = (self._rewards[-1] - self._rewards[0]) / self._window  # the sum telescopes
        self._move_by(self._inc if slope > 0 else -self._dec)
        self._wait = self._every

    def state_dict(self) -> dict[str, Any]:
        """Return delta, the latest rewards and the steps to wait, as plain data."""
        return {**super().state_dict(), "wait": self._wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        super().load_state_dict(state)
        self._wait = state["wait"]


class Algorithm1(_RewardRule):
    """A delta that shrinks while the reward improves, and grows when it falls (OPPO, algorithm 1).

    Once ``2 window`` rewards are there, ``d`` is the mean of the last ``window`` less that of the
    ``window`` before, and ``delta = clip(delta - sign(d) max(1, floor(delta / 4)), low, high)``.
    The last ``window`` are kept, so delta changes every ``window`` steps from then on. In sign this
    contradicts the paper's equation 4 and its text (:class:`Equation4`).

    State: delta, and the rewards of the last ``2 window - 1`` steps at most.

    Args:
        start, low, high: delta at the start, and its bounds; responses.
        window: steps in each of the two means.

    Raises:
        ConfigError: the bounds contradict each other, or the window is not positive.
    """

    def observe(self, feedback: Feedback) -> None:
        """Take in the step's reward, and move delta if it is time."""
        self._rewards.append(feedback.reward)
        if len(self._rewards) < 2 * self._window:
            return
        before, last = sum(self._rewards[: self._window]), sum(self._rewards[self._window :])
        change = max(1, self._delta // 4)
        self._move_by(-change if last > before else change if last < before else 0)
        self._rewards = self._rewards[self._window :]
