"""Plans that move stragglers to few generators, so that the rest can score (RLHFuse)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Protocol, runtime_checkable

import numpy as np

from stretto.bounds import ceil_div
from stretto.errors import ConfigError
from stretto.schedules.controller import Controller, Feedback, Fixed, check_least
from stretto.schedules.predictors import FloatArray, IntArray, Simulating, drain_times, under_way

SHARES = tuple(percent / 100 for percent in range(5, 100, 5))  # simulated R_t, as shares of a batch
SIMULATED = 1024  # responses in a simulation, over all its replicas
EARLY_STEPS = (1, 2, 4, 8)  # after which R_t is chosen again, because data are few
WORTH = 0.98  # migration must take less than this share of the time without it

Remaining = Sequence[Sequence[tuple[int, int]]]
"""Rollouts decoded by each generator: id, and prompt and response tokens so far."""


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """Capacity and speed of each generator, and of the scorers on its devices."""

    engines: int
    best_batch: int  # rows in a decode step, beyond which it takes notably longer (BS_max)
    cache_tokens: int  # capacity of its KV cache (C)
    longest_tokens: int  # prompt and response tokens of the longest possible rollout (M)
    prefill_tokens_per_s: float
    transfer_tokens_per_s: float  # of a KV cache between two generators
    score_tokens_per_s: float = 0.0  # of all scorers on a free one's devices. 0: there are none
    prompt_tokens: int = 0  # length of a typical prompt

    def __post_init__(self) -> None:
        check_least(0, score_tokens_per_s=self.score_tokens_per_s, prompt_tokens=self.prompt_tokens)
        for name in self.__slots__[:6]:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is above 0; got {getattr(self, name)}", "not-positive")
        if self.cache_tokens < self.longest_tokens:
            raise ConfigError(
                f"a generator's cache of {self.cache_tokens} tokens does not hold one rollout of "
                f"{self.longest_tokens}; enlarge the cache or lower the token limit",
                "cache-too-small",
            )

    @property
    def rows(self) -> int:
        """Rollouts for one generator: up to best_batch, and so few that the longest would fit. The
        paper's m >= R M / C allows parts of rollouts. Rounding down makes them fit.
        """
        return min(self.best_batch, self.cache_tokens // self.longest_tokens)

    @property
    def with_cache(self) -> bool:
        return self.transfer_tokens_per_s > self.prefill_tokens_per_s

    def moving_s(self, tokens: float) -> float:
        return tokens / max(self.transfer_tokens_per_s, self.prefill_tokens_per_s)


@dataclass(frozen=True, slots=True)
class RolloutMove:
    """The move of one rollout between generators."""

    rollout_id: int
    source: int
    destination: int
    with_cache: bool  # whether its KV cache moves along, or it is prefilled again


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """The moves, and the generators that have nothing left to decode afterwards."""

    moves: Sequence[RolloutMove]
    freed: Sequence[int]


def destinations(remaining: Sequence[int], limits: MigrationLimits) -> Sequence[int]:
    """Return the fewest generators with room for all rollouts: the ones that have most of them."""
    m = ceil_div(sum(remaining), limits.rows)
    by_load = sorted(range(len(remaining)), key=lambda i: (-remaining[i], i))
    return sorted(by_load[:m])


def plan(remaining: Remaining, limits: MigrationLimits) -> MigrationPlan:
    """Gather rollouts on few generators, the longest first, each on the least loaded one."""
    targets = destinations([len(r) for r in remaining], limits)
    if len(targets) == len(remaining):
        return MigrationPlan((), ())
    leaving = []
    for i, rollouts in enumerate(remaining):
        longest = sorted(rollouts, key=lambda r: (-r[1], r[0]))
        leaving += [(-tokens, id_, i) for id_, tokens in longest[limits.rows * (i in targets) :]]
    load = {i: min(len(remaining[i]), limits.rows) for i in targets}
    moves = []
    for _, id_, source in sorted(leaving):
        destination = min(targets, key=lambda i: (load[i], i))
        load[destination] += 1
        moves.append(RolloutMove(id_, source, destination, limits.with_cache))
    return MigrationPlan(moves, [i for i in range(len(remaining)) if i not in targets])


@runtime_checkable
class MigrationPolicy(Controller, Protocol):
    """Controller that decides when stragglers move, and to which generators."""

    def threshold(self) -> int:
        """Return R_t. Stragglers move once the round waits for so many or fewer. 0: never."""

    def plan(self, remaining: Remaining) -> MigrationPlan:
        """Return the moves to make at the threshold."""


class FixedMigration(Fixed):
    """A policy that moves stragglers at a fixed share of the batch."""

    def __init__(self, limits: MigrationLimits, batch: int, fraction: float) -> None:
        if not 0 <= fraction <= 1:
            raise ConfigError(
                f"R_t is a share of the batch, from 0 to 1; got {fraction}", "not-a-share"
            )
        super().__init__("R_t", 0, [round(fraction * batch)])
        self._limits = limits

    def threshold(self) -> int:
        return self._now

    def plan(self, remaining: Remaining) -> MigrationPlan:
        return plan(remaining, self._limits)


class AutoMigration(Simulating):
    """A policy that chooses R_t by simulation, as lengths drift (RLHFuse, inter-stage fusion).

    Simulates generation and scoring of a batch without migration, and with R_t at 5 %, 10 %, ...,
    95 % of it. Lengths come from recent responses, decode seconds from recent calls, and moves from
    :func:`plan`. Rollouts in flight beyond the batch take part, and the first to end make the
    batch. A generator without rollouts scores finished ones at ``score_tokens_per_s`` (prompts too,
    by all scorers on its devices, 0 if there are none). R_t is 0 before the first data, and if
    migration saves less than 2 %. It is chosen after steps 1, 2, 4, 8 and multiples of ``every``.
    """

    saved = (*Simulating.saved, "_threshold", "_beyond")

    def __init__(
        self, limits: MigrationLimits, batch: int, *, every: int = 20, seed: int = 0
    ) -> None:
        check_least(1, batch=batch, every=every)
        self._limits, self._batch = limits, batch
        self._every, self._seed = every, seed
        super().__init__(max(1024, 4 * batch))
        self._threshold = self._beyond = 0

    def threshold(self) -> int:
        return self._threshold

    def plan(self, remaining: Remaining) -> MigrationPlan:
        return plan(remaining, self._limits)

    def observe(self, feedback: Feedback) -> None:
        self._learn(feedback)
        self._beyond = feedback.beyond
        due = self._steps in EARLY_STEPS or self._steps % self._every == 0
        if due and self._limits.score_tokens_per_s and self._knows_enough:
            self._threshold = self._best()

    def _best(self) -> int:
        rng = np.random.default_rng([self._seed, self._steps])
        thresholds = [*dict.fromkeys([0, *(round(share * self._batch) for share in SHARES)])]
        in_flight = self._batch + self._beyond
        step_seconds = self._latency.step_seconds(np.arange(1, in_flight + 1))
        seconds = np.zeros(len(thresholds))
        fresh = self._lengths.sample(rng.random((max(2, SIMULATED // self._batch), self._batch)))
        carried = under_way(fresh[:, :, None], self._batch, self._beyond, 1)[:2]
        so_far, remaining = (
            np.concatenate([carried_tokens[:, :, 0], fresh_tokens], axis=1)
            for carried_tokens, fresh_tokens in zip(
                carried, (np.zeros_like(fresh), fresh), strict=True
            )
        )
        for trial_so_far, trial_remaining in zip(so_far, remaining, strict=True):
            trial = _Generation(
                trial_so_far, trial_remaining, self._batch, step_seconds, self._limits
            )
            for i, threshold in enumerate(thresholds):
                seconds[i] += _scored_s(*trial.ends(threshold), self._limits.score_tokens_per_s)
        best = int(seconds.argmin())
        return thresholds[best] if seconds[best] < WORTH * seconds[0] else 0


class _Generation:
    """The simulated generation of one batch, with migration at any threshold."""

    def __init__(
        self,
        before: IntArray,  # tokens of responses in flight so far, [in flight]
        remaining: IntArray,  # tokens that they will still get, [in flight]
        batch: int,  # responses that must end
        step_seconds: FloatArray,  # of a decode step of 1, 2, .. rows
        limits: MigrationLimits,
    ) -> None:
        self._batch = batch
        self._step_seconds = step_seconds
        self._limits = limits
        engines = range(limits.engines)
        orders = [
            i + len(engines) * remaining[i :: len(engines)].argsort(kind="stable") for i in engines
        ]
        self._shares = [remaining[order] for order in orders]
        self._known = [(before + limits.prompt_tokens)[order] for order in orders]
        self._ends = [drain_times(step_seconds, share) for share in self._shares]

    def ends(self, threshold: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return responses' ends and tokens, [batch], and generators' ends, [generators], in s."""
        ends = [share.copy() for share in self._ends]
        free: FloatArray = np.array([share.max(initial=0.0) for share in ends])
        if threshold:
            first = np.sort(np.concatenate(ends))[: self._batch]
            moment_s = float(first[-1 - threshold]) if threshold < self._batch else 0.0
            self._migrate(moment_s, ends, free)
        all_ends = np.concatenate(ends)
        batch = np.argsort(all_ends, kind="stable")[: self._batch]
        tokens = (np.concatenate(self._shares) + np.concatenate(self._known)).astype(np.float64)
        # The rest ends in a later round, so generators are free at the end of this one.
        return all_ends[batch], tokens[batch], np.minimum(free, all_ends[batch].max())

    def _migrate(self, moment_s: float, ends: list[FloatArray], free: FloatArray) -> None:
        so_far = [
            float(np.interp(moment_s, [0.0, *ends_s], [0.0, *share]))
            for ends_s, share in zip(self._ends, self._shares, strict=True)
        ]
        places = [[(i, k) for k in np.flatnonzero(e > moment_s)] for i, e in enumerate(ends)]
        decoding = [place for engine_places in places for place in engine_places]
        number = {place: id_ for id_, place in enumerate(decoding)}
        tokens = [so_far[i] + float(self._known[i][k]) for i, k in decoding]
        migration_plan = plan(
            [
                [(number[p], int(tokens[number[p]])) for p in engine_places]
                for engine_places in places
            ],
            self._limits,
        )
        holder = [i for i, _ in decoding]
        ready = np.full(len(ends), moment_s)
        for move in migration_plan.moves:
            holder[move.rollout_id] = move.destination
            moving_s = self._limits.moving_s(tokens[move.rollout_id])
            ready[move.destination] += moving_s
            ready[move.source] += moving_s * move.with_cache
        for target in set(holder):
            target_places = [
                place for place, i in zip(decoding, holder, strict=True) if i == target
            ]
            remaining = np.array([self._shares[i][k] - so_far[i] for i, k in target_places])
            order = np.argsort(remaining, kind="stable")
            times = ready[target] + drain_times(self._step_seconds, remaining[order])
            for place, time_s in zip(order, times, strict=True):
                i, k = target_places[place]
                ends[i][k] = time_s
            free[target] = times[-1]
        for source in migration_plan.freed:
            free[source] = min(free[source], ready[source])


def _scored_s(ends: FloatArray, tokens: FloatArray, free: FloatArray, tokens_per_s: float) -> float:
    """Return when all responses are scored, if free generators take them in order of their ends."""
    order = np.argsort(ends, kind="stable")
    servers, last_s = sorted(free.tolist()), 0.0
    for end, work in zip(
        ends[order].tolist(), (tokens[order] / tokens_per_s).tolist(), strict=True
    ):
        scored_s = max(servers[0], end) + work
        heapreplace(servers, scored_s)
        last_s = max(last_s, scored_s)
    return last_s
