"""Lower bounds of a step's time, by which most candidates are left out without a simulation.

A bound adds up work that no schedule can avoid or hide: what one GPU has to do in a step, and what
must follow one another. How many steps a round of decoding has and what is carried is known from
the responses' lengths (:mod:`~stretto.planner.rounds`).
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.config import ScheduleConfig
from stretto.planner.candidates import Candidate
from stretto.planner.layout import Layout
from stretto.planner.layouts import (
    Setting,
    cost_of_generator,
    cost_of_learner,
    scorers_of,
)
from stretto.planner.rounds import Round, rounds
from stretto.runtime.sim.costs import GeneratorCost, PrefillCost, TrainCost
from stretto.runtime.sim.lengths import Lengths

CARRIED = 0.95
"""Share that counts where responses are carried: copies of a generator do not quite keep step, and
so others may end first."""


@dataclass(frozen=True, slots=True)
class _Costs:
    """Costs of a layout's roles.

    Attributes:
        learner, generator: of the learner, and of a copy of the generator.
        score_s: seconds a token of all scorers, one after another.
        load_s: seconds in which scorers take over weights.
    """

    learner: TrainCost
    generator: GeneratorCost
    score_s: float
    load_s: float


class Bounds:
    """Bounds of candidates for one setting."""

    def __init__(self, setting: Setting, first: int, last: int) -> None:
        """Take in what runs.

        Args:
            setting: what runs.
            first, last: hand-overs of weights, between which the time counts.
        """
        self._setting, self._first, self._last = setting, first, last
        self._costs: dict[tuple[Layout, float], _Costs] = {}
        self._rounds: dict[tuple[int, int], Round] = {}

    def of(self, candidate: Candidate) -> float:
        """Return seconds that a step takes at least.

        Raises:
            ConfigError: generators have no room for keys and values.
        """
        layout, knobs = candidate.layout, candidate.schedule.knobs
        key = layout, candidate.bubble
        if key not in self._costs:
            self._costs[key] = self._costs_of(*key)
        costs = self._costs[key]
        work = self._round(candidate.schedule)
        share = CARRIED if knobs.on("overcommit") else 1.0
        generating = share * self._generating(candidate, costs.generator, work)
        generating += costs.generator.load_s / candidate.schedule.weight_sync_interval
        training = share * costs.learner.seconds(int(work.trained))
        scoring = share * costs.score_s * work.trained
        scorers = scoring + costs.load_s / candidate.schedule.weight_sync_interval
        last = scoring if knobs.score_on == "batch" else 0.0
        produced = generating + last
        if not knobs.streams and not knobs.on("overcommit"):
            produced = max(produced, scoring)  # scorers have nothing of it while it is trained on
        # What is generated now was preceded by the training of lag + 1 steps ago.
        in_turn = (produced + training) / (knobs.lag + 1)
        if not knobs.lag:
            return max(in_turn, scorers)
        on_learner = training + (scorers if layout.sharing == "learner" else 0.0)
        on_generators = generating + (scoring if layout.sharing == "generators" else 0.0)
        return max(in_turn, on_learner, on_generators, scorers)

    def _generating(self, candidate: Candidate, cost: GeneratorCost, work: Round) -> float:
        """Seconds of generating, as the average copy takes and as the longest response takes."""
        copies, decode, knobs = candidate.layout.generator.data, cost.decode, candidate.schedule
        tokens, context = work.tokens / copies, work.context / copies
        known = work.prompts + (work.carried if knobs.carry == "recompute" else 0.0)
        prefill_s = cost.prefill.token_s * known / copies
        if knobs.knobs.on("overcommit"):
            return decode.at_least(work.steps, tokens, context) + prefill_s
        # The copy that has the longest response may have few others.
        rows = self._setting.workload.batch * knobs.weight_sync_interval  # that decode together
        average_s = decode.at_least(work.tokens / rows, tokens, context)
        return max(average_s + prefill_s, decode.seconds(1, 0, int(work.steps)))

    def _round(self, schedule: ScheduleConfig) -> Round:
        """The work of an average step, of those that count."""
        w, interval = self._setting.workload, schedule.weight_sync_interval
        extra = self._delta(schedule)
        extra += -extra % w.samples_per_prompt
        if (extra, interval) not in self._rounds:
            lengths = Lengths(w.response_tokens, w.seed)
            found = rounds(
                w.batch * interval,
                extra,
                self._last,
                length=lambda i: min(lengths(i), w.max_new_tokens),
                prompt=Lengths(w.prompt_tokens, w.seed + 1),
                samples=w.samples_per_prompt,
            )
            self._rounds[extra, interval] = Round.mean(found[self._first :], interval)
        return self._rounds[extra, interval]

    def _delta(self, schedule: ScheduleConfig) -> int:
        """The largest delta in the steps that are simulated."""
        batch = self._setting.workload.batch
        if schedule.knobs.overcommit != "auto":
            return schedule.largest_overcommit(batch)
        looks_back = schedule.overcommit_rule != "throughput"
        steps = self._last * schedule.weight_sync_interval
        if looks_back and 2 * schedule.overcommit_window >= steps:
            return schedule.first_overcommit(batch)  # no reward has been looked at yet
        return schedule.largest_overcommit(batch)

    def _costs_of(self, layout: Layout, bubble: float) -> _Costs:
        setting = self._setting
        score_s = load_s = 0.0
        for scorer in scorers_of(setting, layout):
            assert isinstance(scorer.cost, PrefillCost)
            score_s += scorer.cost.token_s
            load_s += scorer.load_s
        return _Costs(
            cost_of_learner(setting, layout, bubble),
            cost_of_generator(setting, layout),
            score_s,
            load_s,
        )
