"""Who did what, and when: the raw material of timing figures and timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stretto.clock import Clock


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work by one role.

    Attributes:
        start_s, end_s: by the clock that the recorder was given.
        attributes: whatever tells more about it, such as the number of tokens.
    """

    role: str
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]


class Spans:
    """Records spans, also from several threads and coroutines at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: list[Span] = []

    @contextmanager
    def span(self, role: str, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        """Record the body as a span, also when it raises.

        Yields:
            The attributes, to which the body may add what it learns.
        """
        start_s = self._clock.now()
        try:
            yield attributes
        finally:
            self._records.append(Span(role, name, start_s, self._clock.now(), attributes))

    @property
    def records(self) -> tuple[Span, ...]:
        """The spans since the last :meth:`reset`, in the order they ended."""
        return tuple(self._records)

    def totals(self) -> dict[str, float]:
        """Seconds by name since the last :meth:`reset`; overlapping spans each count in full."""
        totals: defaultdict[str, float] = defaultdict(float)
        for record in self._records:
            totals[record.name] += record.end_s - record.start_s
        return dict(totals)

    def reset(self) -> None:
        """Forget the spans recorded so far."""
        self._records.clear()
