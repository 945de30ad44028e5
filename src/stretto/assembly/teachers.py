"""Several teachers of distillation, which divide the prompts by a column of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.config import AlgorithmConfig
from stretto.config.algorithm import TEACHER
from stretto.errors import TaskError, nearest
from stretto.tasks.task import Task


def is_taught_by(scorer: str, data: Mapping[str, Any]) -> bool:
    """Return whether the teacher with a scorer's name reads the responses to a row's prompt."""
    return scorer == f"{TEACHER}-{data.get(TEACHER)}"


def check_teachers(task: Task, algorithm: AlgorithmConfig) -> None:
    """Raise TaskError if the teachers divide the prompts and a row names none of them."""
    if not algorithm.teachers:
        return
    for index in task.indices:
        data = task.row(index).data
        if TEACHER not in data:
            raise TaskError(
                f"algorithm.teachers divides the prompts, and row {index} has no column 'teacher' "
                "with a teacher's name; name the column by `task.columns = teacher=COLUMN`",
                "row-without-teacher",
            )
        name = str(data[TEACHER])
        if name not in algorithm.teachers:
            raise TaskError(
                f"row {index} names the teacher '{name}', which algorithm.teachers has not. "
                f"{nearest(name, algorithm.teachers)}",
                "row-of-unknown-teacher",
            )
