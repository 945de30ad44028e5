"""Settings of a schedule, and its controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Protocol, get_args

from stretto.config.knobs import RoundKnobs, ScoreOn, Settings
from stretto.errors import ConfigError
from stretto.schedules.chunking import ChunkSize
from stretto.schedules.controller import Controller, Feedback
from stretto.schedules.hold import HoldPolicy
from stretto.schedules.migration import MigrationPolicy
from stretto.schedules.overcommit import Overcommit


class Tuner(Controller, Protocol):
    """Controller that sets several knobs for each round, up to the settings' values."""

    @property
    def knobs(self) -> RoundKnobs:
        """Return the knobs of the next round to start."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the latest decision."""

    def take_news(self) -> Sequence[str]:
        """Return a line about each decision since the last call."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Settings and controllers of one schedule. Only the controllers' state changes in a run.

    A tuner replaces ``chunk`` and ``overcommit``, and three settings of its schedule.
    """

    settings: Settings
    chunk: ChunkSize
    overcommit: Overcommit
    migration: MigrationPolicy | None = None
    hold: HoldPolicy | None = None
    tuner: Tuner | None = None

    @property
    def knobs(self) -> RoundKnobs | Settings:
        """``score_on``, ``train_on`` and ``lag`` of the next round to start."""
        return self.tuner.knobs if self.tuner else self.settings

    @property
    def delta(self) -> int:
        delta = self.tuner.knobs.delta if self.tuner else self.overcommit.delta
        return _within("overcommit: delta", delta, 0, self.settings.most_overcommit)

    @property
    def chunk_tokens(self) -> int:
        tokens = self.tuner.knobs.chunk_tokens if self.tuner else self.chunk.tokens
        return _within("chunk_tokens: tokens", tokens, 1, None)

    def observe(self, feedback: Feedback) -> None:
        for controller in filter(None, (self.chunk, self.overcommit, self.migration, self.tuner)):
            controller.observe(feedback)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of a tuner's round: its knobs without those that all rounds report."""
        if self.tuner is None:
            return {}
        score_on = float(get_args(ScoreOn).index(self.knobs.score_on))
        knobs = {"schedule/lag": float(self.knobs.lag), "schedule/score_on": score_on}
        return {**knobs, **self.tuner.metrics}

    def take_news(self) -> Sequence[str]:
        return self.tuner.take_news() if self.tuner else ()

    @property
    def controllers(self) -> Mapping[str, Controller | HoldPolicy]:
        """Existing controllers, by the key of their state in a checkpoint."""
        names = (field.name for field in fields(self) if field.name != "settings")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def _within(name: str, value: Any, low: int, high: int | None) -> int:
    number = int(value) if isinstance(value, Integral) else low - 1
    if low <= number <= (number if high is None else high):
        return number
    limit_text = "" if high is None else f", at most {high} (`schedule.overcommit_max`)"
    raise ConfigError(
        f"schedule.controllers: {name} = {value!r}, which must be an integer of {low} or "
        f"more{limit_text}; correct the controller",
        "controller-value",
    )
