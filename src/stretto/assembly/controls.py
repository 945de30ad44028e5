"""The parts of a schedule, made from the knobs of a run; the same for every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stretto.config import Config, ScheduleConfig
from stretto.schedules.chunking import FixedChunk, TunedChunk
from stretto.schedules.migration import (
    AutoMigration,
    FixedMigration,
    MigrationLimits,
    MigrationPolicy,
)
from stretto.schedules.overcommit import (
    Algorithm1,
    Equation4,
    FixedOvercommit,
    Overcommit,
    ThroughputOvercommit,
)
from stretto.schedules.settings import Controls, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """The amounts of work of a schedule.

    Attributes:
        batch: responses a step.
        samples_per_prompt: responses to each prompt.
        max_new_tokens: token limit of a response.
        steps: batches in the whole run.
        engines: that generate.
    """

    batch: int
    samples_per_prompt: int
    max_new_tokens: int
    steps: int
    engines: int


@dataclass(frozen=True, slots=True)
class Filtering:
    """The rules by which a schedule sorts out scores.

    Attributes:
        drop_failures: leave a response out whose reward function failed, instead of stopping.
        group_at_least: scored responses to one prompt without which all of them are left out.
        reward_weights: factor of each reward source; ``None`` for 1 each.
    """

    drop_failures: bool = False
    group_at_least: int = 1
    reward_weights: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Migrating:
    """The facts about engines that a policy of moving stragglers needs.

    Attributes:
        limits: of the engines.
        score_tokens_per_s: tokens that the devices of one free engine score a second; 0 where no
            scorer sits with the engines.
        prompt_tokens: of a typical prompt.
    """

    limits: MigrationLimits
    score_tokens_per_s: float
    prompt_tokens: int


def migrating_of(
    config: Config, *, prefill_tokens_per_s: float, transfer_tokens_per_s: float | None
) -> Migrating:
    """Return the facts for moving stragglers, from measured rates of an engine.

    Where keys and values do not move, the second rate is ``None``: tokens are prefilled again.

    Engines are taken to slow down with rows no more than their memory makes them: all that is in
    flight may be gathered on one.
    """
    rows, knobs = most_in_flight(config), config.schedule.knobs
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    hosts = knobs.hosts_scorers(config.rollout.engines)
    return Migrating(
        MigrationLimits(
            engines=config.rollout.engines,
            best_batch=rows,
            cache_tokens=rows * longest,
            longest_tokens=longest,
            prefill_tokens_per_s=prefill_tokens_per_s,
            # As fast as prefilling is no reason to move them.
            transfer_tokens_per_s=transfer_tokens_per_s or prefill_tokens_per_s,
        ),
        score_tokens_per_s=prefill_tokens_per_s / 2 if hosts else 0.0,  # reference and critic
        prompt_tokens=config.task.max_prompt_tokens // 2,
    )


def controls_of(config: Config, migrating: Migrating | None, *, restarts: int = 0) -> Controls:
    """Make the settings and controllers of a run; see :func:`controls`."""
    r = config.rollout
    return controls(
        config.schedule,
        RunSizes(
            batch=r.batch,
            samples_per_prompt=r.samples_per_prompt,
            max_new_tokens=r.max_new_tokens,
            steps=config.steps,
            engines=r.engines,
        ),
        Filtering(
            drop_failures=config.reward.on_failure == "drop",
            group_at_least=config.algorithm.definition.group,
            reward_weights=config.reward.factors,
        ),
        seed=config.seed,
        migrating=migrating,
        restarts=restarts,
    )


def controls(
    schedule: ScheduleConfig,
    sizes: RunSizes,
    filtering: Filtering,
    *,
    seed: int,
    migrating: Migrating | None,
    restarts: int = 0,
) -> Controls:
    """Make settings and controllers, as the knobs say.

    Args:
        schedule: the knobs, and how they are turned.
        filtering: the rules for scores.
        migrating: needed where stragglers are moved together.
        restarts: how many processes may come in the place of a generator's or scorer's own, each.
    """
    s, knobs = schedule, schedule.knobs
    return Controls(
        settings=Settings(
            batch=sizes.batch,
            samples_per_prompt=sizes.samples_per_prompt,
            max_new_tokens=sizes.max_new_tokens,
            steps=sizes.steps,
            drop_failures=filtering.drop_failures,
            group_at_least=filtering.group_at_least,
            reward_weights=filtering.reward_weights,
            score_on=knobs.score_on,
            lag=knobs.lag,
            weight_sync_interval=s.weight_sync_interval,
            max_carries=s.max_carries,
            deadline_s=s.deadline_s,
            restarts=restarts,
        ),
        chunk=(
            FixedChunk(s.chunk_tokens)
            if s.chunk_tokens
            else TunedChunk(window=s.chunk_window, max_new_tokens=sizes.max_new_tokens)
        ),
        overcommit=_overcommit(s, sizes, seed),
        migration=_migration(s, sizes, seed, migrating) if migrating else None,
    )


def most_in_flight(config: Config) -> int:
    """Return the most rollouts of a run that are decoded at one time."""
    r = config.rollout
    return config.schedule.most_in_flight(r.batch, r.samples_per_prompt)


def _overcommit(s: ScheduleConfig, sizes: RunSizes, seed: int) -> Overcommit:
    high = s.largest_overcommit(sizes.batch)
    if s.knobs.overcommit != "auto":
        return FixedOvercommit(high)
    start, low = s.first_overcommit(sizes.batch), s.overcommit_min
    match s.overcommit_rule:
        case "equation4":
            inc, dec = s.overcommit_increment, s.overcommit_decrement
            return Equation4(start, low, high, s.overcommit_window, inc, dec)
        case "algorithm1":
            return Algorithm1(start, low, high, s.overcommit_window)
        case "throughput":
            return ThroughputOvercommit(
                sizes.batch * s.weight_sync_interval,
                high,
                s.max_carries,
                low=low,
                group=sizes.samples_per_prompt,
                generators=sizes.engines,
                seed=seed,
            )


def _migration(
    s: ScheduleConfig, sizes: RunSizes, seed: int, on: Migrating
) -> MigrationPolicy | None:
    share, batch = s.knobs.migrate, sizes.batch * s.weight_sync_interval
    if share == "off":
        return None
    if share == "auto":
        return AutoMigration(
            on.limits,
            batch,
            on.score_tokens_per_s,
            prompt_tokens=on.prompt_tokens,
            seed=seed,
        )
    return FixedMigration(on.limits, batch, share)
