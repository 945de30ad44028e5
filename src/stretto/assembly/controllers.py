"""Builds a schedule's controllers from its knobs, and divides CPU cores between roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stretto import outside
from stretto.bounds import ceil_div
from stretto.config import ENVIRONMENT, Config, EnvironmentConfig, RolloutConfig, ScheduleConfig
from stretto.config.knobs import Controlled, Settings
from stretto.schedules import migration, overcommit
from stretto.schedules.chunking import OF_RESPONSES, OF_TURNS, ChunkSize, FixedChunk, TunedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.hold import AutoHold, FixedHold, HoldLimits, HoldPolicy
from stretto.schedules.migration import AutoMigration, FixedMigration, MigrationLimits
from stretto.types import Sampling


def migrating_of(
    config: Config, prefill_tokens_per_s: float, transfer_tokens_per_s: float | None
) -> MigrationLimits:
    """Return the limits for migrating stragglers, from an engine's measured rates.

    ``transfer_tokens_per_s`` is ``None`` if the KV cache is not moved but prefilled again. Only
    memory is assumed to limit the batch, so that one engine may take all rows in flight.
    """
    rows, engines = config.most_in_flight, config.rollout.engines
    hosts_scorers = config.schedule.knobs.hosts_scorers(engines)
    return MigrationLimits(
        engines=engines,
        best_batch=rows,
        cache_tokens=rows * config.longest,
        longest_tokens=config.longest,
        prefill_tokens_per_s=prefill_tokens_per_s,
        # A transfer as slow as prefilling is no reason to migrate.
        transfer_tokens_per_s=transfer_tokens_per_s or prefill_tokens_per_s,
        # Reference and critic share the rate.
        score_tokens_per_s=prefill_tokens_per_s / 2 if hosts_scorers else 0.0,
        prompt_tokens=config.task.max_prompt_tokens // 2,
    )


def bounds_what_waits(config: Config) -> bool:
    """Return whether a rule must release KV caches of waiting episodes, because an engine's room
    may be too small. An engine that does not size its cache keeps as many of their tokens as its
    slots hold, next to the slots.
    """
    r = config.rollout
    few = 0 < r.slots < ceil_div(config.most_in_flight, r.engines)
    bounded = few and not r.capabilities.sizes_cache
    return config.schedule.knobs.hold == "auto" and bool(config.environment.sources) and bounded


def controls_of(
    config: Config,
    migrating: MigrationLimits | None,
    holding: HoldLimits | None = None,
    *,
    restarts: int = 0,
    judges: Sequence[str] = (),
) -> Controls:
    """Build a run's settings and controllers. Environments provide the scores of ``judges``."""
    r = config.rollout
    settings = Settings(
        r.batch,
        r.samples_per_prompt,
        r.max_new_tokens,
        config.steps,
        failures_allowed=config.reward.failures_allowed,
        group_at_least=config.algorithm.group,
        most_skipped=r.most_skipped,
        sources_apart=config.algorithm.normalizes_sources,
        reward_weights=config.reward.factors,
        restarts=restarts,
        episodes=turn_sampling(r, config.environment) if config.environment.sources else None,
        environment_rewards=(*judges, *({ENVIRONMENT} & {*config.reward.sources})),
        cut_by=config.reward.missing_eos_limits,
    )
    run = ScheduledRun(config.schedule, settings, r.engines, config.seed, migrating, holding)
    return controls(run)


def turn_sampling(r: RolloutConfig, environment: EnvironmentConfig) -> Sampling:
    turn = environment.max_turn_tokens or r.max_new_tokens
    return Sampling(r.max_new_tokens, r.temperature, r.top_k, r.top_p, max_turn_tokens=turn)


@dataclass(frozen=True)
class ScheduledRun:
    """The run that a controller is made for.

    Attributes:
        settings: for example the batch.
        migrating: ``None`` if stragglers are not migrated.
        holding: limits of an engine, ``None`` if its KV cache needs none.
    """

    schedule: ScheduleConfig
    settings: Settings
    engines: int
    seed: int
    migrating: MigrationLimits | None
    holding: HoldLimits | None = None


def controls(run: ScheduledRun) -> Controls:
    """Build the controllers that the knobs request. Section ``schedule`` overrides ``settings``."""
    s = run.schedule
    settings = replace(
        run.settings,
        score_on=s.knobs.score_on,
        lag=s.knobs.lag,
        train_on=s.knobs.train_on,
        weight_sync_interval=s.weight_sync_interval,
        max_carries=s.carries,
        deadline_s=s.deadline_s,
        most_overcommit=s.largest_overcommit(run.settings.batch),
    )
    run = replace(run, settings=settings)
    return Controls(settings, *(_controller(name, run) for name in _CONTROLLERS))


def _controller(name: Controlled, run: ScheduledRun) -> Any:
    make, kind = _CONTROLLERS[name]
    needs = {"migrate": run.migrating, "hold": run.settings.episodes}
    if not needs.get(name, True):
        return None
    if source := run.schedule.own_controllers.get(name):
        setting = "schedule.controllers"
        with outside.raising(source, setting):
            controller = outside.load(source, setting, Callable)(run)
        outside.require(controller, kind, f"{setting}: the result of '{source}'")
        return controller
    return make(run)


def _chunk(run: ScheduledRun) -> ChunkSize:
    s, sizes = run.schedule, OF_TURNS if run.settings.episodes else OF_RESPONSES
    if s.chunk_tokens or s.preset == "auto":  # whose tuner replaces it
        return FixedChunk(s.chunk_tokens or run.settings.max_new_tokens)
    return TunedChunk(sizes, s.chunk_window, max_new_tokens=run.settings.max_new_tokens)


def _hold(run: ScheduledRun) -> HoldPolicy | None:
    how = run.schedule.knobs.hold
    if how == "auto":
        return AutoHold(run.holding) if run.holding else None
    return FixedHold(how) if how != "keep" else None


def _overcommit(run: ScheduledRun) -> overcommit.Overcommit:
    s, sizes = run.schedule, run.settings
    high = s.largest_overcommit(sizes.batch)
    if s.knobs.overcommit != "auto" or s.preset == "auto":  # whose tuner replaces it
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
            engines, seed = run.engines, run.seed
            return overcommit.ThroughputOvercommit(
                batch, high, s.max_carries, low=low, group=group, generators=engines, seed=seed
            )


def _migration(run: ScheduledRun) -> migration.MigrationPolicy | None:
    limits, share = run.migrating, run.schedule.knobs.migrate
    assert limits
    batch = run.settings.batch * run.schedule.weight_sync_interval
    if share == "auto":
        return AutoMigration(limits, batch, seed=run.seed)
    return None if share == "off" else FixedMigration(limits, batch, share)


_CONTROLLERS: Mapping[Controlled, tuple[Callable[[ScheduledRun], Any], type]] = {
    "chunk_tokens": (_chunk, ChunkSize),
    "overcommit": (_overcommit, overcommit.Overcommit),
    "migrate": (_migration, migration.MigrationPolicy),
    "hold": (_hold, HoldPolicy),
}
"""Factories of controllers and their protocols, in the order of the fields of Controls."""


class CoreShares(NamedTuple):
    """CPU threads of each generator, of scoring and of training."""

    generating: int
    scoring: int
    training: int


def share_cores(schedule: ScheduleConfig, engines: int, cores: int) -> CoreShares:
    """Divide the cores, unless ``schedule.threads`` does. Concurrent roles get separate cores,
    because threads of two roles on one core block each other. Without overlap, each has all.
    """
    knobs = schedule.knobs
    if schedule.threads and knobs.overlaps(engines):
        return CoreShares(*schedule.threads)
    training, rest = cores, cores
    if knobs.trains_beside:
        training = max(cores // 2, 1)
        rest -= training
    overlaps = knobs.scores_beside(engines)
    scoring = max(rest // 2 if overlaps else rest, 1)
    generating = max((rest - scoring if overlaps else rest) // engines, 1)
    return CoreShares(generating, scoring, training)
