"""A task: rows, each with a prompt, and for some tasks a verifier of the answers.

Verifiers extract an answer from a response, and may compare it as mathematics.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from stretto.errors import TaskError
from stretto.types import Message

INDEX_KEY = "_index"
"""Key of the row's index in ``Prompt.data``, beside the row's own columns. Reserved."""

RIGHT = 1.0
"""The least score of a right answer: 1 of 0 and 1, or full credit of partial credit."""

SHA256 = "sha256:"
"""The beginning of a fingerprint in a :attr:`Task.identity`."""

BLOCKS = 256
"""Most fingerprints of one task: larger ones have several rows in each."""

Extraction = Literal["full", "last_number", "answer_tag"]

TIME_LIMIT_S = 5
"""Time limit for reading an expression, and for comparing two."""

# A minus sign belongs to the number unless it stands right behind an operand, as in "5-3".
# Thousands must be grouped by three, so that the list "1,2,3" ends in 3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-\u2212])?(?:(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)

_encode = json.JSONEncoder(skipkeys=True, default=lambda value: type(value).__name__).encode


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One row of a task.

    Attributes:
        prompt: plain text, or the messages of a conversation; nothing added to it yet.
        data: the row as it stands in the dataset; its columns are what reward functions get.
        reference: a model answer in full, if any.
        index: the row's place in its task; ``None`` for a prompt that comes from elsewhere.
        tokens: the prompt as the actor reads it, where the task has it tokenised already; then
            ``prompt`` is its text.
        shown: what a warm-up teaches in place of the reference: a turn, or all that follows the
            prompt, turns of the policy with what answers them.
    """

    prompt: str | tuple[Message, ...]
    data: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    index: int | None = None
    tokens: tuple[int, ...] = ()
    shown: str | tuple[Message, ...] | None = None

    def demonstration(self, what: str) -> str | tuple[Message, ...]:
        """Return what a warm-up teaches of the row, or raise TaskError: ``what`` needs it."""
        shown = self.reference if self.shown is None else self.shown
        if shown is None:
            raise TaskError(
                f"{what} trains on the task's own answers, and this task has none; set "
                "warmup_examples = 0, or name their column as answer or demonstration in "
                "task.columns",
                "task-without-answers",
            )
        return shown


class Task(ABC):
    """A sequence of rows, the same for the same settings and seed.

    Attributes:
        left_out: rows of the data that cannot be used, which count for nothing.
        left_out_because: what is wrong with the first of them.
        timeouts: answers that could not be compared within the time limit, and so were wrong.
        found_answers: column that is read as the answer although the settings name none.
    """

    left_out = 0
    left_out_because = ""
    timeouts = 0
    found_answers = ""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    def indices(self) -> Sequence[int]:
        """The indices of the rows, which lead to the data: where that has rows that cannot be used,
        there are gaps."""
        return range(len(self))

    @abstractmethod
    def row(self, index: int) -> TaskRow:
        """Return the row at ``index``, one of :attr:`indices`."""

    @property
    def first(self) -> TaskRow:
        return self.row(self.indices[0])

    @property
    def identity(self) -> Mapping[str, str]:
        """Facts about the rows by their names, the same for another opening with the same rows.

        Fingerprints begin with :data:`SHA256`.
        """
        return {"number of rows": str(len(self))}

    @property
    def has_verifier(self) -> bool:
        """Whether the task can score answers by itself."""
        return True

    def require_verifier(self) -> None:
        """Raise TaskError if the task has no verifier."""
        if not self.has_verifier:
            raise TaskError(
                "the task cannot score answers: task.columns names no answer. Name it, or leave "
                "'task' out of reward.sources and score with a function or a model",
                "task-without-verifier",
            )

    @abstractmethod
    def verify(self, index: int, response: str) -> float:
        """Return the verifier's score of a response to a row; 1 is a right answer.

        Raises TaskError if the task has no verifier. Errors of the verifier itself are passed on:
        an answer that could not be scored has no score.
        """


def fingerprint(data: Mapping[str, Any]) -> str:
    """Return a short text that two processes share only if their rows hold the same data.

    Values that JSON has no form for (pictures, dates) count by their type alone.
    """
    plain = {key: value for key, value in data.items() if key != INDEX_KEY}
    return hashlib.sha256(_encode(plain).encode()).hexdigest()[:16]


def fingerprints(rows: Iterable[Mapping[str, Any]], count: int) -> dict[str, str]:
    """Return fingerprints of ``count`` rows, each or in blocks, as :func:`fingerprint` counts."""
    size, rest = max(-(-count // BLOCKS), 1), iter(rows)
    marks = {}
    for first in range(0, count, size):
        last = min(first + size, count) - 1
        digest = hashlib.sha256()
        for row in islice(rest, last - first + 1):
            digest.update(_encode(row).encode() + b"\n")
        name = f"row {first}" if first == last else f"rows {first} to {last}"
        marks[name] = f"{SHA256}{digest.hexdigest()[:16]}"
    return marks


def content(row: TaskRow) -> str:
    """Return the content of a row as text, equal for rows that ask the same.

    The rows of procedural tasks repeat, and files share rows, so a prompt is held out by its
    content alone, whatever the file, the seed and the order. Kinds of white space count as equal,
    and so do a text and a conversation of this one turn.
    """
    turns = row.prompt
    if isinstance(turns, str):
        turns = (Message(role="user", content=turns),)
    return json.dumps([(turn["role"], " ".join(turn["content"].split())) for turn in turns])


def is_held_out(row: TaskRow, share: float) -> bool:
    """Return whether a row is for evaluation alone, with this share of all different prompts.

    Prompts that a smaller share holds out, a larger one does too.
    """
    if not share:
        return False
    digest = hashlib.sha256(content(row).encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def extract(response: str, how: Extraction) -> str | None:
    """Return the part of ``response`` that is scored; ``None`` when there is no such part.

    ``full`` is all of it without surrounding blanks. ``last_number`` is written plainly: '1,234.'
    becomes '1234'. ``answer_tag`` is what stands in the last ``<answer>...</answer>``.
    """
    if how == "full":
        return response.strip()
    if how == "answer_tag":
        tagged = _ANSWER.findall(response)
        return tagged[-1].strip() if tagged else None
    numbers = _NUMBER.findall(response)
    return numbers[-1].replace(",", "").replace("\u2212", "-") if numbers else None


def same_answer(reference: str, response: str, *, bare: bool) -> bool:
    """Return whether ``response`` gives the answer ``reference``.

    Equal texts are the same answer. If the reference holds no mathematics, no other text is. A
    response that math-verify cannot read or compare is not the same answer.

    Args:
        reference: the right answer and nothing else: a number, an expression, LaTeX or a word.
        bare: all of the response is one expression; otherwise it is searched in the text.

    Raises:
        TimeoutError: reading or comparing took longer than the time limit.
        TaskError: called outside the main thread, where math-verify cannot keep a time limit.
    """
    reference, response = reference.strip(), response.strip()
    if reference == response:
        return True
    if threading.current_thread() is not threading.main_thread():
        raise TaskError(
            "mathematical answers are compared under a time limit that only a process's main "
            "thread can keep; score there, or in a process of its own with FunctionScorer",
            "not-main-thread",
        )
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        gold, answer = _parse(reference, bare=True), _parse(response, bare=bare)
        return bool(verify(gold, answer, timeout_seconds=TIME_LIMIT_S, raise_on_error=True))
    except TimeoutException as error:
        raise TimeoutError(
            f"math-verify could not compare with '{reference}' within {TIME_LIMIT_S} s"
        ) from error
    except Exception:
        return False


def _parse(text: str, *, bare: bool) -> Any:
    from math_verify import parse

    if bare and "$" not in text and "\\boxed" not in text:
        text = f"${text}$"
    return parse(text, parsing_timeout=TIME_LIMIT_S, raise_on_error=True)
