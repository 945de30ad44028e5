"""Preferences: two responses to one prompt, of which one was preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from stretto.config import PairsConfig
from stretto.errors import TaskError
from stretto.tasks.conversations import cells_of
from stretto.tasks.files import Row, read
from stretto.tasks.responses import PromptLayout, attempt
from stretto.tasks.tables import as_messages, as_prompt
from stretto.types import Message

TURN = "\n\nAssistant:"
"""Mark before each response in transcripts such as those of Bai et al. (2022)."""

Side = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one prompt.

    Attributes:
        prompt: text or messages.
        chosen: the preferred response.
        rejected: the other one.
        index: the row's place in its dataset.
        transcript: whether the prompt is the common beginning of two texts, which carry turns of
            their own.
        data: the row as it stands.
    """

    prompt: str | tuple[Message, ...]
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
    """The rows of a dataset as pairs, checked.

    Returns:
        The pairs, and for each row left out (``data.on_error = drop``) the reason.

    Raises:
        TaskError: the data cannot be read, or a row has not the columns, two equal sides, an empty
            one, or sides that are not answers to one prompt.
    """
    rows = read(config)
    asked = config.prompt_column
    columns = [config.chosen_column, config.rejected_column]
    cells_of(rows[0], columns, f"'{config.name}'")  # without them nothing can be left out
    named = asked in rows[0]
    if asked and not named and asked != PairsConfig.model_fields["prompt_column"].default:
        raise TaskError(
            f"data.prompt_column = '{asked}' is no column of '{config.name}', which has "
            f"{', '.join(map(repr, sorted(rows[0])))}; name the prompt's column, or set it to '' "
            "where both sides begin with the prompt"
        )

    def make(numbered: tuple[int, Row]) -> Pair:
        index, row = numbered
        where = f"'{config.name}', row {index}"
        chosen, rejected = cells_of(row, columns, where)
        prompt = as_prompt(cells_of(row, [asked], where)[0], where) if named else None
        return _pair(prompt, chosen, rejected, index, row, where, turns=bool(asked))

    return attempt(enumerate(rows), make, config)


def tokens_of(pair: Pair, layout: PromptLayout) -> PairTokens:
    """A pair in a model's tokens.

    Raises:
        TaskError: the prompt needs a chat template that there is not, or that refuses it; or both
            sides are the same tokens.
    """
    try:
        prompt = layout.prompt(pair.prompt, transcript=pair.transcript)
        chosen, rejected = (layout.response(prompt, r) for r in (pair.chosen, pair.rejected))
        if chosen == rejected:
            raise TaskError("chosen and rejected are the same tokens, which prefers neither")
    except TaskError as error:
        raise TaskError(f"row {pair.index}: {error}") from error
    return PairTokens(prompt.tokens, chosen, rejected)


def _pair(
    prompt: str | tuple[Message, ...] | None,
    chosen: Any,
    rejected: Any,
    index: int,
    row: Row,
    where: str,
    *,
    turns: bool,
) -> Pair:
    """Make a row's pair; ``turns``: texts without a prompt must share a turn, not only words."""
    a, b = _side(chosen, "chosen", where), _side(rejected, "rejected", where)
    if a == b:
        raise TaskError(f"{where}: chosen and rejected are equal, which prefers neither")
    transcript = False
    if isinstance(a, str) and isinstance(b, str):
        if prompt is None:
            transcript = True
            at = _common_text(a, b, row, where, turns=turns)
            prompt, a, b = a[:at], a[at:], b[at:]
    elif isinstance(a, tuple) and isinstance(b, tuple):
        prompt, a, b = _common_messages(prompt, a, b, where)
    else:
        raise TaskError(f"{where}: one side is text and the other messages; make both the same")
    for name, text in (("chosen", a), ("rejected", b)):
        if not text.strip():
            raise TaskError(f"{where}: the {name} response is empty")
    return Pair(prompt, a, b, index, transcript, row)


def _side(value: Any, name: str, where: str) -> Side:
    side = value if isinstance(value, str) else as_messages(value)
    if not side:
        raise TaskError(
            f"{where}: the {name} side must be text that is not empty, or a list of messages with "
            f"'role' and 'content' and nothing else; got {repr(value)[:200]}"
        )
    return side


def _common_text(chosen: str, rejected: str, row: Row, where: str, *, turns: bool) -> int:
    """End of the prompt that two texts begin with: behind the last turn mark that they share.

    Without a mark, unless ``turns`` asks for one: before the last white space that they share.
    """
    same = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
    common = "".join(character for character, _ in same)
    if TURN in common:
        return common.rindex(TURN) + len(TURN)
    if turns:
        raise TaskError(
            f"{where}: there is no column with the prompt, and the two sides share no turn "
            f"({TURN!r}). The columns: {', '.join(map(repr, sorted(row)))}. Name the prompt's with "
            "data.prompt_column, or set it to '' where both texts begin with the prompt"
        )
    for at in range(len(common), 0, -1):
        if (
            chosen[at : at + 1].isspace()
            and rejected[at : at + 1].isspace()
            and common[:at].strip()
        ):
            return at
    raise TaskError(
        f"{where}: the two sides do not begin with the same prompt; name the prompt's column with "
        "data.prompt_column"
    )


def _common_messages(
    prompt: str | tuple[Message, ...] | None,
    chosen: tuple[Message, ...],
    rejected: tuple[Message, ...],
    where: str,
) -> tuple[str | tuple[Message, ...], str, str]:
    """Prompt and responses. Sides of several messages are whole conversations and bring both."""
    shared = len(list(takewhile(lambda m: m[0] == m[1], zip(chosen, rejected, strict=False))))
    responses = [side[shared:] for side in (chosen, rejected)]
    if any(len(r) != 1 or r[0]["role"] != "assistant" for r in responses):
        raise TaskError(
            f"{where}: the two sides differ in one turn of the assistant, the last; after "
            f"{shared} messages in common these have {_roles(responses[0])} and "
            f"{_roles(responses[1])}"
        )
    if not shared and prompt is None:
        raise TaskError(
            f"{where}: the sides hold responses only; name the prompt's column with "
            "data.prompt_column"
        )
    asked = chosen[:shared] or prompt
    assert asked is not None
    return asked, responses[0][0]["content"], responses[1][0]["content"]


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message["role"] for message in messages) or "nothing"
