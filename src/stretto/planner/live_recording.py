"""The records of a run in progress, from which its tuner simulates it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stretto.config import Config
from stretto.errors import StateError, StrettoError
from stretto.machine import Machine
from stretto.observe import RolloutRecord
from stretto.observe.spans import Span, Spans
from stretto.planner.replay import Recording, call_work_s
from stretto.protocols import DRIVER
from stretto.runtime.sim.cluster import Cluster
from stretto.schedules.rollout import Rollout
from stretto.workers.gate import EventGate

ROUNDS = 8  # latest rounds whose spans count
ADAPT = f"{DRIVER}/adapt"  # contains the simulations themselves


class LiveRecording:
    """Cost model (:class:`~stretto.runtime.sim.tuning.CostModel`) of a run: fitted to its spans.

    Each fit passes the run's gate, so that a replay of the run decides alike.
    """

    def __init__(
        self, config: Config, spans: Spans, gate: EventGate, thread_scaling: tuple[float, float]
    ) -> None:
        self._config = config
        self._spans = spans
        self._gate = gate
        self._machine = replace(Machine.here(), thread_scaling=thread_scaling)
        self._recent: deque[list[Span]] = deque(maxlen=ROUNDS)
        self._trained: deque[list[RolloutRecord]] = deque(maxlen=ROUNDS)
        self._cpu_s: deque[float] = deque(maxlen=ROUNDS)  # the driver's, by round
        self._seen_s = 0.0  # end of the last span that was read
        self._seen_cpu_s = time.thread_time()

    def observe(self, trained: Sequence[Rollout]) -> None:
        """Keep the round's spans, before the training loop takes them."""
        new = [span for span in self._spans.records if span.end_s > self._seen_s]
        self._seen_s = max((span.end_s for span in new), default=self._seen_s)
        self._recent.append([span for span in new if span.name != ADAPT])
        self._trained.append([RolloutRecord.of(0, rollout, None) for rollout in trained])
        cpu_s = time.thread_time()
        self._cpu_s.append(cpu_s - self._seen_cpu_s)
        self._seen_cpu_s = cpu_s

    def cluster(self, number: int) -> Cluster:
        """Fit the costs of the latest rounds. StateError if too little was recorded."""
        fitted = self._gate.fact(f"costs {number}", self._fit)
        if not fitted:
            raise StateError("the run has recorded too little for a simulation", "no-spans")
        return Cluster.model_validate(fitted)

    def _fit(self) -> dict[str, Any]:
        """Return the run as a cluster, as plain data. Empty if too little was recorded."""
        spans = [span for round_spans in self._recent for span in round_spans]
        rollouts = [record for records in self._trained for record in records]
        work_s = call_work_s(spans, sum(self._cpu_s), rollouts)
        recording = Recording(self._config, rollouts, spans, self._machine, call_work_s=work_s)
        try:
            cluster = recording.cluster()
        except StrettoError:
            return {}
        finally:
            self._seen_cpu_s = time.thread_time()  # the fit is no work of the next round
        # The tuner replaces these, which are long.
        workload = cluster.workload.model_copy(update={"rewards": ()})
        return cluster.model_copy(update={"workload": workload}).model_dump(mode="json")
