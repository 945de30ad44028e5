"""Beginning and executing runs: what the functions and the commands that train have in common."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from stretto.api.settings import R, check_resumable, settled
from stretto.checks import check_run, check_supervised, disk
from stretto.config import Config, RewardModelConfig, SftConfig, SupervisedConfig, recipes
from stretto.config.training import token_budget
from stretto.errors import OutOfMemoryError, StateError, first_line, is_out_of_memory
from stretto.machine import Machine, usable_gpus
from stretto.observe import Progress, RunDirectory, make_progress
from stretto.planner import fitting
from stretto.saying import CHECKING, LOADING
from stretto.signals import ending_in_order

if TYPE_CHECKING:
    from stretto.assembly.models import Overrides
    from stretto.runs import RewardModelResult, SftResult, TrainResult
    from stretto.tasks import Task

T = TypeVar("T")

_FEW_TOKENS, _FEW_SLOTS = 256, 4
"""Tokens of a pass and rollouts in slots below which less is not worth proposing."""


@dataclass(frozen=True, slots=True)
class Begun(Generic[R]):
    """A run that has its folder, and has not been executed.

    Attributes:
        config: its settings.
        run_dir: its folder.
        resuming: whether it goes on from the newest checkpoint in it.
        task: that its settings name, where it was opened to be checked.
    """

    config: R
    run_dir: RunDirectory
    resuming: bool = False
    task: Task | None = None


def begin(
    config: R, name: str = "run", *, resume: str | Path = "", given: Overrides | None = None
) -> Begun[R]:
    """Begin a run: look for what would fail, and make its folder, or open that of the run which it
    goes on with.

    Args:
        name: what a new folder in ``config.out`` is called by; a number is added.
        resume: the folder of the run to go on with; empty for a new one.
        given: what the caller brings instead of names.

    Raises:
        StrettoError: what :mod:`stretto.checks` finds.
        ConfigError: a new folder cannot be made; or ``resume`` is no run's folder, or a setting
            beyond :data:`~stretto.api.RESUMABLE` is changed.
        StorageError: the folder cannot be written to.
    """
    if not resume:
        task = _checked(config, given, Path(config.out), resuming=False)
        return Begun(config, RunDirectory.create(config.out, name, config), task=task)
    assert isinstance(config, Config), "runs of supervised training keep no checkpoints"
    run_dir = RunDirectory.open(resume)
    check_resumable(recipes.load(run_dir.config_file), config)
    ended = given is None and run_dir.ended(config.steps) is not None
    task = None if ended else _checked(config, given, run_dir.path, resuming=True)
    return Begun(config, run_dir, resuming=True, task=task)


def _checked(
    config: Config | SftConfig | RewardModelConfig,
    given: Overrides | None,
    folder: Path,
    *,
    resuming: bool,
) -> Task | None:
    """Look for what would fail; return the task, where it was opened for that."""
    task = None
    with make_progress(config.observe.progress).working(CHECKING):
        if isinstance(config, Config):
            task = check_run(config, **_brought(given))
        else:
            check_supervised(config)
        if given is None or given.actor is None:
            disk.check(config, folder, resuming=resuming)
    return task


def _brought(given: Overrides | None) -> dict[str, Any]:
    """Return what of a run the settings do not name, for its check."""
    if given is None:
        return {}
    return {
        "models": given.actor is None,
        "tokenizer": given.tokenizer is None,
        "task": given.task,
        "brought": {*given.functions, *given.reward_models},
    }


@overload
def execute(
    run: Begun[Config], *, given: Overrides | None = None, progress: Progress | None = None
) -> TrainResult: ...


@overload
def execute(run: Begun[SftConfig], *, progress: Progress | None = None) -> SftResult: ...


@overload
def execute(
    run: Begun[RewardModelConfig], *, progress: Progress | None = None
) -> RewardModelResult: ...


def execute(
    run: Begun[Any], *, given: Overrides | None = None, progress: Progress | None = None
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
            from stretto.assembly.models import NO_OVERRIDES

            # A model that the caller brings has a type of its own.
            actor = given.actor if given else None
            final, decided = (config, []) if actor is not None else _settled(config, run_dir)
            if isinstance(final, Config) and actor is None:
                decided += _checked_devices(final, given)
            run_dir.save_machine(Machine.here())
            text = opening(final, run_dir, actor, resuming=run.resuming)
        display.start(text)
        for line in decided:
            display.note(line)
        if isinstance(final, Config):
            brought = replace(given or NO_OVERRIDES, opened=run.task)
            return runs.train(
                final, run_dir=run_dir, resume=run.resuming, progress=display, overrides=brought
            )
        supervised = runs.sft if isinstance(final, SftConfig) else runs.train_reward_model
        return supervised(final, run_dir=run_dir, progress=display)

    with _memory_explained(config):
        return _to_the_end(work, run_dir, display, keep=run.resuming)


def _checked_devices(config: Config, given: Overrides | None) -> list[str]:
    """Refuse what does not fit; return remarks. Models that the caller brings are not looked at."""
    brought = given and (given.critic or given.reference or given.reward_models)
    if brought and config.runtime != "inline":
        return []
    return fitting.check_devices(config)


@contextmanager
def _memory_explained(config: Config | SupervisedConfig) -> Iterator[None]:
    """Say what a run can do about it where its memory is used up.

    Raises:
        OutOfMemoryError: in place of what torch or Python raised.
    """
    try:
        yield
    except Exception as error:
        short = next((e for e in (error, error.__cause__) if e and is_out_of_memory(e)), None)
        if short is None:
            raise
        what = f" ({first_line(short)})" if str(short) else ""
        raise OutOfMemoryError(
            f"out of memory{what}. Less is taken with {_remedies(config)}"
        ) from error


def _remedies(config: Config | SupervisedConfig) -> str:
    """Return options that take less memory, of those that the settings have not taken yet."""
    model, found = config.model, list[str]()
    on_gpu = model.device != "cpu" and usable_gpus()
    tokens = token_budget(config.training.microbatch_tokens, "cuda" if on_gpu else "cpu")
    if tokens > _FEW_TOKENS:
        found.append(f"--training.microbatch-tokens {max(tokens // 4, _FEW_TOKENS)}")
    if not model.gradient_checkpointing:
        found.append("--model.gradient-checkpointing")
    if not model.lora_rank:
        found.append("--model.lora-rank 16")
    if isinstance(config, Config):
        slots = config.rollout.slots or config.rollout.batch
        if slots > _FEW_SLOTS:
            found.append(f"--rollout.slots {max(slots // 4, _FEW_SLOTS)}")
    return f"{', '.join([*found, 'or'])} a smaller model"


def _settled(config: R, run_dir: RunDirectory) -> tuple[R, list[str]]:
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
