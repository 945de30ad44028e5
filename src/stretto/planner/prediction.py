"""A run's steps as they were, beside what the simulator makes of its own records, by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import StateError, StrettoError
from stretto.observe import RunDirectory
from stretto.observe.idle import Intervals, is_generator, seconds, union
from stretto.observe.spans import Span
from stretto.planner.calibration import role_of
from stretto.planner.memory import SYNC
from stretto.planner.replay import Recording
from stretto.protocols import DRIVER
from stretto.runtime.sim.simulate import simulate

WARM_STEPS = 3
"""First steps left out: they warm up."""
MOST_STEPS = 200
"""Steps looked at and simulated, at most: enough for a mean, and done in seconds."""
LEAST_STEPS = 5
"""Steps beyond the first ones without which there is no mean to speak of."""
STEP = "whole step"
_SCORING, _SCORING_BY = ("prefill", "score"), "scoring: "
_PHASES = {
    "gen": "generation",
    "migrate": "moving responses",
    "update": "training",
    "publish": SYNC,
    "send": SYNC,
    "load": SYNC,
    DRIVER: "the driver itself",
}
_ORDER = list(dict.fromkeys(_PHASES.values()))


class PhaseTime(NamedTuple):
    """Mean seconds a step of one kind of work, or of waiting."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float | None:
        """What was predicted, as a multiple of what was measured; ``None`` for nothing."""
        return self.predicted_s / self.measured_s if self.measured_s else None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Phases of a run's steps, measured and predicted.

    Attributes:
        phases: the last one is the whole step.
        first, last: the steps of the means.
        taken: by the run, according to its trace; there may be more than were looked at.
        why: there is no prediction, in one line; empty where there is one.
    """

    phases: Sequence[PhaseTime] = ()
    first: int = 0
    last: int = 0
    taken: int = 0
    why: str = ""

    @property
    def step(self) -> PhaseTime:
        """The whole step."""
        return self.phases[-1]

    @property
    def title(self) -> str:
        """The steps that this is about, in words."""
        left_out = f" of {self.taken:,}" if self.taken > self.last else ""
        return f"seconds a step, means of steps {self.first} to {self.last}{left_out}"

    def table(self) -> str:
        """A line a phase, for people."""
        width = max(len(phase.name) for phase in self.phases)
        lines = [f"  {'':{width}}  measured  predicted  ratio"]
        for p in self.phases:
            ratio = f"{p.ratio:.2f}" if p.ratio is not None else "-"
            lines.append(
                f"  {p.name:{width}}  {p.measured_s:8.4f}  {p.predicted_s:9.4f}  {ratio:>5}"
            )
        return "\n".join(lines)

    def text(self, name: str) -> str:
        """The table of a run of this name, or the reason for none."""
        if self.why:
            return f"{name}: no prediction: {self.why}"
        title = f"{name}, measured and as the simulator predicts it from its own records"
        return f"{title} ({self.title}):\n{self.table()}"

    def data(self) -> dict[str, Any]:
        """The same as plain data, for a page and for programs."""
        if self.why:
            return {"why": self.why}
        return {"title": self.title, "phases": [list(phase) for phase in self.phases]}


def predict(folder: str | Path) -> Prediction:
    """Replay a run from its own records, and compare.

    Raises ConfigError if it is no folder of a run that trains by a schedule, StateError if the run
    has recorded too little, or a file is damaged.
    """
    run = RunDirectory.open(folder)
    if not run.trace.path.is_file():
        problem = "a prediction is made from a run's trace.json, and there is none"
        raise StateError(problem, "no-trace")
    trace = run.trace.read(MOST_STEPS)
    steps = trace.steps[WARM_STEPS:]
    if len(steps) < LEAST_STEPS:
        raise StateError(
            f"a prediction takes {WARM_STEPS + LEAST_STEPS} steps, of which the first {WARM_STEPS} "
            f"warm up; there are {len(trace.steps)}",
            "too-few-steps",
        )
    cluster = Recording.of(run, trace, WARM_STEPS).cluster()
    result = simulate(cluster, steps=len(trace.steps))
    ends_s = list(accumulate(step["timing_s/step"] for step in result.steps))
    window = (ends_s[WARM_STEPS - 1], ends_s[-1])
    measured = phases_of(trace.spans, steps[0].start_s, steps[-1].end_s, len(steps))
    simulated = phases_of(result.spans, *window, len(ends_s) - WARM_STEPS)
    names = dict.fromkeys((*measured, *simulated))
    phases = [PhaseTime(n, measured.get(n, 0.0), simulated.get(n, 0.0)) for n in names]
    phases.sort(key=lambda phase: phase.name == STEP)
    metrics = run.read_metrics()
    taken = int(metrics[-1]["step"]) if metrics else steps[-1].step
    return Prediction(phases, steps[0].step, steps[-1].step, taken)


def predicted(folders: Sequence[str | Path]) -> list[Prediction]:
    """Predict each run from its own records; one that recorded too little is told, not refused."""
    found = []
    for folder in folders:
        try:
            found.append(predict(folder))
        except StrettoError as error:
            found.append(Prediction(why=" ".join(str(error).split())))
    return found


def phases_of(spans: Iterable[Span], start_s: float, end_s: float, steps: int) -> dict[str, float]:
    """Return the seconds a step of each phase between two moments.

    Work of several generators, or replicas of a scorer, is added up, and so is their waiting, of
    which their part in weight syncs is one. A sync counts once, for all roles that take part.

    Args:
        spans: those that touch the window; parts outside of it are cut off.
        start_s, end_s: the window.
    """
    work: defaultdict[tuple[str, str], Intervals] = defaultdict(list)  # by phase and role
    busy: defaultdict[str, Intervals] = defaultdict(list)
    for span in spans:
        part = (max(span.start_s, start_s), min(span.end_s, end_s))
        phase = "" if span.waits else _phase(span)
        if not phase or part[0] > part[1]:
            continue
        # All roles that take part in a weight sync are at it together.
        work[phase, "" if phase == SYNC else span.role].append(part)
        busy[span.role] += [part] if phase != SYNC else []
    found: defaultdict[str, float] = defaultdict(float)
    for (phase, _), parts in sorted(work.items(), key=lambda item: _order(item[0][0])):
        found[phase] += seconds(union(parts))
    whole_s = end_s - start_s
    idle = {role: whole_s - seconds(union(parts)) for role, parts in busy.items()}
    found["generators waiting"] = sum(s for role, s in idle.items() if is_generator(role))
    found["learner waiting"] = idle.get("learner", whole_s)
    found["nobody at work"] = whole_s - seconds(union(p for parts in work.values() for p in parts))
    found[STEP] = whole_s
    return {phase: s / steps for phase, s in found.items()}


def _phase(span: Span) -> str:
    kind = span.name.partition("/")[0]
    return f"{_SCORING_BY}{role_of(span)}" if kind in _SCORING else _PHASES.get(kind, "")


def _order(phase: str) -> tuple[int, str]:
    """Sort key of phases: scorers, by name, come after generation."""
    return (2 * _ORDER.index(phase), "") if phase in _ORDER else (1, phase)
