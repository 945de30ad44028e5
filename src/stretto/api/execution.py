"""Beginning and executing runs: what the functions and the commands that train have in common."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from stretto.api.settings import R, check_resumable, settled
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.errors import StateError
from stretto.machine import Machine
from stretto.observe import Progress, RunDirectory, make_progress
from stretto.saying import LOADING, Saying
from stretto.signals import ending_in_order

if TYPE_CHECKING:
    from stretto.assembly.models import Given
    from stretto.runs import RewardModelResult, SftResult, TrainResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begun(Generic[R]):
    """A run that has its folder, and has not been executed.

    Attributes:
        config: its settings.
        run_dir: its folder.
        resuming: whether it goes on from the newest checkpoint in it.
    """

    config: R
    run_dir: RunDirectory
    resuming: bool = False


def begin(config: R, name: str = "run", *, resume: str | Path = "") -> Begun[R]:
    """Begin a run: make its folder, or open that of the run which it goes on with.

    Args:
        config: its settings.
        name: what a new folder in ``config.out`` is called by; a number is added.
        resume: the folder of the run to go on with; empty for a new one.

    Raises:
        ConfigError: a new folder cannot be made; or ``resume`` is no run's folder, or a setting
            beyond :data:`~stretto.api.RESUMABLE` is changed.
        StorageError: the folder cannot be written to.
    """
    if not resume:
        return Begun(config, RunDirectory.create(config.out, name, config))
    assert isinstance(config, Config), "runs of supervised training keep no checkpoints"
    run_dir = RunDirectory.open(resume)
    check_resumable(recipes.load(run_dir.config_file), config)
    return Begun(config, run_dir, resuming=True)


@overload
def execute(
    run: Begun[Config], *, given: Given | None = None, progress: Progress | None = None
) -> TrainResult: ...


@overload
def execute(run: Begun[SftConfig], *, progress: Progress | None = None) -> SftResult: ...


@overload
def execute(
    run: Begun[RewardModelConfig], *, progress: Progress | None = None
) -> RewardModelResult: ...


def execute(
    run: Begun[Any], *, given: Given | None = None, progress: Progress | None = None
) -> Any:
    """Execute a run that was begun: display, training, and where the results are.

    One that is resumed and has ended already is not: what came of it is returned at once.

    Args:
        run: its folder is removed again if it is new and ends before its first step. The settings
            of one that is resumed are written into its folder.
        given: what the caller brings instead of names.
        progress: a display; without one what ``observe.progress`` says.

    Raises:
        StrettoError: a setting, a model, a dataset, a reward function, the numbers or the disk are
            at fault; or another process is at work in the folder.
        KeyboardInterrupt: Ctrl-C, or as :class:`stretto.signals.Terminated` SIGTERM or SIGHUP.
    """
    config, run_dir = run.config, run.run_dir
    display = progress or make_progress(config.observe.progress)
    if run.resuming and given is None and (ended := run_dir.ended(config.steps)) is not None:
        display.note(
            f"the run in {run_dir.path} has ended: all of its {ended.steps} steps are taken, and "
            f"the trained model is in {ended.model}. More steps go on from there (--steps)"
        )
        return ended

    def work() -> Any:
        if run.resuming:
            run_dir.save_config(config)
        with display.working(LOADING):
            from stretto import runs
            from stretto.api.opening import opening

            # A model that the caller brings has a type of its own.
            actor = given.actor if given else None
            final, decided = (config, []) if actor else _settled(config, run_dir)
            run_dir.save_machine(Machine.here())
            text = opening(final, run_dir, actor, Saying(display), resuming=run.resuming)
        display.start(final, text)
        for line in decided:
            display.note(line)
        if isinstance(final, Config):
            brought = {"given": given} if given else {}
            return runs.train(
                final, run_dir=run_dir, resume=run.resuming, progress=display, **brought
            )
        supervised = runs.sft if isinstance(final, SftConfig) else runs.train_reward_model
        return supervised(final, run_dir=run_dir, progress=display)

    return _to_the_end(work, run_dir, display, keep=run.resuming)


def _settled(config: R, run_dir: RunDirectory) -> tuple[R, list[str]]:
    """The settings with what the machine decides, kept in the run's folder, and lines about it."""
    lines: list[str] = []
    final = settled(config, lines.append)
    if lines:
        run_dir.save_config(final)
    return final, lines


def _to_the_end(
    work: Callable[[], T], run_dir: RunDirectory, display: Progress, keep: bool = False
) -> T:
    """Do a run's work while nobody else writes into its folder, and say what there is of it, also
    where it is stopped.
    """
    with ending_in_order(), ExitStack() as stack:
        stack.enter_context(run_dir.locked(display.note))
        try:
            with stack:  # a folder that is removed is let go of first
                result = work()
        except BaseException:
            _leave(run_dir, display, keep)
            raise
        display.close()
        records = "metrics, samples" if run_dir.samples_file.exists() else "metrics"
        display.note(f"done; {records} and the trained model are in {run_dir.path}")
        return result


def _leave(run_dir: RunDirectory, display: Progress, keep: bool) -> None:
    """Say what there is of a run that was stopped; one that never took a step leaves nothing.

    What fails on the way, as on a terminal that is gone, must not hide what stopped the run.
    """
    with suppress(OSError, ValueError, StateError):
        display.close()
    with suppress(OSError, ValueError, StateError):
        if any(record["step"] for record in run_dir.read_metrics()):
            display.note(f"stopped; what was done so far is in {run_dir.path}")
        elif not keep:
            shutil.rmtree(run_dir.path)
