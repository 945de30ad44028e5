"""The choice of the runtime that a run is put on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from stretto.assembly.models import NOTHING, Given
from stretto.config import Config
from stretto.runtime.base import Running
from stretto.saying import Say


def start(
    config: Config,
    stack: ExitStack,
    say: Say,
    given: Given = NOTHING,
    folder: Path | None = None,
) -> Running:
    """Put a run together on the runtime that the settings name.

    Args:
        say: called with a line about whatever takes time.
        given: what the caller brings instead of names.
        folder: of the run, for the logs of its processes; without it they print where this one
            does.

    Raises:
        StrettoError: a setting, a model, a dataset or a reward source is at fault.
    """
    if config.runtime != "inline":
        from stretto.runtime.groups import run

        return run.start(config, stack, say, given, folder)
    from stretto.runtime import inline

    return inline.start(config, stack, say, given)
