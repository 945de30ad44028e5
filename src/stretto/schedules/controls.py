"""What decides as a schedule runs: its settings, and a controller for each thing that adapts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from stretto.config.schedule import Settings
from stretto.schedules.chunking import ChunkSize
from stretto.schedules.controller import Controller
from stretto.schedules.hold import HoldPolicy
from stretto.schedules.migration import MigrationPolicy
from stretto.schedules.overcommit import Overcommit


@dataclass(frozen=True, slots=True)
class Controls:
    """Settings and controllers of one schedule; the controllers change as it runs."""

    settings: Settings
    chunk: ChunkSize
    overcommit: Overcommit
    migration: MigrationPolicy | None = None
    hold: HoldPolicy | None = None

    @property
    def controllers(self) -> Mapping[str, Controller | HoldPolicy]:
        """The controllers that exist, by the name that their state has in a checkpoint."""
        names = (each.name for each in fields(self) if each.name != "settings")
        return {name: getattr(self, name) for name in names if getattr(self, name)}
