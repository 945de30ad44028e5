"""The books: no prompt is lost, and none is trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stretto.errors import LifecycleError
from stretto.types import Rollout, RolloutState


class Ledger:
    """Counts rollouts so that, at every moment, dispatched = in flight + trained + rejected.

    State: the counts, and the ids in flight.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.trained = 0
        self.rejected: Counter[str] = Counter()
        self._in_flight: set[int] = set()

    @property
    def in_flight(self) -> int:
        """Rollouts dispatched and not yet trained or rejected."""
        return len(self._in_flight)

    def dispatch(self, rollouts: Sequence[Rollout]) -> None:
        """Rollouts leave the queue.

        Raises:
            LifecycleError: one of them is in flight already.
        """
        for rollout in rollouts:
            if rollout.id in self._in_flight:
                raise LifecycleError(f"rollout {rollout.id} was dispatched twice")
            self._in_flight.add(rollout.id)
        self.dispatched += len(rollouts)

    def close(self, rollouts: Sequence[Rollout]) -> None:
        """Rollouts reached the end of their lives: trained, or rejected for a reason.

        Raises:
            LifecycleError: one of them is not in flight or not at an end, or the books do not
                balance.
        """
        for rollout in rollouts:
            if rollout.id not in self._in_flight:
                raise LifecycleError(f"rollout {rollout.id} ends but was not in flight")
            if rollout.state is RolloutState.TRAINED:
                self.trained += 1
            elif rollout.state is RolloutState.REJECTED:
                self.rejected[rollout.rejected_because] += 1
            else:
                raise LifecycleError(f"rollout {rollout.id} ends in state {rollout.state}")
            self._in_flight.remove(rollout.id)
        ended = self.trained + self.rejected.total()
        if self.dispatched != self.in_flight + ended:
            raise LifecycleError(
                f"the books do not balance: {self.dispatched} dispatched, but {self.in_flight} in "
                f"flight + {self.trained} trained + {self.rejected.total()} rejected"
            )

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "rejected": dict(self.rejected),
            "in_flight": sorted(self._in_flight),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.dispatched, self.trained = state["dispatched"], state["trained"]
        self.rejected = Counter(state["rejected"])
        self._in_flight = set(state["in_flight"])
