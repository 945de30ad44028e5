"""Procedural problems made from a seed, with their verifiers.

``chain_sum`` and ``spell_backward`` are built in, with the questions and scores of reasoning-gym's
datasets of the same names. ``chain_sum`` also has the same settings and rows, ``spell_backward``
has fewer words. All other datasets need the library reasoning-gym.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

from stretto.config import TaskConfig
from stretto.errors import TaskError, nearest, require
from stretto.tasks.task import Task, TaskRow, extract

SEED_STRIDE = 1_000_003
"""Distance between the seeds of runs, so that rows, drawn with seed + i, are not shared."""

DEFAULT_SIZE = 100_000  # rows by default, made on access

WORDS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()


@dataclass(frozen=True)
class ChainSum:
    """Sums and differences of random numbers."""

    min_terms: int = 2
    max_terms: int = 6
    min_digits: int = 1
    max_digits: int = 4

    def make(self, seed: int, index: int) -> tuple[str, str]:
        """Draw a question and its answer."""
        rng = Random(seed + index)
        terms = rng.randint(self.min_terms, self.max_terms)
        digits = rng.randint(self.min_digits, self.max_digits)
        low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
        numbers = [rng.randint(low, high) for _ in range(terms)]
        signs = ["+", *(rng.choice("+-") for _ in range(terms - 1))]
        total = sum(int(sign + str(n)) for sign, n in zip(signs, numbers, strict=True))
        chain = " ".join(f"{sign} {n}" for sign, n in zip(signs, numbers, strict=True))
        problem = f"{chain.removeprefix('+ ')} ="
        return f"State the final answer to the following arithmetic problem: {problem}", str(total)

    def score(self, answer: str, right: str) -> float:
        """Return 1 for the same number, or the share of the right digits in a longer answer."""
        answer = answer.replace(",", "")
        try:
            if Decimal(answer) == Decimal(right):
                return 1.0
        except InvalidOperation:
            pass
        return len(right) / len(answer) if right in answer else 0.0


@dataclass(frozen=True)
class SpellBackward:
    """Words of three letters to be spelled backward."""

    def make(self, seed: int, index: int) -> tuple[str, str]:
        word = Random(seed + index).choice(WORDS)
        return f"Spell this word backward (example: sun -> nus): {word}", word[::-1]

    def score(self, answer: str, right: str) -> float:
        """Return the share of right letters, or 0.8 if all are right and more follow."""
        answer = answer.lower()
        share = sum(a == b for a, b in zip(answer, right, strict=False)) / len(right)
        return 0.8 if share == 1 and len(answer) > len(right) else share


PROBLEMS = {"chain_sum": ChainSum, "spell_backward": SpellBackward}


class _BuiltIn:
    """Problems of one kind, with the methods of reasoning-gym's datasets."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._problem, self._seed = _problem(config), seed
        self._size = config.size or DEFAULT_SIZE

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, str]:
        question, answer = self._problem.make(self._seed, index)
        return {"question": question, "answer": answer}

    def score_answer(self, answer: str | None, entry: Mapping[str, str]) -> float:
        return self._problem.score(answer, entry["answer"]) if answer else 0.0


class ProceduralTask(Task):
    """Problems of one kind, built in or of reasoning-gym, scored by their own verifier.

    The rows of a few datasets follow the iteration order of Python sets, so they differ between
    processes unless the environment sets PYTHONHASHSEED.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._of_library = config.kind == "reasoning-gym"
        open_dataset = _reasoning_dataset if self._of_library else _BuiltIn
        self._dataset: Any = open_dataset(config, seed * SEED_STRIDE % 2**32)
        self._extract = config.extract
        # Cached, because a row may be slow to make, and is needed once per response.
        self._entry = lru_cache(maxsize=4096)(self._dataset.__getitem__)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> TaskRow:
        entry = self._entry(index)
        answer = entry["answer"] if isinstance(entry["answer"], str) else None
        return TaskRow(prompt=entry["question"], data=dict(entry), reference=answer, index=index)

    @property
    def identity(self) -> Mapping[str, str]:
        """Number of rows, and the library's version. The settings determine the rest."""
        version = {"reasoning-gym": metadata.version("reasoning-gym")} if self._of_library else {}
        return {**super().identity, **version}

    def verify(self, index: int, response: str) -> float:
        """Return the dataset's own score, mostly from 0 to 1. It gets a missing answer as None."""
        answer = extract(response, self._extract)
        return float(self._dataset.score_answer(answer, self._entry(index)))


def _check_names(config: TaskConfig, kind: Any) -> None:
    settings = {field.name for field in dataclasses.fields(kind)} - {"seed", "size"}
    for key in config.settings:
        if key in ("seed", "size"):
            remedy = "set task.size" if key == "size" else "it comes from the run's seed"
            raise TaskError(f"task.settings must not hold '{key}'; {remedy}", "setting-elsewhere")
        if key not in settings:
            raise TaskError(
                f"task.settings: '{config.name}' has no setting '{key}'. {nearest(key, settings)}",
                "unknown-task-setting",
            )


def _problem(config: TaskConfig) -> ChainSum | SpellBackward:
    if config.name not in PROBLEMS:
        raise TaskError(
            f"task.name = '{config.name}' is none of the procedural tasks. "
            f"{nearest(config.name, PROBLEMS)} reasoning-gym has more: task.kind = 'reasoning-gym'",
            "unknown-task",
        )
    kind: Any = PROBLEMS[config.name]
    _check_names(config, kind)
    problem: ChainSum | SpellBackward = kind(**config.settings)
    limits = list(dataclasses.asdict(problem).items())
    for (low, minimum), (high, maximum) in zip(limits[::2], limits[1::2], strict=True):
        if not (type(minimum) is type(maximum) is int and 0 < minimum <= maximum):
            raise TaskError(
                f"task.settings: {low} and {high} of '{config.name}' must be whole numbers above "
                f"0, the second no less than the first; got {minimum!r} and {maximum!r}",
                "task-setting-range",
            )
    return problem


def _reasoning_dataset(config: TaskConfig, seed: int) -> Any:
    require("reasoning_gym", "tasks", "task.kind = 'reasoning-gym'")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        raise TaskError(
            f"task.name = '{config.name}' is not a dataset of reasoning-gym. "
            f"{nearest(config.name, DATASETS)}",
            "unknown-task",
        )
    _check_names(config, DATASETS[config.name][1])
    size = config.size or DEFAULT_SIZE
    try:
        return reasoning_gym.create_dataset(config.name, size=size, seed=seed, **config.settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskError(
            f"task.settings: '{config.name}' refuses {dict(config.settings)}: {error}",
            "task-setting-range",
        ) from error
