"""Checks that the disk has room for a run's checkpoints and models."""

from __future__ import annotations

from pathlib import Path

from stretto import files
from stretto.config import Config, SupervisedConfig
from stretto.errors import ModelError, StorageError
from stretto.observe.run_directory import CHECKPOINTS, KEPT
from stretto.planner.fitting import TRAINED_ROLES, plan_for, width
from stretto.saying import format_size


def written(config: Config | SupervisedConfig) -> tuple[int, int] | None:
    """Return the bytes of a checkpoint and of the models, or ``None`` if a model is not on this
    machine.

    A checkpoint (0 if none is written) has float32 masters and both Adam moments of all trained
    weights, and the generation weights if they are a copy. The models are the final one, the
    warm-up's outcome, and, in an evaluated run, the best model and its replacement.
    """
    reinforced = (config.algorithm, config.reward) if isinstance(config, Config) else ()
    try:
        plan = plan_for(config.model, *reinforced)
    except ModelError:
        return None
    weights, checkpoint = width(config.model) * plan.parameters, 0
    if not isinstance(config, Config):
        return 0, weights
    if config.observe.checkpoints:
        trained = sum(role in TRAINED_ROLES for role in plan.mixed)
        checkpoint = 12 * plan.trained * trained
        checkpoint += weights if config.schedule.knobs.copies_weights else 0
    models = 1 + bool(config.warmup_examples) + 2 * bool(config.observe.eval_every)
    return checkpoint, weights * models


def check(sizes: tuple[int, int] | None, folder: Path, *, resuming: bool = False) -> None:
    """Refuse a run whose :func:`written` sizes exceed the disk. Resuming needs no checkpoint."""
    if sizes is None:
        return
    (checkpoint, model), free = sizes, files.free(folder)
    checkpoint = 0 if resuming else checkpoint
    needed = round(max(checkpoint + model, (1 + files.SPARE) * checkpoint))
    if needed > free:
        also, remedy = "", "Make room, or choose another disk with `out`"
        if checkpoint:
            also = f", {format_size(checkpoint)} for a checkpoint, and room for records"
            remedy = f"{remedy}, or leave checkpoints out with `observe.checkpoint_minutes = 0`"
        raise StorageError(
            f"'{folder}' is on a disk with {format_size(free)} free, and the run needs "
            f"{format_size(needed)} there: {format_size(model)} for its model{also}. {remedy}",
            "disk-too-small",
        )


def said(sizes: tuple[int, int] | None, folder: Path) -> str:
    """Describe the size of a run's checkpoints, and how many of them the disk can hold."""
    if sizes is None or not sizes[0]:
        return ""
    size, free = sizes[0], files.free(folder)
    capacity = int((free + files.size_of(folder / CHECKPOINTS)) / size - 1 - files.SPARE)
    if capacity >= KEPT:
        note = f"at most {KEPT} kept"
    elif capacity == 1:
        note = f"1 kept, as {format_size(free)} are free"
    else:
        note = f"and only the first is written, as {format_size(free)} are free: make room"
    return f"checkpoints: {format_size(size)} each, {note}"
