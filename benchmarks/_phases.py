"""Phases of a step: their memory, their traffic, and where their seconds go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.planner.memory_model import Parts


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a piece of work, by what it takes them of.

    Attributes:
        arithmetic_s: of the GPU's operations.
        memory_s: of reading and writing its memory.
        hidden_s: of traffic that goes on beside these (FSDP fetches the next layer meanwhile).
        exposed_s: of traffic that they wait for.
        host_s: of traffic with the host's memory.
        overhead_s: of launches and latencies.
    """

    arithmetic_s: float = 0.0
    memory_s: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def by_limit(self) -> dict[str, float]:
        """Seconds by what limits; of what goes on side by side the longest counts."""
        beside = {
            "arithmetic": self.arithmetic_s,
            "GPU memory": self.memory_s,
            "links": self.hidden_s,
        }
        longest = max(beside, key=lambda limit: beside[limit])
        limits = {"links": self.exposed_s, "host": self.host_s, "overhead": self.overhead_s}
        limits[longest] = limits.get(longest, 0.0) + beside[longest]
        return limits

    def times(self, count: float) -> Work:
        """Return this work done so many times."""
        return Work(
            count * self.arithmetic_s,
            count * self.memory_s,
            count * self.hidden_s,
            count * self.exposed_s,
            count * self.host_s,
            count * self.overhead_s,
        )


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step.

    Attributes:
        name: generation, scoring, training or weight sync.
        parts: bytes of a GPU, by what takes them.
        wire_bytes: that a GPU takes in over links, in a step.
        work: the pieces it is made of, one after the other.
    """

    name: str
    parts: Parts
    wire_bytes: float
    work: tuple[Work, ...]

    @property
    def memory_bytes(self) -> float:
        """Bytes of a GPU."""
        return sum(self.parts.values())

    @property
    def by_limit(self) -> dict[str, float]:
        """Seconds by what limits."""
        return added(piece.by_limit for piece in self.work)

    @property
    def seconds(self) -> float:
        """Seconds in a step."""
        return sum(self.by_limit.values())


def added(limits: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the sums of seconds by what limits."""
    total: dict[str, float] = {}
    for each in limits:
        for limit, seconds in each.items():
            total[limit] = total.get(limit, 0.0) + seconds
    return total
