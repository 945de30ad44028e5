"""Turns of calls that need some of a group's ranks."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import CancelledError
from threading import Condition


class RankTurns:
    """Turns of calls from several threads, in the order of requests. A turn begins once no earlier
    one needs a rank of it, so that calls on disjoint ranks run at the same time.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.requests: list[RankTurn] = []  # until the turn is over

    def request(self, ranks: Collection[int]) -> RankTurn:
        turn = RankTurn(self, frozenset(ranks))
        with self.changed:
            self.requests.append(turn)
        return turn


class RankTurn:
    """A requested turn. As a context manager, it waits for its ranks and gives them back."""

    def __init__(self, turns: RankTurns, ranks: frozenset[int]) -> None:
        self.ranks = ranks
        self._turns = turns
        self._begun = False

    def __enter__(self) -> None:
        try:
            with self._turns.changed:
                self._turns.changed.wait_for(self._may_begin)
                self._begun = True
        except BaseException:  # Ctrl-C too
            self.withdraw()
            raise

    def __exit__(self, *_: object) -> None:
        self._begun = False
        self.withdraw()

    def withdraw(self) -> None:
        """Give the turn up, unless it has begun. Entering it then raises CancelledError."""
        with self._turns.changed:
            if self in self._turns.requests and not self._begun:
                self._turns.requests.remove(self)
                self._turns.changed.notify_all()

    def _may_begin(self) -> bool:
        requests = self._turns.requests
        if self not in requests:
            raise CancelledError
        earlier = requests[: requests.index(self)]
        return not any(turn.ranks & self.ranks for turn in earlier)
