"""Tasks: rows with prompts, and optionally a verifier, which may compare answers as mathematics."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from stretto.bounds import ceil_div
from stretto.errors import TaskError

if TYPE_CHECKING:
    from stretto.types import Message

INDEX_KEY = "_index"
"""Reserved key of ``Prompt.data`` for the row's index, in addition to the row's columns."""

RIGHT = 1.0  # lowest score of a right answer: 1 of 0 and 1, or full credit
SHA256 = "sha256:"  # prefix of fingerprints in Task.identity
BLOCKS = 256  # most fingerprints of one task; in a larger task each covers several rows

Extraction = Literal["full", "last_number", "answer_tag"]

TIME_LIMIT_S = 5  # time limit for parsing an expression, and for comparing two

# A minus sign belongs to the number unless it directly follows an operand, as in "5-3".
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
        prompt: plain text, or the messages of a conversation, without additions.
        data: the row as in the dataset. Reward functions get its columns.
        reference: a complete model answer, if any.
        index: the row's index in its task, or ``None`` for a prompt from elsewhere.
        tokens: the prompt's tokens, if the task has them. ``prompt`` is then their text.
        shown: replaces the reference in a warm-up. A turn, or all messages after the prompt.
    """

    prompt: str | tuple[Message, ...]
    data: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    index: int | None = None
    tokens: tuple[int, ...] = ()
    shown: str | tuple[Message, ...] | None = None

    def demonstration(self, what: str) -> str | tuple[Message, ...]:
        """Return the row's turn or messages for a warm-up. If none, TaskError names ``what``."""
        demonstration = self.reference if self.shown is None else self.shown
        if demonstration is None:
            raise TaskError(
                f"{what} trains on the task's own answers, and this task has none; set "
                "warmup_examples = 0, or name their column as answer or demonstration in "
                "task.columns",
                "task-without-answers",
            )
        return demonstration


class Task(ABC):
    """A sequence of rows that depends only on settings and seed.

    Attributes:
        left_out: number of unusable rows, which are ignored.
        left_out_because: the problem of the first one.
        timeouts: answers that could not be compared in time, and so count as wrong.
        found_answers: column used as the answer although the settings name none.
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
        """Indices of the usable rows in the data. Unusable rows leave gaps."""
        return range(len(self))

    @abstractmethod
    def row(self, index: int) -> TaskRow:
        """Return the row at ``index``, one of :attr:`indices`."""

    @property
    def first(self) -> TaskRow:
        return self.row(self.indices[0])

    @property
    def identity(self) -> Mapping[str, str]:
        """Properties of the rows by name, equal for equal rows. Hashes begin with ``sha256:``."""
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
        """Return the verifier's score of a response to a row. 1 is a right answer.

        Raises TaskError if the task has no verifier. Errors of the verifier are passed on, because
        an answer that could not be scored has no score.
        """


def fingerprint(data: Mapping[str, Any]) -> str:
    """Return a short text that two processes share only if their rows hold the same data.

    Values without a JSON form, such as pictures and dates, count by type only.
    """
    plain = {key: value for key, value in data.items() if key != INDEX_KEY}
    return hashlib.sha256(_encode(plain).encode()).hexdigest()[:16]


def fingerprints(rows: Iterable[Mapping[str, Any]], count: int) -> dict[str, str]:
    """Return fingerprints of ``count`` rows, one each or in blocks (see :func:`fingerprint`)."""
    size, row_iterator = max(ceil_div(count, BLOCKS), 1), iter(rows)
    marks = {}
    for first in range(0, count, size):
        last = min(first + size, count) - 1
        digest = hashlib.sha256()
        for row in islice(row_iterator, last - first + 1):
            digest.update(_encode(row).encode() + b"\n")
        name = f"row {first}" if first == last else f"rows {first} to {last}"
        marks[name] = f"{SHA256}{digest.hexdigest()[:16]}"
    return marks


def content(row: TaskRow) -> str:
    """Return the content of a row as text, equal for rows with the same question.

    A prompt is held out by its content only, whatever the file, seed and order, because rows of
    procedural tasks repeat and files share rows. All kinds of white space are equal, and so are a
    text and a conversation with it as the only turn.
    """
    turns = row.prompt
    if isinstance(turns, str):
        turns = ({"role": "user", "content": turns},)
    return json.dumps([(turn["role"], " ".join(turn["content"].split())) for turn in turns])


def is_held_out(row: TaskRow, share: float) -> bool:
    """Whether a row is for evaluation only, with this share of all different prompts.

    A larger share also holds out all prompts of a smaller one.
    """
    if not share:
        return False
    digest = hashlib.sha256(content(row).encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def extract(response: str, how: Extraction) -> str | None:
    """Return the part of ``response`` to score, or ``None`` if it has none.

    ``full`` is the response without surrounding blanks. ``last_number`` is normalised, so that
    '1,234.' becomes '1234'. ``answer_tag`` is the content of the last ``<answer>...</answer>``.
    """
    if how == "full":
        return response.strip()
    if how == "answer_tag":
        answers = _ANSWER.findall(response)
        return answers[-1].strip() if answers else None
    numbers = _NUMBER.findall(response)
    return numbers[-1].replace(",", "").replace("\u2212", "-") if numbers else None


def same_answer(reference: str, response: str, *, bare: bool) -> bool:
    """Whether ``response`` gives the answer ``reference``.

    Equal texts are the same answer. If the reference contains no mathematics, no other text is. A
    response that math-verify cannot parse or compare is not the same answer.

    Args:
        reference: only the right answer: a number, an expression, LaTeX or a word.
        bare: whether the response is one expression. Otherwise it is searched in the text.

    Raises:
        TimeoutError: parsing or comparing took longer than the time limit.
        TaskError: not the main thread, so that math-verify cannot keep a time limit.
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
