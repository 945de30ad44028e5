"""The settings of asynchronous RLHF in virtual time: what is reported, assumed and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from _papers import EAGER_S_A_LAYER, PADDED, scheduled, step_s
from stretto.config import ScheduleConfig
from stretto.layout import Layout
from stretto.models.shapes import shape_of
from stretto.planner.candidates import Candidate, PlanSpec, cluster_of
from stretto.planner.hardware import Hardware
from stretto.planner.run_layout import ModelShapes, RunLayout
from stretto.runtime.sim.cluster import (
    Cluster,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
)
from stretto.runtime.sim.costs import DecodeCost, Efficiency, GeneratorCost, SampleCost, TrainCost
from stretto.runtime.sim.lengths import Lognormal, Uniform
from stretto.runtime.sim.simulate import SimResult

STEPS = 10
SKIPPED = 3
"""First steps left out, in which the two are not yet side by side."""
RULE_S = 0.0001
"""Seconds in which a rule looks at a response."""
AHEAD: Mapping[str, Any] = {"lag": 1}
"""Generate with the weights of the step before, while training on that step's responses."""
TRAINED = 2
"""Responses to a prompt that Online DPO trains on: the best and the worst."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A setting of the paper, and what it reports of it.

    Attributes:
        name: task and actor.
        model: the actor; the others have its shape.
        gpu: kind of GPU (assumed).
        gpus: of which one generates, and the others score and train (assumed).
        prompts: of a step.
        samples: responses to each.
        limit: tokens of a response, at most.
        prompt_tokens, response_tokens: lengths (assumed).
        generating_s, training_s: of a synchronous step, as reported; scoring is in the latter.
        overlapped_s: of an asynchronous step, as reported.
        speedup: of a whole run, as reported.
        rule: a rule gives rewards, and no model.
    """

    name: str
    model: str
    gpu: str
    gpus: int
    prompts: int
    samples: int
    limit: int
    prompt_tokens: Uniform
    response_tokens: Lognormal
    generating_s: float | None
    training_s: float | None
    overlapped_s: float | None
    speedup: float
    rule: bool = False

    @property
    def plain_s(self) -> float | None:
        """Seconds of a synchronous step, as reported."""
        if self.generating_s is None or self.training_s is None:
            return None
        return self.generating_s + self.training_s

    @property
    def step_speedup(self) -> str:
        """Reported speed-up of a step, before ours."""
        if self.plain_s is None or self.overlapped_s is None:
            return f"{self.speedup:.2f} (run), "
        return f"{self.plain_s / self.overlapped_s:.2f}, "


TASKS = (
    Task(
        "TL;DR, Pythia 2.8B",
        "pythia-2.8b",
        "a100-80gb",
        4,
        512,
        2,
        128,
        Uniform(low=200, high=512),
        Lognormal(median=50, p95=110),
        None,
        None,
        None,
        1.25,
    ),
    Task(
        "No Robots, LLaMA 3.1 8B",
        "llama-3.1-8b",
        "h100",
        8,
        256,
        2,
        1024,
        Uniform(low=20, high=512),
        Lognormal(median=250, p95=1000),
        21.0,
        33.0,
        39.0,
        230 / 142,
    ),
    Task(
        "GSM8K, Rho 1B",
        "rho-1b",
        "a100-80gb",
        4,
        252,
        4,
        512,
        Uniform(low=60, high=180),
        Lognormal(median=120, p95=280),
        12.2,
        12.8,
        15.1,
        218 / 129,
        rule=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is assumed, and which dials are turned.

    Attributes:
        padded: responses are padded where they are scored and trained on.
        training: share of the GPUs' peak; scoring reaches a quarter more, as by default.
        eager: each decode step launches its kernels from Python.
        updates: on each mini-batch (the dial T).
        samples: responses to a prompt (the dial K); 0 keeps the task's.
    """

    padded: bool = True
    training: float = 0.4
    eager: bool = False
    updates: int = 1
    samples: int = 0


PLAIN = Assumed()
VARIANTS: Mapping[str, Assumed] = {
    "as assumed": PLAIN,
    "nothing padded": replace(PLAIN, padded=False),
    "training and scoring at half the speed": replace(PLAIN, training=0.2),
    "eager decoding, 0.8 ms a layer": replace(PLAIN, eager=True),
}
SLOWED = 1.18
"""Factor on both stages, while both are at work, under which asynchronous steps take what is
reported: 39 s for 33 s, and 15.1 s for 12.8 s."""
DIAL_N = (1, 2, 4, 16)
DIAL_T = (1, 2, 3)
DIAL_K = (2, 4)


def cluster(task: Task, assumed: Assumed, steps: int) -> Cluster:
    """Return one GPU that generates beside those that score and train."""
    actor = shape_of(task.model)
    samples = assumed.samples or task.samples
    spec = PlanSpec(
        ModelShapes(actor, reference=actor, reward=None if task.rule else actor.valued()),
        Workload(
            batch=task.prompts * samples,
            samples_per_prompt=samples,
            steps=steps,
            max_new_tokens=task.limit,
            prompt_tokens=task.prompt_tokens,
            response_tokens=task.response_tokens,
        ),
        Hardware.of(
            task.gpu, Efficiency(step_s=EAGER_S_A_LAYER * actor.layers if assumed.eager else 0.002)
        ),
        epochs=assumed.updates,
        updates=assumed.updates,
        functions={"rule": SampleCost(sample_s=RULE_S)} if task.rule else {},
    )
    slower = Hardware.of(
        task.gpu, Efficiency(training=assumed.training, prefill=1.25 * assumed.training)
    )
    others = task.gpus - 1
    layout = RunLayout(Layout(fsdp=others), Layout(), Layout(dp=others), "learner")
    plan = Candidate(layout, "sync", ScheduleConfig())
    found = cluster_of(replace(spec, hardware=slower), plan)
    # Rows take memory as they grow, as vLLM's do: no slots are kept at full length.
    generators = cluster_of(spec, plan).generators
    paged = tuple(generator.model_copy(update={"slots": 0}) for generator in generators)
    found = found.model_copy(update={"generators": paged})
    return _best_and_worst(found, samples, assumed.padded)


def _best_and_worst(found: Cluster, samples: int, padded: bool) -> Cluster:
    """Train on two responses to each prompt, whose reference is all that is looked at."""
    share = TRAINED / samples
    learner, cost = found.learner, found.learner.cost
    assert cost is not None
    scorers = []
    for scorer in found.scorers:
        update: dict[str, Any] = {"padded": PADDED if padded else 0}
        if scorer.name == "reference" and scorer.cost is not None:
            assert not isinstance(scorer.cost, SampleCost)
            update["cost"] = scorer.cost.model_copy(update={"token_s": scorer.cost.token_s * share})
        scorers.append(scorer.model_copy(update=update))
    trained = cost.model_copy(update={"token_s": cost.token_s * share})
    return found.model_copy(
        update={
            "scorers": tuple(scorers),
            "learner": learner.model_copy(update={"padded": padded, "cost": trained}),
        }
    )


# -- what is simulated -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """A task one stage after the other, and overlapped."""

    plain: SimResult
    ahead: SimResult

    @property
    def plain_s(self) -> float:
        """Seconds of a synchronous step."""
        return steady_s(self.plain)

    @property
    def ahead_s(self) -> float:
        """Seconds of an asynchronous step."""
        return steady_s(self.ahead)

    @property
    def speedup(self) -> float:
        """Return how many times as fast asynchronous steps are."""
        return self.plain_s / self.ahead_s

    def work_s(self, *names: str) -> float:
        """Return the seconds of a synchronous step that go into work of these kinds."""
        spans = [s for s in self.plain.spans if s.name in names]
        return sum(s.end_s - s.start_s for s in spans) / len(self.plain.steps)


def steady_s(run: SimResult) -> float:
    """Return the mean seconds of a step in which the two stages are side by side."""
    return step_s(run, SKIPPED)


@cache
def plain(task: Task, assumed: Assumed, steps: int) -> SimResult:
    """Run a task one stage after the other, at costs by formula."""
    return scheduled(cluster(task, assumed, steps))


@cache
def ahead(task: Task, assumed: Assumed, steps: int) -> SimResult:
    """Run a task with the two stages side by side."""
    return scheduled(cluster(task, assumed, steps), **AHEAD)


def both(task: Task, assumed: Assumed, steps: int) -> Pair:
    """Run a task both ways."""
    return Pair(plain(task, assumed, steps), ahead(task, assumed, steps))


def of_reported(task: Task, steps: int, slower: float = 1.0) -> Pair:
    """Run a task with the reported times of generating and training, overlapped ones ``slower``.

    What is left to the simulator is the schedule and the hand-over, by formula.
    """
    assert task.generating_s is not None
    assert task.training_s is not None
    by_formula = cluster(task, PLAIN, 1).generators[0].cost
    assert by_formula is not None

    def run(factor: float, **schedule: Any) -> SimResult:
        assert task.generating_s is not None
        assert task.training_s is not None
        token_s = factor * task.generating_s / task.limit
        cost = GeneratorCost(decode=DecodeCost(step_s=token_s), load_s=by_formula.load_s)
        found = Cluster(
            generators=(GeneratorRole(devices=(0,), cost=cost),),
            scorers=(ScorerRole(name="reward", cost=SampleCost()),),  # in the training time
            learner=LearnerRole(devices=(1,), cost=TrainCost(step_s=factor * task.training_s)),
            workload=Workload(
                batch=8,
                steps=steps,
                max_new_tokens=task.limit,
                response_tokens=Uniform(low=task.limit, high=task.limit),
            ),
        )
        return scheduled(found, **schedule)

    return Pair(run(1.0), run(slower, **AHEAD))


def dial_n(task: Task, n: int) -> tuple[float, float]:
    """Return seconds a mini-batch with N of them between two hand-overs, both ways.

    Of several rounds, without the first and the last: there the stages are not side by side.
    """
    rounds = max(3, SKIPPED + 5 - n)
    found = cluster(task, PLAIN, rounds * n)
    runs = (scheduled(found, weight_sync_interval=n, **knobs) for knobs in ({}, AHEAD))
    first, second = (
        fmean(step["timing_s/step"] for step in run.steps[n : (rounds - 1) * n]) for run in runs
    )
    return first, second
