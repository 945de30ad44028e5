"""Prompts and their verifiers: procedural tasks, datasets of files or the hub, and GSM8K."""

from __future__ import annotations

from stretto.config import TaskConfig
from stretto.errors import TaskError
from stretto.saying import Say, silent, working
from stretto.tasks.procedural import ProceduralTask
from stretto.tasks.tables import Gsm8kTask, TableTask
from stretto.tasks.task import INDEX_KEY, Task, TaskRow

__all__ = ["INDEX_KEY", "Task", "TaskRow", "load"]

_WITHOUT_EFFECT = {
    "procedural": ("split", "columns"),
    "reasoning-gym": ("split", "columns"),
    "dataset": ("settings",),
    "gsm8k": ("settings", "columns"),
}
"""Settings that a kind of task refuses, because they have no effect on it."""


def load(config: TaskConfig, seed: int, say: Say = silent) -> Task:
    """Open the task that ``config`` names.

    Args:
        seed: of procedural tasks. Rows of files and of the hub do not depend on it.

    Raises:
        TaskError: the task or one of its settings is unknown, the data cannot be read or lacks a
            column, or a setting has no effect on this kind of task.
        MissingExtraError: this kind of task needs a library that is not installed.
    """
    for key in filter(config.is_set, _WITHOUT_EFFECT[config.kind]):
        raise TaskError(
            f"task.{key} = {getattr(config, key)!r} has no effect with task.kind = "
            f"'{config.kind}'; leave task.{key} out, or choose another kind",
            "setting-without-effect",
        )
    if config.is_procedural and config.held_out_rows:
        raise TaskError(
            f"task.held_out = '{config.held_out}' names rows of a file or of the hub, which "
            f"task.kind = '{config.kind}' has not; give a share of its prompts, such as 0.2",
            "held-out-rows-of-made-task",
        )
    with working(say, f"reading {config.name}"):
        match config.kind:
            case "procedural" | "reasoning-gym":
                return ProceduralTask(config, seed)
            case "gsm8k":
                return Gsm8kTask(config)
            case "dataset":
                return TableTask(config)
