"""Teachers of distillation. Several divide the prompts by a column of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stretto.config import AlgorithmConfig, Config
from stretto.config.algorithm import TEACHER
from stretto.errors import ConfigError, TaskError, nearest
from stretto.tasks.encode import same_tokenizer
from stretto.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def teacher_shares(task: Task, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return the share of a task's prompts for each of several teachers, by their scorers' names.
    Raises TaskError as :func:`check_teachers` does.
    """
    check_teachers(task, algorithm)
    counts = Counter(f"{TEACHER}-{task.row(index).data[TEACHER]}" for index in task.indices)
    return {name: counts[name] / counts.total() for name in algorithm.teacher_models}


def reads_tokens(
    config: Config,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    actor_tokenizer: PreTrainedTokenizerBase,
) -> bool:
    """Return whether a teacher reads the actor's tokens. Otherwise it reads their text. Raises
    ConfigError if it can read neither. ``name`` is that of its scorer.
    """
    if same_tokenizer(tokenizer, actor_tokenizer):
        return True
    because = "does not say where in a text its tokens are"
    if config.environment.sources:
        because = "cannot read the turns of an episode, which the actor's template laid out"
    elif tokenizer.is_fast:
        return False
    model = config.algorithm.teacher_models[name]
    raise ConfigError(
        f"the {name} '{model}' has another tokenizer than the actor, which {because}; choose a "
        "model of the actor's family, or fine-tune the actor on the teacher's texts with "
        "`stretto sft`",
        "teacher-of-other-tokenizer",
    )
