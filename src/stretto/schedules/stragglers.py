"""The choice of R_t by simulation: when it pays to gather stragglers."""

from __future__ import annotations

from heapq import heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import ConfigError
from stretto.schedules.feedback import Feedback
from stretto.schedules.latency import LatencyModel, drain_times
from stretto.schedules.lengths import LengthModel, under_way
from stretto.schedules.migration import MigrationLimits, MigrationPlan, Remaining, plan

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SHARES = tuple(percent / 100 for percent in range(5, 100, 5))
"""Thresholds that are simulated, as shares of the batch."""
SIMULATED = 1024
"""Responses in a simulation, over all its replicas."""
EARLY_STEPS = (1, 2, 4, 8)
"""Steps after which R_t is chosen anew, while little is known."""
WORTH = 0.98
"""Migration is chosen if it is predicted to take less than this share of the time without."""


class AutoMigration:
    """A policy that chooses R_t by simulation, as lengths drift (RLHFuse, inter-stage fusion).

    Generation and scoring of a batch are simulated for R_t at 5 %, 10 %, .. 95 % of it and without
    migration: lengths from the recent ones, seconds of a decode step from the recent calls, moves
    from :func:`plan`. What is in flight beyond the batch is decoded and moved with it, and the
    first to end make the batch. A generator whose rollouts have all ended or moved away scores what
    has finished. R_t is 0 until there is something to simulate from, and when migration does not
    save at least 2 %.

    State: R_t, steps seen, rollouts beyond the batch, lengths, decode calls.

    Args:
        score_tokens_per_s: tokens, prompts included, that the devices of one free generator score
            a second, by all scorers that run on them; 0 where none does, so that nothing is gained.
        every: steps from one decision to the next.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        limits: MigrationLimits,
        batch: int,
        score_tokens_per_s: float,
        *,
        prompt_tokens: int = 0,
        every: int = 20,
        seed: int = 0,
    ) -> None:
        if min(batch, every) < 1 or min(score_tokens_per_s, prompt_tokens) < 0:
            raise ConfigError(
                "batch and every are at least 1, score_tokens_per_s and prompt_tokens at least 0; "
                f"got {batch}, {every}, {score_tokens_per_s} and {prompt_tokens}"
            )
        self._limits, self._batch = limits, batch
        self._score_tokens_per_s, self._prompt_tokens = score_tokens_per_s, prompt_tokens
        self._every, self._seed = every, seed
        self._lengths, self._latency = LengthModel(max(1024, 4 * batch)), LatencyModel()
        self._threshold, self._steps, self._beyond = 0, 0, 0

    def threshold(self) -> int:
        """R_t in rollouts."""
        return self._threshold

    def plan(self, remaining: Remaining) -> MigrationPlan:
        """Return the plan of :func:`~stretto.schedules.migration.plan` within the limits."""
        return plan(remaining, self._limits)

    def observe(self, feedback: Feedback) -> None:
        """Take in lengths and decode calls, and decide anew if it is time."""
        self._lengths.observe(feedback.lengths)
        self._latency.observe(feedback.decode)
        self._steps, self._beyond = self._steps + 1, feedback.beyond
        due = self._steps in EARLY_STEPS or self._steps % self._every == 0
        if due and self._score_tokens_per_s and len(self._lengths) and len(self._latency):
            self._threshold = self._best()

    def state_dict(self) -> dict[str, Any]:
        """Return R_t, the counts, the lengths and the decode calls, as plain data."""
        return {
            "threshold": self._threshold,
            "steps": self._steps,
            "beyond": self._beyond,
            "lengths": self._lengths.state_dict(),
            "latency": self._latency.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._threshold, self._steps = state["threshold"], state["steps"]
        self._beyond = state["beyond"]
        self._lengths.load_state_dict(state["lengths"])
        self._latency.load_state_dict(state["latency"])

    def _best(self) -> int:
        rng = np.random.default_rng([self._seed, self._steps])
        thresholds = [0, *(round(share * self._batch) for share in SHARES)]
        in_flight = self._batch + self._beyond
        step_seconds = self._latency.step_seconds(np.arange(1, in_flight + 1))
        seconds = np.zeros(len(thresholds))
        fresh = self._lengths.sample(rng.random((max(2, SIMULATED // self._batch), self._batch)))
        carried = under_way(fresh[:, :, None], self._batch, self._beyond, 1)[:2]
        before, left = (
            np.concatenate([tokens[:, :, 0], own], axis=1)
            for tokens, own in zip(carried, (np.zeros_like(fresh), fresh), strict=True)
        )
        for had, gets in zip(before, left, strict=True):
            run = _Run(had, gets, self._batch, step_seconds, self._limits, self._prompt_tokens)
            for i, threshold in enumerate(thresholds):
                seconds[i] += _scored_s(*run.ends(threshold), self._score_tokens_per_s)
        best = int(seconds.argmin())
        return thresholds[best] if seconds[best] < WORTH * seconds[0] else 0


class _Run:
    """Generation of one batch, with migration at any threshold.

    Args:
        before: tokens that responses in flight have already; shape [in flight].
        left: tokens that they still get; shape [in flight].
        batch: responses that have to end.
        step_seconds: of a decode step of 1, 2, .. rows.
    """

    def __init__(
        self,
        before: IntArray,
        left: IntArray,
        batch: int,
        step_seconds: FloatArray,
        limits: MigrationLimits,
        prompt_tokens: int,
    ) -> None:
        self._batch, self._step_seconds, self._limits = batch, step_seconds, limits
        engines = range(limits.engines)
        orders = [
            i + len(engines) * left[i :: len(engines)].argsort(kind="stable") for i in engines
        ]
        self._shares = [left[order] for order in orders]
        self._known = [(before + prompt_tokens)[order] for order in orders]
        self._ends = [drain_times(step_seconds, share) for share in self._shares]

    def ends(self, threshold: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the ends of the batch's responses, their tokens, and the ends of generators' work.

        Each response's tokens include its prompt.

        Seconds from the start of generation; shapes [batch], [batch], [generators].
        """
        ends = [share.copy() for share in self._ends]
        free: FloatArray = np.array([share.max(initial=0.0) for share in ends])
        if threshold:
            first = np.sort(np.concatenate(ends))[: self._batch]
            moment_s = float(first[-1 - threshold]) if threshold < self._batch else 0.0
            self._migrate(moment_s, ends, free)
        every_end = np.concatenate(ends)
        chosen = np.argsort(every_end, kind="stable")[: self._batch]
        tokens = (np.concatenate(self._shares) + np.concatenate(self._known)).astype(np.float64)
        # The others end in a later round: with this one the generators are free.
        return every_end[chosen], tokens[chosen], np.minimum(free, every_end[chosen].max())

    def _migrate(self, moment_s: float, ends: list[FloatArray], free: FloatArray) -> None:
        """Write down what changes when stragglers move at ``moment_s``."""
        so_far = [
            float(np.interp(moment_s, [0.0, *ends_s], [0.0, *share]))
            for ends_s, share in zip(self._ends, self._shares, strict=True)
        ]
        places = [[(i, k) for k in np.flatnonzero(e > moment_s)] for i, e in enumerate(ends)]
        decoding = [place for of_one in places for place in of_one]
        number = {place: id_ for id_, place in enumerate(decoding)}
        tokens = [so_far[i] + float(self._known[i][k]) for i, k in decoding]
        chosen = plan(
            [[(number[p], int(tokens[number[p]])) for p in of_one] for of_one in places],
            self._limits,
        )
        holder = [i for i, _ in decoding]
        ready = np.full(len(ends), moment_s)
        for move in chosen.moves:
            holder[move.rollout_id] = move.destination
            moving_s = self._limits.moving_s(tokens[move.rollout_id])
            ready[move.destination] += moving_s
            ready[move.source] += moving_s * move.with_cache
        for target in set(holder):
            held = [place for place, i in zip(decoding, holder, strict=True) if i == target]
            left = np.array([self._shares[i][k] - so_far[i] for i, k in held])
            order = np.argsort(left, kind="stable")
            times = ready[target] + drain_times(self._step_seconds, left[order])
            for place, time_s in zip(order, times, strict=True):
                i, k = held[place]
                ends[i][k] = time_s
            free[target] = times[-1]
        for source in chosen.freed:
            free[source] = min(free[source], ready[source])


def _scored_s(ends: FloatArray, tokens: FloatArray, free: FloatArray, tokens_per_s: float) -> float:
    """Return when everything is scored: seconds from the start of generation.

    Responses are scored one at a time on each free generator, in the order in which they ended.

    Args:
        ends: when each response is there to be scored; shape [batch].
        tokens: of each, with its prompt.
        free: when each generator becomes free; shape [generators].
    """
    order = np.argsort(ends, kind="stable")
    servers, done = sorted(free.tolist()), 0.0
    for end, work in zip(
        ends[order].tolist(), (tokens[order] / tokens_per_s).tolist(), strict=True
    ):
        scored = max(servers[0], end) + work
        heapreplace(servers, scored)
        done = max(done, scored)
    return done
