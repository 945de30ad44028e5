"""A run on GPUs that fail: what is left of a week for training, and where the rest goes.

Failures, checkpoints and restarts are the only events. Between them training flows, at a rate that
follows from the copies at work, and equal cycles of training and checkpoint are taken in one leap.
So the time that a week takes to simulate grows with its failures, not with its steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import fmean, stdev

from _fleet import HOUR_S, Failure, Fleet, Recovery, drawn

WEEK_S = 7 * 24 * HOUR_S

USEFUL, LOST, CHECKPOINT = "training", "lost work", "checkpoints"
DETECTION, WAITING, RESTART, DEGRADED = "detection", "waiting for nodes", "restart", "degraded"
CAUSES = (USEFUL, LOST, CHECKPOINT, DETECTION, WAITING, RESTART, DEGRADED)
"""What time goes to."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the time of a run.

    Attributes:
        seconds: by cause (:data:`CAUSES`); together all of it.
        restarts: of the whole run.
        replaced: copies that were replaced while it went on.
    """

    seconds: Mapping[str, float]
    restarts: int
    replaced: int

    @property
    def goodput(self) -> float:
        """Share of the steps that there would be without failures and checkpoints."""
        return self.seconds[USEFUL] / sum(self.seconds.values())


def simulate(
    fleet: Fleet, recovery: Recovery, failures: Iterable[Failure], wall_s: float = WEEK_S
) -> Outcome:
    """Simulate a run.

    Args:
        failures: in the order of their times.
        wall_s: seconds that it runs.
    """
    run = _Run(fleet, recovery)
    for time_s, gpu in failures:
        if time_s >= wall_s:
            break
        run.advance(time_s)
        run.fail(gpu)
    run.advance(wall_s)
    return Outcome(run.spent, run.restarts, run.replaced)


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over several runs.

    Attributes:
        goodput: share of the steps that there would be without failures and checkpoints.
        within: half the width of its confidence interval of 95 %.
        shares: of the time, by cause.
        restarts: of the whole run.
        replaced: copies that were replaced while it went on.
    """

    goodput: float
    within: float
    shares: Mapping[str, float]
    restarts: float
    replaced: float


def summarize(
    fleet: Fleet,
    recovery: Recovery,
    per_gpu_hour: float,
    seeds: Sequence[int],
    wall_s: float = WEEK_S,
) -> Summary:
    """Simulate a run with each seed's failures. The same seeds give every fleet the same ones.

    Args:
        fleet, recovery, wall_s: as of :func:`simulate`.
        per_gpu_hour: failures of a GPU in an hour, such as one of
            :data:`~_fleet.PUBLISHED`.
        seeds: two or more.
    """
    runs = [
        simulate(fleet, recovery, drawn(fleet.gpus, per_gpu_hour, seed), wall_s) for seed in seeds
    ]
    goodputs = [run.goodput for run in runs]
    return Summary(
        goodput=fmean(goodputs),
        within=1.96 * stdev(goodputs) / math.sqrt(len(runs)),
        shares={cause: fmean(run.seconds[cause] for run in runs) / wall_s for cause in CAUSES},
        restarts=fmean(run.restarts for run in runs),
        replaced=fmean(run.replaced for run in runs),
    )


class _Run:
    """The state of a run between two events."""

    def __init__(self, fleet: Fleet, recovery: Recovery) -> None:
        self._fleet, self._recovery = fleet, recovery
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self.restarts = self.replaced = 0
        self._now, self._rate, self._step_s = 0.0, 1.0, fleet.step_s()
        self._kept = 0.0  # of the useful seconds, those in a complete checkpoint
        self._due = recovery.period_s
        self._writing: tuple[float, float] | None = None  # its end, and useful seconds in it
        self._stalls: list[tuple[float, str]] = []  # ends and causes, one after the other
        self._away: dict[tuple[str, int], float] = {}  # lost copies, and when they are back
        self._back_s = math.inf  # the first of them
        self._nodes = [0.0] * recovery.spares  # a heap: when each can be used
        self._ready_s = self._up_s = 0.0  # nodes of the latest restart are there; it has ended

    def advance(self, until: float) -> None:
        """Let time pass."""
        self._settle()
        while self._now < until:
            if self._stalls:
                end, cause = self._stalls[0]
                self._spend(min(end, until) - self._now, cause)
            elif self._due <= self._now and not self._writing:
                self._checkpoint(min(until, self._back_s))
            else:  # a checkpoint is written before the next one is due
                event = self._writing[0] if self._writing else self._due
                self._spend(min(event, until, self._back_s) - self._now, USEFUL)
            self._settle()

    def fail(self, gpu: int) -> None:
        """Lose a GPU now."""
        care = self._recovery
        width = self._fleet.gpus_per_node if care.whole_nodes else 1
        group, copies = self._fleet.hit(gpu, width)
        there = [(group.name, copy) for copy in copies if (group.name, copy) not in self._away]
        if not there:
            return
        noticed = self._now + care.detect_s
        heappush(self._nodes, self._now + care.repair_s)
        node = max(noticed, heappop(self._nodes))
        if not group.replaced or self._now < self._up_s:  # a run that starts needs everyone
            self._restart(noticed, node)
            return
        self.replaced += len(there)
        self._away |= dict.fromkeys(there, node + care.replace_s)
        self._tune()
        self._stall(noticed, DETECTION)
        self._stall(self._free_s + group.again_s, DEGRADED)

    def _restart(self, noticed: float, node: float) -> None:
        """End the run and start it from the last complete checkpoint, with all that were away."""
        care = self._recovery
        self.restarts += 1
        self.spent[LOST] += self.spent[USEFUL] - self._kept
        self.spent[USEFUL] = self._kept
        others = (back - care.replace_s for back in self._away.values())
        self._ready_s = max(self._ready_s, node, *others)
        self._up_s = self._ready_s + care.restart_s
        self._due = self._up_s + care.period_s
        self._writing, self._stalls, self._away = None, [], {}
        self._tune()
        self._stall(noticed, DETECTION)
        self._stall(self._ready_s, WAITING)
        self._stall(self._up_s, RESTART)

    def _checkpoint(self, until: float) -> None:
        """Start the checkpoint that is due, or take all that have a whole period before ``until``.

        Nothing else happens until then, so that all periods are equal.
        """
        care, period = self._recovery, self._recovery.period_s
        whole = int((until - self._now) / period)
        if whole:
            trained = period - care.hold_s
            self._spend(whole * care.hold_s, CHECKPOINT)
            self._spend(whole * trained, USEFUL)
            self._kept = self.spent[USEFUL] - self._rate * trained
            self._due = self._now
        else:
            self._due = self._now + period
            self._writing = (self._now + care.hold_s + care.write_s, self.spent[USEFUL])
            self._stall(self._now + care.hold_s, CHECKPOINT)

    def _settle(self) -> None:
        """Take note of what has ended by now."""
        if self._writing and self._writing[0] <= self._now:
            self._kept, self._writing = self._writing[1], None
        while self._stalls and self._stalls[0][0] <= self._now:
            del self._stalls[0]
        if self._back_s <= self._now:
            self._away = {copy: back for copy, back in self._away.items() if back > self._now}
            self._tune()

    def _tune(self) -> None:
        self._back_s = min(self._away.values(), default=math.inf)
        away = Counter(name for name, _ in self._away)
        self._rate = self._step_s / self._fleet.step_s(away) if away else 1.0

    def _spend(self, seconds: float, cause: str) -> None:
        rate = self._rate if cause == USEFUL else 1.0
        self.spent[cause] += rate * seconds
        self.spent[DEGRADED] += (1 - rate) * seconds
        self._now += seconds

    @property
    def _free_s(self) -> float:
        return self._stalls[-1][0] if self._stalls else self._now

    def _stall(self, until: float, cause: str) -> None:
        if until > self._free_s:
            self._stalls.append((until, cause))
