"""Schedules over scripted roles, whose settings are plain data. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.config.knobs import Settings
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.migration import FixedMigration, MigrationLimits
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.testing import FakeEnvironment, FakeGenerator, FakeLearner, FakeScorer, World


@dataclass(frozen=True)
class Setting:
    """A short run.

    Attributes:
        settings: of the schedule.
        turns: tokens of turns by rollout, and seconds of their answers, where there are episodes.
        hosted: whether each generator's device has a copy of each scorer that is a model.
        critic: whether there is one.
        score_s, train_s: seconds of a scorer's call, and of a step of the learner.
        fails: ids that the reward function fails on.
        order: seed of the order of simultaneous events; ``None`` for that of their making.
    """

    settings: Settings
    lengths: Sequence[int] = (3, 17, 2, 9, 5, 1, 30)
    engines: int = 1
    migrate: float = 0.0
    delta: int = 0
    chunk: int = 4
    hosted: bool = False
    critic: bool = True
    score_s: float = 0.5
    train_s: float = 2.0
    fails: Sequence[int] = ()
    order: int | None = None
    turns: Sequence[Sequence[int]] = ()
    waits_s: Sequence[float] = (3.0,)

    @property
    def timeless(self) -> bool:
        """Whether time decides nothing of what is trained on, as no engines race."""
        return not self.delta or (self.engines == 1 and not self.turns)


def schedule_of(setting: Setting, world: World) -> Schedule:
    """The setting's schedule, over scripted roles: a judge, a reward model and maybe a critic."""
    generators = [FakeGenerator(world, f"gen{i}") for i in range(setting.engines)]
    replicas = [ScorerReplica(FakeScorer(world, "judge"))]
    world.loaded["judge"] = 0
    models: list[dict[str, Any]] = [{"name": "model"}]
    if setting.critic:
        models.append({"name": "critic", "kind": "values", "follows": "critic"})
    for host in range(setting.engines) if setting.hosted else (None,):
        replicas += [
            ScorerReplica(FakeScorer(world, **each, seconds=setting.score_s), host)
            for each in models
        ]
    limits = MigrationLimits(setting.engines, 8, 10_000, 100, 1e4, 1e5)
    batch = setting.settings.batch
    migration = FixedMigration(limits, batch, setting.migrate) if setting.migrate else None
    return Schedule(
        world.next_prompt,
        generators,
        replicas,
        FakeLearner(world, setting.train_s),
        Controls(
            setting.settings, FixedChunk(setting.chunk), FixedOvercommit(setting.delta), migration
        ),
        world.clock,
        world,
        environment=FakeEnvironment(world, setting.waits_s) if setting.turns else None,
    )
