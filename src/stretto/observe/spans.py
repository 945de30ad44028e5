"""Spans: which role did what, and when. Timings, traces and timelines are made of them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.protocols import DRIVER, Clock, Tracer

WAIT = "wait"
"""Name of spans in which a role has nothing to do. Their attribute ``cause`` is the reason."""

DOWN = "down"
"""Name and cause of spans in which a role's process is lost and not replaced."""

CHECKPOINT = "checkpoint"
"""The role of taking and writing checkpoints, for which no other role waits."""

WEIGHT_SYNC = "weights"
"""The role of the weight sync between processes, as the driver sees it."""

SWAPS = "swaps"
"""The role of copies between a device and the host's memory, in parallel with other work."""

ENVIRONMENT = "environment"
"""The role that answers turns of episodes, many at once, and the cause of waiting for it."""

DRIVER_CPU = "timing_s/driver_cpu"
"""The metric of the CPU seconds of the driver's thread in a step."""

NO_DEVICES = frozenset({CHECKPOINT, DRIVER, WEIGHT_SYNC, SWAPS, ENVIRONMENT})
"""Roles without a device, which run next to the others and are never busy or idle."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work by one role, or of waiting.

    Attributes:
        role: 'generator' ('generator 0', 'generator 1', ... of several), a scorer's name,
            'learner', or one of :data:`NO_DEVICES`. Each has a track in a timeline.
        name: gen, prefill/ROLE, score/ROLE, accumulate, update, publish, load, send, migrate,
            swap, driver/WORK, checkpoint/stage, checkpoint/write, of an environment open and step,
            or :data:`WAIT` or :data:`DOWN`.
        attributes: further facts, for example rollouts, tokens and version. A wait has a ``cause``:
            data, stragglers, environment, scores, weights, swap.
    """

    role: str
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]

    @property
    def waits(self) -> bool:
        return self.name in (WAIT, DOWN)

    @property
    def cause(self) -> str:
        return DOWN if self.name == DOWN else str(self.attributes.get("cause", "other"))


@dataclass(frozen=True, slots=True)
class Window:
    """Spans between two moments of the recorder's clock."""

    start_s: float
    end_s: float
    ended: tuple[Span, ...]  # in order of their ends; may have begun earlier
    open: tuple[Span, ...] = ()  # still open, cut at the end
    devices: Mapping[str, str] = field(default_factory=dict)  # by role, if known
    processes: Mapping[str, str] = field(default_factory=dict)  # by role, without the driver's


@dataclass(eq=False)
class Spans:
    """A thread-safe recorder of spans, for threads and coroutines."""

    clock: Clock
    devices: Mapping[str, str] = field(default_factory=dict)
    processes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Span] = []
        self._open: dict[int, Span] = {}
        self._since_s = self.clock.now()

    def span(
        self, role: str, name: str, **attributes: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        """Record the body as a span, even if it raises. It may add to the yielded attributes."""
        return self._opened(role, name, attributes, kept=True)

    @contextmanager
    def awaiting(self, role: str, name: str) -> Iterator[None]:
        """Count the body as an open span, whose record the role's process will add later."""
        with self._opened(role, name, {}, kept=False):
            yield

    @contextmanager
    def _opened(
        self, role: str, name: str, attributes: dict[str, Any], *, kept: bool
    ) -> Iterator[dict[str, Any]]:
        with self._lock:
            now_s = self.clock.now()
            span = Span(role, name, now_s, now_s, attributes)
            self._open[id(span)] = span
        try:
            yield attributes
        finally:
            with self._lock:
                del self._open[id(span)]
                if kept:
                    self._records.append(replace(span, end_s=self.clock.now()))

    def add(self, role: str, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """Record a span with known times. Raises ValueError if it ends before it starts."""
        if end_s < start_s:
            raise ValueError(f"a span ends after it starts; got {start_s} s to {end_s} s")
        with self._lock:
            self._records.append(Span(role, name, start_s, end_s, attributes))

    @property
    def records(self) -> tuple[Span, ...]:
        """The spans since the last :meth:`take`, in order of their ends."""
        with self._lock:
            return tuple(self._records)

    def totals(self) -> dict[str, float]:
        """Return seconds of work by name, of :attr:`records`. Overlapping spans count in full. An
        environment's names are prefixed with its role, because ``step`` has another meaning too."""
        totals: defaultdict[str, float] = defaultdict(float)
        for record in self.records:
            if not record.waits:
                prefix = f"{ENVIRONMENT}/" if record.role == ENVIRONMENT else ""
                totals[f"{prefix}{record.name}"] += record.end_s - record.start_s
        return dict(totals)

    def take(self) -> Window:
        """Remove and return the spans since the last call. A span that is still
        open is reported up to now, and again in full once it has ended."""
        with self._lock:
            now_s = self.clock.now()
            # Copy the attributes, because the body of an open span may still add to them.
            open_spans = tuple(
                replace(span, end_s=now_s, attributes=dict(span.attributes))
                for span in self._open.values()
            )
            spans = tuple(self._records)
            window = Window(self._since_s, now_s, spans, open_spans, self.devices, self.processes)
            self._records.clear()
            self._since_s = now_s
        return window


class WorkSpans:
    """A tracer without past stretches, for a replay: their times are those of the recorded run."""

    def __init__(self, tracer: Tracer) -> None:
        self.span = tracer.span
        self.awaiting = tracer.awaiting

    def add(self, role: str, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """Do nothing."""
