"""A cluster and the run on it, as one typed object that a TOML file can hold.

Every role lists its devices by number. Roles that share a device take turns on it. The cost of a
role's work is given in numbers, or by a model, a kind of GPU and an assumed efficiency, which
:func:`stretto.planner.formulas.priced` converts to numbers before the simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from stretto.config import ScheduleConfig, recipes
from stretto.config.sections import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Rows,
    Section,
    Seed,
    refuse,
)
from stretto.errors import ConfigError, RuleError
from stretto.runtime.sim import costs
from stretto.runtime.sim.faults import Faults
from stretto.runtime.sim.lengths import Distribution, LearningCurve, Lognormal, Uniform
from stretto.runtime.sim.turns import SimEpisodes, Turns
from stretto.schedules.hold import HoldLimits
from stretto.schedules.migration import MigrationLimits
from stretto.types import Sampling, ScoreKind

Devices = tuple[NonNegativeInt, ...]
C = TypeVar("C")

_GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly over the unit interval
_QUANTILES = 200  # to compute the mean of a distribution
RISE = 0.25
"""Relative slowdown of a decode step from which a generator's batch counts as too large."""


class _Role(Section):
    """A role on devices."""

    tensor_parallel: PositiveInt = 1
    """Devices that a copy of the model is split over. There are as many copies as fit."""
    threads: PositiveInt = 1
    """CPU threads of its work, of the cluster's cores."""

    def _require(self, model: str, cost: object, devices: Devices) -> None:
        if bool(model) == (cost is not None):
            raise RuleError(
                f"a role's costs come either from a model or from numbers; got model = '{model}' "
                f"and cost {'given' if cost is not None else 'not given'}",
                "model-or-cost",
            )
        if len(devices) % self.tensor_parallel:
            raise RuleError(
                f"tensor_parallel must divide devices; got {self.tensor_parallel} for "
                f"{len(devices)} devices",
                "devices-not-divided",
            )


class GeneratorRole(_Role):
    """A generator: one engine, or several data-parallel replicas that answer as one."""

    devices: Annotated[Devices, Field(min_length=1)] = (0,)
    """Its devices."""
    model: str = ""
    """The actor, if costs follow from it."""
    cost: costs.GeneratorCost | None = None
    """Costs of one replica in numbers."""
    slots: NonNegativeInt = 0
    """Rollouts that a replica decodes together. 0: all in flight."""
    speculation: costs.SimSpeculation = costs.SimSpeculation()
    """Speculative decoding."""
    best_batch: NonNegativeInt = 0
    """Rollouts that a replica decodes before a step slows down notably. 0: derived from costs."""

    @property
    def replicas(self) -> int:
        return len(self.devices) // self.tensor_parallel

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._require(self.model, self.cost, self.devices)
        return self


class ScorerRole(_Role):
    """A reward model, the reference, the critic, or a function."""

    name: str
    """The scorer's name, shared by its replicas."""
    kind: ScoreKind = "reward"
    """The kind of its scores."""
    devices: Devices = ()
    """Its devices. Empty for a function, which then shares none with other roles."""
    model: str = ""
    """The model, if costs follow from it."""
    cost: costs.PrefillCost | costs.SampleCost | None = None
    """Costs in numbers: by tokens, or by responses for a function."""
    follows: str = ""
    """The trained model whose weights it loads ('actor', 'critic'). Empty: frozen."""
    streams: bool = True
    """Prefill tokens as they arrive. Otherwise the full response at its end."""
    padded: NonNegativeInt = 0
    """Responses that a model scores at a time, padded to the longest of them. 0: no padding."""
    worthwhile_tokens: NonNegativeInt = 0
    """Tokens that make a call worth its fixed cost."""
    load_s: NonNegative = 0.0
    """Seconds to load a version of the weights."""
    host: NonNegativeInt | None = None
    """The generator whose devices it shares."""
    prompts: tuple[Fraction, Fraction] = (0.0, 1.0)
    """The part of the prompts whose responses it reads: of two teachers [0.0, 0.3] and [0.3, 1.0].
    """

    @property
    def share(self) -> float:
        low, high = self.prompts
        return high - low

    def reads(self, prompt_id: int) -> bool:
        """Return whether it reads the responses to a prompt, as spread evenly over the ids."""
        low, high = self.prompts
        return low <= prompt_id * _GOLDEN % 1.0 < high

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model and not self.devices:
            raise RuleError(f"scorer '{self.name}' is a model and needs devices; name them")
        self._require(self.model, self.cost, self.devices)
        return self


def divided_prompts(shares: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Divide the prompts among scorers by name in proportion to their shares."""
    ends = [*accumulate(shares.values())]
    parts = pairwise([0.0, *(end / (ends[-1] or 1.0) for end in ends)])
    return dict(zip(shares, parts, strict=True))


class LearnerRole(_Role):
    """The learner, data parallel over its devices."""

    devices: Annotated[Devices, Field(min_length=1)] = (0,)
    """Its devices."""
    trains: tuple[Literal["actor"]] | tuple[Literal["actor"], Literal["critic"]] = ("actor",)
    """The trained models, which are published under these names."""
    models: tuple[str, ...] = ()
    """Their model names, if costs follow from them."""
    cost: costs.TrainCost | None = None
    """Costs in numbers."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    updates: PositiveInt = 1
    """Optimizer updates per step, over all epochs."""
    padded: bool = False
    """Whether each response of a batch is padded to the longest."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._require(" ".join(self.models), self.cost, self.devices)
        if self.models and len(self.models) != len(self.trains):
            rule = f"learner.models names one model for each of trains = {self.trains}"
            raise RuleError(f"{rule}; got {self.models}")
        return self


class Workload(Section):
    """The prompts, responses and rewards that a run trains on."""

    batch: Rows = 112
    """Responses per step."""
    samples_per_prompt: Rows = 1
    """Responses to each prompt. Must divide batch."""
    group_at_least: PositiveInt = 1
    """Scored responses that a prompt needs. With fewer, all its responses are left out."""
    most_skipped: NonNegativeInt = 0
    """Responses of groups with equal rewards that a round may replace."""
    steps: PositiveInt = 50
    """Batches to train on."""
    max_new_tokens: PositiveInt = 2048
    """Token limit of a response."""
    prompt_tokens: Distribution = Uniform(low=128, high=384)
    """Lengths of prompts, by prompt id."""
    response_tokens: Distribution = Lognormal(median=300, p95=1200)
    """Lengths of responses before the limit, by rollout id, or of turns if there are episodes."""
    episodes: SimEpisodes | None = None
    """Turns, answers and waits, if responses have several turns. max_new_tokens limits the sum."""
    learning: LearningCurve = LearningCurve()
    """The effect of training on rewards."""
    chunks: tuple[PositiveInt, ...] = ()
    """Recorded chunk sizes by round, if the schedule chooses them. Empty: it chooses."""
    deltas: tuple[NonNegativeInt, ...] = ()
    """Recorded over-commitment by round, likewise."""
    rewards: tuple[float | None, ...] = ()
    """Recorded rewards by rollout id. Beyond the last full group they repeat, so that groups have
    equal rewards as often. Rollouts without one follow the learning curve."""
    failures_allowed: float = 0.0
    """Share of a step's responses that may be left out for lack of a score. With more the run
    stops.
    """
    seed: Seed = 0
    """Seed of lengths and rewards."""

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a prompt and its response."""
        shares = [(i + 0.5) / _QUANTILES for i in range(_QUANTILES)]
        prompts = [self.prompt_tokens.quantile(u, i) for i, u in enumerate(shares)]
        if turns := self.turns:
            lengths = [float(sum(t.tokens + t.answer for t in turns(i))) for i in range(_QUANTILES)]
        else:
            lengths = [self.response_tokens.quantile(u, i) for i, u in enumerate(shares)]
        return fmean(prompts) + fmean(min(tokens, self.max_new_tokens) for tokens in lengths)

    @property
    def turns(self) -> Turns | None:
        return Turns(self.episodes, self.response_tokens, self.seed) if self.episodes else None

    @property
    def sampling(self) -> Sampling | None:
        """Limits on the turns of a response, or ``None`` without episodes."""
        if self.episodes is None:
            return None
        turn_limit = self.episodes.max_turn_tokens or self.max_new_tokens
        return Sampling(self.max_new_tokens, max_turn_tokens=turn_limit)

    def reward(self, rollout_id: int, version: int) -> float:
        recorded = len(self.rewards) - len(self.rewards) % self.samples_per_prompt
        if recorded and (reward := self.rewards[rollout_id % recorded]) is not None:
            return reward
        return self.learning.reward(self.seed, rollout_id, version)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch % self.samples_per_prompt:
            raise RuleError(
                f"batch must be a multiple of samples_per_prompt; got {self.batch} and "
                f"{self.samples_per_prompt}",
                "batch-not-groups",
            )
        return self


class Cluster(Section):
    """A cluster: roles, their devices, the work and the schedule."""

    gpu: str = "h100"
    """Kind of device, for costs that follow from models."""
    efficiency: costs.Efficiency = costs.Efficiency()
    """Shares of the devices' peaks that are reached."""
    cores: NonNegativeInt = 0
    """CPU cores that the threads of all roles share. 0: enough for all."""
    thread_scaling: NonNegative = 0.0
    """Speed of several roles, relative to one, if they are threads of a process that hinder each
    other by Python's lock or in memory. 0: they share only cores."""
    call_s: NonNegative = 0.0
    """Seconds that a role's call and its answer spend in transit, in addition to the work."""
    driver: Mapping[str, costs.DriverCost] = {}
    """Costs of the driver's own work, by span name (``driver/...``). Other spans cost nothing."""
    generators: Annotated[tuple[GeneratorRole, ...], Field(min_length=1)]
    """The generators, at least one."""
    scorers: tuple[ScorerRole, ...] = ()
    """The scorers. Replicas of one scorer on several devices have the same name."""
    learner: LearnerRole
    """The learner."""
    workload: Workload = Workload()
    schedule: ScheduleConfig = ScheduleConfig()
    faults: Faults = Faults()
    """Calls that fail, and processes that die."""
    restarts: NonNegativeInt = 0
    """How many processes may replace each generator's or scorer's, one after another."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(self.schedule.overcommit_rules(self.workload.batch))
        if self.schedule.asks_to_migrate and len(self.generators) == 1:
            raise RuleError(
                f"schedule.migrate = {self.schedule.migrate!r} moves responses between generators, "
                "and there is one; describe several, or set schedule.migrate = 'off'",
                "migrate-with-one-engine",
            )
        for scorer in self.scorers:
            if scorer.host is not None and scorer.host >= len(self.generators):
                setting = f"scorer '{scorer.name}' lives with generator {scorer.host}"
                count = f"{len(self.generators)}, counted from 0"
                raise RuleError(f"{setting}, but there are {count}", "unknown-host")
            if scorer.follows not in ("", *self.learner.trains):
                setting = f"scorer '{scorer.name}' follows '{scorer.follows}'"
                remedy = f"give one of {self.learner.trains}, which are trained, or '' for none"
                raise RuleError(f"{setting}; {remedy}", "follows-untrained")
        return self

    @property
    def device_count(self) -> int:
        device_groups = [*(g.devices for g in self.generators), *(s.devices for s in self.scorers)]
        return 1 + max(
            max(devices, default=0) for devices in (*device_groups, self.learner.devices)
        )

    @property
    def migrating(self) -> MigrationLimits:
        """The limits for moving stragglers between generators, once costs are numbers."""
        role, w = self.generators[0], self.workload
        cost = known(role.cost)
        longest = w.max_new_tokens + int(w.prompt_tokens.quantile(0.999, 0))
        prefill_s = _token_s(cost.prefill, longest) / role.replicas
        transfer_s = cost.cache_bytes / cost.transfer.bytes_per_s
        fit = cost.decode.rows_within((1 + RISE) * cost.decode.seconds(0, 0, 1), longest / 2)
        best = max(int(fit), 1) if fit < inf else 0
        scoring_s = sum(
            scorer.share * _token_s(scorer.cost, longest)
            for scorer in self.scorers
            if scorer.host == 0 and isinstance(scorer.cost, costs.PrefillCost)
        )
        return MigrationLimits(
            engines=len(self.generators),
            best_batch=(role.best_batch or best or w.batch) * role.replicas,
            cache_tokens=(cost.cache_tokens or longest * w.batch) * role.replicas,
            longest_tokens=longest,
            prefill_tokens_per_s=1 / prefill_s if prefill_s else 1e12,
            transfer_tokens_per_s=1 / transfer_s if transfer_s else 1e12,
            score_tokens_per_s=1 / scoring_s if scoring_s else 1e12,
            prompt_tokens=int(w.prompt_tokens.quantile(0.5, 0)),
        )

    @property
    def holding(self) -> HoldLimits | None:
        """The facts about keys and values of waiting rollouts, once costs are numbers."""
        role, w = self.generators[0], self.workload
        cost, longest = known(role.cost), w.max_new_tokens + int(w.prompt_tokens.quantile(0.999, 0))
        if not cost.cache_tokens:
            return None
        token_s = _token_s(cost.prefill, longest) / role.replicas
        copied = cost.offload.bytes_per_s / cost.cache_bytes if cost.cache_bytes else 0.0
        return HoldLimits(
            cost.cache_tokens * role.replicas, 1 / token_s if token_s else 1e12, copied
        )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a description from a TOML file. Raises ConfigError for errors in it."""
        return recipes.build(recipes.read(path), f"'{path}'", cls)


def known(cost: C | None) -> C:
    """Return a role's cost. Raises ConfigError if it is not priced, but follows from a model."""
    if cost is None:
        raise ConfigError(
            "a role's costs follow from a model: stretto.planner.formulas.priced(cluster) makes "
            "numbers of them, which can be simulated",
            "cost-unpriced",
        )
    return cost


def _token_s(cost: costs.PrefillCost, tokens: int) -> float:
    return cost.token_s or cost.call_s / tokens
