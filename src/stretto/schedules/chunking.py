"""The size of chunks: tokens that the actor decodes before the scorers are given them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Protocol, runtime_checkable

from stretto.errors import ConfigError
from stretto.schedules.controller import Controller, Feedback, Fixed, Stateful
from stretto.schedules.models import LengthModel

SHORTEST = 8  # tokens in a chunk, at least; below that the calls cost more than they overlap
LONG = 0.95  # the quantile of the lengths from which a response counts as long
REMEMBERED = 1024  # lengths that the quantile is taken from
OF_RESPONSES, OF_TURNS = (128, 256, 512), (8, 16, 32)
"""Sizes that are tried. One that environments have answered is decoded from the next chunk on, and
waits for the end of the one under way; so chunks of episodes are short."""
ABOUT = 1.05  # times that differ by a smaller factor are equal: steps differ by as much anyway


@runtime_checkable
class ChunkSize(Controller, Protocol):
    """A controller that decides the size of chunks, step by step."""

    @property
    def tokens(self) -> int:
        """Tokens that one decode call of the coming step gives each rollout."""


class FixedChunk(Fixed):
    """Sizes of chunks that are given: one of them never changes, several serve one step each."""

    def __init__(self, *sizes: int) -> None:
        super().__init__("chunk_tokens", 1, sizes)

    @property
    def tokens(self) -> int:
        return self._now


class TunedChunk(Stateful):
    """A controller that tries sizes now and then and keeps the fastest (OPPO, intra-step overlap).

    Small chunks cost calls and contention, large ones leave nothing to overlap. At the start of
    every window of steps the candidates take turns for up to a quarter of it; then the one with the
    least median time per decoded token serves, or the largest of those about as fast, as it needs
    fewer calls. A run's first step pays for what is done once, and runs the middle candidate.

    Once a window, all candidates are halved together until the largest is no longer than a long
    response: the 95th percentile of recent lengths; in the first window the token limit, as the
    first to finish are short whatever the others are. Those that become equal are one.
    """

    saved = ("sizes", "tokens", "place", "times", "lengths")

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
