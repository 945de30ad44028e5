"""A task: rows, each with a prompt, and for some tasks a verifier of the answers."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import TaskError
from stretto.types import Message

INDEX_KEY = "_index"
"""Key of the row's index in ``Prompt.data``, beside the row's own columns. Reserved."""

RIGHT = 1.0
"""A verifier's score of a right answer, and the least one: 1 of 0 and 1, or full credit of partial
credit."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One row of a task.

    Attributes:
        prompt: plain text, or the messages of a conversation; nothing added to it yet.
        data: the row as it stands in the dataset; its columns are what reward functions get.
        reference: a model answer in full where the task has one: what supervised training would
            train on.
        index: the row's place in its task; ``None`` for a prompt that comes from elsewhere.
        tokens: the prompt as the actor reads it, where the task has it tokenised already; then
            ``prompt`` is its text.
    """

    prompt: str | tuple[Message, ...]
    data: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    index: int | None = None
    tokens: tuple[int, ...] = ()


class Task(ABC):
    """A sequence of rows, the same for the same settings and seed."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def row(self, index: int) -> TaskRow:
        """The row at ``index``, from 0 to ``len(self) - 1``."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What the rows are, by which another opening of the task is known to have the same.

        What is said, and of what; fingerprints begin with :data:`SHA256`.
        """
        return {"number of rows": str(len(self))}

    @property
    @abstractmethod
    def has_verifier(self) -> bool:
        """Return whether the task can score answers by itself."""

    def require_verifier(self) -> None:
        """Make sure that the task has a reward function.

        Raises:
            TaskError: it has none.
        """
        if not self.has_verifier:
            raise TaskError(
                "the task cannot score answers: its task.answer_column is empty. Set it, or leave "
                "'task' out of reward.sources and score with a function or a model"
            )

    def own_answer(self, index: int, what: str) -> str:
        """Return the task's own answer to a row; ``what`` needs it, as the subject of a message.

        Raises TaskError if there is none.
        """
        reference = self.row(index).reference
        if reference is None:
            raise TaskError(
                f"{what} trains on the task's own answers, and this task has none; set "
                "warmup_examples = 0, or name their column in task.answer_column",
                "task-without-answers",
            )
        return reference

    @abstractmethod
    def verify(self, index: int, response: str) -> float:
        """Return the reward function's score of a response to a row; 1 is a right answer.

        Errors of the reward function itself are passed on: an answer that could not be scored has
        no score.

        Raises:
            TaskError: the task has no reward function.
        """


SHA256 = "sha256:"
"""The beginning of a fingerprint in a :attr:`Task.identity`."""

BLOCKS = 256
"""Most fingerprints of one task: larger ones have several rows in each."""

_encode = json.JSONEncoder(skipkeys=True, default=lambda value: type(value).__name__).encode


def fingerprint(data: Mapping[str, Any]) -> str:
    """A short text that two processes share only if their rows hold the same data.

    Values that JSON has no form for (pictures, dates) count by their type alone.
    """
    plain = {key: value for key, value in data.items() if key != INDEX_KEY}
    return hashlib.sha256(_encode(plain).encode()).hexdigest()[:16]


class RowMarks:
    """Fingerprints of rows that come one by one, in order: of each, or of blocks of them."""

    def __init__(self, rows: int) -> None:
        self._rows, self._size = rows, max(-(-rows // BLOCKS), 1)
        self._done, self._marks = 0, list[str]()
        self._digest = hashlib.sha256()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next row; values count as in :func:`fingerprint`."""
        self._digest.update(_encode(row).encode() + b"\n")
        self._done += 1
        if self._done % self._size == 0 or self._done == self._rows:
            self._marks.append(f"{SHA256}{self._digest.hexdigest()[:16]}")
            self._digest = hashlib.sha256()

    @property
    def named(self) -> dict[str, str]:
        """The fingerprints, by the rows that they are of."""
        return {self._name(i): mark for i, mark in enumerate(self._marks)}

    def _name(self, block: int) -> str:
        first = block * self._size
        last = min(first + self._size, self._rows) - 1
        return f"row {first}" if first == last else f"rows {first} to {last}"


def content(row: TaskRow) -> str:
    """Content of a row as text, equal for rows that ask the same.

    The seed and the place of a row do not tell what it asks: the rows of procedural tasks repeat,
    and files share rows. So a prompt is held out by its content alone, in every file, under every
    seed and in every order.

    Kinds of white space count as equal, and so do a text and a conversation of this one turn.
    """
    turns = row.prompt
    said = (
        [("user", turns)] if isinstance(turns, str) else [(t["role"], t["content"]) for t in turns]
    )
    return json.dumps([(role, " ".join(text.split())) for role, text in said])


def is_held_out(row: TaskRow, share: float) -> bool:
    """Return whether a row is for evaluation alone.

    Args:
        share: share of all different prompts to hold out, from 0 (none) to 1. Prompts that a
            smaller share holds out, a larger one does too.
    """
    if not share:
        return False
    digest = hashlib.sha256(content(row).encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
