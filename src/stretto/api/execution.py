"""Beginning and executing runs: what the functions and the commands that train have in common."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, overload

from stretto.api.settings import R, check_resumable, settled
from stretto.checks import check_run, check_supervised, disk
from stretto.config import Config, RewardModelConfig, SftConfig, SupervisedConfig, recipes
from stretto.config.training import token_budget
from stretto.errors import OutOfMemoryError, StateError, first_line, is_out_of_memory
from stretto.machine import Machine, usable_gpus
from stretto.models.info import measure, model_info
from stretto.observe import Progress, RunDirectory, make_progress
from stretto.observe.progress import headline
from stretto.planner import fitting
from stretto.saying import CHECKING, LOADING, format_count
from stretto.signals import ending_in_order

if TYPE_CHECKING:
    from torch import nn

    from stretto.assembly.models import Overrides
    from stretto.runs import RewardModelResult, SftResult, TrainResult
    from stretto.tasks import Task

_FEW_TOKENS, _FEW_SLOTS = 256, 4
"""Tokens of a pass and rollouts in slots below which less is not worth proposing."""


@dataclass(frozen=True, slots=True)
class Begun(Generic[R]):
    """A run that has its folder, and has not been executed.

    Attributes:
        resuming: whether it goes on from the newest checkpoint in its folder.
        overrides: objects in place of names in the settings.
        task: the one that the settings name, where it was opened to be checked.
    """

    config: R
    run_dir: RunDirectory
    resuming: bool = False
    overrides: Overrides | None = None
    task: Task | None = None


def begin(
    config: R, name: str = "run", *, resume: str | Path = "", overrides: Overrides | None = None
) -> Begun[R]:
    """Begin a run: look for what would fail, and make its folder, or open that of the run which it
    goes on with.

    Raises a StrettoError as :mod:`stretto.checks` does, and where the folder cannot be made or
    written to, or ``resume`` is no run's folder or has settings that may not be changed.

    Args:
        name: what a new folder in ``config.out`` is called by; a number is added.
        resume: the folder of the run to go on with; empty for a new one.
        overrides: objects in place of names in the settings.
    """
    run_dir, folder = None, Path(config.out)
    if resume:
        assert isinstance(config, Config), "runs of supervised training keep no checkpoints"
        run_dir = RunDirectory.open(resume)
        folder = run_dir.path
        check_resumable(recipes.load(run_dir.config_file), config)
    task = None
    if not (run_dir and overrides is None and run_dir.ended(config.steps)):
        with make_progress(config.observe.progress).working(CHECKING):
            if isinstance(config, Config):
                task = check_run(config, overrides)
            else:
                check_supervised(config)
            if overrides is None or overrides.actor is None:
                disk.check(config, folder, resuming=bool(resume))
    run_dir = run_dir or RunDirectory.create(config.out, name, config)
    return Begun(config, run_dir, bool(resume), overrides, task)


@overload
def execute(run: Begun[Config], *, progress: Progress | None = None) -> TrainResult: ...
@overload
def execute(run: Begun[SftConfig], *, progress: Progress | None = None) -> SftResult: ...
@overload
def execute(
    run: Begun[RewardModelConfig], *, progress: Progress | None = None
) -> RewardModelResult: ...
def execute(run: Begun[Any], *, progress: Progress | None = None) -> Any:
    """Execute a run that was begun: display, training, and where the results are.

    A new folder is removed again if the run ends before its first step. The settings of a run that
    is resumed are written into its folder; one that has ended already is not executed, and its
    result is returned at once.

    Raises a StrettoError where a setting, a model, a dataset, a reward function, the numbers or the
    disk are at fault, or another process is at work in the folder; KeyboardInterrupt for Ctrl-C, or
    as :class:`stretto.signals.Terminated` for SIGTERM or SIGHUP.

    Args:
        progress: a display; without one what ``observe.progress`` says.
    """
    config, run_dir = run.config, run.run_dir
    display = progress or make_progress(config.observe.progress)
    ended = run_dir.ended(config.steps) if run.resuming and run.overrides is None else None
    if ended is not None:
        display.note(
            f"the run in {run_dir.path} has ended: all of its {ended.steps} steps are taken, and "
            f"the trained model is in {ended.model}. More steps go on from there (--steps)"
        )
        return ended
    with _memory_explained(config), ending_in_order(), ExitStack() as stack:
        stack.enter_context(run_dir.locked(display.note))
        try:
            with stack:  # a folder that is removed is let go of first
                result = _train(run, display)
        except BaseException:
            _leave(run_dir, display, keep=run.resuming)
            raise
        display.close()
        records = "metrics, samples" if run_dir.samples_file.exists() else "metrics"
        display.note(f"done; {records} and the trained model are in {run_dir.path}")
        return result


def _train(run: Begun[Any], display: Progress) -> Any:
    config, run_dir, overrides = run.config, run.run_dir, run.overrides
    if run.resuming:
        run_dir.save_config(config)
    lines: list[str] = []
    with display.working(LOADING):
        from stretto import runs
        from stretto.assembly.models import NO_OVERRIDES

        actor = overrides.actor if overrides else None
        if actor is None:  # else the model has a type of its own
            config = settled(config, lines.append)
            if lines:
                run_dir.save_config(config)
            if isinstance(config, Config):
                lines += _check_devices(config, overrides)
        run_dir.save_machine(Machine.here())
        text = _opening(config, run_dir, actor, resuming=run.resuming)
    display.start(text)
    for line in lines:
        display.note(line)
    if isinstance(config, Config):
        overrides = replace(overrides or NO_OVERRIDES, opened=run.task)
        return runs.train(
            config, run_dir=run_dir, resume=run.resuming, progress=display, overrides=overrides
        )
    supervised = runs.sft if isinstance(config, SftConfig) else runs.train_reward_model
    return supervised(config, run_dir=run_dir, progress=display)


def _check_devices(config: Config, overrides: Overrides | None) -> list[str]:
    """Refuse what does not fit; return remarks. Models that are objects are not looked at."""
    objects = overrides and (overrides.critic or overrides.reference or overrides.reward_models)
    return [] if objects and config.runtime != "inline" else fitting.check_devices(config)


def _opening(
    config: Config | SupervisedConfig,
    run_dir: RunDirectory,
    actor: nn.Module | None,
    *,
    resuming: bool,
) -> str:
    """Say in three lines what will run, on what, and where its results go."""
    from stretto.models.backend import pick_device

    where = f"{'goes on' if resuming else 'results'} in {run_dir.path}"
    if actor is None:
        size = ""
        if model_info(config.model.name) is not None:
            parameters, adapters = measure(config.model)
            size = f"{format_count(parameters)} parameters"
            if adapters is not None:
                size += f", of which adapters train {format_count(adapters)}"
        dtype, device = str(config.model.dtype), pick_device(config.model.device).type
        where = "; ".join(filter(None, (where, disk.said(config, run_dir.path))))
    else:
        weight = next(actor.parameters())
        size = f"{format_count(sum(p.numel() for p in actor.parameters()))} parameters"
        dtype, device = str(weight.dtype).removeprefix("torch."), weight.device.type
    return headline(config, ", ".join(filter(None, (size, f"{dtype} on {device}"))), where)


@contextmanager
def _memory_explained(config: Config | SupervisedConfig) -> Iterator[None]:
    """Raise OutOfMemoryError, with what a run can do about it, in place of torch's or Python's."""
    try:
        yield
    except Exception as error:
        short = next((e for e in (error, error.__cause__) if e and is_out_of_memory(e)), None)
        if short is None:
            raise
        what = f" ({first_line(short)})" if str(short) else ""
        raise OutOfMemoryError(
            f"out of memory{what}. Less is taken with {_remedies(config)}", "out-of-memory"
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


def _leave(run_dir: RunDirectory, display: Progress, *, keep: bool) -> None:
    """Name the folder of a run that was stopped; remove it if the run never took a step.

    What fails on the way, as on a terminal that is gone, must not hide what stopped the run.
    """
    with suppress(OSError, ValueError, StateError):
        display.close()
    with suppress(OSError, ValueError, StateError):
        if any(record["step"] for record in run_dir.read_metrics()):
            display.note(f"stopped; what was done so far is in {run_dir.path}")
        elif not keep:
            shutil.rmtree(run_dir.path)
