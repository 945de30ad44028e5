"""Lower bounds of a step's time, by which most candidates are left out without a simulation.

A bound adds up work that no schedule can avoid or hide: what one GPU has to do in a step, and what
must follow one another. How many steps a round of decoding has and what is carried is known from
the responses' lengths alone: all rows in flight get a token a step, whatever the GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import fmean
from typing import NamedTuple

from stretto.config import ScheduleConfig
from stretto.planner.candidates import Candidate
from stretto.planner.clusters import PlanSpec, cost_of_generator, cost_of_learner, scorers_of
from stretto.planner.layout import Layout
from stretto.runtime.sim.costs import GeneratorCost, PrefillCost
from stretto.runtime.sim.lengths import Lengths

CARRIED = 0.95
"""Share that counts where responses are carried: copies of a generator do not quite keep step, and
so others may end first."""


class Round(NamedTuple):
    """The work of a round of decoding, or of an average step.

    Attributes:
        steps: decode steps, until enough responses have ended.
        tokens: decoded.
        context: tokens of prompts and responses that these steps read.
        prompts: tokens of the prompts that came in.
        trained: tokens of the responses that ended first, with their prompts.
        carried: tokens of what is still in flight at the end, with their prompts.
    """

    steps: float
    tokens: float
    context: float
    prompts: float
    trained: float
    carried: float


def rounds(
    batch: int,
    extra: int,
    count: int,
    *,
    length: Callable[[int], int],
    prompt: Callable[[int], int],
    samples: int = 1,
) -> list[Round]:
    """Decode batches in lockstep.

    Args:
        extra: that are in flight besides (delta); a multiple of ``samples``.
        length: of a response, by its number.
        prompt: length of a prompt, by its number.
        samples: responses to each prompt, which end together.
    """
    groups: list[list[tuple[int, int, int]]] = []  # prompt tokens, first step, last step of each
    drawn = now = 0
    found = []
    for _ in range(count):
        came = 0
        while len(groups) < (batch + extra) // samples:
            tokens, first = prompt(drawn), drawn * samples
            groups.append([(tokens, now, now + length(first + i)) for i in range(samples)])
            came += tokens
            drawn += 1
        groups.sort(key=lambda group: max(end for *_, end in group))
        done, groups = groups[: batch // samples], groups[batch // samples :]
        start, now = now, max(now, *(end for *_, end in done[-1]))
        decoded = [
            (tokens, start - begin, max(min(end, now), start) - begin)
            for group in (*done, *groups)
            for tokens, begin, end in group
        ]
        found.append(
            Round(
                steps=now - start,
                tokens=sum(last - first for _, first, last in decoded),
                context=sum(
                    (last - first) * tokens + (last * (last - 1) - first * (first - 1)) // 2
                    for tokens, first, last in decoded
                ),
                prompts=came,
                trained=sum(t + end - begin for group in done for t, begin, end in group),
                carried=sum(
                    t + min(end, now) - begin for group in groups for t, begin, end in group
                ),
            )
        )
    return found


class Bounds:
    """Bounds of a plan's candidates.

    Args:
        first, last: weight syncs, between which the time counts.
    """

    def __init__(self, spec: PlanSpec, first: int, last: int) -> None:
        self._spec, self._first, self._last = spec, first, last
        self._generator = cache(lambda layout: cost_of_generator(spec, layout))
        self._learner = cache(lambda layout, bubble: cost_of_learner(spec, layout, bubble))
        self._scorers = cache(self._scorers_of)
        self._rounds = cache(self._rounds_of)

    def of(self, candidate: Candidate) -> float:
        """Return seconds that a step takes at least.

        Raises ConfigError if generators have no room for keys and values.
        """
        layout, schedule, knobs = candidate.layout, candidate.schedule, candidate.schedule.knobs
        generator, learner = self._generator(layout), self._learner(layout, candidate.bubble)
        token_s, load_s = self._scorers(layout)
        work = self._rounds(self._extra(schedule), schedule.weight_sync_interval)
        share = CARRIED if knobs.on("overcommit") else 1.0
        generating = share * self._generating(candidate, generator, work)
        generating += generator.load_s / schedule.weight_sync_interval
        training = share * learner.seconds(int(work.trained))
        scoring = share * token_s * work.trained
        scorers = scoring + load_s / schedule.weight_sync_interval
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
        copies, decode, schedule = candidate.layout.generator.data, cost.decode, candidate.schedule
        tokens, context = work.tokens / copies, work.context / copies
        known = work.prompts + (work.carried if schedule.carry == "recompute" else 0.0)
        prefill_s = cost.prefill.token_s * known / copies
        if schedule.knobs.on("overcommit"):
            return decode.at_least(work.steps, tokens, context) + prefill_s
        # The copy that has the longest response may have few others.
        rows = self._spec.workload.batch * schedule.weight_sync_interval  # that decode together
        average_s = decode.at_least(work.tokens / rows, tokens, context)
        return max(average_s + prefill_s, decode.seconds(1, 0, int(work.steps)))

    def _rounds_of(self, extra: int, interval: int) -> Round:
        """The work of an average step, of those that count."""
        w = self._spec.workload
        lengths = Lengths(w.response_tokens, w.seed)
        found = rounds(
            w.batch * interval,
            extra + -extra % w.samples_per_prompt,
            self._last,
            length=lambda i: min(lengths(i), w.max_new_tokens),
            prompt=Lengths(w.prompt_tokens, w.seed + 1),
            samples=w.samples_per_prompt,
        )
        return Round(*(fmean(each) / interval for each in zip(*found[self._first :], strict=True)))

    def _extra(self, schedule: ScheduleConfig) -> int:
        """The largest delta in the steps that are simulated."""
        batch = self._spec.workload.batch
        looks_back = schedule.overcommit_rule != "throughput"
        steps = self._last * schedule.weight_sync_interval
        if (
            schedule.knobs.overcommit == "auto"
            and looks_back
            and 2 * schedule.overcommit_window >= steps
        ):
            return schedule.first_overcommit(batch)  # no reward has been looked at yet
        return schedule.largest_overcommit(batch)

    def _scorers_of(self, layout: Layout) -> tuple[float, float]:
        """Seconds a token of all scorers in turn, and those in which they take over weights."""
        scorers = scorers_of(self._spec, layout)
        costs = [scorer.cost for scorer in scorers if isinstance(scorer.cost, PrefillCost)]
        return sum(cost.token_s for cost in costs), sum(scorer.load_s for scorer in scorers)
