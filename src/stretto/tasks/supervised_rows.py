"""Rows for training: demonstrations, and preferences between two responses to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from stretto.config import DemonstrationsConfig, PairsConfig, RowsConfig
from stretto.errors import TaskError
from stretto.tasks.messages import (
    INSTRUCTION,
    KEYS,
    PROMPTS,
    Answer,
    as_messages,
    cell_of,
    prompt_of,
)
from stretto.tasks.responses import Example, PromptLayout
from stretto.tasks.tables import Row, of_row, read
from stretto.types import Message

T = TypeVar("T")
U = TypeVar("U")

Turns = str | tuple[Message, ...]  # text, or the messages of a conversation

TURN = "\n\nAssistant:"
"""Mark before each response in transcripts such as those of Bai et al. (2022)."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and its completion: text, or messages of which the assistant's are trained.

    Without a prompt the completion is a text that is trained from its second token on.
    """

    prompt: Turns
    completion: Turns
    index: int
    data: Row = field(default_factory=dict)  # may bring tools and a system message


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one prompt, of which ``chosen`` was preferred."""

    prompt: Turns
    chosen: Answer
    rejected: Answer
    index: int = 0  # of the row in its dataset
    transcript: bool = False  # the prompt is the common beginning of two texts that contain turns
    data: Row = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PairTokens:
    """A pair for a reward model. Responses follow the prompt and include the end token."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longer side, including the prompt."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def attempt(
    items: Iterable[T], make: Callable[[T], U], config: RowsConfig
) -> tuple[list[U], list[str]]:
    """Apply ``make`` to each item. For one that cannot be used, do as ``data.on_error`` says.

    Returns the results, and the reason for each item left out. Raises TaskError, with the code of
    the first reason, if items must not be left out, or if none can be used.
    """
    results, errors = list[U](), list[TaskError]()
    for item in items:
        try:
            results.append(make(item))
        except TaskError as error:
            errors.append(error)
    if errors and not results:
        raise TaskError(
            f"none of the {len(errors)} rows of '{config.name}' can be used; correct them, or the "
            f"columns that data names. The first: {errors[0]}",
            errors[0].code,
        )
    if errors and config.on_error == "stop":
        count_note = f" ({len(errors)} rows cannot be used)" if len(errors) > 1 else ""
        raise TaskError(
            f"{errors[0]}{count_note}. Correct the data, or leave rows out: data.on_error = 'drop'",
            errors[0].code,
        )
    return results, list(map(str, errors))


def attempt_rows(
    rows: Iterable[Row], make: Callable[[Row, int], U], config: RowsConfig
) -> tuple[list[U], list[str]]:
    """Apply ``make`` to each row and its index (see :func:`attempt`)."""

    def make_named(row: tuple[int, Row]) -> U:
        with of_row(f"'{config.name}', row {row[0]}"):
            return make(row[1], row[0])

    return attempt(enumerate(rows), make_named, config)


def cells_of(row: Row, *columns: str) -> list[Any]:
    """Return a row's cells in the named columns. Raises TaskError if it lacks one."""
    for column in columns:
        if not _has(row, column):
            raise TaskError(
                f"no column '{column}'; its columns: {_listed(row)}. Name the one that is meant "
                "by the setting of section data whose name ends in _column",
                "missing-column",
            )
    return [cell_of(row, column) for column in columns]


def _has(row: Row, column: str) -> bool:
    try:
        cell_of(row, column)
    except KeyError:
        return False
    return True


def _listed(row: Row) -> str:
    return ", ".join(map(repr, sorted(row)))


def read_demonstrations(config: DemonstrationsConfig) -> tuple[list[Demonstration], list[str]]:
    """Return the usable rows of a dataset, and the reasons for leaving out the rest.

    The first row determines the columns. Raises TaskError if the data cannot be read, lacks the
    columns, or as :func:`attempt`.
    """
    rows = read(config)
    return attempt_rows(rows, _reader(rows[0], config), config)


def _reader(row: Row, config: DemonstrationsConfig) -> Callable[[Row, int], Demonstration]:
    """Return a reader for the settings' columns, or the columns of well-known datasets."""
    messages, columns = config.messages_column, (config.prompt_column, config.completion_column)
    conversations, pairs = [messages], [columns]
    if not any(map(config.is_set, ("messages_column", "prompt_column", "completion_column"))):
        conversations.append("conversations")
        pairs.append((INSTRUCTION, "output"))
    for column in filter(None, conversations):
        if _has(row, column):
            return partial(_dialogue, column)
    for pair in pairs:
        if all(_has(row, column) for column in pair):
            return partial(_answered, pair)
    if len(pairs) > 1 and "text" in row:
        return _text
    columns_text = f"'{columns[0]}' and '{columns[1]}'"
    if messages:
        columns_text = f"'{messages}', or {columns_text}"
    raise TaskError(
        f"'{config.name}' has no column {columns_text}, but {_listed(row)}. Name them with "
        "data.messages_column, or data.prompt_column and data.completion_column",
        "missing-column",
    )


def example_of(row: Demonstration, layout: PromptLayout) -> Example:
    """Tokenise a demonstration. Errors are those of the layout."""
    with of_row(f"row {row.index}"):
        if not row.prompt:
            assert isinstance(row.completion, str)
            return layout.text(row.completion)
        return layout.example(layout.prompt(row.prompt, data=row.data), row.completion)


def _text(row: Row, index: int) -> Demonstration:
    (text,) = cells_of(row, "text")
    if not isinstance(text, str) or not text.strip():
        raise TaskError(f"the column 'text' holds text; got {text!r}", "no-completion")
    return Demonstration("", text, index, row)


def _dialogue(column: str, row: Row, index: int) -> Demonstration:
    (cell,) = cells_of(row, column)
    messages = as_messages(cell)
    if not messages:
        message = f"a conversation is a list of messages with {KEYS}; got {repr(cell)[:200]}"
        raise TaskError(message, "no-conversation")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        message = f"no turn is the assistant's, so nothing is learned ({_roles(messages)})"
        raise TaskError(message, "no-assistant-turn")
    if not turns[0]:
        raise TaskError("a conversation begins with what the assistant answers to", "no-prompt")
    _check_said(messages)
    return Demonstration(messages[: turns[0]], messages[turns[0] :], index, row)


def _answered(columns: tuple[str, str], row: Row, index: int) -> Demonstration:
    _, completion = cells_of(row, *columns)
    prompt = prompt_of(row, columns[0])
    messages = as_messages(completion)
    if not messages and isinstance(completion, str) and completion.strip():
        return Demonstration(prompt, completion, index, row)
    if not messages or messages[-1]["role"] != "assistant":
        raise TaskError(
            "a completion is text, or a list of messages that ends with the assistant's; got "
            f"{repr(completion)[:200]}",
            "no-completion",
        )
    _check_said(messages)
    if isinstance(prompt, str):
        prompt = (Message(role="user", content=prompt),)
    return Demonstration(prompt, messages, index, row)


def _check_said(messages: Sequence[Message]) -> None:
    answers = (m for m in messages if m["role"] == "assistant" and not m.get("tool_calls"))
    if not all(m["content"].strip() for m in answers):
        raise TaskError("a turn of the assistant is empty", "empty-response")


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message["role"] for message in messages) or "nothing"


def read_pairs(config: PairsConfig) -> tuple[list[Pair], list[str]]:
    """Return the usable rows of a dataset as pairs, and the reasons for leaving out the rest.

    A row is unusable if it lacks a column, or if its sides are equal, empty, or not answers to one
    prompt. Raises TaskError if the data cannot be read, or as :func:`attempt`.
    """
    rows, column = read(config), config.prompt_column
    columns = config.chosen_column, config.rejected_column
    with of_row(f"'{config.name}'"):
        cells_of(rows[0], *columns)  # an error of the dataset, not of a row
    has_prompt = bool(column) and _has(rows[0], column)
    if column and not has_prompt and config.is_set("prompt_column"):
        raise TaskError(
            f"'{config.name}' has no data.prompt_column = '{column}', but {_listed(rows[0])}; name "
            "the prompt's column, or set it to '' where both sides begin with the prompt",
            "missing-column",
        )

    def make(row: Row, index: int) -> Pair:
        chosen_cell, rejected_cell, *_ = cells_of(row, *columns, *([column] if has_prompt else []))
        a, b = _side(chosen_cell, "chosen"), _side(rejected_cell, "rejected")
        if a == b:
            raise TaskError("chosen and rejected are equal, which prefers neither", "equal-sides")
        transcript = not has_prompt and isinstance(a, str)
        sides = _sides(
            prompt_of(row, column) if has_prompt else None, a, b, row, turns=bool(column)
        )
        for name, answer in zip(("chosen", "rejected"), sides[1:], strict=True):
            if isinstance(answer, str) and not answer.strip():
                raise TaskError(f"the {name} response is empty", "empty-response")
        return Pair(*sides, index, transcript, row)

    return attempt_rows(rows, make, config)


def tokens_of(pair: Pair, layout: PromptLayout) -> PairTokens:
    """Tokenise a pair. Raises TaskError if both sides are the same tokens."""
    with of_row(f"row {pair.index}"):
        prompt = layout.prompt(pair.prompt, data=pair.data, transcript=pair.transcript)
        chosen_ids, rejected_ids = (
            layout.response(prompt, r) for r in (pair.chosen, pair.rejected)
        )
        if chosen_ids == rejected_ids:
            message = "chosen and rejected are the same tokens, which prefers neither"
            raise TaskError(message, "equal-sides")
    return PairTokens(prompt.tokens, chosen_ids, rejected_ids)


def _side(value: Any, name: str) -> Turns:
    side = as_messages(value) or (value if isinstance(value, str) else ())
    if not side:
        raise TaskError(
            f"the {name} side must be text that is not empty, or a list of messages with {KEYS}; "
            f"got {repr(value)[:200]}",
            "no-side",
        )
    return side


def _sides(
    prompt: Turns | None, a: Turns, b: Turns, row: Row, *, turns: bool
) -> tuple[Turns, Answer, Answer]:
    if isinstance(a, str) and isinstance(b, str):
        if prompt is not None:
            return prompt, a, b
        at = _common_text(a, b, row, turns=turns)
        return a[:at], a[at:], b[at:]
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _common_messages(prompt, a, b)
    raise TaskError("one side is text and the other messages; make both the same", "mixed-sides")


def _common_text(chosen: str, rejected: str, row: Row, *, turns: bool) -> int:
    """Return the length of the prompt with which two texts begin: up to their last common turn
    mark, or without one, up to the last white space in both.

    Raises TaskError without a mark if ``turns``, and a column of the row may be the prompt.
    """
    common_pairs = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
    common = "".join(character for character, _ in common_pairs)
    if TURN in common:
        return common.rindex(TURN) + len(TURN)
    if turns and any(name in row for name in PROMPTS):
        raise TaskError(
            f"no column has the prompt, and the two sides share no turn ({TURN!r}); name one of "
            f"{_listed(row)} in data.prompt_column, or set it to '' where both texts begin with "
            "the prompt",
            "no-shared-turn",
        )
    for at in range(len(common), 0, -1):
        blank = chosen[at : at + 1].isspace() and rejected[at : at + 1].isspace()
        if blank and common[:at].strip():
            return at
    raise TaskError(
        "the two sides do not begin with the same prompt; name the prompt's column with "
        "data.prompt_column",
        "no-shared-prompt",
    )


def _common_messages(
    prompt: Turns | None, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[Turns, Answer, Answer]:
    """Return prompt and responses. Sides of several messages are complete conversations."""
    shared_count = len(list(takewhile(lambda m: m[0] == m[1], zip(chosen, rejected, strict=False))))
    a, b = chosen[shared_count:], rejected[shared_count:]
    if any(len(r) != 1 or r[0]["role"] != "assistant" for r in (a, b)):
        raise TaskError(
            "the two sides differ in one turn of the assistant, the last; after "
            f"{shared_count} messages in common these have {_roles(a)} and {_roles(b)}",
            "sides-differ-in-turns",
        )
    common_prompt = chosen[:shared_count] or prompt
    if common_prompt is None:
        message = "the sides hold responses only; name the prompt's column with data.prompt_column"
        raise TaskError(message, "no-shared-prompt")
    return common_prompt, _answer(a[0]), _answer(b[0])


def _answer(turn: Message) -> Answer:
    return turn if turn.keys() - {"role", "content"} else turn["content"]
