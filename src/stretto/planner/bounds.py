"""Lower bounds of a step's time, by which most candidates are left out without a simulation.

A bound adds up work that no schedule can avoid or hide: what one GPU has to do in a step, and what
must follow one another. How much that is follows from the responses' lengths, whatever the GPUs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from stretto.config import ScheduleConfig
from stretto.planner.candidates import Candidate
from stretto.planner.clusters import PlanSpec, cost_of_generator, cost_of_learner, scorers_of
from stretto.planner.layout import Layout
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, Workload
from stretto.runtime.sim.costs import DecodeCost, GeneratorCost, PrefillCost, TrainCost
from stretto.runtime.sim.simulate import simulate

CARRIED = 0.95
"""Share that counts where responses are carried: copies of a generator do not quite keep step, and
so others may end first."""


class StepWork(NamedTuple):
    """The work of an average step.

    Attributes:
        steps: decode steps, until enough responses have ended.
        tokens: decoded.
        context: tokens of prompts and responses that these steps read.
        prefilled: tokens whose keys and values were made before.
        trained: tokens of the responses that ended first, with their prompts.
    """

    steps: float
    tokens: float
    context: float
    prefilled: float
    trained: float


def work_of(workload: Workload, schedule: ScheduleConfig, first: int, last: int) -> StepWork:
    """Return the work of a step, on average between two weight syncs.

    All rows in flight get a token a decode step, which is the only thing that takes time.
    """
    interval = schedule.weight_sync_interval
    cluster = Cluster(
        generators=(GeneratorRole(cost=GeneratorCost(decode=DecodeCost(step_s=1.0))),),
        learner=LearnerRole(devices=(1,), cost=TrainCost()),
        workload=workload.model_copy(update={"steps": last * interval}),
        schedule=schedule,
    )
    spans = simulate(cluster).spans
    updates = [span for span in spans if span.name == "update"]
    began_s = updates[(first - 1) * interval].start_s
    calls = [span for span in spans if span.name == "gen" and span.end_s > began_s]
    names = ("steps", "tokens", "context", "prefilled")
    sums = [sum(span.attributes[name] for span in calls) for name in names]
    trained = sum(span.attributes["tokens"] for span in updates[first * interval :])
    return StepWork(*(each / (last - first) / interval for each in (*sums, trained)))


class Bounds:
    """Bounds of a plan's candidates, in the time between two weight syncs."""

    def __init__(self, spec: PlanSpec, first: int, last: int) -> None:
        self._spec, self._last = spec, last
        self._generator = cache(lambda layout: cost_of_generator(spec, layout))
        self._learner = cache(lambda layout, bubble: cost_of_learner(spec, layout, bubble))
        self._scorers = cache(self._scorers_of)
        self._work = cache(lambda schedule: work_of(spec.workload, schedule, first, last))

    def of(self, candidate: Candidate) -> float:
        """Return seconds that a step takes at least.

        Raises ConfigError if generators have no room for keys and values.
        """
        layout, schedule, knobs = candidate.layout, candidate.schedule, candidate.schedule.knobs
        generator, learner = self._generator(layout), self._learner(layout, candidate.bubble)
        token_s, load_s = self._scorers(layout)
        work = self._work(self._lockstep(schedule))
        share = CARRIED if knobs.on("overcommit") else 1.0
        generating = share * self._generating(candidate, generator, work)
        generating += generator.load_s / schedule.weight_sync_interval
        training = share * learner.seconds(int(work.trained))
        scoring = share * token_s * work.trained
        scorers = scoring + load_s / schedule.weight_sync_interval
        produced = generating + (scoring if knobs.score_on == "batch" else 0.0)
        if not knobs.streams and not knobs.on("overcommit"):
            produced = max(produced, scoring)  # scorers have nothing of it while it is trained on
        # What is generated now was preceded by the training of lag + 1 steps ago.
        in_turn = (produced + training) / (knobs.lag + 1)
        if not knobs.lag:
            return max(in_turn, scorers)
        on_learner = training + (scorers if layout.sharing == "learner" else 0.0)
        on_generators = generating + (scoring if layout.sharing == "generators" else 0.0)
        return max(in_turn, on_learner, on_generators, scorers)

    def _generating(self, candidate: Candidate, cost: GeneratorCost, work: StepWork) -> float:
        """Seconds of generating, as the average copy takes and as the longest response takes."""
        copies, decode, schedule = candidate.layout.generator.data, cost.decode, candidate.schedule
        tokens, context = work.tokens / copies, work.context / copies
        prefill_s = cost.prefill.token_s * work.prefilled / copies
        if schedule.knobs.on("overcommit"):
            return decode.at_least(work.steps, tokens, context) + prefill_s
        # The copy that has the longest response may have few others.
        rows = self._spec.workload.batch * schedule.weight_sync_interval  # that decode together
        average_s = decode.at_least(work.tokens / rows, tokens, context)
        return max(average_s + prefill_s, decode.seconds(1, 0, int(work.steps)))

    def _lockstep(self, schedule: ScheduleConfig) -> ScheduleConfig:
        """Return a schedule with the largest delta of the steps that are simulated, and no more."""
        w, interval = self._spec.workload, schedule.weight_sync_interval
        extra = schedule.largest_overcommit(w.batch)
        looks_back = schedule.overcommit_rule != "throughput"
        unseen = 2 * schedule.overcommit_window >= self._last * interval
        if schedule.knobs.overcommit == "auto" and looks_back and unseen:
            extra = schedule.first_overcommit(w.batch)  # no reward has been looked at yet
        extra += -extra % w.samples_per_prompt
        return ScheduleConfig(
            score_on="rollout",
            overcommit=extra,
            weight_sync_interval=interval,
            carry=schedule.carry,
        )

    def _scorers_of(self, layout: Layout) -> tuple[float, float]:
        """Seconds a token of all scorers in turn, and those in which they take over weights."""
        scorers = scorers_of(self._spec, layout)
        costs = [scorer.cost for scorer in scorers if isinstance(scorer.cost, PrefillCost)]
        return sum(cost.token_s for cost in costs), sum(scorer.load_s for scorer in scorers)
