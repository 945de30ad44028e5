"""Tokenises a growing response for a reward model or teacher with another tokenizer.

Such a model reads text. The tokens of a growing text change at its end, because the last word may
become another one. So only tokens at least two words before the end are read. At the end the
complete text is tokenised again, and tokens that differ are rolled back.

Text of the policy cannot spell control tokens (:mod:`stretto.tasks.encode`). Texts here are
escaped, and offsets are characters of the text as the model reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from stretto.errors import ModelError
from stretto.scoring.response_buffer import response_text
from stretto.tasks.encode import MARK, Encoder, Pieces
from stretto.tasks.responses import continued, turn_of
from stretto.types import FinishReason, Message, Prompt, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_WORDS = 2
"""Words at the end of the text that wait for the text after them."""
HELD_CHARACTERS = 64
"""Most characters to hold back in a text without spaces."""
CONTEXT_TOKENS = 16
"""Earlier tokens to tokenise again, so that new ones are the same as in the complete text."""
AGREEMENT_TOKENS = 4
"""Context tokens that must not change. Otherwise the complete text is tokenised again."""

Encode = Callable[[str, int], Pieces]
"""Encodes a text from a position on, from which spans count. Special tokens only at 0."""


class ConversationReader:
    """The tokens of a rollout for a reward model with another tokenizer.

    - A conversation is rendered by the model's chat template. Without one, empty lines join its
      turns. A plain prompt and its response are one text.
    - The prompt has the same tokens as without a response.
    - A finished response is followed by an end token only, as in the training of reward models.
    - An episode is read as messages, because the actor's template laid out its tokens.

    Raises ModelError if the chat template refuses a conversation.

    Args:
        name: of the scorer, for messages.
        stop: strings that ended responses. They are not read.
        ends: the reward model's end tokens. Its tokenizer's is added if the template has none. If
            empty, the rendered conversation is read unchanged.
        given_ends: the actor's end tokens, for responses that were not sampled.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        actor_tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        ends: frozenset[int] = frozenset(),
        given_ends: frozenset[int] = frozenset(),
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._actor_tokenizer = actor_tokenizer
        self._encoder, self._end = Encoder(tokenizer), cast(int, tokenizer.eos_token_id)
        self._stop = tuple(stop)
        self._ends = ends
        self._given_ends = given_ends

    def tokens(self, response: Response) -> list[int]:
        """Return all tokens to read of a finished response."""
        prompt, sampled = response.prompt, response.tokens.tolist()
        text = response_text(self._actor_tokenizer, sampled, response.finish, self._stop)
        if response.messages:
            first = prompt.messages or (Message(role="user", content=prompt.text),)
            *earlier, last = (*first, *response.messages)
            if last["role"] != "assistant" or last.get("tool_calls"):
                text = self._conversation([*earlier, last])
                special = not self._tokenizer.chat_template
                return self._encoder.ids(text, special=special, closed=True)
            prompt, text = replace(prompt, messages=tuple(earlier)), last["content"]
        rendering, special = self._render(prompt, text), not self._templated(prompt)
        if not self._ends:
            return self._encoder.ids(rendering, special=special, closed=True)
        body, _, closing = self._render(prompt, text, unfinished=True).partition(MARK)
        has_given_end = bool(sampled) and sampled[-1] in self._given_ends
        is_finished = has_given_end or response.finish is FinishReason.STOP
        rendering = rendering if is_finished else body
        prompt_text = self._asked(prompt)
        if not rendering.startswith(prompt_text):  # rendered differently with an answer
            prompt_text = ""
        prompt_ids = self._encoder.ids(prompt_text, special=special) if prompt_text else []
        response_ids = continued(
            self._encoder, prompt_text, prompt_ids, rendering[len(prompt_text) :], special=special
        )
        closed = turn_of(self._encoder.ids(closing, special=False), self._ends)
        if is_finished and not special and (prompt_text or closed):
            response_ids = turn_of(response_ids, self._ends) or [*response_ids, self._end]
        elif is_finished:
            response_ids.append(self._end)
        return [*prompt_ids, *response_ids]

    def begun(self, response: Response) -> str:
        """Return the text of the prompt and the unfinished response, escaped.

        It may end in replacement characters for an incomplete character. Each call decodes and
        renders everything, which takes a tenth of the time of tokenising.
        """
        text = response_text(self._actor_tokenizer, response.tokens.tolist(), None)
        return self._render(response.prompt, text, unfinished=True).partition(MARK)[0]

    def prefix(self, prompt: Prompt) -> StablePrefix:
        """Return an empty :class:`StablePrefix` for the text of :meth:`begun`."""
        return StablePrefix(self._encoding(prompt), max(map(len, self._stop), default=0))

    def _encoding(self, prompt: Prompt) -> Encode:
        special = not self._templated(prompt)
        prompt_text = self._asked(prompt) if self._ends else ""

        def pieces(text: str, first: bool) -> Pieces:
            return self._encoder.pieces(text, special=special and first)

        def encode(text: str, start: int) -> Pieces:
            ids, spans = pieces(text[start:], start == 0)
            edge = len(prompt_text) - start
            if not (text.startswith(prompt_text) and any(a < edge < b for a, b in spans)):
                return ids, spans
            # A token spans the end of the prompt, whose tokens must not change.
            ids, spans = pieces(text[start : len(prompt_text)], start == 0)
            more, places = pieces(text[len(prompt_text) :], False)
            return [*ids, *more], [*spans, *((a + edge, b + edge) for a, b in places)]

        return encode

    def _asked(self, prompt: Prompt) -> str:
        """Return the prompt without a response, escaped. Empty if a chat template refuses it."""
        if not prompt.messages:
            return self._encoder.escape(prompt.text)
        if not self._templated(prompt):
            return self._encoder.escape("".join(t["content"] + "\n\n" for t in prompt.messages))
        from jinja2 import TemplateError

        try:
            return self._encoder.chat(prompt.messages, add_generation_prompt=True)
        except TemplateError:
            return ""

    def _templated(self, prompt: Prompt) -> bool:
        return bool(prompt.messages and self._tokenizer.chat_template)

    def _render(self, prompt: Prompt, text: str, *, unfinished: bool = False) -> str:
        """Return prompt and response, escaped. If unfinished, :data:`MARK` follows them."""
        if not prompt.messages:
            return self._encoder.escape(prompt.text + text) + MARK * unfinished
        turns = [*prompt.messages, Message(role="assistant", content=text)]
        return self._conversation(turns, unfinished=unfinished)

    def _conversation(self, turns: Sequence[Message], *, unfinished: bool = False) -> str:
        if not self._tokenizer.chat_template:
            text = "\n\n".join(turn["content"] for turn in turns)
            return self._encoder.escape(text) + MARK * unfinished
        from jinja2 import TemplateError

        try:
            return self._encoder.chat(turns, unfinished=unfinished)
        except TemplateError as error:
            *before, last = turns
            excerpt = Message(role=last["role"], content=last["content"] + " [...]" * unfinished)
            raise ModelError(
                f"the chat template of '{self._name}' refuses the conversation "
                f"{[*before, excerpt]}: {error}. Leave task.system empty, or choose another "
                "model, one that knows tools where there are any",
                "template-refuses",
            ) from error


class StablePrefix:
    """The tokens of a growing text without its last words, which may still change.

    Each call tokenises the new text and some context, so that the work is linear in the length. The
    last ``held`` characters may be cut off when the text ends (a stop string). The tokens of the
    first ``fixed`` characters do not change.
    """

    def __init__(self, encode: Encode, held: int = 0, fixed: int = 0) -> None:
        self._encode = encode
        self._held = held
        self._fixed = fixed
        self.tokens: list[int] = []
        self._starts: list[int] = []
        self._text = ""  # the text of ``tokens``

    def grow(self, text: str) -> int:
        """Update to the text so far. Return how many leading tokens did not change."""
        last = max(0, len(text) - self._held)
        first = max(0, last - HELD_CHARACTERS)
        gaps = [gap.start() for gap in re.finditer(r"\s+", text[first:last])]
        stable_end = first + gaps[-HELD_WORDS] if len(gaps) >= HELD_WORDS else first
        end = max(self._fixed, stable_end)
        if not text.startswith(self._text):
            return self._renew(text, end)
        count = len(self.tokens)
        if end <= len(self._text):
            return count
        start = self._context_start()
        ids, spans = self._encode(text, start)
        edge = len(self._text) - start
        new = next((i for i, (a, _) in enumerate(spans) if a >= edge), len(ids)) if count else 0
        check = min(AGREEMENT_TOKENS, count)
        if ids[max(0, new - check) : new] != self.tokens[count - check :]:
            return self._renew(text, end)
        self._commit(text, end, start, ids[new:], spans[new:])
        return count

    def close(self, tokens: Sequence[int]) -> int:
        count = _common(self.tokens, tokens)
        self.tokens[:] = tokens
        return count

    def _renew(self, text: str, end: int) -> int:
        before = self.tokens
        self.tokens = []
        self._starts = []
        self._text = ""
        self._commit(text, end, 0, *self._encode(text, 0))
        return _common(before, self.tokens)

    def _commit(
        self, text: str, end: int, start: int, ids: list[int], spans: list[tuple[int, int]]
    ) -> None:
        """Add tokens up to the first that ends after ``end``. Spans count from ``start``."""
        edge = len(self._text)
        for token, (a, b) in zip(ids, spans, strict=True):
            if start + b > end:
                break
            self.tokens.append(token)
            self._starts.append(start + a)
            edge = max(edge, start + b)
        self._text = text[:edge]

    def _context_start(self) -> int:
        """Return where to begin tokenising: at a word, some tokens before the new ones."""
        for at in reversed(range(1, len(self.tokens) - CONTEXT_TOKENS + 1)):
            start = self._starts[at]
            at_word = any(c.isspace() for c in self._text[max(0, start - 1) : start + 1])
            if at_word or at < len(self.tokens) - 4 * CONTEXT_TOKENS:
                return start
        return 0


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
