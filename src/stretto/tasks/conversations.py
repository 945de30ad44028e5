"""Demonstrations to learn from: conversations, or prompts with their completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.config import DemonstrationsConfig
from stretto.errors import TaskError
from stretto.tasks.files import Row, read
from stretto.tasks.responses import Example, PromptLayout, attempt
from stretto.tasks.tables import as_messages, as_prompt
from stretto.types import Message


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One row to learn from.

    Attributes:
        prompt: text or messages; not learned.
        completion: what follows it: text, or messages of which the assistant's are learned.
        index: the row's place in its dataset.
    """

    prompt: str | tuple[Message, ...]
    completion: str | tuple[Message, ...]
    index: int


def read_demonstrations(config: DemonstrationsConfig) -> tuple[list[Demonstration], list[str]]:
    """The rows of a dataset, checked; the first row says which columns are read.

    Returns:
        The demonstrations, and for each row left out (``data.on_error = drop``) the reason.

    Raises:
        TaskError: the data cannot be read, has not the columns, or a row cannot be used.
    """
    rows = read(config)
    conversational = bool(config.messages_column) and config.messages_column in rows[0]
    columns = (
        [config.messages_column]
        if conversational
        else [config.prompt_column, config.completion_column]
    )
    if not conversational and any(column not in rows[0] for column in columns):
        wanted = f"'{columns[0]}' and '{columns[1]}'"
        if config.messages_column:
            wanted = f"'{config.messages_column}', or {wanted}"
        raise TaskError(
            f"demonstrations stand in the column {wanted}, and '{config.name}' has the columns "
            f"{_listed(rows[0])}. Name them with data.messages_column, or data.prompt_column and "
            "data.completion_column"
        )

    def make(numbered: tuple[int, Row]) -> Demonstration:
        index, row = numbered
        where = f"'{config.name}', row {index}"
        cells = cells_of(row, columns, where)
        return _dialogue(cells[0], index, where) if conversational else _answer(cells, index, where)

    return attempt(enumerate(rows), make, config)


def example_of(row: Demonstration, layout: PromptLayout) -> Example:
    """A demonstration in a model's tokens.

    Raises:
        TaskError: the prompt needs a chat template that there is not, or that refuses it.
    """
    try:
        return layout.example(layout.prompt(row.prompt), row.completion)
    except TaskError as error:
        raise TaskError(f"row {row.index}: {error}") from error


def cells_of(row: Mapping[str, Any], columns: Sequence[str], where: str) -> list[Any]:
    """The cells of a row in the named columns.

    Raises:
        TaskError: the row lacks a column; the message lists those it has.
    """
    for column in columns:
        if column not in row:
            raise TaskError(
                f"{where} has no column '{column}'; its columns: {_listed(row)}. Name the one that "
                "is meant with the data.*_column settings"
            )
    return [row[column] for column in columns]


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(row)))


def _dialogue(cell: Any, index: int, where: str) -> Demonstration:
    """A conversation: its prompt is all before the assistant's first turn."""
    messages = as_messages(cell)
    if not messages:
        raise TaskError(
            f"{where}: a conversation is a list of messages with 'role' and 'content' and nothing "
            f"else; got {repr(cell)[:200]}"
        )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        roles = ", ".join(message["role"] for message in messages)
        raise TaskError(f"{where}: no turn is the assistant's, so nothing is learned ({roles})")
    if not turns[0]:
        raise TaskError(f"{where}: a conversation begins with what the assistant answers to")
    _check_said(messages, where)
    return Demonstration(messages[: turns[0]], messages[turns[0] :], index)


def _answer(cells: Sequence[Any], index: int, where: str) -> Demonstration:
    """A prompt and its completion."""
    prompt = as_prompt(cells[0], where)
    completion = cells[1]
    if isinstance(completion, str) and completion.strip():
        return Demonstration(prompt, completion, index)
    messages = as_messages(completion)
    if not messages or messages[-1]["role"] != "assistant":
        raise TaskError(
            f"{where}: a completion is text, or a list of messages that ends with the assistant's; "
            f"got {repr(completion)[:200]}"
        )
    _check_said(messages, where)
    if isinstance(prompt, str):
        prompt = (Message(role="user", content=prompt),)
    return Demonstration(prompt, messages, index)


def _check_said(messages: Sequence[Message], where: str) -> None:
    if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
        raise TaskError(f"{where}: a turn of the assistant is empty")
