"""Rows to learn from: demonstrations, and preferences between two responses to one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from stretto.config import DemonstrationsConfig, PairsConfig, RowsConfig
from stretto.errors import TaskError
from stretto.tasks.responses import Example, PromptLayout
from stretto.tasks.tables import Row, as_messages, as_prompt, read
from stretto.types import Message

T = TypeVar("T")
U = TypeVar("U")

Turns = str | tuple[Message, ...]
"""Text, or the messages of a conversation."""

TURN = "\n\nAssistant:"
"""Mark before each response in transcripts such as those of Bai et al. (2022)."""


def attempt(
    items: Iterable[T], make: Callable[[T], U], config: RowsConfig
) -> tuple[list[U], list[str]]:
    """Make something of each item; where one cannot be used, do what ``data.on_error`` says.

    Returns:
        What was made, and for each item left out the reason.

    Raises:
        TaskError: items cannot be used, and are not to be left out; or none can. Its code is that
            of the first.
    """
    made, errors = list[U](), list[TaskError]()
    for item in items:
        try:
            made.append(make(item))
        except TaskError as error:
            errors.append(error)
    if errors and not made:
        raise TaskError(
            f"none of the {len(errors)} rows of '{config.name}' can be used; correct them, or the "
            f"columns that data names. The first: {errors[0]}",
            errors[0].code,
        )
    if errors and config.on_error == "stop":
        others = f" ({len(errors)} rows cannot be used)" if len(errors) > 1 else ""
        raise TaskError(
            f"{errors[0]}{others}. Correct the data, or set data.on_error = 'drop' to leave such "
            "rows out",
            errors[0].code,
        )
    return made, list(map(str, errors))


def attempt_rows(
    rows: Iterable[Row], make: Callable[[Row, int, str], U], config: RowsConfig
) -> tuple[list[U], list[str]]:
    """Make something of each row, its index and its name in messages; see :func:`attempt`."""
    named = ((row, i, f"'{config.name}', row {i}") for i, row in enumerate(rows))
    return attempt(named, lambda each: make(*each), config)


@contextmanager
def of_row(index: int) -> Iterator[None]:
    """Name a row in a TaskError about its tokens."""
    try:
        yield
    except TaskError as error:
        raise TaskError(f"row {index}: {error}", error.code) from error


def cells_of(row: Mapping[str, Any], columns: Sequence[str], where: str) -> list[Any]:
    """Return the cells of a row in the named columns; raise TaskError if the row lacks one."""
    for column in columns:
        if column not in row:
            raise TaskError(
                f"{where} has no column '{column}'; its columns: {_listed(row)}. Name the one that "
                "is meant with the data.*_column settings",
                "missing-column",
            )
    return [row[column] for column in columns]


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(row)))


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One row to learn from.

    Attributes:
        prompt: not learned.
        completion: what follows it: text, or messages of which the assistant's are learned.
        index: the row's place in its dataset.
    """

    prompt: Turns
    completion: Turns
    index: int


def read_demonstrations(config: DemonstrationsConfig) -> tuple[list[Demonstration], list[str]]:
    """Return the rows of a dataset, checked; the first row says which columns are read.

    Beside them stands for each row left out (``data.on_error = drop``) the reason. Raises TaskError
    if the data cannot be read, lacks the columns, or a row cannot be used.
    """
    rows = read(config)
    if config.messages_column and config.messages_column in rows[0]:
        return attempt_rows(rows, partial(_dialogue, config.messages_column), config)
    columns = [config.prompt_column, config.completion_column]
    if any(column not in rows[0] for column in columns):
        wanted = f"'{columns[0]}' and '{columns[1]}'"
        if config.messages_column:
            wanted = f"'{config.messages_column}', or {wanted}"
        raise TaskError(
            f"demonstrations stand in the column {wanted}, and '{config.name}' has the columns "
            f"{_listed(rows[0])}. Name them with data.messages_column, or data.prompt_column and "
            "data.completion_column",
            "missing-column",
        )
    return attempt_rows(rows, partial(_answered, columns), config)


def example_of(row: Demonstration, layout: PromptLayout) -> Example:
    """Return a demonstration in a model's tokens.

    Raises TaskError if the prompt needs a chat template that there is not, or that refuses it.
    """
    with of_row(row.index):
        return layout.example(layout.prompt(row.prompt), row.completion)


def _dialogue(column: str, row: Row, index: int, where: str) -> Demonstration:
    """Read a conversation: its prompt is all before the assistant's first turn."""
    (cell,) = cells_of(row, [column], where)
    messages = as_messages(cell)
    if not messages:
        raise TaskError(
            f"{where}: a conversation is a list of messages with 'role' and 'content' and nothing "
            f"else; got {repr(cell)[:200]}",
            "no-conversation",
        )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise TaskError(
            f"{where}: no turn is the assistant's, so nothing is learned ({_roles(messages)})",
            "no-assistant-turn",
        )
    if not turns[0]:
        message = f"{where}: a conversation begins with what the assistant answers to"
        raise TaskError(message, "assistant-begins")
    _check_said(messages, where)
    return Demonstration(messages[: turns[0]], messages[turns[0] :], index)


def _answered(columns: Sequence[str], row: Row, index: int, where: str) -> Demonstration:
    """Read a prompt and its completion."""
    asked, completion = cells_of(row, columns, where)
    prompt = as_prompt(asked, where)
    if isinstance(completion, str) and completion.strip():
        return Demonstration(prompt, completion, index)
    messages = as_messages(completion)
    if not messages or messages[-1]["role"] != "assistant":
        raise TaskError(
            f"{where}: a completion is text, or a list of messages that ends with the assistant's; "
            f"got {repr(completion)[:200]}",
            "no-completion",
        )
    _check_said(messages, where)
    if isinstance(prompt, str):
        prompt = (Message(role="user", content=prompt),)
    return Demonstration(prompt, messages, index)


def _check_said(messages: Sequence[Message], where: str) -> None:
    if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
        raise TaskError(f"{where}: a turn of the assistant is empty", "empty-response")


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message["role"] for message in messages) or "nothing"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one prompt, of which ``chosen`` was preferred.

    Attributes:
        index: the row's place in its dataset.
        transcript: whether the prompt is the common beginning of two texts, which carry turns of
            their own.
        data: the row as it stands.
    """

    prompt: Turns
    chosen: str
    rejected: str
    index: int = 0
    transcript: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PairTokens:
    """A pair as a reward model reads it: a response behind the prompt, with its end token."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longer side, prompt counted."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def read_pairs(config: PairsConfig) -> tuple[list[Pair], list[str]]:
    """Return the rows of a dataset as pairs, checked.

    Beside them stands for each row left out (``data.on_error = drop``) the reason. Raises TaskError
    if the data cannot be read, or a row lacks a column, has two equal sides, an empty one, or sides
    that are not answers to one prompt.
    """
    rows = read(config)
    asked = config.prompt_column
    columns = [config.chosen_column, config.rejected_column]
    cells_of(rows[0], columns, f"'{config.name}'")  # without them nothing can be left out
    named = asked in rows[0]
    if asked and not named and config.is_set("prompt_column"):
        raise TaskError(
            f"data.prompt_column = '{asked}' is no column of '{config.name}', which has "
            f"{_listed(rows[0])}; name the prompt's column, or set it to '' where both sides begin "
            "with the prompt",
            "missing-column",
        )

    def make(row: Row, index: int, where: str) -> Pair:
        chosen, rejected = cells_of(row, columns, where)
        prompt = as_prompt(cells_of(row, [asked], where)[0], where) if named else None
        a, b = _side(chosen, "chosen", where), _side(rejected, "rejected", where)
        if a == b:
            message = f"{where}: chosen and rejected are equal, which prefers neither"
            raise TaskError(message, "equal-sides")
        sides = _sides(prompt, a, b, row, where, turns=bool(asked))
        for name, text in (("chosen", sides[1]), ("rejected", sides[2])):
            if not text.strip():
                raise TaskError(f"{where}: the {name} response is empty", "empty-response")
        return Pair(*sides, index, prompt is None and isinstance(a, str), row)

    return attempt_rows(rows, make, config)


def tokens_of(pair: Pair, layout: PromptLayout) -> PairTokens:
    """Return a pair in a model's tokens.

    Raises TaskError if the prompt needs a chat template that there is not, or that refuses it; or
    if both sides are the same tokens.
    """
    with of_row(pair.index):
        prompt = layout.prompt(pair.prompt, transcript=pair.transcript)
        chosen, rejected = (layout.response(prompt, r) for r in (pair.chosen, pair.rejected))
        if chosen == rejected:
            message = "chosen and rejected are the same tokens, which prefers neither"
            raise TaskError(message, "equal-sides")
    return PairTokens(prompt.tokens, chosen, rejected)


def _side(value: Any, name: str, where: str) -> Turns:
    side = value if isinstance(value, str) else as_messages(value)
    if not side:
        raise TaskError(
            f"{where}: the {name} side must be text that is not empty, or a list of messages with "
            f"'role' and 'content' and nothing else; got {repr(value)[:200]}",
            "no-side",
        )
    return side


def _sides(
    prompt: Turns | None, a: Turns, b: Turns, row: Row, where: str, *, turns: bool
) -> tuple[Turns, str, str]:
    """Return prompt and responses; ``turns``: texts without a prompt must share a turn."""
    if isinstance(a, str) and isinstance(b, str):
        if prompt is not None:
            return prompt, a, b
        at = _common_text(a, b, row, where, turns=turns)
        return a[:at], a[at:], b[at:]
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _common_messages(prompt, a, b, where)
    message = f"{where}: one side is text and the other messages; make both the same"
    raise TaskError(message, "mixed-sides")


def _common_text(chosen: str, rejected: str, row: Row, where: str, *, turns: bool) -> int:
    """Return the end of the prompt that two texts begin with: behind the last turn mark they share.

    Without a mark, unless ``turns`` asks for one: before the last white space that they share.
    """
    same = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
    common = "".join(character for character, _ in same)
    if TURN in common:
        return common.rindex(TURN) + len(TURN)
    if turns:
        raise TaskError(
            f"{where}: there is no column with the prompt, and the two sides share no turn "
            f"({TURN!r}). The columns: {_listed(row)}. Name the prompt's with data.prompt_column, "
            "or set it to '' where both texts begin with the prompt",
            "no-shared-turn",
        )
    for at in range(len(common), 0, -1):
        blank = chosen[at : at + 1].isspace() and rejected[at : at + 1].isspace()
        if blank and common[:at].strip():
            return at
    raise TaskError(
        f"{where}: the two sides do not begin with the same prompt; name the prompt's column with "
        "data.prompt_column",
        "no-shared-prompt",
    )


def _common_messages(
    prompt: Turns | None, chosen: tuple[Message, ...], rejected: tuple[Message, ...], where: str
) -> tuple[Turns, str, str]:
    """Return prompt and responses. Sides of several messages are whole conversations."""
    shared = len(list(takewhile(lambda m: m[0] == m[1], zip(chosen, rejected, strict=False))))
    responses = [side[shared:] for side in (chosen, rejected)]
    if any(len(r) != 1 or r[0]["role"] != "assistant" for r in responses):
        raise TaskError(
            f"{where}: the two sides differ in one turn of the assistant, the last; after "
            f"{shared} messages in common these have {_roles(responses[0])} and "
            f"{_roles(responses[1])}",
            "sides-differ-in-turns",
        )
    asked = chosen[:shared] or prompt
    if asked is None:
        raise TaskError(
            f"{where}: the sides hold responses only; name the prompt's column with "
            "data.prompt_column",
            "no-shared-prompt",
        )
    return asked, responses[0][0]["content"], responses[1][0]["content"]
