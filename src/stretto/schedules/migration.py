"""Plans that move stragglers together: RLHFuse's inter-stage fusion.

Once few responses are still being decoded, they are gathered on few of the generators. The devices
of the others are free, and score what has finished. ``stragglers.py`` decides when that pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.errors import ConfigError
from stretto.schedules.feedback import Feedback

Remaining = Sequence[Sequence[tuple[int, int]]]
"""Rollouts that each generator is decoding: id, and prompt and response tokens so far."""


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """The limits of what generators can hold and move.

    Attributes:
        engines: generators.
        best_batch: rows one of them decodes before a step takes notably longer (BS_max).
        cache_tokens: tokens whose keys and values one of them can hold (C).
        longest_tokens: prompt and response tokens of the longest possible rollout (M).
        prefill_tokens_per_s: how fast one of them prefills.
        transfer_tokens_per_s: how fast keys and values move from one to another.

    Raises:
        ConfigError: a number is not positive, or a generator cannot hold the longest rollout.
    """

    engines: int
    best_batch: int
    cache_tokens: int
    longest_tokens: int
    prefill_tokens_per_s: float
    transfer_tokens_per_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is above 0; got {getattr(self, name)}")
        if self.cache_tokens < self.longest_tokens:
            raise ConfigError(
                f"a generator's cache of {self.cache_tokens} tokens does not hold one rollout of "
                f"{self.longest_tokens}; enlarge the cache or lower the token limit"
            )

    @property
    def rows(self) -> int:
        """Rollouts that one generator takes: no more than best_batch, and all may be longest ones.

        The paper's m >= R M / C counts parts of rollouts; whole ones are counted here, so that they
        really fit.
        """
        return min(self.best_batch, self.cache_tokens // self.longest_tokens)

    @property
    def with_cache(self) -> bool:
        """Return whether moving keys and values takes less time than prefilling them again."""
        return self.transfer_tokens_per_s > self.prefill_tokens_per_s

    def moving_s(self, tokens: float) -> float:
        """Seconds to move a rollout of so many tokens, the faster way."""
        return tokens / max(self.transfer_tokens_per_s, self.prefill_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Move:
    """A rollout on its way from one generator to another.

    Attributes:
        with_cache: move its keys and values; else its tokens are prefilled again.
    """

    rollout_id: int
    source: int
    destination: int
    with_cache: bool


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """The moves, and the generators that have nothing left to decode afterwards."""

    moves: Sequence[Move]
    freed: Sequence[int]


def destinations(remaining: Sequence[int], limits: MigrationLimits) -> Sequence[int]:
    """The generators that take all remaining rollouts, in ascending order.

    As few as keep to both limits (RLHFuse: ``m >= R / BS_max`` and ``m >= R M / C``), and of all
    generators those with the most rollouts left, so that the fewest move.

    Args:
        remaining: rollouts that each generator is decoding.
    """
    m = -(-sum(remaining) // limits.rows)
    by_load = sorted(range(len(remaining)), key=lambda i: (-remaining[i], i))
    return sorted(by_load[:m])


def plan(remaining: Remaining, limits: MigrationLimits) -> MigrationPlan:
    """Gather what remains on as few generators as the limits allow.

    The longest move first, each to the destination with the fewest rollouts then. A destination
    that holds more rollouts than the limits allow gives away its shortest as well.
    """
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
        moves.append(Move(id_, source, destination, limits.with_cache))
    return MigrationPlan(moves, [i for i in range(len(remaining)) if i not in targets])


class MigrationPolicy(Protocol):
    """A controller that decides when stragglers move, and where to."""

    def threshold(self) -> int:
        """R_t: stragglers move once the round waits for no more than so many; 0 is never."""
        ...

    def plan(self, remaining: Remaining) -> MigrationPlan:
        """Return the moves to make when that number is reached."""
        ...

    def observe(self, feedback: Feedback) -> None:
        """Learn from the step that has just ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the policy has learnt, as plain data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        ...


class FixedMigration:
    """A policy that moves stragglers at a fixed share of the batch. There is no state.

    Raises:
        ConfigError: the fraction is not within [0, 1].
    """

    def __init__(self, limits: MigrationLimits, batch: int, fraction: float) -> None:
        if not 0 <= fraction <= 1:
            raise ConfigError(f"R_t is a share of the batch, from 0 to 1; got {fraction}")
        self._limits, self._threshold = limits, round(fraction * batch)

    def threshold(self) -> int:
        """R_t in rollouts."""
        return self._threshold

    def plan(self, remaining: Remaining) -> MigrationPlan:
        """Return the plan of :func:`plan` within the limits."""
        return plan(remaining, self._limits)

    def observe(self, feedback: Feedback) -> None:
        """Learn nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing: there is no state."""
