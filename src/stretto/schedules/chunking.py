"""Chunk size: tokens per rollout that are decoded before scorers get them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Protocol, runtime_checkable

from stretto.errors import ConfigError
from stretto.schedules.controller import Controller, Feedback, Fixed
from stretto.schedules.predictors import LengthModel
from stretto.stateful import Stateful

SHORTEST = 8  # tokens. In smaller chunks the calls cost more than they overlap
LONG = 0.95  # quantile of lengths that counts as a long response
REMEMBERED = 1024  # recent lengths for this quantile
OF_RESPONSES, OF_TURNS = (128, 256, 512), (8, 16, 32)
"""Sizes to try: small for episodes, because an answered rollout waits until a chunk ends."""
ABOUT = 1.05  # times within this factor are equal, because steps vary as much anyway


@runtime_checkable
class ChunkSize(Controller, Protocol):
    """Controller that sets the chunk size for each step."""

    @property
    def tokens(self) -> int:
        """Tokens per rollout and decode call in the next step."""


class FixedChunk(Fixed):
    """Given chunk sizes, one per step. The last one stays."""

    def __init__(self, *sizes: int) -> None:
        super().__init__("chunk_tokens", 1, sizes)

    @property
    def tokens(self) -> int:
        return self._now


class TunedChunk(Stateful):
    """Controller that regularly tries sizes and keeps the fastest (OPPO, intra-step overlap).

    Small chunks cost calls and contention. Large ones leave no overlap. Each window of steps starts
    with turns of all candidates, for up to a quarter of it or one turn each. Then the size with the
    lowest median time per decoded token is used, or the largest of about the same speed, because it
    needs fewer calls. A run's first step has one-time costs. It uses the middle size, untimed.

    Once per window, candidates are halved until the largest is no longer than a long response, and
    equal ones are merged. Long is the 95th percentile of recent lengths, but the token limit in the
    first window, because the first responses to finish are short.
    """

    saved = ("_sizes", "_tokens", "_place", "_times", "_lengths")

    def __init__(
        self, candidates: Sequence[int] = OF_RESPONSES, window: int = 50, *, max_new_tokens: int
    ) -> None:
        if not candidates or min(candidates) < SHORTEST:
            raise ConfigError(
                f"chunk sizes to try have at least {SHORTEST} tokens each; got {tuple(candidates)}",
                "chunks-too-short",
            )
        if window <= len(candidates):
            raise ConfigError(
                f"a window of {window} steps is too short to try {len(candidates)} chunk sizes and "
                f"then use the best; make it longer than {len(candidates)} steps",
                "window-too-short",
            )
        self._candidates, self._window = sorted(set(candidates)), window
        self._lengths = LengthModel(REMEMBERED)
        self._sizes = self._scaled(max_new_tokens)
        self._tokens = self._sizes[len(self._sizes) // 2]
        self._place = -1
        self._times: list[list[float]] = []

    @property
    def tokens(self) -> int:
        return self._tokens

    def observe(self, feedback: Feedback) -> None:
        self._lengths.observe(feedback.lengths)
        decoded = sum(sample.rows * sample.steps for sample in feedback.decode)
        if 0 <= self._place < self._trial_steps and decoded:
            self._times[self._place % len(self._sizes)].append(feedback.seconds / decoded)
        self._place += 1
        if self._place == self._window:
            self._place = 0
            self._sizes = self._scaled(self._lengths.quantile(LONG))
        if self._place == 0:
            self._times = [[] for _ in self._sizes]
        if self._place < self._trial_steps:
            self._tokens = self._sizes[self._place % len(self._sizes)]
        elif self._place == self._trial_steps:
            self._tokens = self._fastest()

    @property
    def _trial_steps(self) -> int:
        turns = max(1, self._window // (4 * len(self._sizes)))
        return turns * len(self._sizes) if len(self._sizes) > 1 else 0

    def _scaled(self, long_tokens: float) -> list[int]:
        sizes = self._candidates
        while sizes[-1] > max(long_tokens, SHORTEST):
            sizes = sorted({max(SHORTEST, size // 2) for size in sizes})
        return sizes

    def _fastest(self) -> int:
        timed = [(median(t), size) for t, size in zip(self._times, self._sizes, strict=True) if t]
        if not timed:
            return self._sizes[len(self._sizes) // 2]
        best_s, _ = min(timed)
        return max(size for seconds, size in timed if seconds <= ABOUT * best_s)
