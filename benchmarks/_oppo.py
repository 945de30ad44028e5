"""OPPO's figures in virtual time: speed-ups, ablation, fixed delta, utilisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from _bars import Bars, Figure, picture
from _papers import EAGER_S_A_LAYER, PADDED, Part, percent, scheduled, step_s, table
from stretto.runtime.sim.cluster import Cluster
from stretto.runtime.sim.lengths import Lognormal
from stretto.runtime.sim.simulate import SimResult

CLUSTERS = Path(__file__).parent / "clusters"
KNOBS: Mapping[str, Mapping[str, Any]] = {
    "intra": {"score_on": "chunk"},
    "inter": {"overcommit": "auto"},
    "both": {"score_on": "chunk", "overcommit": "auto"},
}
DELTAS: Sequence[int] = (4, 8, 32, 64)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A setting of the paper, and what it reports of it.

    Attributes:
        name: task, actor and GPUs.
        cluster: file in ``benchmarks/clusters``.
        layers: of the actor.
        speedups: by knobs, in time to reward.
        utilisation: of the GPUs, before and after.
    """

    name: str
    cluster: str
    layers: int
    speedups: Mapping[str, float]
    utilisation: tuple[float, float]


TASKS = (
    Task(
        "Stack-Exchange, 7B, 8 H200",
        "oppo-7b-h200",
        28,
        {"intra": 1.2, "inter": 1.6, "both": 1.9},
        (0.506, 0.710),
    ),
    Task(
        "Stack-Exchange, 3B, 8 A100",
        "oppo-3b-a100",
        36,
        {"intra": 1.3, "inter": 2.06, "both": 2.5},
        (0.387, 0.736),
    ),
    Task("GSM8K, 7B, 4 GH200", "oppo-7b-gh200", 28, {"both": 2.8}, (0.457, 0.673)),
    Task("OpenCoder, 3B, 8 A100", "oppo-3b-a100-code", 36, {"both": 2.4}, (0.357, 0.741)),
)
FIXED = 2
"""First tasks, of which delta is varied too."""
RULES = ("equation4", "algorithm1", "throughput")
SCORERS = ("reward", "reference", "critic")
TITLES = {"both": "both knobs", "intra": "streaming alone", "inter": "over-commitment alone"}


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is assumed of the trainer. The defaults are those of TRL as it comes.

    Attributes:
        eager: each decode step launches its kernels from Python.
        epochs: passes over a batch, with an update each.
        padded: responses are padded where they are scored and trained on.
        prefill, training: shares of the GPUs' peak.
        p95: 95th percentile of the lengths; 0 keeps the cluster's.
        limit: of a response's tokens; 0 keeps the cluster's.
    """

    eager: bool = True
    epochs: int = 4
    padded: bool = True
    prefill: float = 0.5
    training: float = 0.4
    p95: int = 0
    limit: int = 0

    def cluster(self, task: Task, steps: int) -> Cluster:
        """Return the cluster of a task under these assumptions."""
        found = Cluster.read(CLUSTERS / f"{task.cluster}.toml")
        efficiency = {"prefill": self.prefill, "training": self.training}
        if self.eager:
            efficiency["step_s"] = EAGER_S_A_LAYER * task.layers
        workload: dict[str, Any] = {"steps": steps}
        if self.limit:
            workload["max_new_tokens"] = self.limit
        if self.p95:
            assert isinstance(found.workload.response_tokens, Lognormal)
            median = found.workload.response_tokens.median
            workload["response_tokens"] = Lognormal(median=median, p95=self.p95)
        learner = {"epochs": self.epochs, "updates": self.epochs, "padded": self.padded}
        padded = {"padded": PADDED if self.padded else 0}
        return found.model_copy(
            update={
                "efficiency": found.efficiency.model_copy(update=efficiency),
                "learner": found.learner.model_copy(update=learner),
                "scorers": tuple(s.model_copy(update=padded) for s in found.scorers),
                "workload": found.workload.model_copy(update=workload),
            }
        )


TRL = Assumed()
LEAN = Assumed(eager=False, padded=False)
VARIANTS: Mapping[str, Assumed] = {
    "as TRL comes": TRL,
    "CUDA graphs": replace(TRL, eager=False),
    "nothing padded": replace(TRL, padded=False),
    "CUDA graphs, nothing padded": LEAN,
    "one epoch": replace(TRL, epochs=1),
    "one epoch, nothing padded": replace(TRL, epochs=1, padded=False),
    "longest responses 2,048, p95 2,000": replace(TRL, p95=2000, limit=2048),
    "p95 600": replace(TRL, p95=600),
    "scoring and training at half the speed": replace(TRL, prefill=0.25, training=0.2),
    "scoring at a quarter of the speed": replace(TRL, prefill=0.125),
}
VARIED = ((TASKS[0], tuple(VARIANTS)), (TASKS[2], tuple(VARIANTS)[:7]))
"""Tasks whose assumptions are varied, and how."""


def part(steps: int = 32, *, smoke: bool = False) -> Part:
    """Return tables and pictures.

    Args:
        steps: of each run.
        smoke: of few runs.
    """
    tasks = TASKS[:1] if smoke else TASKS
    as_trl = [all_knobs(TRL, task, steps) for task in tasks]
    lean = [all_knobs(LEAN, task, steps) for task in tasks]
    deltas = [delta_gains(task, steps) for task in tasks[:FIXED]]
    varied = [
        (task, name, all_knobs(VARIANTS[name], task, steps))
        for task, names in (VARIED if not smoke else ())
        for name in names
    ]
    return Part(
        {
            "oppo-speedups": speedup_table(tasks, as_trl, lean),
            "oppo-delta": delta_table(tasks, deltas),
            "oppo-utilisation": utilisation_table(tasks, as_trl),
            "oppo-varied": varied_table(varied),
        },
        {"papers-oppo.svg": drawn(tasks, as_trl, lean)},
    )


# -- what is simulated -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ablation:
    """Runs of one task, by what is on; ``base`` is the plain schedule."""

    cluster: Cluster
    runs: Mapping[str, SimResult]

    def speedup(self, knobs: str) -> float:
        """Return how many times as fast steps are as the plain schedule's."""
        return steady_s(self.runs["base"]) / steady_s(self.runs[knobs])

    def share(self, *roles: str) -> float:
        """Return the share of a plain step in which some roles work, one after another."""
        return sum(self.runs["base"].utilisation.get(role, 0.0) for role in roles)

    def utilisation(self, knobs: str) -> float:
        """Return the share of all devices' time in which they work.

        Decoding counts by the share of a batch's rows that get a token in a step: a device that
        decodes three rows of sixteen is not taken for busy.
        """
        run, batch = self.runs[knobs], self.cluster.workload.batch
        devices = len(run.device_utilisation)
        idle_s = 0.0
        for span in run.spans:
            if span.name == "gen":
                rows = span.attributes["steps"] * batch
                filled = min(span.attributes["tokens"] / max(rows, 1), 1.0)
                idle_s += (1 - filled) * (span.end_s - span.start_s)
        idle_s *= len(self.cluster.generators[0].devices)
        return fmean(run.device_utilisation) - idle_s / (run.makespan_s * devices)


def steady_s(run: SimResult) -> float:
    """Return the mean seconds of a step, but for the first ones.

    These train on short responses, as long ones are carried.
    """
    return step_s(run, len(run.steps) // 8)


@cache
def all_knobs(assumed: Assumed, task: Task, steps: int) -> Ablation:
    """Run the plain schedule, and each setting of the knobs."""
    cluster = assumed.cluster(task, steps)
    settings = {"base": dict[str, Any](), **KNOBS}
    return Ablation(cluster, {name: scheduled(cluster, **each) for name, each in settings.items()})


def delta_gains(task: Task, steps: int) -> dict[str, tuple[float, float]]:
    """Return speed-up and mean delta of fixed deltas, and of the rules."""
    cluster = TRL.cluster(task, steps)
    plain = scheduled(cluster, score_on="chunk")
    settings: dict[str, dict[str, Any]] = {str(d): {"overcommit": d} for d in DELTAS}
    settings |= {rule: {"overcommit": "auto", "overcommit_rule": rule} for rule in RULES}
    found = {}
    for name, each in settings.items():
        run = scheduled(cluster, score_on="chunk", **each)
        mean = fmean(step["schedule/overcommit"] for step in run.steps)
        found[name] = steady_s(plain) / steady_s(run), mean
    return found


# -- tables and pictures ---------------------------------------------------------------------------


def speedup_table(
    tasks: Sequence[Task], as_trl: Sequence[Ablation], lean: Sequence[Ablation]
) -> str:
    """Return speed-ups of each task and knob."""
    head = ["setting", "plain step", "scoring, training"]
    head += [f"{knobs}: reported, ours, lean" for knobs in KNOBS]
    rows = []
    for task, ours, other in zip(tasks, as_trl, lean, strict=True):
        cells = [
            f"{reported(task, knobs)}, **{ours.speedup(knobs):.2f}**, {other.speedup(knobs):.2f}"
            for knobs in KNOBS
        ]
        shares = f"{percent(ours.share(*SCORERS))}, {percent(ours.share('learner'))}"
        rows.append([task.name, f"{steady_s(ours.runs['base']):.0f} s", shares, *cells])
    return table(head, rows)


def reported(task: Task, knobs: str) -> str:
    """Return a reported speed-up."""
    return f"{task.speedups[knobs]:.2f}" if knobs in task.speedups else "-"


def delta_table(tasks: Sequence[Task], deltas: Sequence[Mapping[str, tuple[float, float]]]) -> str:
    """Return speed-ups over streaming alone, by delta."""
    names = list(deltas[0])
    rows = []
    for task, found in zip(tasks, deltas, strict=False):
        cells = [
            f"{gain:.2f}" + ("" if n.isdigit() else f" (mean {mean:.0f})")
            for n, (gain, mean) in found.items()
        ]
        rows.append([task.name, *cells])
    return table(["speed-up over delta 0", *names], rows)


def utilisation_table(tasks: Sequence[Task], as_trl: Sequence[Ablation]) -> str:
    """Return utilisation without knobs and with both, and what the two make of each other."""
    rows = []
    for task, ours in zip(tasks, as_trl, strict=True):
        before, after = task.utilisation
        base, both = ours.utilisation("base"), ours.utilisation("both")
        work = [fmean(ours.runs[knobs].device_utilisation) for knobs in ("base", "both")]
        rows.append(
            [
                task.name,
                f"{percent(before)} to {percent(after)}, x {after / before:.2f}",
                f"**{percent(base)} to {percent(both)}, x {both / base:.2f}**",
                f"{percent(work[0])} to {percent(work[1])}",
            ]
        )
    return table(["setting", "reported", "ours", "any work counted in full"], rows)


def varied_table(varied: Sequence[tuple[Task, str, Ablation]]) -> str:
    """Return what each assumption changes."""
    rows = []
    for task, name, found in varied:
        gains = [f"{found.speedup(knobs):.2f}" for knobs in KNOBS]
        shares = [percent(found.share(*SCORERS)), percent(found.share("learner"))]
        rows.append([task.name, name, f"{steady_s(found.runs['base']):.0f} s", *shares, *gains])
    head = ["setting", "assumed", "plain step", "scoring", "training", *KNOBS]
    return table(head, rows)


def drawn(tasks: Sequence[Task], as_trl: Sequence[Ablation], lean: Sequence[Ablation]) -> str:
    """Return a picture of speed-ups, the ablation and utilisation."""
    panels = [
        Bars(
            f"Speed-up of the step, {what}",
            [task.name for task in those],
            {
                "reported": [task.speedups[knobs] for task in those],
                "simulated, trainer as TRL": [
                    a.speedup(knobs) for a, _ in zip(as_trl, those, strict=False)
                ],
                "simulated, lean trainer": [
                    a.speedup(knobs) for a, _ in zip(lean, those, strict=False)
                ],
            },
        )
        for knobs, what in TITLES.items()
        if (those := [task for task in tasks if knobs in task.speedups])
    ]
    names = list[str]()
    series: dict[str, list[Figure]] = {"reported": [], "simulated, trainer as TRL": []}
    for task, ours in zip(tasks, as_trl, strict=True):
        for knobs, share in zip(("base", "both"), task.utilisation, strict=True):
            names.append(f"{task.name}, {knobs}")
            series["reported"].append(100 * share)
            series["simulated, trainer as TRL"].append(100 * ours.utilisation(knobs))
    panels.append(Bars("GPU utilisation, %", names, series))
    return picture("OPPO: reported and simulated speed-ups and utilisation", panels)
