"""The members of a run that can be replaced: what has become of each, as a pure state machine.

::

    HEALTHY <-> SUSPECT          late, answered
    HEALTHY, SUSPECT -> DEAD     died
    DEAD -> STARTING             starting, as often as the budget allows
    STARTING -> STALE            started: the process is there, with whatever weights
    STALE -> HEALTHY             loaded: it has the weights of the others, and serves
    STARTING, STALE -> DEAD      died
    DEAD -> RETIRED              retired: it is not replaced again

A new member serves after a hand-over, and there is no other way. No clock, no roles, no waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from stretto.errors import LifecycleError
from stretto.types import WeightsRef


class MemberState(StrEnum):
    """The state of a role's process, as far as a schedule knows."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    STARTING = "starting"
    STALE = "stale"
    RETIRED = "retired"


_S = MemberState

_EDGES: Mapping[str, Mapping[MemberState, MemberState]] = {
    "late": {_S.HEALTHY: _S.SUSPECT, _S.SUSPECT: _S.SUSPECT},
    "answered": {_S.HEALTHY: _S.HEALTHY, _S.SUSPECT: _S.HEALTHY},
    "died": dict.fromkeys((_S.HEALTHY, _S.SUSPECT, _S.STARTING, _S.STALE), _S.DEAD),
    "starting": {_S.DEAD: _S.STARTING},
    "started": {_S.STARTING: _S.STALE},
    "loaded": {_S.STALE: _S.HEALTHY, _S.HEALTHY: _S.HEALTHY, _S.SUSPECT: _S.HEALTHY},
    "retired": {_S.DEAD: _S.RETIRED},
}


class Member:
    """One role's process, and those that come in its place.

    Args:
        restarts: how many processes may come in the place of the first.

    Attributes:
        state: what is known of the process.
        deaths: processes that were lost.
        lives: processes that were started in place of another; tells one from the next.
        version: of the weights that it loaded last.
        cause: why the last process was lost.
    """

    def __init__(self, name: str, restarts: int) -> None:
        self.name, self._restarts = name, restarts
        self.state = MemberState.HEALTHY
        self.deaths = self.lives = self.version = 0
        self.cause = ""

    @property
    def serves(self) -> bool:
        """Return whether it may be given work."""
        return self.state in (MemberState.HEALTHY, MemberState.SUSPECT)

    @property
    def exhausted(self) -> bool:
        """Return whether the budget has no further process."""
        return self.lives >= self._restarts

    def late(self) -> None:
        """Note that an answer is overdue."""
        self._go("late")

    def answered(self) -> None:
        """Note an answer."""
        self._go("answered")

    def died(self, cause: str) -> None:
        """Note that the process is lost."""
        self._go("died")
        self.deaths, self.cause = self.deaths + 1, cause

    def starting(self) -> None:
        """Note that a new process is being started.

        Raises:
            LifecycleError: the budget is spent, or nobody has died.
        """
        if self.exhausted:
            raise LifecycleError(
                f"{self.name} has been replaced {self.lives} times, and may be {self._restarts} "
                "times; retire it"
            )
        self._go("starting")
        self.lives += 1

    def started(self) -> None:
        """Note that the new process is there; its weights are not those of the others."""
        self._go("started")

    def loaded(self, version: int) -> None:
        """Note a hand-over, after which a new process serves."""
        self._go("loaded")
        self.version = version

    def retired(self) -> None:
        """Note that nobody comes in the place of the last process."""
        self._go("retired")

    def _go(self, event: str) -> None:
        """Move along an edge.

        Raises:
            LifecycleError: there is none for this event from the present state.
        """
        after = _EDGES[event].get(self.state)
        if after is None:
            raise LifecycleError(f"{self.name} is {self.state}; '{event}' cannot happen to it")
        self.state = after


class Fleet:
    """The members of a run, and the weights that those who follow a model hold.

    State: the tickets, and the totals so far. Budgets begin anew when a run is taken up again, as
    its processes do.

    Args:
        restarts: budget of each member.
        initial: tickets of the weights that roles start with, by model.

    Attributes:
        restarts: as given; with 0 there are no replacements.
        held: tickets of the weights that were handed over last, by model.
    """

    def __init__(self, restarts: int = 0, initial: Mapping[str, WeightsRef] | None = None) -> None:
        self.restarts = restarts
        self.held: Mapping[str, WeightsRef] = dict(initial or {})
        self._members: list[Member] = []
        self._told: dict[int, int] = {}  # deaths that a line was returned about, by member
        self._before = [0, 0]  # deaths and restarts before the run was taken up again

    def member(self, name: str) -> Member:
        """Return a new member, healthy."""
        self._members.append(Member(name, self.restarts))
        return self._members[-1]

    @property
    def deaths(self) -> int:
        """Processes lost in the whole run."""
        return self._before[0] + sum(m.deaths for m in self._members)

    @property
    def replacements(self) -> int:
        """Processes started in place of others in the whole run."""
        return self._before[1] + sum(m.lives for m in self._members)

    def losses(self) -> list[str]:
        """Return a line for people about each member lost since the last call."""
        lines = []
        for i, member in enumerate(self._members if self.restarts else ()):
            if member.deaths > self._told.get(i, 0):
                self._told[i] = member.deaths
                what = member.cause.partition("; mend the cause")[0]  # the run goes on by itself
                dead = member.state in (MemberState.DEAD, MemberState.RETIRED)
                number = member.lives + dead
                then = f"restart {number} of {self.restarts}"
                lines.append(f"{what} ({then if number <= self.restarts else 'not replaced'})")
        return lines

    def metrics(self) -> dict[str, float]:
        """Return the totals, where members may be replaced."""
        if not self.restarts:
            return {}
        return {
            "cluster/deaths": float(self.deaths),
            "cluster/restarts": float(self.replacements),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return tickets and totals, as plain data."""
        return {
            "held": tickets_of(self.held),
            "totals": [self.deaths, self.replacements],
        }

    def load_state_dict(self, state: Mapping[str, Any], channel: str = "") -> None:
        """The inverse of :meth:`state_dict`; initial tickets stay where it has none."""
        self.held = {**self.held, **tickets_from(state["held"], channel)}
        self._before = list(state["totals"])


def tickets_of(refs: Mapping[str, WeightsRef]) -> dict[str, Any]:
    """Return tickets as plain data; without the channel, which is another on each runtime."""
    return {
        model: {"version": ref.version, "fingerprint": ref.fingerprint}
        for model, ref in refs.items()
    }


def tickets_from(state: Mapping[str, Any], channel: str) -> dict[str, WeightsRef]:
    """The inverse of :func:`tickets_of`, for weights in a channel."""
    return {
        model: WeightsRef(model, ref["version"], ref["fingerprint"], channel)
        for model, ref in state.items()
    }
