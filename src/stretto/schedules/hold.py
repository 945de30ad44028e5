"""The KV cache of episodes that wait for their environment: the knob ``hold``.

It is kept on the device, offloaded to host memory, or dropped and recomputed. Keeping is free while
there is room. Beyond that, ``auto`` releases the caches that free the most room for the longest
time, at the lowest cost in engine seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stretto.errors import ConfigError
from stretto.schedules.controller import check_least
from stretto.schedules.rollout import Rollout
from stretto.stateful import Stateful
from stretto.types import Hold

WINDOW = 256  # latest waits remembered per kind


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """KV cache capacity of an engine, and its speed of restoring a released cache."""

    cache_tokens: int  # capacity. 0: unlimited
    prefill_tokens_per_s: float  # speed of recomputing
    copy_tokens_per_s: float = 0.0  # speed of copying to the host, and back. 0: impossible
    apart: bool = False  # whether rows being decoded have separate room

    def __post_init__(self) -> None:
        check_least(0, cache_tokens=self.cache_tokens, copy_tokens_per_s=self.copy_tokens_per_s)
        if self.prefill_tokens_per_s <= 0:
            speed = self.prefill_tokens_per_s
            raise ConfigError(f"prefill_tokens_per_s is above 0; got {speed}", "not-positive")

    def let_go(self, tokens: int) -> tuple[Hold, float]:
        """Return the cheaper way to release the cache of so many tokens, and its seconds."""
        remake_s = tokens / self.prefill_tokens_per_s
        if not self.copy_tokens_per_s:
            return "remake", remake_s
        offload_s = 2 * tokens / self.copy_tokens_per_s  # there and back
        return ("offload", offload_s) if offload_s < remake_s else ("remake", remake_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rollout that waits for its environment, and whose KV cache an engine keeps."""

    rollout_id: int
    tokens: int
    since_s: float
    kind: str = ""  # the environment's name if known, because its waits are similar


@runtime_checkable
class HoldPolicy(Protocol):
    """Decides on the KV cache of waiting rollouts, and learns from past waits."""

    def waited(self, kind: str, seconds: float) -> None:
        """Learn how long a wait took."""

    def decide(self, waiting: Sequence[Waiting], decoding: int, now_s: float) -> Mapping[int, Hold]:
        """Return the treatment of all caches that one engine keeps, by id. The default is to keep.
        ``decoding`` are the tokens of rollouts that it decodes, or is about to.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state as plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


class FixedHold(Stateful):
    """The same treatment for all waits."""

    def __init__(self, how: Hold = "keep") -> None:
        self._how = how

    def waited(self, kind: str, seconds: float) -> None:
        """Learn nothing."""

    def decide(self, waiting: Sequence[Waiting], decoding: int, now_s: float) -> Mapping[int, Hold]:
        return {} if self._how == "keep" else {w.rollout_id: self._how for w in waiting}


class AutoHold(Stateful):
    """Releases caches only if there is no room, and the cheapest first.

    A rollout of n tokens with w more expected seconds of waiting frees ``n w`` token-seconds, and
    costs the seconds in which the engine copies or recomputes its cache. The lowest cost per
    token-second goes first, until the rest fits. A cache that costs w or more is never released.
    """

    saved = ("_seconds",)

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._seconds: dict[str, list[float]] = {}  # of the latest waits, by kind

    def waited(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = [*self._seconds.get(kind, ()), seconds][-WINDOW:]

    def remaining_s(self, kind: str, waited_s: float) -> float:
        """Predict the rest of a wait: the mean rest of remembered waits that lasted longer.

        If none did, it is the time waited so far, as in a heavy tail. An unknown kind uses the
        waits of all kinds.
        """
        all_seconds = [s for waits in self._seconds.values() for s in waits]
        longer = [s for s in self._seconds.get(kind, all_seconds) if s > waited_s]
        return sum(longer) / len(longer) - waited_s if longer else waited_s

    def decide(self, waiting: Sequence[Waiting], decoding: int, now_s: float) -> Mapping[int, Hold]:
        capacity = self._limits.cache_tokens
        excess_tokens = (
            sum(w.tokens for w in waiting) + (0 if self._limits.apart else decoding) - capacity
        )
        if not capacity or excess_tokens <= 0:
            return {}
        offers: list[tuple[float, int, int, Hold]] = []
        for w in waiting:
            how, cost_s = self._limits.let_go(w.tokens)
            left_s = self.remaining_s(w.kind, now_s - w.since_s)
            if left_s > cost_s:
                offers.append((cost_s / (w.tokens * left_s), w.rollout_id, w.tokens, how))
        treatments: dict[int, Hold] = {}
        for _, id_, tokens, how in sorted(offers):
            if excess_tokens <= 0:
                break
            treatments[id_] = how
            excess_tokens -= tokens
        return treatments


class Parked:
    """The waiting rollouts of all engines, and which of them still have their KV cache."""

    def __init__(self, policy: HoldPolicy) -> None:
        self._policy = policy
        self._kept: dict[int, Rollout] = {}
        self._since: dict[int, tuple[float, str]] = {}

    def begin(self, rollout: Rollout, now_s: float) -> None:
        self._kept[rollout.id] = rollout
        self._since[rollout.id] = now_s, str(rollout.prompt.data.get("environment", ""))

    def end(self, rollout_id: int, now_s: float | None) -> None:
        """Record that a rollout continues at this time, or (``None``) never."""
        self._kept.pop(rollout_id, None)
        since_s, kind = self._since.pop(rollout_id, (0.0, None))
        if kind is not None and now_s is not None:
            self._policy.waited(kind, now_s - since_s)

    def void(self) -> None:
        """Record new weights, under which caches must be recomputed."""
        self._kept.clear()

    def decide(
        self, rollout_ids: Iterable[int], decoding: int, now_s: float
    ) -> Mapping[Hold, Sequence[int]]:
        """Return the ids of caches to release at one engine, by treatment."""
        rollouts = (self._kept[id_] for id_ in sorted(rollout_ids) if id_ in self._kept)
        waiting = [Waiting(r.id, r.total_tokens, *self._since[r.id]) for r in rollouts]
        ids_by_treatment: dict[Hold, list[int]] = {}
        for id_, how in self._policy.decide(waiting, decoding, now_s).items():
            if how != "keep":
                del self._kept[id_]
                ids_by_treatment.setdefault(how, []).append(id_)
        return ids_by_treatment
