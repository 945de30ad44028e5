"""What becomes of keys and values while an episode waits for its environment: the knob ``hold``.

They are kept where they are, offloaded to the host's memory, or dropped and made again. Keeping
costs nothing while there is room. Where there is not, those are let go that give up most room for
the longest time, for the fewest seconds of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stretto.errors import ConfigError
from stretto.schedules.controller import Stateful, check_least
from stretto.schedules.rollout import Rollout
from stretto.types import Hold

WINDOW = 256
"""Waits remembered of each kind, the latest."""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """What an engine can keep, and what it takes to have keys and values back.

    Attributes:
        cache_tokens: tokens whose keys and values it can hold; 0: any number.
        prefill_tokens_per_s: tokens that it reads a second, which makes keys and values again.
        copy_tokens_per_s: tokens whose keys and values go to the host a second, or come back; 0
            where they cannot.
        apart: rows that are decoded have other room.
    """

    cache_tokens: int
    prefill_tokens_per_s: float
    copy_tokens_per_s: float = 0.0
    apart: bool = False

    def __post_init__(self) -> None:
        check_least(0, cache_tokens=self.cache_tokens, copy_tokens_per_s=self.copy_tokens_per_s)
        if self.prefill_tokens_per_s <= 0:
            given = self.prefill_tokens_per_s
            raise ConfigError(f"prefill_tokens_per_s is above 0; got {given}", "not-positive")

    def let_go(self, tokens: int) -> tuple[Hold, float]:
        """Return the cheaper way to let keys and values of so many tokens go, and its seconds."""
        remake_s = tokens / self.prefill_tokens_per_s
        if not self.copy_tokens_per_s:
            return "remake", remake_s
        offload_s = 2 * tokens / self.copy_tokens_per_s  # there and back
        return ("offload", offload_s) if offload_s < remake_s else ("remake", remake_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rollout whose environment works, and whose keys and values an engine keeps.

    ``kind`` is what is waited for, as far as that is known; waits of one kind are alike.
    """

    rollout_id: int
    tokens: int
    since_s: float
    kind: str = ""


class WaitModel(Stateful):
    """How long waits take, by their kind, from the latest ones.

    What is left of a wait is expected to be what was left, on average, of those that had lasted as
    long; of a wait that is longer than all of them as much again as it has lasted, which is so at
    any length of a heavy tail. A kind that is not known is taken for a mixture of all.
    """

    saved = ("seconds",)

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def observe(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = [*self._seconds.get(kind, ()), seconds][-WINDOW:]

    def remaining_s(self, kind: str, waited_s: float) -> float:
        every = [s for waits in self._seconds.values() for s in waits]
        longer = [s for s in self._seconds.get(kind, every) if s > waited_s]
        return sum(longer) / len(longer) - waited_s if longer else waited_s


@runtime_checkable
class HoldPolicy(Protocol):
    """What decides on keys and values of rollouts that wait; it learns from waits that are over."""

    def waited(self, kind: str, seconds: float) -> None:
        """Learn how long a wait has taken."""

    def decide(self, waiting: Sequence[Waiting], decoding: int, now_s: float) -> Mapping[int, Hold]:
        """Say what becomes of rollouts that wait at one engine, by id; others are kept.

        Args:
            waiting: all whose keys and values the engine keeps.
            decoding: tokens whose keys and values those take that are decoded, or soon will be.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, as plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""


class FixedHold(Stateful):
    """One way for all waits."""

    def __init__(self, how: Hold = "keep") -> None:
        self._how = how

    def waited(self, kind: str, seconds: float) -> None:
        """Learn nothing."""

    def decide(self, waiting: Sequence[Waiting], decoding: int, now_s: float) -> Mapping[int, Hold]:
        return {} if self._how == "keep" else {w.rollout_id: self._how for w in waiting}


class AutoHold:
    """Lets go only of what there is no room for, and of that what costs least.

    A rollout of n tokens whose wait is expected to last w more seconds gives n w token-seconds of
    room, for the seconds by which the engine is kept from decoding. Those with the fewest of these
    seconds a token-second go first, until the others fit. One whose answer is expected sooner than
    its keys and values would be back is never let go.
    """

    def __init__(self, limits: HoldLimits) -> None:
        self._limits, self._waits = limits, WaitModel()

    def waited(self, kind: str, seconds: float) -> None:
        self._waits.observe(kind, seconds)

    def decide(self, waiting: Sequence[Waiting], decoding: int, now_s: float) -> Mapping[int, Hold]:
        room = self._limits.cache_tokens
        beyond = sum(w.tokens for w in waiting) + (0 if self._limits.apart else decoding) - room
        if not room or beyond <= 0:
            return {}
        offers: list[tuple[float, int, int, Hold]] = []
        for w in waiting:
            how, cost_s = self._limits.let_go(w.tokens)
            left_s = self._waits.remaining_s(w.kind, now_s - w.since_s)
            if left_s > cost_s:
                offers.append((cost_s / (w.tokens * left_s), w.rollout_id, w.tokens, how))
        found: dict[int, Hold] = {}
        for _, id_, tokens, how in sorted(offers):
            if beyond <= 0:
                break
            found[id_] = how
            beyond -= tokens
        return found

    def state_dict(self) -> dict[str, Any]:
        return self._waits.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waits.load_state_dict(state)


class Parked:
    """The rollouts that wait, at all engines, and what was decided on their keys and values."""

    def __init__(self, policy: HoldPolicy) -> None:
        self._policy = policy
        self._kept: dict[int, Rollout] = {}
        self._since: dict[int, tuple[float, str]] = {}

    def begin(self, rollout: Rollout, now_s: float) -> None:
        self._kept[rollout.id] = rollout
        self._since[rollout.id] = now_s, str(rollout.prompt.data.get("environment", ""))

    def end(self, rollout_id: int, now_s: float | None) -> None:
        """Note that a rollout goes on, at this time; at none: that it does not."""
        self._kept.pop(rollout_id, None)
        since_s, kind = self._since.pop(rollout_id, (0.0, None))
        if kind is not None and now_s is not None:
            self._policy.waited(kind, now_s - since_s)

    def void(self) -> None:
        """Note that new weights have come, under which keys and values are made again."""
        self._kept.clear()

    def decide(
        self, rollout_ids: Iterable[int], decoding: int, now_s: float
    ) -> Mapping[Hold, Sequence[int]]:
        """Decide on those of one engine that are kept; return which are not any more, and how."""
        kept = (self._kept[id_] for id_ in sorted(rollout_ids) if id_ in self._kept)
        waiting = [Waiting(r.id, r.total_tokens, *self._since[r.id]) for r in kept]
        found: dict[Hold, list[int]] = {}
        for id_, how in self._policy.decide(waiting, decoding, now_s).items():
            if how != "keep":
                del self._kept[id_]
                found.setdefault(how, []).append(id_)
        return found
