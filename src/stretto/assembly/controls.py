"""The controllers of a schedule, and the shares of CPU cores, as the knobs of a run ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stretto.config import (
    ENVIRONMENT,
    Config,
    EnvironmentConfig,
    RolloutConfig,
    ScheduleConfig,
)
from stretto.config.schedule import Settings
from stretto.schedules import migration, overcommit
from stretto.schedules.chunking import OF_RESPONSES, OF_TURNS, FixedChunk, TunedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.hold import AutoHold, FixedHold, HoldLimits, HoldPolicy
from stretto.schedules.migration import AutoMigration, FixedMigration, MigrationLimits
from stretto.types import Sampling


@dataclass(frozen=True)
class Migrating:
    """The facts about engines that a policy of moving stragglers needs.

    Attributes:
        score_tokens_per_s: tokens that the devices of one free engine score a second; 0 where no
            scorer sits with the engines.
        prompt_tokens: of a typical prompt.
    """

    limits: MigrationLimits
    score_tokens_per_s: float
    prompt_tokens: int


def migrating_of(
    config: Config, prefill_tokens_per_s: float, transfer_tokens_per_s: float | None
) -> Migrating:
    """Return the facts for moving stragglers, from measured rates of an engine.

    The second rate is ``None`` where keys and values do not move: tokens are prefilled again.
    Memory alone is taken to slow engines down with rows: all in flight may be gathered on one.
    """
    rows, engines = config.most_in_flight, config.rollout.engines
    return Migrating(
        MigrationLimits(
            engines=engines,
            best_batch=rows,
            cache_tokens=rows * config.longest,
            longest_tokens=config.longest,
            prefill_tokens_per_s=prefill_tokens_per_s,
            # As fast as prefilling is no reason to move them.
            transfer_tokens_per_s=transfer_tokens_per_s or prefill_tokens_per_s,
        ),
        # Reference and critic.
        prefill_tokens_per_s / 2 if config.schedule.knobs.hosts_scorers(engines) else 0.0,
        config.task.max_prompt_tokens // 2,
    )


def bounds_what_waits(config: Config) -> bool:
    """Return whether engines have less room for episodes that wait than there may be.

    Stretto's own engine keeps as many tokens of them as its slots have, apart from these; vLLM
    decides by itself.
    """
    r = config.rollout
    few = 0 < r.slots < -(-config.most_in_flight // r.engines)
    return bool(config.environment.sources) and few and r.engine != "vllm"


def holding_of(config: Config, prefill_tokens_per_s: float, copy_tokens_per_s: float) -> HoldLimits:
    room = config.rollout.slots * config.longest
    return HoldLimits(room, prefill_tokens_per_s, copy_tokens_per_s, apart=True)


def controls_of(
    config: Config,
    migrating: Migrating | None,
    holding: HoldLimits | None = None,
    *,
    restarts: int = 0,
    judges: Sequence[str] = (),
) -> Controls:
    """Make the settings and controllers of a run; see :func:`controls`.

    ``judges`` are reward sources that environments bring the scores of.
    """
    r = config.rollout
    settings = Settings(
        r.batch,
        r.samples_per_prompt,
        r.max_new_tokens,
        config.steps,
        failures_allowed=config.reward.failures_allowed,
        group_at_least=config.algorithm.definition.group,
        reward_weights=config.reward.factors,
        restarts=restarts,
        episodes=turn_sampling(r, config.environment) if config.environment.sources else None,
        environment_rewards=(*judges, *({ENVIRONMENT} & {*config.reward.sources})),
        cut_by=config.reward.missing_eos_limits,
    )
    return controls(config.schedule, settings, r.engines, config.seed, migrating, holding)


def turn_sampling(r: RolloutConfig, environment: EnvironmentConfig) -> Sampling:
    turn = environment.max_turn_tokens or r.max_new_tokens
    return Sampling(r.max_new_tokens, r.temperature, r.top_k, r.top_p, max_turn_tokens=turn)


def controls(
    s: ScheduleConfig,
    settings: Settings,
    engines: int,
    seed: int,
    migrating: Migrating | None,
    holding: HoldLimits | None = None,
) -> Controls:
    """Make the controllers that the knobs ask for.

    Args:
        settings: of the run; those that ``s`` has too are taken from there.
        migrating: needed where stragglers are moved together.
        holding: of an engine; ``None`` where it has room for all keys and values, or makes it.
    """
    settings = replace(
        settings,
        score_on=s.knobs.score_on,
        lag=s.knobs.lag,
        weight_sync_interval=s.weight_sync_interval,
        max_carries=s.max_carries,
        deadline_s=s.deadline_s,
    )
    sizes = OF_TURNS if settings.episodes else OF_RESPONSES
    tuned = TunedChunk(sizes, s.chunk_window, max_new_tokens=settings.max_new_tokens)
    return Controls(
        settings,
        FixedChunk(s.chunk_tokens) if s.chunk_tokens else tuned,
        _overcommit(s, settings, engines, seed),
        _migration(s, settings, seed, migrating) if migrating else None,
        _hold(s, holding) if settings.episodes else None,
    )


def _hold(s: ScheduleConfig, limits: HoldLimits | None) -> HoldPolicy | None:
    how = s.knobs.hold
    if how == "auto":
        return AutoHold(limits) if limits else None
    return FixedHold(how) if how != "keep" else None


def _overcommit(
    s: ScheduleConfig, sizes: Settings, engines: int, seed: int
) -> overcommit.Overcommit:
    high = s.largest_overcommit(sizes.batch)
    if s.knobs.overcommit != "auto":
        return overcommit.FixedOvercommit(high)
    start, low = s.first_overcommit(sizes.batch), s.overcommit_min
    match s.overcommit_rule:
        case "equation4":
            inc, dec = s.overcommit_increment, s.overcommit_decrement
            return overcommit.Equation4(start, low, high, s.overcommit_window, inc, dec)
        case "algorithm1":
            return overcommit.Algorithm1(start, low, high, s.overcommit_window)
        case "throughput":
            batch, group = sizes.batch * s.weight_sync_interval, sizes.samples_per_prompt
            return overcommit.ThroughputOvercommit(
                batch, high, s.max_carries, low=low, group=group, generators=engines, seed=seed
            )


def _migration(
    s: ScheduleConfig, sizes: Settings, seed: int, on: Migrating
) -> migration.MigrationPolicy | None:
    batch, tokens, share = sizes.batch * s.weight_sync_interval, on.prompt_tokens, s.knobs.migrate
    if share == "auto":
        rate = on.score_tokens_per_s
        return AutoMigration(on.limits, batch, rate, prompt_tokens=tokens, seed=seed)
    return None if share == "off" else FixedMigration(on.limits, batch, share)


class CoreShares(NamedTuple):
    """CPU threads of each generator, of scoring and of training."""

    generating: int
    scoring: int
    training: int


def share_cores(schedule: ScheduleConfig, engines: int, cores: int) -> CoreShares:
    """Share the cores out, unless the settings do.

    Roles that work at the same time get cores of their own, as threads of two roles on one core
    wait for each other.
    """
    if schedule.threads:
        return CoreShares(*schedule.threads)
    knobs = schedule.knobs
    training, left = cores, cores
    if knobs.trains_beside:
        training = max(cores // 2, 1)
        left -= training
    beside = knobs.scores_beside(engines)
    scoring = max(left // 2 if beside else left, 1)
    generating = max((left - scoring if beside else left) // engines, 1)
    return CoreShares(generating, scoring, training)
