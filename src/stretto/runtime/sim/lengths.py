"""Distributions of response lengths, and a model of rewards.

A length is a pure function of (seed, rollout id): the inverse distribution function at one uniform
number. All schedules can thus be compared on identical responses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import ceil, exp, log
from statistics import NormalDist, median
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stretto.config.sections import Fraction, NonNegative, Positive, PositiveInt, Section
from stretto.errors import RuleError

_NORMAL = NormalDist()


@lru_cache(1 << 18)  # a search simulates the same rollouts many times
def uniform(*key: int | str) -> float:
    """A pseudo-random number in (0, 1), as a pure function of the key."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) * 2.0**-64


class Lognormal(Section):
    """A lognormal, the usual shape: most responses are short, the longest many times as long.
    Defined by its median and one other percentile.
    """

    kind: Literal["lognormal"] = "lognormal"
    median: Positive = 200.0
    """Tokens."""
    p95: float | None = None
    """Tokens that one response in twenty exceeds."""
    p99: float | None = None
    """Tokens that one in a hundred exceeds. Give this or p95."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        percentiles = [p for p in (self.p95, self.p99) if p is not None]
        if len(percentiles) != 1 or percentiles[0] < self.median:
            raise RuleError(
                f"a lognormal is fitted to its median and either p95 or p99, not below it; got "
                f"median = {self.median}, p95 = {self.p95}, p99 = {self.p99}",
                "one-percentile",
            )
        return self

    @cached_property
    def sigma(self) -> float:
        share, tokens = (0.99, self.p99) if self.p95 is None else (0.95, self.p95)
        assert tokens is not None
        return log(tokens / self.median) / _NORMAL.inv_cdf(share)

    def quantile(self, u: float, rollout_id: int) -> float:
        return self.median * exp(self.sigma * _NORMAL.inv_cdf(u))


class Uniform(Section):
    """Lengths spread evenly over a range."""

    kind: Literal["uniform"] = "uniform"
    low: PositiveInt = 1
    """Tokens of the shortest."""
    high: PositiveInt = 512
    """Tokens of the longest."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high < self.low:
            problem = f"high must not be below low; got low {self.low}, high {self.high}"
            raise RuleError(problem, "high-below-low")
        return self

    def quantile(self, u: float, rollout_id: int) -> float:
        return self.low + int(u * (self.high - self.low + 1))


class Bimodal(Section):
    """Short answers and long ones, each within ``spread`` of their mode."""

    kind: Literal["bimodal"] = "bimodal"
    short: Positive = 100.0
    """Tokens of a short answer."""
    long: Positive = 1000.0
    """Tokens of a long answer."""
    long_share: Fraction = 0.2
    """Share of long answers."""
    spread: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lengths are uniform in mode * (1 - spread) .. mode * (1 + spread)."""

    def quantile(self, u: float, rollout_id: int) -> float:
        short = 1.0 - self.long_share
        mode, v = (self.short, u / short) if u < short else (self.long, (u - short) / (1 - short))
        return mode * (1 + self.spread * (2 * v - 1))


class Geometric(Section):
    """A geometric distribution: each token ends the response with the same probability."""

    kind: Literal["geometric"] = "geometric"
    mean: Annotated[float, Field(gt=1)] = 200.0
    """Tokens."""

    def quantile(self, u: float, rollout_id: int) -> float:
        return ceil(log(1 - u) / log(1 - 1 / self.mean))


class Drifting(Section):
    """A lognormal whose median moves during training."""

    kind: Literal["drifting"] = "drifting"
    first: Positive = 100.0
    """Median of the first responses, in tokens."""
    last: Positive = 400.0
    """Median from ``over`` rollouts on."""
    over: PositiveInt = 10_000
    """Rollouts over which the median moves, linearly in the logarithm."""
    p95_ratio: Annotated[float, Field(ge=1)] = 4.0
    """The 95th percentile, in medians."""

    def quantile(self, u: float, rollout_id: int) -> float:
        progress = min(rollout_id / self.over, 1.0)
        middle = self.first * exp(log(self.last / self.first) * progress)
        sigma = log(self.p95_ratio) / _NORMAL.inv_cdf(0.95)
        return middle * exp(sigma * _NORMAL.inv_cdf(u))


class HeavyTail(Section):
    """A Pareto distribution: the longest responses are extremely long."""

    kind: Literal["heavy_tail"] = "heavy_tail"
    shortest: Positive = 50.0
    """Tokens."""
    exponent: Positive = 1.2
    """P(length > x) falls like x to the power -exponent. The mean is finite above 1."""

    def quantile(self, u: float, rollout_id: int) -> float:
        return float(self.shortest * (1 - u) ** (-1 / self.exponent))


class Replayed(Section):
    """The lengths of a recorded run, by rollout id. Beyond the last rollout they repeat."""

    kind: Literal["replayed"] = "replayed"
    tokens: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Entry i is the length of rollout i."""

    @classmethod
    def from_ledger(
        cls, tokens_by_id: Mapping[int, int], so_far: Mapping[int, int] = {}
    ) -> Replayed:
        """Use the lengths of finished rollouts. Unknown rollouts get the median length. Unfinished
        rollouts get the median of all lengths greater than their length in ``so_far``.
        """
        lengths = sorted(tokens_by_id.values())
        middle = round(median(lengths))
        longer = {i: lengths[bisect_right(lengths, n) :] or [n] for i, n in so_far.items()}
        length_by_id = {**{i: round(median(rest)) for i, rest in longer.items()}, **tokens_by_id}
        return cls(tokens=tuple(length_by_id.get(i, middle) for i in range(max(length_by_id) + 1)))

    def quantile(self, u: float, rollout_id: int) -> float:
        return self.tokens[rollout_id % len(self.tokens)]


Distribution = Annotated[
    Lognormal | Uniform | Bimodal | Geometric | Drifting | HeavyTail | Replayed,
    Field(discriminator="kind"),
]
"""``quantile(u, rollout_id)`` gives the tokens at the share ``u`` for this rollout."""


class Lengths:
    """Response lengths of a run by rollout id, at least 1, without an upper limit."""

    def __init__(self, distribution: Distribution, seed: int) -> None:
        self._distribution, self._seed = distribution, seed

    def __call__(self, rollout_id: int) -> int:
        u = uniform(self._seed, "length", rollout_id)
        return max(1, round(self._distribution.quantile(u, rollout_id)))


class LearningCurve(Section):
    """A model of how training changes rewards. It claims nothing about any task. The mean reward of
    version v is ``last + (first - last) * exp(-v / versions)``. Rewards of single responses are
    uniform around it.
    """

    first: float = 0.0
    """Mean reward of the untrained policy."""
    last: float = 1.0
    """Mean reward that training converges to."""
    versions: NonNegative = 50.0
    """Syncs until the distance to ``last`` has fallen to 37 %. 0: immediately converged."""
    spread: NonNegative = 0.5
    """Largest distance of a response's reward from the mean."""

    def reward(self, seed: int, rollout_id: int, version: int) -> float:
        decay = exp(-version / self.versions) if self.versions else 0.0
        noise = self.spread * (2 * uniform(seed, "reward", rollout_id) - 1)
        return self.last + (self.first - self.last) * decay + noise
