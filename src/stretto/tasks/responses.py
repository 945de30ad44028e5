"""Tokenises given responses as if the model had sampled them.

A response follows its prompt as in generation, and ends with the token that ends a turn. So
training uses the same tokens as the engine and the scorers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from stretto.config import RowsConfig, TaskConfig
from stretto.errors import TaskError
from stretto.tasks.encode import Encoder, template_accepts, utf8
from stretto.tasks.messages import (
    TOOLS,
    Answer,
    arguments_in,
    is_ignored,
    text_of_answer,
    tools_in,
)
from stretto.tasks.prompts import render
from stretto.tasks.task import TaskRow
from stretto.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\b")
"""Block with which a chat template marks the assistant's text."""

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence to train on."""

    tokens: tuple[int, ...]  # up to the last trained one
    trained: tuple[bool, ...]  # by token; never the first, because nothing predicts it

    @property
    def prompt(self) -> tuple[int, ...]:
        start = self.trained.index(True)
        return self.tokens[:start] if start > 1 else self.tokens


def continued(
    encoder: Encoder, text: str, tokens: Sequence[int], piece: str, *, special: bool
) -> list[int]:
    """Return the tokens of ``piece`` after ``text``, whose own ``tokens`` must not change.

    Args:
        text: escaped, like ``piece``.
        special: whether ``tokens`` include the tokenizer's special tokens around texts.
    """
    all_ids = encoder.ids(text + piece, special=special)
    if all_ids[: len(tokens)] == list(tokens):
        return all_ids[len(tokens) :]
    return encoder.ids(piece)


def turn_of(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Cut a turn after its last end token and before the template's line break, or return []."""
    end_positions = [i for i, token in enumerate(ids) if token in ends]
    return list(ids[: end_positions[-1] + 1]) if end_positions else []


class PromptLayout:
    """Tokenises prompts and given responses.

    Args:
        ends: tokens that end a response. A plain text ends with the tokenizer's own.

    Attributes:
        found: spellings of control tokens in texts so far. They are read as text.

    Raises TaskError if there is no end-of-sequence token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], config: RowsConfig
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise TaskError(
                "responses end with the tokenizer's end-of-sequence token, and it has none; set "
                "eos_token in the model's tokenizer_config.json",
                "no-end-token",
            )
        self._tokenizer = tokenizer
        self._ends = ends
        self._config = config
        self._encoder = Encoder(tokenizer, config.template_arguments)
        self._end = cast(int, tokenizer.eos_token_id)
        self.found = self._encoder.found
        self._after = partial(continued, self._encoder)

    def prompt(
        self,
        prompt: str | tuple[Message, ...],
        *,
        data: Mapping[str, Any] = MappingProxyType({}),
        transcript: bool = False,
    ) -> Prompt:
        """Return a prompt as a policy reads it.

        Args:
            data: the prompt's row, which may bring tools and a system message.
            transcript: whether the text contains turns. ``data.chat = auto`` then adds nothing.

        Raises TaskError if a chat template is needed, but is missing, switched off, or refuses it.
        """
        c = self._config
        as_is = transcript and c.chat == "auto" and not c.system
        task = TaskConfig(kind="dataset", system=c.system, chat="off" if as_is else c.chat)
        row = TaskRow(prompt, dict(data))
        return render(row, task, self._tokenizer, encoder=self._encoder, section="data")

    def response(self, prompt: Prompt, answer: Answer) -> tuple[int, ...]:
        """Return a response's tokens and end token.

        Raises TaskError if it changes the rendered prompt, or has calls without a chat template.
        """
        if prompt.messages is None:
            text = text_of_answer(answer)
            escaped, at = self._encoder.escape(prompt.text + text), len(prompt.text)
            response_ids = self._after(escaped[:at], prompt.tokens, escaped[at:], special=True)
            return (*response_ids, self._end)
        turn = Message(role="assistant", content=answer) if isinstance(answer, str) else answer
        options = _options(prompt)
        prompt_text = self._template(prompt.messages, add_generation_prompt=True, **options)
        escaped = self._grown(prompt_text, [*prompt.messages, turn], options)
        ids = self._after(prompt_text, prompt.tokens, escaped, special=False)
        return tuple(turn_of(ids, self._ends) or [*ids, self._end])

    def example(self, prompt: Prompt, completion: str | tuple[Message, ...]) -> Example:
        """Return a prompt and completion to train on. Raises TaskError like :meth:`response`."""
        start = len(prompt.tokens)
        if prompt.messages is None or isinstance(completion, str):
            assert isinstance(completion, str)
            answer = self.response(prompt, completion)
            return _example([*prompt.tokens, *answer], [False] * start + [True] * len(answer))
        turns = [*prompt.messages, *completion]
        marked = _GENERATION.search(str(self._tokenizer.chat_template))
        if not marked or any(map(is_ignored, completion)):
            return self._spanned(prompt.messages, turns, _options(prompt))
        with template_accepts(turns):
            tokens, marks = self._encoder.marked(turns, **_options(prompt))
        return _example(tokens, [False] * start + marks[start:])

    def text(self, text: str) -> Example:
        """Return a text without a prompt, trained from its second token on.

        Its spellings of control tokens are control tokens, because a chat template may have been
        applied to it. An end token is added if it has none.
        """
        utf8(text)
        tokenizer, ends = self._tokenizer, self._ends | {self._end}
        begin = tokenizer.bos_token
        special = not (begin and text.startswith(str(begin)))  # no second begin token
        tokens = list(tokenizer(text, add_special_tokens=special)["input_ids"])
        spans = turn_of(tokens, ends)
        if spans and not str(tokenizer.decode(tokens[len(spans) :])).strip():
            tokens = spans
        else:
            tokens.append(self._end)
        return _example(tokens, [False] + [True] * (len(tokens) - 1))

    def _spanned(
        self, prompt_turns: Sequence[Message], turns: Sequence[Message], options: Options
    ) -> Example:
        text, tokens = "", list[int]()
        trained = list[bool]()
        for at in range(len(prompt_turns), len(turns)):
            if turns[at]["role"] != "assistant" or is_ignored(turns[at]):
                continue
            for is_answer in (False, True):
                piece = self._grown(text, turns[: at + is_answer], options, answer=not is_answer)
                ids = self._after(text, tokens, piece, special=False)
                count = len(turn_of(ids, self._ends)) or len(ids) if is_answer else 0
                text += piece
                tokens += ids
                trained += [True] * count + [False] * (len(ids) - count)
        if any(trained[-1:]) and tokens[-1] not in self._ends:  # the template does not end a turn
            tokens.append(self._end)
            trained.append(True)
        return _example(tokens, trained)

    def _grown(
        self, text: str, turns: Sequence[Message], options: Options, *, answer: bool = False
    ) -> str:
        full_text = self._template(turns, add_generation_prompt=answer, **options)
        if not full_text.startswith(text):
            at = next(i for i, c in enumerate(text) if full_text[i : i + 1] != c)
            raise TaskError(
                "the chat template shows earlier turns differently once more is said (from "
                f"{self._encoder.plain(text[at : at + 40])!r} on), so that what was read is not "
                "what is learned; train on the last turn only (prompt and completion columns), or "
                "use a template with {% generation %} blocks",
                "template-changes-turns",
            )
        return full_text[len(text) :]

    def _template(self, turns: Sequence[Message], **options: Any) -> str:
        with template_accepts(turns):
            return self._encoder.chat(turns, **options)


def _options(prompt: Prompt) -> Options:
    return {"tools": tools_in(prompt.data, TOOLS) or None, **arguments_in(prompt.data)}


def _example(tokens: Sequence[int], trained: Sequence[bool]) -> Example:
    trained_positions = [i for i, t in enumerate(trained) if t]
    if not trained_positions:
        raise TaskError("nothing is left to learn: no token is the assistant's", "nothing-to-learn")
    stop = trained_positions[-1] + 1
    return Example(tuple(tokens[:stop]), (False, *trained[1:stop]))
