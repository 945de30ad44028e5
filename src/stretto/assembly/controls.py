"""From the knobs of a run to what its schedule is made of; the same for every runtime."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.config import Config
from stretto.schedules.chunking import FixedChunk, TunedChunk
from stretto.schedules.migration import FixedMigration, MigrationLimits, MigrationPolicy
from stretto.schedules.overcommit import Algorithm1, Equation4, FixedOvercommit, Overcommit
from stretto.schedules.settings import Controls, Settings
from stretto.schedules.stragglers import AutoMigration
from stretto.schedules.throughput import ThroughputOvercommit


@dataclass(frozen=True)
class Migrating:
    """What a policy has to know of where stragglers move.

    Attributes:
        limits: of the engines.
        score_tokens_per_s: tokens that the devices of one free engine score a second; 0 where no
            scorer sits with the engines.
        prompt_tokens: of a typical prompt.
    """

    limits: MigrationLimits
    score_tokens_per_s: float
    prompt_tokens: int


def migrates(config: Config) -> bool:
    """Whether stragglers are moved together: it takes several engines."""
    return config.schedule.knob("migrate") not in ("off", 0) and config.rollout.engines > 1


def hosts_scorers(config: Config) -> bool:
    """Whether scorers sit with the engines, to work where nothing is left to decode.

    Those that stream have a place of their own, as they work while everyone decodes.
    """
    return migrates(config) and config.schedule.knob("score_on") != "chunk"


def model_seats(config: Config) -> int:
    """How many seats each model scorer has: one, or one with each engine that may be freed."""
    return config.rollout.engines if hosts_scorers(config) else 1


def controls(config: Config, migrating: Migrating | None) -> Controls:
    """Settings and controllers, as the knobs say.

    Args:
        config: of the run.
        migrating: needed where stragglers are moved together.
    """
    s, r = config.schedule, config.rollout
    return Controls(
        settings=Settings(
            batch=r.batch,
            samples_per_prompt=r.samples_per_prompt,
            max_new_tokens=r.max_new_tokens,
            steps=config.steps,
            drop_failures=config.reward.on_failure == "drop",
            group_at_least=config.algorithm.definition.group,
            reward_weights=config.reward.factors,
            score_on=s.knob("score_on"),
            lag=s.knob("lag"),
            batches_per_handover=s.batches_per_handover,
            max_carries=s.max_carries,
            deadline_s=s.deadline_s,
        ),
        chunk=(
            FixedChunk(s.chunk_tokens)
            if s.chunk_tokens
            else TunedChunk(window=s.chunk_window, max_new_tokens=r.max_new_tokens)
        ),
        overcommit=_overcommit(config),
        migration=_migration(config, migrating) if migrating else None,
    )


def largest_overcommit(config: Config) -> int:
    """The largest delta that a run may come to; responses."""
    return config.schedule.largest_overcommit(config.rollout.batch)


def most_in_flight(config: Config) -> int:
    """The most rollouts that are being decoded at one time."""
    n = config.rollout.samples_per_prompt  # of which delta fills up the last group
    delta = -(-largest_overcommit(config) // n) * n
    return config.rollout.batch * config.schedule.batches_per_handover + delta


def _overcommit(config: Config) -> Overcommit:
    s, knob, high = config.schedule, config.schedule.knob("overcommit"), largest_overcommit(config)
    if knob != "auto":
        return FixedOvercommit(high)
    start, low = s.first_overcommit(config.rollout.batch), s.overcommit_min
    match s.overcommit_rule:
        case "equation4":
            inc, dec = s.overcommit_increment, s.overcommit_decrement
            return Equation4(start, low, high, s.overcommit_window, inc, dec)
        case "algorithm1":
            return Algorithm1(start, low, high, s.overcommit_window)
        case "throughput":
            return ThroughputOvercommit(
                config.rollout.batch * s.batches_per_handover,
                high,
                s.max_carries,
                low=low,
                group=config.rollout.samples_per_prompt,
                generators=config.rollout.engines,
                seed=config.seed,
            )


def _migration(config: Config, on: Migrating) -> MigrationPolicy:
    knob, batch = config.schedule.knob("migrate"), config.rollout.batch
    batch *= config.schedule.batches_per_handover
    if knob != "auto":
        return FixedMigration(on.limits, batch, float(knob))
    return AutoMigration(
        on.limits,
        batch,
        on.score_tokens_per_s,
        prompt_tokens=on.prompt_tokens,
        seed=config.seed,
    )
