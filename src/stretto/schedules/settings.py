"""The settings of a schedule, and the outcome of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.schedules.chunking import ChunkSize
from stretto.schedules.migration import MigrationPolicy
from stretto.schedules.overcommit import Overcommit
from stretto.schedules.rollout import Rollout
from stretto.types import Stats

ScoreOn = Literal["batch", "rollout", "chunk"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a schedule.

    Attributes:
        batch: responses a step.
        samples_per_prompt: responses to each prompt.
        max_new_tokens: token limit of a response.
        steps: batches in the whole run; no round is begun for steps beyond.
        drop_failures: leave a response out whose reward function failed, instead of stopping.
        group_at_least: scored responses to one prompt without which the learner can do nothing with
            any of them; they are then left out together.
        reward_weights: factor of each reward source; ``None`` for 1 each.
        score_on: when scorers get to see a response.
        lag: versions that the generators may be behind the learner.
        weight_sync_interval: steps between two hand-overs of weights.
        max_carries: how often a rollout may be left for the next round.
        deadline_s: how long a role may take to answer a call.
        restarts: how many processes may come in the place of a generator's or scorer's own, each;
            with 0 the loss of one ends the run.
    """

    batch: int
    samples_per_prompt: int
    max_new_tokens: int
    steps: int
    drop_failures: bool = False
    group_at_least: int = 1
    reward_weights: Mapping[str, float] | None = None
    score_on: ScoreOn = "batch"
    lag: int = 0
    weight_sync_interval: int = 1
    max_carries: int = 8
    deadline_s: float = 1800.0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Controls:
    """Settings and controllers of one schedule; the controllers change as it runs.

    Attributes:
        chunk: tokens that a rollout gets between two looks at what has ended.
        overcommit: rollouts in flight beyond the batch.
        migration: when stragglers are moved together; ``None`` for never.
    """

    settings: Settings
    chunk: ChunkSize
    overcommit: Overcommit
    migration: MigrationPolicy | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one step.

    Attributes:
        batch: the rollouts that were trained on, with their scores.
        rejected: the rollouts that were left out, each with its reason.
        stats: the learner's metrics, and the schedule's own.
        rewards: of the rollouts that were trained on, by id, as trained on.
        losses: a line about each role whose process was lost since the step before.
    """

    batch: Sequence[Rollout]
    rejected: Sequence[Rollout]
    stats: Stats
    rewards: Mapping[int, float]
    losses: Sequence[str] = ()
