"""The books: no prompt is lost, and none is trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stretto.errors import LifecycleError
from stretto.schedules.rollout import Rollout, RolloutState


class Ledger:
    """Every move of every rollout, so that at each: dispatched = in flight + trained + rejected."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.trained = 0
        self.rejected: Counter[str] = Counter()
        self._rejections = 0
        self._in_flight: dict[int, RolloutState] = {}

    @property
    def in_flight(self) -> int:
        """Rollouts dispatched and not yet trained or rejected."""
        return len(self._in_flight)

    def dispatch(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts from the queue; raise LifecycleError if one is not fresh."""
        for rollout in rollouts:
            if rollout.id in self._in_flight or rollout.state is not RolloutState.QUEUED:
                raise LifecycleError(
                    f"rollout {rollout.id} was dispatched twice", "dispatched-twice"
                )
            self._in_flight[rollout.id] = rollout.state
            self.dispatched += 1
        self._check()

    def move(self, rollout: Rollout, state: RolloutState, because: str = "") -> None:
        """Take a rollout to its next state; raise LifecycleError if the books do not allow it."""
        known = self._in_flight.get(rollout.id)
        if known is not rollout.state:
            raise LifecycleError(
                f"rollout {rollout.id} is {rollout.state}, but the books have it as "
                f"{known or 'not in flight'}",
                "not-as-booked",
            )
        rollout.move(state, because)
        self._in_flight[rollout.id] = state
        if state in (RolloutState.TRAINED, RolloutState.REJECTED):
            del self._in_flight[rollout.id]
        if state is RolloutState.TRAINED:
            self.trained += 1
        if state is RolloutState.REJECTED:
            self.rejected[because] += 1
            self._rejections += 1
        self._check()

    def _check(self) -> None:
        if self.dispatched != len(self._in_flight) + self.trained + self._rejections:
            raise LifecycleError(
                f"the books do not balance: {self.dispatched} dispatched, but {self.in_flight} in "
                f"flight + {self.trained} trained + {self._rejections} rejected",
                "books-unbalanced",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the states of rollouts in flight, as plain data."""
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "rejected": dict(self.rejected),
            "in_flight": {id_: str(state) for id_, state in self._in_flight.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        self.dispatched, self.trained = state["dispatched"], state["trained"]
        self.rejected = Counter(state["rejected"])
        self._rejections = self.rejected.total()
        self._in_flight = {id_: RolloutState(s) for id_, s in state["in_flight"].items()}
        self._check()
