"""Replays of recorded runs, and runs that branch off from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import files
from stretto.api.settings import BRANCHABLE, changed, check_resumable
from stretto.api.training import begin, execute
from stretto.checks import check_run
from stretto.config.sections import NonNegativeInt
from stretto.errors import ConfigError, StateError
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
    from_: NonNegativeInt = 0,
    out: str | Path = "",
    progress: Progress | None = None,
    **changes: Any,
) -> TrainResult:
    """Repeat a run from its flight record, like ``stretto replay``: with the same weights, bit for
    bit, in a new folder. Raises StateError if there is no record, for the first outcome that
    differs, and for a run that was given objects as models or functions.

    Args:
        run: its folder.
        to: Last step. Default: the last recorded one, or that of the branch's settings.
        from_: Last step to repeat. An ordinary run branches off after it, to which changes of
            settings apply. Default: none.
        out: Folder for the replay's own folder. Default: that of the run's.
        progress: display object. ``None`` is ``observe.progress``.
        changes: as in :func:`train`, for settings in :data:`BRANCHABLE`.
    """
    recorded = RunDirectory.open(run)
    from stretto.workers.flight import read_flight

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
    legs = replaying.legs_of(segments, from_ or to)
    branch = changed(legs[-1].segment.config, changes)
    _check_branch(from_, to, changes, branch.steps)
    check_resumable(legs[-1].segment.config, branch, BRANCHABLE)
    folder = Path(out) if out else recorded.path.absolute().parent
    kind = "branch" if from_ else "replay"
    target = RunDirectory.create(folder, f"{recorded.name}-{kind}", config)
    with ending_in_order(), ExitStack() as stack:
        stack.enter_context(target.locked(display.note))
        display.start(f"repeats {recorded.path} up to step {legs[-1].until} in {target.path}")
        result = replaying.replay(recorded, target, legs, progress=display)
    display.close()
    if from_:
        display.note(f"branches off from {recorded.path} after step {from_}")
        origin = {"run": str(recorded.path.absolute()), "step": from_, "changes": changes}
        files.write_whole(target.branch_file, json.dumps(origin, default=str).encode())
        begun = begin(branch, resume=target.path, may_change=BRANCHABLE)
        return execute(
            begun, progress=display, on_step=lambda step, stats: "stop" if step == to else None
        )
    display.note(f"done; the replay's records and model are in {target.path}")
    return result


def _check_branch(from_: int, to: int, changes: Mapping[str, Any], steps: int) -> None:
    if changes and not from_:
        raise ConfigError(
            "a replay has the settings of its run; name the step after which "
            f"{', '.join(changes).replace('__', '.')} shall change with `from_`",
            "changes-without-branch",
        )
    if from_ and 0 < to <= from_:
        raise ConfigError(
            f"`to = {to}` is not after `from_ = {from_}`, where the branch starts", "branch-empty"
        )
    if steps <= from_:
        raise ConfigError(
            f"`from_ = {from_}` is the last of the run's {steps} steps, after which no step "
            f"is left; name an earlier one, or more steps by `steps = {from_ + 1}`",
            "branch-empty",
        )
