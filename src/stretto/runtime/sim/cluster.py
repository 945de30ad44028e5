"""A cluster and the run on it, as one typed object that a TOML file can hold.

Every role names its devices, by number; roles that share one take turns on it. What a role's work
costs is given in numbers, or by a model, a kind of GPU and an assumed efficiency, of which
:func:`stretto.planner.formulas.priced` makes numbers before anything is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from stretto.assembly.controls import Migrating
from stretto.config import ScheduleConfig, changes, recipes
from stretto.config.sections import (
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
from stretto.runtime.sim.episodes import Episodes, Turns
from stretto.runtime.sim.faults import Faults
from stretto.runtime.sim.lengths import Distribution, LearningCurve, Lognormal, Uniform
from stretto.schedules.hold import HoldLimits
from stretto.schedules.migration import MigrationLimits
from stretto.types import Sampling, ScoreKind

Devices = tuple[NonNegativeInt, ...]
C = TypeVar("C")

_QUANTILES = 200  # of a distribution, of which a mean is made
RISE = 0.25
"""Share by which a decode step may get longer before a generator's batch counts as too large."""


class GeneratorRole(Section):
    """A generator: one engine, or several data-parallel replicas that answer as one."""

    devices: Annotated[Devices, Field(min_length=1)] = (0,)
    """The devices it works on."""
    model: str = ""
    """The actor, if costs follow from it."""
    cost: costs.GeneratorCost | None = None
    """Costs in numbers, of one replica."""
    tensor_parallel: PositiveInt = 1
    """Devices a replica; there are as many replicas as fit."""
    slots: NonNegativeInt = 0
    """Rollouts that a replica decodes together; 0 takes all in flight."""
    speculation: costs.Speculation = costs.Speculation()
    """Proposed tokens."""
    threads: PositiveInt = 1
    """CPU threads that its work takes, of the cluster's cores."""
    best_batch: NonNegativeInt = 0
    """Rollouts that a replica decodes before a step takes notably longer; 0: as costs say."""

    @property
    def replicas(self) -> int:
        return len(self.devices) // self.tensor_parallel

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_role(self.model, self.cost, self.tensor_parallel, self.devices)
        return self


class ScorerRole(Section):
    """A reward model, the reference, the critic, or a function."""

    name: str
    """The scorer's name; replicas of one scorer share it."""
    kind: ScoreKind = "reward"
    """The kind of its scores."""
    devices: Devices = ()
    """The devices it works on; empty for a function, which shares nothing with others."""
    model: str = ""
    """The model, if costs follow from it."""
    cost: costs.PrefillCost | costs.SampleCost | None = None
    """Costs in numbers: by tokens, or by responses for a function."""
    tensor_parallel: PositiveInt = 1
    """Devices that a copy of the model is split over; there are as many copies as fit."""
    follows: str = ""
    """The trained model whose weights it loads ('actor', 'critic'); empty: frozen."""
    streams: bool = True
    """Prefill tokens as they come; else all of a response at its end."""
    padded: NonNegativeInt = 0
    """Responses that a model scores at a time, each padded to the longest of them; 0 pads none."""
    worthwhile_tokens: NonNegativeInt = 0
    """Tokens that make a call worth its fixed cost."""
    load_s: NonNegative = 0.0
    """Seconds to take over a version of the weights."""
    host: NonNegativeInt | None = None
    """The generator on whose devices it lives."""
    threads: PositiveInt = 1
    """CPU threads that its work takes, of the cluster's cores."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model and not self.devices:
            raise RuleError(f"scorer '{self.name}' is a model and needs devices; name them")
        _check_role(self.model, self.cost, self.tensor_parallel, self.devices)
        return self


class LearnerRole(Section):
    """The learner, data parallel over its devices."""

    devices: Annotated[Devices, Field(min_length=1)] = (0,)
    """The devices it works on."""
    trains: tuple[Literal["actor"]] | tuple[Literal["actor"], Literal["critic"]] = ("actor",)
    """The trained models, which are published under these names."""
    models: tuple[str, ...] = ()
    """The models that these are, if costs follow from them."""
    cost: costs.TrainCost | None = None
    """Costs in numbers."""
    tensor_parallel: PositiveInt = 1
    """Devices that each layer is split over."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    updates: PositiveInt = 1
    """Optimizer updates a step, in all passes."""
    padded: bool = False
    """Whether each response of a batch is padded to the longest."""
    threads: PositiveInt = 1
    """CPU threads that its work takes, of the cluster's cores."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_role(" ".join(self.models), self.cost, self.tensor_parallel, self.devices)
        if self.models and len(self.models) != len(self.trains):
            rule = f"learner.models names one model for each of trains = {self.trains}"
            raise RuleError(f"{rule}; got {self.models}")
        return self


class Workload(Section):
    """The prompts, responses and rewards that a run trains on."""

    batch: Rows = 112
    """Responses a step."""
    samples_per_prompt: Rows = 1
    """Responses to each prompt; divides batch."""
    group_at_least: PositiveInt = 1
    """Scored responses to one prompt without which the others are left out too."""
    steps: PositiveInt = 50
    """Batches to train on."""
    max_new_tokens: PositiveInt = 2048
    """Token limit of a response."""
    prompt_tokens: Distribution = Uniform(low=128, high=384)
    """Lengths of prompts, by prompt id."""
    response_tokens: Distribution = Lognormal(median=300, p95=1200)
    """Lengths of responses, by rollout id, before the limit; of turns, where there are episodes."""
    episodes: Episodes | None = None
    """Turns, answers and waits, where responses have several turns; max_new_tokens counts all."""
    learning: LearningCurve = LearningCurve()
    """The effect of training on rewards."""
    chunks: tuple[PositiveInt, ...] = ()
    """Chunk sizes by round, as recorded, where the schedule chooses them; empty: it chooses."""
    deltas: tuple[NonNegativeInt, ...] = ()
    """Over-commitment by round, likewise."""
    rewards: tuple[float | None, ...] = ()
    """Rewards by rollout id, as recorded; rollouts without one follow the learning curve."""
    failures_allowed: float = 0.0
    """Reaction to a response that gets no score: stop the run, or drop (leave out) the response."""
    seed: Seed = 0
    """Seed of lengths and rewards."""

    @property
    def mean_tokens(self) -> float:
        """Tokens of a prompt and its response, on average."""
        shares = [(i + 0.5) / _QUANTILES for i in range(_QUANTILES)]
        prompts = (self.prompt_tokens.quantile(u, i) for i, u in enumerate(shares))
        if turns := self.turns:
            each = (sum(t.tokens + t.answer for t in turns(i)) for i in range(_QUANTILES))
            return fmean(prompts) + fmean(min(tokens, self.max_new_tokens) for tokens in each)
        responses = (self.response_tokens.quantile(u, i) for i, u in enumerate(shares))
        return fmean(prompts) + fmean(min(tokens, self.max_new_tokens) for tokens in responses)

    @property
    def turns(self) -> Turns | None:
        return Turns(self.episodes, self.response_tokens, self.seed) if self.episodes else None

    @property
    def sampling(self) -> Sampling | None:
        """How a response's turns are limited, where it has several."""
        if self.episodes is None:
            return None
        most = self.episodes.max_turn_tokens or self.max_new_tokens
        return Sampling(self.max_new_tokens, max_turn_tokens=most)

    def reward(self, rollout_id: int, version: int) -> float:
        if rollout_id < len(self.rewards) and (known := self.rewards[rollout_id]) is not None:
            return known
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
    """Shares of the devices' peak that are reached."""
    cores: NonNegativeInt = 0
    """CPU cores that the threads of all roles share; 0 for enough."""
    call_s: NonNegative = 0.0
    """Seconds that a call of a role is on its way, and its answer, beside its work."""
    driver: Mapping[str, costs.DriverCost] = {}
    """Costs of the driver's own work, by the names of its spans (``driver/...``); none without."""
    generators: Annotated[tuple[GeneratorRole, ...], Field(min_length=1)]
    """The generators, at least one."""
    scorers: tuple[ScorerRole, ...] = ()
    """The scorers; replicas of one scorer on several devices have the same name."""
    learner: LearnerRole
    """The learner; there is one."""
    workload: Workload = Workload()
    schedule: ScheduleConfig = ScheduleConfig()
    faults: Faults = Faults()
    """Calls that go wrong, and processes that die."""
    restarts: NonNegativeInt = 0
    """Processes that may replace that of a generator or scorer, one after another, for each."""

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
                given = f"scorer '{scorer.name}' lives with generator {scorer.host}"
                there = f"{len(self.generators)}, counted from 0"
                raise RuleError(f"{given}, but there are {there}", "unknown-host")
            if scorer.follows not in ("", *self.learner.trains):
                given = f"scorer '{scorer.name}' follows '{scorer.follows}'"
                remedy = f"give one of {self.learner.trains}, which are trained, or '' for none"
                raise RuleError(f"{given}; {remedy}", "follows-untrained")
        return self

    @property
    def device_count(self) -> int:
        each = [*(g.devices for g in self.generators), *(s.devices for s in self.scorers)]
        return 1 + max(max(devices, default=0) for devices in (*each, self.learner.devices))

    @property
    def migrating(self) -> Migrating:
        """The facts for moving stragglers between the generators, once costs are numbers."""
        role, w = self.generators[0], self.workload
        cost = known(role.cost)
        longest = w.max_new_tokens + int(w.prompt_tokens.quantile(0.999, 0))
        prefill_s = _token_s(cost.prefill, longest) / role.replicas
        transfer_s = cost.cache_bytes / cost.transfer.bytes_per_s
        fit = cost.decode.rows_within((1 + RISE) * cost.decode.seconds(0, 0, 1), longest / 2)
        best = max(int(fit), 1) if fit < inf else 0
        scoring_s = sum(
            _token_s(scorer.cost, longest)
            for scorer in self.scorers
            if scorer.host == 0 and isinstance(scorer.cost, costs.PrefillCost)
        )
        return Migrating(
            MigrationLimits(
                engines=len(self.generators),
                best_batch=(role.best_batch or best or w.batch) * role.replicas,
                cache_tokens=(cost.cache_tokens or longest * w.batch) * role.replicas,
                longest_tokens=longest,
                prefill_tokens_per_s=1 / prefill_s if prefill_s else 1e12,
                transfer_tokens_per_s=1 / transfer_s if transfer_s else 1e12,
            ),
            score_tokens_per_s=1 / scoring_s if scoring_s else 1e12,
            prompt_tokens=int(w.prompt_tokens.quantile(0.5, 0)),
        )

    @property
    def holding(self) -> HoldLimits | None:
        """The facts about keys and values of rollouts that wait, once costs are numbers."""
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
        """Read a description from a TOML file; raises ConfigError for a fault in it."""
        return recipes.build(changes.read(path), f"'{path}'", cls)


def known(cost: C | None) -> C:
    """Return a role's cost; raises ConfigError if it is no number yet, but follows from a model."""
    if cost is None:
        raise ConfigError(
            "a role's costs follow from a model: stretto.planner.formulas.priced(cluster) makes "
            "numbers of them, which can be simulated",
            "cost-unpriced",
        )
    return cost


def _token_s(cost: costs.PrefillCost, tokens: int) -> float:
    return cost.token_s or cost.call_s / tokens


def _check_role(model: str, cost: object, tensor_parallel: int, devices: Devices) -> None:
    if bool(model) == (cost is not None):
        raise RuleError(
            f"a role's costs come either from a model or from numbers; got model = '{model}' and "
            f"cost {'given' if cost is not None else 'not given'}",
            "model-or-cost",
        )
    if len(devices) % tensor_parallel:
        given = f"{tensor_parallel} for {len(devices)} devices"
        raise RuleError(f"tensor_parallel must divide devices; got {given}", "devices-not-divided")
