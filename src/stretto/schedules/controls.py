"""Settings of a schedule, and its controllers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from stretto.config.knobs import Settings
from stretto.errors import ConfigError
from stretto.schedules.chunking import ChunkSize
from stretto.schedules.controller import Controller, Feedback
from stretto.schedules.hold import HoldPolicy
from stretto.schedules.migration import MigrationPolicy
from stretto.schedules.overcommit import Overcommit


@dataclass(frozen=True, slots=True)
class Controls:
    """Settings and controllers of one schedule. Only the controllers' state changes in a run."""

    settings: Settings
    chunk: ChunkSize
    overcommit: Overcommit
    migration: MigrationPolicy | None = None
    hold: HoldPolicy | None = None

    @property
    def delta(self) -> int:
        return _within("overcommit: delta", self.overcommit.delta, 0, self.settings.most_overcommit)

    @property
    def chunk_tokens(self) -> int:
        return _within("chunk_tokens: tokens", self.chunk.tokens, 1, None)

    def observe(self, feedback: Feedback) -> None:
        for controller in filter(None, (self.chunk, self.overcommit, self.migration)):
            controller.observe(feedback)

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
