"""The preset ``auto``: a run simulates itself between two rounds, and tries the fastest knobs.

- It starts as ``sync``, and only uses values within the settings' bounds (``round_knobs``).
- One decision is open at a time. A trial lasts until its speed is clear, and is ended early if it
  is much slower. Its knobs are kept if they were faster than the knobs before.
- Rejected knobs are not tried again for a number of rounds that doubles with each rejection.
- No trial starts once all failed ones have cost 2 % of the run's rounds.
- Decisions depend on the schedule's clock and on data of the schedule only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from math import log
from statistics import fmean
from typing import Any, Protocol

from stretto.config import ScheduleConfig
from stretto.config.knobs import RoundKnobs, Settings
from stretto.errors import StrettoError
from stretto.observe.transcripts import turn_sizes
from stretto.runtime.sim.cluster import Cluster, Workload
from stretto.runtime.sim.faults import Faults
from stretto.runtime.sim.lengths import Replayed
from stretto.runtime.sim.simulate import simulate
from stretto.schedules.chunking import SHORTEST
from stretto.schedules.controller import Feedback
from stretto.schedules.rollout import Rollout
from stretto.stateful import Stateful
from stretto.types import FORKS

FIRST_ROUNDS = 2  # of a run, which have one-time costs
LEAST_ROUNDS = 3  # measured rounds before the first decision, and in a trial
MOST_ROUNDS = 10  # of a trial whose speed is not clear
UNCLEAR, FASTER = 0.05, 1.01  # distance of a speedup from 1 that is not clear, and that is kept
REMEMBERED = 8  # latest rounds whose speeds and responses count
EVERY = 16  # rounds between two decisions, and of a first rejection
WORTH = 1.02  # predicted speedup that is worth a trial, or a change of one more group of knobs
SLOW, SLOW_ROUNDS = 0.8, 2  # a trial ends after rounds below this share of the speed before
LOSS = 0.02  # share of the run's rounds that failed trials may cost
DRIFT = 0.2  # relative change of speed or mean length that triggers a decision
SHARE, FIRST_S = 0.01, 0.75  # of the run's expected time, or seconds at first, for simulations
STEP_S, RESPONSE_S = 0.0015, 0.00012  # assumed seconds to simulate a step, and each response of it
TURN = 3  # responses that take as long to simulate as a turn of an episode
SEARCHED = 16  # knobs that a search simulates, about
WARM = 4  # simulated rounds before a measurement if work is carried from round to round
FIELDS = (("lag", "delta", "train_on"), ("score_on", "chunk_tokens", "train_on"))
"""Knobs that the search changes together, one group at a time."""


class CostModel(Protocol):
    """The run as a cluster, whose workload and schedule are replaced."""

    def observe(self, trained: Sequence[Rollout]) -> None:
        """Learn from the round that has just ended."""

    def cluster(self, number: int) -> Cluster:
        """Return the roles, with present costs. Raises StateError if too little was recorded.
        ``number`` is that of the latest round."""


class DescribedCosts:
    """The cost model of a run that is itself simulated: its description."""

    def __init__(self, described: Cluster) -> None:
        self._described = described

    def observe(self, trained: Sequence[Rollout]) -> None:
        """Learn nothing."""

    def cluster(self, number: int) -> Cluster:
        return self._described.model_copy(update={"faults": Faults()})


class AutoTuner(Stateful):
    """Tuner (:class:`~stretto.schedules.controls.Tuner`) of the preset ``auto``."""

    saved = (
        "_round", "_elapsed_s", "_simulated_s", "_current", "_trial", "_measured", "_predicted",
        "_correction", "_settle", "_due", "_rejections", "_lost_rounds", "_responses", "_decided",
        "_ratios",
    )  # fmt: skip

    def __init__(self, schedule: ScheduleConfig, settings: Settings, costs: CostModel) -> None:
        self._schedule = schedule
        self._settings = settings
        self._costs = costs
        choices = schedule.round_knobs(settings.batch, settings.samples_per_prompt)
        self._choices = list(choices)
        self._rounds_in_all = settings.steps // settings.weight_sync_interval
        self._size = settings.batch * settings.weight_sync_interval  # responses of a round
        self._round = 0
        self._elapsed_s = self._simulated_s = 0.0
        first = self._choices[0]
        self._current = astuple(
            replace(first, chunk_tokens=self._chunks(settings.max_new_tokens)[-1])
        )
        self._trial: tuple[Any, ...] = ()
        self._measured: list[tuple[float, float, int]] = []  # rounds: tokens, seconds, responses
        self._predicted = 1.0  # speedup of the trial
        self._correction = 1.0  # measured speed of the knobs before it, relative to the simulated
        self._settle = FIRST_ROUNDS  # rounds to come that mix two settings, or warm up
        self._due = 0
        self._rejections: dict[str, tuple[int, int]] = {}  # until which round, and how many
        self._lost_rounds = 0.0
        self._responses: list[list[Any]] = []  # latest ones: see _remember
        self._cluster: Cluster | None = None  # at the last decision
        self._decided: list[float] = []  # mean length and speed at the last decision
        self._ratios: list[float] = []  # predicted and measured speedup of the last trial
        self._news: list[str] = []

    @property
    def knobs(self) -> RoundKnobs:
        return RoundKnobs(*(self._trial or self._current))

    @property
    def metrics(self) -> dict[str, float]:
        return dict(zip(("schedule/predicted", "schedule/measured"), self._ratios, strict=False))

    def take_news(self) -> Sequence[str]:
        news, self._news = self._news, []
        return news

    def observe(self, feedback: Feedback) -> None:
        self._round += 1
        self._elapsed_s += feedback.seconds
        count = self._remember(feedback.trained)
        self._costs.observe(feedback.trained)
        if self._settle or not count:
            self._settle = max(self._settle - 1, 0)
            return
        tokens = sum(prompt + response for _, prompt, response, _ in self._responses[-count:])
        self._measured.append((tokens, feedback.seconds, count))
        if self._trial:
            self._judge()
            return
        self._measured = self._measured[-REMEMBERED:]
        if len(self._measured) >= LEAST_ROUNDS and (self._round >= self._due or self._drifted):
            self._decide()

    def _remember(self, trained: Sequence[Rollout]) -> int:
        """Keep ids, prompt lengths, response lengths and turns, without further samples of an
        episode. Returns their number."""
        rollouts = [rollout for rollout in trained if rollout.id < FORKS]
        for rollout in rollouts:
            sizes = turn_sizes(rollout)
            turns = [[max(t["tokens"], 1), t["wait_s"], t["context"]] for t in sizes]
            row = [rollout.id, len(rollout.prompt.tokens), max(len(rollout), 1), turns]
            self._responses.append(row)
        self._responses = self._responses[-max(REMEMBERED * self._size, 64) :]
        return len(rollouts)

    @property
    def _mean_length(self) -> float:
        return fmean(tokens for _, _, tokens, _ in self._responses[-2 * self._size :])

    @property
    def _drifted(self) -> bool:
        if not self._decided:
            return False
        now = self._mean_length, speed(self._measured[-LEAST_ROUNDS:])
        return any(abs(log(a / b)) > DRIFT for a, b in zip(now, self._decided, strict=True))

    def _decide(self) -> None:
        """Start a trial of the knobs that the simulation prefers, if any."""
        to_come = self._rounds_in_all - self._round
        if self._lost_rounds >= LOSS * self._rounds_in_all or to_come <= MOST_ROUNDS:
            return
        most_s = SHARE * self._elapsed_s / self._round * self._rounds_in_all
        if not self._simulated_s:
            most_s = max(most_s, FIRST_S)
        rounds = self._rounds_known
        while self._simulated_s + self._seconds_to_search(rounds) > most_s:
            rounds -= 1
            if rounds < LEAST_ROUNDS:
                return
        self._due = self._round + EVERY
        self._decided = [self._mean_length, speed(self._measured)]
        try:
            best, self._predicted = self._search(rounds)
        except StrettoError:  # too little has been recorded
            self._due = self._round + 1
            return
        if self._predicted >= WORTH:
            self._trial = astuple(best)
            self._measured = []
            self._settle = settling(RoundKnobs(*self._current), best)
            self._news.append(f"auto: tries {text(best)}: predicted {self._predicted:.2f}x")

    def _judge(self) -> None:
        """Keep the trial's knobs, or go back, once it is clear which ones are faster."""
        before, trial = RoundKnobs(*self._current), RoundKnobs(*self._trial)
        rounds, ratio = len(self._measured), self._speedup(before)
        if ratio > SLOW:
            unclear = abs(ratio - 1) < UNCLEAR and rounds < MOST_ROUNDS
            # With delta, rounds of short responses and of carried long ones alternate.
            least, odd = (2 * LEAST_ROUNDS, rounds % 2) if trial.delta else (LEAST_ROUNDS, 0)
            if unclear or odd or rounds < least:
                return
        elif rounds < SLOW_ROUNDS:  # a single one may have been disturbed
            return
        self._ratios = [self._predicted, ratio]
        ratios = f"predicted {self._predicted:.2f}x, measured {ratio:.2f}x"
        self._trial = ()
        self._due = self._round
        if ratio > FASTER:
            self._current = astuple(trial)
            self._news.append(f"auto: keeps {text(trial)}: {ratios}")
        else:
            count = self._rejections.get(repr(trial), (0, 0))[1] + 1
            self._rejections[repr(trial)] = self._round + EVERY * 2 ** (count - 1), count
            self._lost_rounds += (rounds + settling(before, trial)) * (1 / ratio - 1)
            self._settle = settling(trial, before)
            self._measured = []
            self._news.append(f"auto: goes back to {text(before)} from {text(trial)}: {ratios}")

    def _speedup(self, before: RoundKnobs) -> float:
        """Return the trial's speed, relative to that of the knobs before on the same responses,
        which is simulated, and corrected by the error of the simulation in their own rounds."""
        counts = [count for *_, count in self._measured]
        responses = sorted(self._responses[-sum(counts) :])
        if not responses:
            return 1.0
        if self._cluster is None:  # after a resume
            self._cluster = self._costs.cluster(self._round)
        expected = self._simulated(self._cluster, before, responses, len(counts))
        return speed(self._measured) / (expected * self._correction)

    def _search(self, rounds: int) -> tuple[RoundKnobs, float]:
        """Return the best knobs by simulation of the latest rounds, and their speedup. One group
        of knobs is changed at a time, until no change is faster. Groups that hardly matter return
        to the present knobs."""
        cluster = self._cluster = self._costs.cluster(self._round)
        current = RoundKnobs(*self._current)
        speeds: dict[RoundKnobs, float] = {}
        responses = sorted(self._responses[-rounds * self._size :])

        def simulated(knobs: RoundKnobs) -> float:
            if knobs not in speeds:
                speeds[knobs] = self._simulated(cluster, knobs, responses, rounds)
            return speeds[knobs]

        best = before = current
        self._correction = speed(self._measured) / simulated(current)
        while True:
            for fields in FIELDS:
                for knobs in self._others(best, fields):
                    if simulated(knobs) > 1.005 * simulated(best):  # else rounding decides
                        best = knobs
            if best == before:
                break
            before = best
        least = simulated(best) / WORTH
        for fields in FIELDS:  # change no knob for less, as overlap may cost more than predicted
            plainer = replace(best, **{name: getattr(current, name) for name in fields})
            if self._is_open(plainer) and simulated(plainer) >= least:
                best = plainer
        return best, simulated(best) / simulated(current)

    def _others(self, best: RoundKnobs, fields: Sequence[str]) -> Iterator[RoundKnobs]:
        """Yield open knobs that differ in these fields only."""
        lengths = sorted(tokens for _, _, tokens, _ in self._responses)
        for choice in self._choices:
            plain = choice.score_on == "batch" and not choice.delta  # decodes in one call
            sizes = () if plain else self._chunks(lengths[-1])
            for tokens in dict.fromkeys([best.chunk_tokens, *sizes]):
                knobs = replace(choice, chunk_tokens=tokens)
                same = replace(knobs, **{name: getattr(best, name) for name in fields}) == best
                if same and knobs != best and self._is_open(knobs):
                    yield knobs

    def _is_open(self, knobs: RoundKnobs) -> bool:
        """Return whether knobs are permitted, and were not rejected lately."""
        until, _ = self._rejections.get(repr(knobs), (0, 0))
        chunk = knobs.chunk_tokens
        permitted = any(replace(choice, chunk_tokens=chunk) == knobs for choice in self._choices)
        return permitted and self._round >= until

    def _chunks(self, longest: int) -> list[int]:
        """Return sizes to choose from: three parts of a long response, or the one by hand."""
        if self._schedule.chunk_tokens:
            return [self._schedule.chunk_tokens]
        power = 1 << max(longest - 1, 1).bit_length()
        return sorted({max(power // part, SHORTEST) for part in (32, 8, 2)})

    @property
    def _rounds_known(self) -> int:
        return max(1, min(REMEMBERED, len(self._responses) // self._size))

    def _seconds_to_search(self, rounds: int) -> float:
        return SEARCHED * self._seconds_to_simulate(WARM // 2 + rounds)

    def _seconds_to_simulate(self, rounds: int) -> float:
        turns = fmean(len(turns) for *_, turns in self._responses)
        steps_s = STEP_S * self._settings.weight_sync_interval
        return rounds * (steps_s + RESPONSE_S * self._size * (1 + TURN * turns))

    def _simulated(
        self, cluster: Cluster, knobs: RoundKnobs, responses: Sequence[list[Any]], rounds: int
    ) -> float:
        """Return the tokens per second that are trained on in so many rounds."""
        warm = WARM if knobs.lag or knobs.delta else 0
        interval = self._settings.weight_sync_interval
        steps = (warm + rounds) * interval
        workload = workload_of(cluster.workload, responses, steps + interval)
        schedule = fixed(self._schedule, knobs)
        twin = cluster.model_copy(update={"workload": workload, "schedule": schedule})
        self._simulated_s += self._seconds_to_simulate(warm + rounds)
        with ThreadPoolExecutor(1) as thread:  # because this thread's event loop is running
            result = thread.submit(simulate, twin, steps=steps).result()
        measured = result.steps[warm * interval :]
        tokens = sum(s["perf/throughput"] * s["timing_s/step"] for s in measured)
        return tokens / sum(s["timing_s/step"] for s in measured)


def workload_of(workload: Workload, responses: Sequence[list[Any]], steps: int) -> Workload:
    """Return the workload with these responses (:meth:`AutoTuner._remember`), repeated."""
    prompts = responses[:: workload.samples_per_prompt]
    update: dict[str, Any] = {
        "steps": steps,
        "chunks": (),
        "deltas": (),
        "prompt_tokens": Replayed(tokens=tuple(max(tokens, 1) for _, tokens, _, _ in prompts)),
        "response_tokens": Replayed(tokens=tuple(tokens for _, _, tokens, _ in responses)),
    }
    if workload.episodes:
        turns = tuple(tuple(map(tuple, turns)) for *_, turns in responses if turns)
        episodes = workload.episodes.model_copy(update={"recorded": turns})
        update["episodes"] = episodes.at_once() if episodes.work_s else episodes
    return workload.model_copy(update=update)


def fixed(schedule: ScheduleConfig, knobs: RoundKnobs) -> ScheduleConfig:
    """Return the schedule with these knobs in every round."""
    limits = schedule.knobs
    return schedule.model_copy(
        update={
            "preset": "sync",
            "score_on": knobs.score_on,
            "overcommit": knobs.delta,
            "lag": knobs.lag,
            "chunk_tokens": knobs.chunk_tokens,
            "migrate": limits.migrate,
            "hold": limits.hold,
            "train_on": knobs.train_on,
            "max_carries": schedule.carries,
        }
    )


def settling(before: RoundKnobs, after: RoundKnobs) -> int:
    """Return the rounds after a change until a round has only work of the new knobs: those under
    way, one in which the learner meets the generator, and two that trains on more short responses.
    """
    return before.lag + (before.lag != after.lag) + 2 * (before.delta != after.delta)


def speed(rounds: Sequence[tuple[float, float, int]]) -> float:
    """Return the tokens per second of rounds."""
    return sum(tokens for tokens, _, _ in rounds) / max(sum(s for _, s, _ in rounds), 1e-9)


def text(knobs: RoundKnobs) -> str:
    values = f"overcommit {knobs.delta}, lag {knobs.lag}, chunk tokens {knobs.chunk_tokens}"
    groups = ", train on group" if knobs.train_on == "group" else ""
    return f"score on {knobs.score_on}, {values}{groups}"
