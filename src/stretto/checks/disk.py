"""Whether the disk has room for what a run writes: its checkpoints and its model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from stretto.config import Config
from stretto.errors import ModelError, StorageError
from stretto.models.memory import TRAINED_ROLES, format_size, plan_for, width


@dataclass(frozen=True, slots=True)
class Written:
    """What a run writes at most, in bytes.

    Attributes:
        checkpoint: float32 masters and both moments of Adam of all that is trained.
        model: the trained model.
    """

    checkpoint: int
    model: int

    @classmethod
    def by(cls, config: Config) -> Written | None:
        """Return what a run writes; ``None`` where its models are not here to be counted."""
        try:
            plan = plan_for(config)
        except ModelError:
            return None
        trained = sum(role.role in TRAINED_ROLES for role in plan.mixed.roles)
        checkpoint = 12 * plan.trained * trained if config.observe.checkpoints else 0
        return cls(checkpoint, width(config.model) * plan.parameters)


def check(config: Config, folder: Path) -> None:
    """Refuse a run whose checkpoint and model do not fit on the disk.

    Args:
        config: of the run.
        folder: in which its own folder is, or will be.

    Raises:
        StorageError: they do not.
    """
    written = Written.by(config)
    if written is None:
        return
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if written.checkpoint + written.model > free:
        raise StorageError(
            f"'{folder}' is on a disk with {format_size(free)} free, and the run writes "
            f"{format_size(written.model)} for its model and {format_size(written.checkpoint)} for "
            "a checkpoint: make room, choose another disk with --out, or leave checkpoints out "
            "with --observe.checkpoint-minutes 0"
        )
