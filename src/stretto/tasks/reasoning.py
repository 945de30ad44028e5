"""Procedural tasks of reasoning-gym, judged by their own verifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

from stretto.config import TaskConfig
from stretto.errors import TaskError, nearest, require
from stretto.tasks.answers import extract
from stretto.tasks.base import Task, TaskRow
from stretto.tasks.procedural import DEFAULT_SIZE, SEED_STRIDE, check_names


class ReasoningTask(Task):
    """A dataset of reasoning-gym by name.

    The rows of a few datasets follow the iteration order of Python sets, and so differ from one
    process to the next unless the environment fixes PYTHONHASHSEED.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._dataset = _create(config, seed)
        self._extract = config.extract
        # A row may be slow to make, and is asked for once a response.
        self._entry = lru_cache(maxsize=4096)(self._dataset.__getitem__)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._dataset)

    def row(self, index: int) -> TaskRow:
        """The row at ``index``; made now."""
        entry = self._entry(index)
        answer = entry["answer"]
        return TaskRow(
            prompt=entry["question"],
            data=dict(entry),
            reference=answer if isinstance(answer, str) else None,
            index=index,
        )

    @property
    def identity(self) -> Mapping[str, str]:
        """Number of rows, and the version of what makes them; the settings say the rest."""
        return {**super().identity, "reasoning-gym": metadata.version("reasoning-gym")}

    @property
    def has_verifier(self) -> bool:
        """Return true: every dataset of reasoning-gym has a verifier."""
        return True

    def verify(self, index: int, response: str) -> float:
        """The dataset's own score, mostly from 0 to 1; a missing answer is handed over as None."""
        answer = extract(response, self._extract)
        return float(self._dataset.score_answer(answer, self._entry(index)))


def _create(config: TaskConfig, seed: int) -> Any:
    """The dataset, with every name in the settings checked first."""
    require("reasoning_gym", "tasks", "task.kind = 'reasoning-gym'")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        raise TaskError(
            f"task.name = '{config.name}' is not a dataset of reasoning-gym. "
            f"{nearest(config.name, DATASETS)}"
        )
    known = {field.name for field in dataclasses.fields(DATASETS[config.name][1])}
    check_names(config, known - {"seed", "size"})
    try:
        return reasoning_gym.create_dataset(
            config.name,
            size=config.size or DEFAULT_SIZE,
            seed=seed * SEED_STRIDE % 2**32,
            **config.settings,
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskError(
            f"task.settings: '{config.name}' refuses {dict(config.settings)}: {error}"
        ) from error
