"""What becomes of a candidate: its steps in virtual time, and the memory that it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from stretto.planner import memory
from stretto.planner.candidates import Candidate, memory_by_phase
from stretto.planner.layouts import Setting, cluster_of, devices_of
from stretto.planner.memory import Parts
from stretto.runtime.sim.simulate import SimResult, simulate

ROUNDS, WARM = 6, 2
"""Hand-overs of weights that are simulated, and those that fill the pipeline and do not count."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate and what the simulator says of it.

    Attributes:
        candidate: the plan.
        step_s: seconds of a step, once the pipeline is filled.
        samples_per_s: responses trained on, over all GPUs together.
        memory: bytes of a GPU, by phase and by what takes them.
        host_bytes: in the host's memory, for each GPU: of what is offloaded.
        staleness_mean, staleness_max: versions that responses are behind when they are trained on.
        busy: share of all GPUs' time in which a role worked.
        idle: shares of all GPUs' time by what a GPU waited for: data, scores, weights, stragglers.
            Together with ``busy`` they are 1.
    """

    candidate: Candidate
    step_s: float
    samples_per_s: float
    memory: Mapping[str, Parts]
    host_bytes: float
    staleness_mean: float
    staleness_max: float
    busy: float
    idle: Mapping[str, float]


def outcome_of(setting: Setting, candidate: Candidate) -> Outcome:
    """Simulate a candidate.

    Raises:
        ConfigError: generators have no room for keys and values.
        StalledError: the schedule cannot go on.
    """
    cluster = cluster_of(
        setting,
        candidate.layout,
        candidate.schedule,
        engines=candidate.engines,
        bubble=candidate.bubble,
    )
    interval = candidate.schedule.weight_sync_interval
    steps, warm = ROUNDS * interval, WARM * interval
    workload = cluster.workload.model_copy(update={"steps": steps})
    result = simulate(cluster.model_copy(update={"workload": workload}))
    ends = list(accumulate(step["timing_s/step"] for step in result.steps))
    step_s = (ends[-1] - ends[warm - 1]) / (steps - warm)
    counted = result.steps[warm:]
    busy, idle = times_of(result, candidate)
    return Outcome(
        candidate=candidate,
        step_s=step_s,
        samples_per_s=workload.batch / step_s,
        memory=memory_by_phase(setting, candidate),
        host_bytes=memory.host_bytes(setting.models, candidate.layout),
        staleness_mean=fmean(step["staleness/mean"] for step in counted),
        staleness_max=max(step["staleness/max"] for step in counted),
        busy=busy,
        idle=idle,
    )


def times_of(result: SimResult, candidate: Candidate) -> tuple[float, dict[str, float]]:
    """Return the share of all GPUs' time that is worked, and the shares of waiting by cause.

    A GPU's waiting is divided by cause as that of its roles is. Copies of a generator that have
    nothing left to decode while others go on wait for stragglers.
    """
    learner, generators, scorers = devices_of(candidate.layout)
    names: dict[int, set[str]] = defaultdict(set)
    for role, _ in result.idle_s:
        if role.startswith("generator"):
            used = generators
        elif role == "learner":
            used = learner
        else:
            used = scorers
        for device in used:
            names[device].add(role)
    uneven: dict[str, float] = defaultdict(float)
    for span in result.spans:
        uneven[span.role] += float(span.attributes.get("uneven_s", 0.0))
    idle: dict[str, float] = defaultdict(float)
    count = len(result.device_utilisation)
    each = len(generators) // candidate.engines
    worked = 0.0
    for device, share in enumerate(result.device_utilisation):
        waited = 0.0
        if device in generators:
            at = (device - generators[0]) // each
            name = f"generator {at}" if candidate.engines > 1 else "generator"
            waited = uneven[name] / result.makespan_s
        worked += share - waited
        idle["stragglers"] += waited
        by_cause: dict[str, float] = defaultdict(float)
        for (role, cause), seconds in result.idle_s.items():
            if role in names[device]:
                by_cause[cause] += seconds
        total = sum(by_cause.values())
        for cause, seconds in by_cause.items():
            idle[cause] += (1 - share) * seconds / total if total else 0.0
    return worked / count, {cause: share / count for cause, share in idle.items() if share > 0}
