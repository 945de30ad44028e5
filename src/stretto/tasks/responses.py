"""Given responses in a model's own tokens, laid out as if the model had sampled them.

A response stands behind its prompt as in generation, and ends with the token that ends a turn. What
is trained on here is then what an engine samples, and what scorers read, token for token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from stretto.config import RowsConfig, TaskConfig
from stretto.errors import TaskError
from stretto.tasks.base import TaskRow
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import render
from stretto.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
U = TypeVar("U")

_GENERATION = re.compile(r"\{%-?\s*generation\b")
"""Block by which a chat template marks the assistant's words."""


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence to learn.

    Attributes:
        tokens: up to the last one that is learned.
        trained: of each token, whether it is learned; never the first, which nothing predicts.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens before the first one that is learned."""
        return self.tokens[: self.trained.index(True)]


def attempt(
    items: Iterable[T], make: Callable[[T], U], config: RowsConfig
) -> tuple[list[U], list[str]]:
    """Make something of each item; where one cannot be used, do what ``data.on_error`` says.

    Returns:
        What was made, and for each item left out the reason.

    Raises:
        TaskError: items cannot be used, and are not to be left out; or none can.
    """
    made: list[U] = []
    reasons: list[str] = []
    for item in items:
        try:
            made.append(make(item))
        except TaskError as error:
            reasons.append(str(error))
    if reasons and not made:
        raise TaskError(
            f"none of the {len(reasons)} rows of '{config.name}' can be used; correct them, or the "
            f"columns that data names. The first: {reasons[0]}"
        )
    if reasons and config.on_error == "stop":
        others = f" ({len(reasons)} rows cannot be used)" if len(reasons) > 1 else ""
        raise TaskError(
            f"{reasons[0]}{others}. Correct the data, or set data.on_error = 'drop' to leave such "
            "rows out"
        )
    return made, reasons


def continued(
    encoder: Encoder,
    text: str,
    tokens: Sequence[int],
    piece: str,
    *,
    special: bool,
) -> list[int]:
    """Tokens of ``piece`` behind ``text``, whose own stay as they are.

    Args:
        text: what comes before, escaped.
        tokens: of that text.
        special: whether ``tokens`` have the special tokens that the tokenizer puts around texts.
    """
    whole = encoder.ids(text + piece, special=special)
    if whole[: len(tokens)] == list(tokens):
        return whole[len(tokens) :]
    return encoder.ids(piece)


def turn_of(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Cut a turn behind its last end token; empty if no token ends the turn.

    Templates put a line break behind the end token, which nobody samples.
    """
    ended = [i for i, token in enumerate(ids) if token in ends]
    return list(ids[: ended[-1] + 1]) if ended else []


class PromptLayout:
    """The layout of prompts and given responses in a model's tokens.

    Args:
        ends: tokens that end a response; of these the tokenizer's own ends a plain text.

    Attributes:
        found: spellings of control tokens in what was laid out so far; they are read as text.

    Raises:
        TaskError: there is no end-of-sequence token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], config: RowsConfig
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise TaskError(
                "responses end with the tokenizer's end-of-sequence token, and it has none; set "
                "eos_token in the model's tokenizer_config.json"
            )
        self._tokenizer, self._ends, self._config = tokenizer, ends, config
        self._encoder = Encoder(tokenizer)
        self._end = cast(int, tokenizer.eos_token_id)
        self.found = self._encoder.found

    def prompt(self, prompt: str | tuple[Message, ...], *, transcript: bool = False) -> Prompt:
        """A prompt as a policy reads it.

        Args:
            prompt: text, or messages.
            transcript: text that carries turns of its own; ``data.chat = auto`` leaves it as it is.

        Raises:
            TaskError: it needs a chat template that there is not, or that is switched off, or that
                refuses it.
        """
        c = self._config
        is_chat = not isinstance(prompt, str)
        if is_chat and c.chat == "off":
            raise TaskError("data.chat = 'off', and the prompt is a list of messages")
        if (is_chat or c.system or c.chat == "on") and not self._tokenizer.chat_template:
            what = "the prompt is a list of messages" if is_chat else "data asks for a conversation"
            raise TaskError(
                f"{what}, and the tokenizer has no chat template; use a model that was made for "
                "chat, or text without data.system and with data.chat = 'off'"
            )
        if c.system and isinstance(prompt, tuple) and prompt[0]["role"] == "system":
            raise TaskError("data.system is set, and the prompt has a system message of its own")
        as_is = transcript and c.chat == "auto" and not c.system
        task = TaskConfig(kind="dataset", system=c.system, chat="off" if as_is else c.chat)
        return render(TaskRow(prompt), task, self._tokenizer, encoder=self._encoder)

    def response(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """A response's tokens, the end token as the last.

        Raises:
            TaskError: the chat template shows the prompt in another way once it is answered.
        """
        if prompt.messages is None:
            read, at = self._encoder.escape(prompt.text + text), len(prompt.text)
            said = self._after(read[:at], prompt.tokens, read[at:], special=True)
            return (*said, self._end)
        turn = Message(role="assistant", content=text)
        asked = self._template(prompt.messages, add_generation_prompt=True)
        read = self._grown(asked, [*prompt.messages, turn])
        ids = self._after(asked, prompt.tokens, read, special=False)
        return tuple(self._turn(ids) or [*ids, self._end])

    def example(self, prompt: Prompt, completion: str | tuple[Message, ...]) -> Example:
        """A prompt and what follows it, of which the assistant's turns are learned.

        Raises:
            TaskError: as :meth:`response`.
        """
        if prompt.messages is None or isinstance(completion, str):
            assert isinstance(completion, str)
            said = self.response(prompt, completion)
            return _example(
                [*prompt.tokens, *said], [False] * len(prompt.tokens) + [True] * len(said)
            )
        turns = [*prompt.messages, *completion]
        if _GENERATION.search(str(self._tokenizer.chat_template)):
            return self._marked(prompt, turns)
        return self._spanned(prompt, turns)

    def _marked(self, prompt: Prompt, turns: Sequence[Message]) -> Example:
        with self._refusals():
            tokens, marks = self._encoder.marked(turns)
        start = len(prompt.tokens)
        return _example(tokens, [False] * start + marks[start:])

    def _spanned(self, prompt: Prompt, turns: Sequence[Message]) -> Example:
        """Make an example by the text that the template adds for each turn of the assistant."""
        assert prompt.messages is not None
        text, tokens = "", list[int]()
        trained = list[bool]()

        def add(piece: str, learned: bool) -> None:
            nonlocal text
            ids = self._after(text, tokens, piece, special=False)
            count = len(self._turn(ids)) or len(ids) if learned else 0
            text += piece
            tokens.extend(ids)
            trained.extend([True] * count + [False] * (len(ids) - count))

        for at in range(len(prompt.messages), len(turns)):
            if turns[at]["role"] == "assistant":
                add(self._grown(text, turns[:at], answer=True), False)
                add(self._grown(text, turns[: at + 1]), True)
        if trained[-1] and tokens[-1] not in self._ends:  # the template does not end a turn
            tokens.append(self._end)
            trained.append(True)
        return _example(tokens, trained)

    def _grown(self, text: str, turns: Sequence[Message], *, answer: bool = False) -> str:
        """Text that the rendered turns add to ``text``, which is their beginning."""
        whole = self._template(turns, add_generation_prompt=answer)
        if not whole.startswith(text):
            at = next(i for i, c in enumerate(text) if whole[i : i + 1] != c)
            raise TaskError(
                "the chat template shows earlier turns differently once more is said (from "
                f"{self._encoder.plain(text[at : at + 40])!r} on), so that what was read is not "
                "what is learned; train on the last turn only (prompt and completion columns), or "
                "use a template with {% generation %} blocks"
            )
        return whole[len(text) :]

    def _template(self, turns: Sequence[Message], **options: bool) -> str:
        with self._refusals():
            return self._encoder.chat(turns, **options)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        from jinja2 import TemplateError

        try:
            yield
        except TemplateError as error:
            raise TaskError(f"the chat template refuses the messages: {error}") from error

    def _after(self, text: str, tokens: Sequence[int], piece: str, *, special: bool) -> list[int]:
        return continued(self._encoder, text, tokens, piece, special=special)

    def _turn(self, ids: Sequence[int]) -> list[int]:
        return turn_of(ids, self._ends)


def _example(tokens: Sequence[int], trained: Sequence[bool]) -> Example:
    """Cut behind the last token that is learned.

    Raises:
        TaskError: no token is learned.
    """
    learned = [i for i, t in enumerate(trained) if t]
    if not learned:
        raise TaskError("nothing is left to learn: no token is the assistant's")
    stop = learned[-1] + 1
    return Example(tuple(tokens[:stop]), (False, *trained[1:stop]))
