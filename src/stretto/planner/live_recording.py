"""The records of a run in progress, from which its tuner simulates it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stretto.config import Config
from stretto.machine import Machine
from stretto.observe import RolloutRecord
from stretto.observe.spans import Span, Spans
from stretto.planner.replay import Recording
from stretto.protocols import DRIVER
from stretto.runtime.sim.cluster import Cluster
from stretto.schedules.rollout import Rollout

ROUNDS = 8  # latest rounds whose spans count
ADAPT = f"{DRIVER}/adapt"  # contains the simulations themselves


class LiveRecording:
    """Cost model (:class:`~stretto.runtime.sim.tuning.CostModel`) of a run: fitted to its spans."""

    def __init__(self, config: Config, spans: Spans) -> None:
        self._config = config
        self._spans = spans
        self._machine = Machine.here()
        self._recent: deque[list[Span]] = deque(maxlen=ROUNDS)
        self._trained: deque[list[RolloutRecord]] = deque(maxlen=ROUNDS)
        self._seen_s = 0.0  # end of the last span that was read

    def observe(self, trained: Sequence[Rollout]) -> None:
        """Keep the round's spans, before the training loop takes them."""
        new = [span for span in self._spans.records if span.end_s > self._seen_s]
        self._seen_s = max((span.end_s for span in new), default=self._seen_s)
        self._recent.append([span for span in new if span.name != ADAPT])
        self._trained.append([RolloutRecord.of(0, rollout, None) for rollout in trained])

    def cluster(self) -> Cluster:
        """Return the run as a cluster. Raises StateError if too little was recorded."""
        spans = [span for round_spans in self._recent for span in round_spans]
        rollouts = [record for records in self._trained for record in records]
        return Recording(self._config, rollouts, spans, self._machine).cluster()
