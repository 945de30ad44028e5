"""Replays of recorded runs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.checks import check_run
from stretto.config.sections import NonNegativeInt
from stretto.errors import StateError
from stretto.interfaces import in_python
from stretto.observe import Progress, RunDirectory, make_progress
from stretto.saying import LOADING
from stretto.signals import ending_in_order

if TYPE_CHECKING:
    from stretto.runs import TrainResult


@in_python
def replay(
    run: str | Path,
    *,
    to: NonNegativeInt = 0,
    out: str | Path = "",
    progress: Progress | None = None,
) -> TrainResult:
    """Repeat a run from its flight record, like ``stretto replay``: with the same weights, bit for
    bit, in a new folder. Raises StateError if there is no record, for the first outcome that
    differs, and for a run that was given objects as models or functions.

    Args:
        run: its folder.
        to: the last step to repeat. 0 repeats all recorded ones.
        out: folder for the replay's own. By default that of the run's.
        progress: display object. ``None`` is ``observe.progress``.
    """
    recorded = RunDirectory.open(run)
    from stretto.observe.flight import read_flight

    segments = read_flight(recorded.flight_file)
    config = segments[-1].config
    if objects := segments[-1].head.get("objects"):
        raise StateError(
            f"the run was given Python objects ({', '.join(objects)}), which its folder does not "
            "have, so it cannot be replayed. Runs that name functions as 'file.py:name', and "
            "models by their folders, can",
            "objects-not-recorded",
        )
    display = progress or make_progress(config.observe.progress)
    with display.working(LOADING):
        check_run(config)
        from stretto.runs import replaying
    legs = replaying.legs_of(segments, to)
    folder = Path(out) if out else recorded.path.absolute().parent
    target = RunDirectory.create(folder, f"{recorded.name}-replay", config)
    with ending_in_order(), ExitStack() as stack:
        stack.enter_context(target.locked(display.note))
        display.start(f"repeats {recorded.path} up to step {legs[-1].until} in {target.path}")
        result = replaying.replay(recorded, target, legs, progress=display)
    display.close()
    display.note(f"done; the replay's records and model are in {target.path}")
    return result
