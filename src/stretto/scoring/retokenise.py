"""A response in the tokens of another tokenizer, while the response still grows.

A reward model with a tokenizer of its own reads text. The tokens of a text that grows are not those
of the text so far with some added: the last word may yet become another one. So only tokens are
read that lie two words or more before the end, and at the end the whole text is tokenised once
more. What was read wrongly, if anything, then shows, and is taken back.

What a policy types stays text: it spells no control tokens (:mod:`stretto.tasks.encode`). Texts
here are escaped, and offsets are characters of the text as the model reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from stretto.errors import ModelError
from stretto.scoring.responses import response_text
from stretto.tasks.encode import MARK, Encoder, Pieces
from stretto.tasks.responses import continued, turn_of
from stretto.types import FinishReason, Message, Prompt, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_WORDS = 2
"""Words at the end of the text that wait for what comes after them."""
HELD_CHARACTERS = 64
"""Characters that are held back at most, where a text has no spaces."""
CONTEXT_TOKENS = 16
"""Tokens before the new ones that are tokenised once more, so that the new ones come out as in the
whole text."""
AGREEMENT_TOKENS = 4
"""Context tokens that must come out as before; else the whole text is tokenised anew."""

Encode = Callable[[str, int], Pieces]
"""Encodes a text from a place in it on; special tokens are added only where that is 0. The spans of
the tokens count from that place."""


class ConversationReader:
    """The tokens of a rollout as a reward model with a tokenizer of its own reads them.

    A conversation goes through the model's chat template, or where it has none becomes the text of
    its turns with empty lines between. A plain prompt and its response are one text. The prompt's
    tokens stay what they are without a response. A response that has ended is followed by an end
    token, and that by nothing, as where reward models are trained. An episode is read as its
    messages, not as its tokens, which are laid out by the actor's template. Raises ModelError where
    the chat template refuses a conversation.

    Args:
        name: the scorer's, for messages.
        stop: strings that ended responses; not part of what is read.
        ends: tokens of the reward model that end a response; of these the tokenizer's own stands
            where the template has none. Empty: the conversation is read as its template has it.
        given_ends: tokens of the actor that end responses which were given rather than sampled.
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
        self._name, self._tokenizer, self._actor_tokenizer = name, tokenizer, actor_tokenizer
        self._encoder, self._end = Encoder(tokenizer), cast(int, tokenizer.eos_token_id)
        self._stop, self._ends, self._given_ends = tuple(stop), ends, given_ends

    def tokens(self, response: Response) -> list[int]:
        """Return all tokens that are read of a finished response."""
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
        read, special = self._render(prompt, text), not self._templated(prompt)
        if not self._ends:
            return self._encoder.ids(read, special=special, closed=True)
        shown, _, closing = self._render(prompt, text, unfinished=True).partition(MARK)
        given = bool(sampled) and sampled[-1] in self._given_ends
        ended = given or response.finish is FinishReason.STOP
        read = read if ended else shown
        asked = self._asked(prompt)
        if not read.startswith(asked):  # the template shows it in another way once it is answered
            asked = ""
        before = self._encoder.ids(asked, special=special) if asked else []
        said = continued(self._encoder, asked, before, read[len(asked) :], special=special)
        closed = turn_of(self._encoder.ids(closing, special=False), self._ends)
        if ended and not special and (asked or closed):
            said = turn_of(said, self._ends) or [*said, self._end]
        elif ended:
            said.append(self._end)
        return [*before, *said]

    def begun(self, response: Response) -> str:
        """Return the text that is read of an unfinished response, escaped, up to its end so far.

        It may end in replacement characters, for a character of which some bytes are still to come.
        Decoding and rendering begin anew each time: that is a tenth of the time of tokenising.
        """
        text = response_text(self._actor_tokenizer, response.tokens.tolist(), None)
        return self._render(response.prompt, text, unfinished=True).partition(MARK)[0]

    def prefix(self, prompt: Prompt) -> StablePrefix:
        """Return the text of :meth:`begun` in tokens; empty as yet."""
        special = not self._templated(prompt)
        asked = self._asked(prompt) if self._ends else ""

        def pieces(text: str, first: bool) -> Pieces:
            return self._encoder.pieces(text, special=special and first)

        def encode(text: str, start: int) -> Pieces:
            ids, spans = pieces(text[start:], start == 0)
            edge = len(asked) - start
            if not (text.startswith(asked) and any(a < edge < b for a, b in spans)):
                return ids, spans
            # A token lies across the end of the prompt, whose own tokens stay.
            ids, spans = pieces(text[start : len(asked)], start == 0)
            more, places = pieces(text[len(asked) :], False)
            return [*ids, *more], [*spans, *((a + edge, b + edge) for a, b in places)]

        return StablePrefix(encode, max(map(len, self._stop), default=0))

    def _asked(self, prompt: Prompt) -> str:
        """Return the prompt as it is read alone, escaped; empty if a chat template refuses that."""
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
        """Return prompt and response, escaped; unfinished, with :data:`MARK` behind them."""
        if not prompt.messages:
            return self._encoder.escape(prompt.text + text) + MARK * unfinished
        turns = [*prompt.messages, Message(role="assistant", content=text)]
        return self._conversation(turns, unfinished=unfinished)

    def _conversation(self, turns: Sequence[Message], *, unfinished: bool = False) -> str:
        if not self._tokenizer.chat_template:
            read = "\n\n".join(turn["content"] for turn in turns)
            return self._encoder.escape(read) + MARK * unfinished
        from jinja2 import TemplateError

        try:
            return self._encoder.chat(turns, unfinished=unfinished)
        except TemplateError as error:
            *before, last = turns
            shown = Message(role=last["role"], content=last["content"] + " [...]" * unfinished)
            raise ModelError(
                f"the chat template of reward model '{self._name}' refuses the conversation "
                f"{[*before, shown]}: {error}. Leave task.system empty, or choose another "
                "reward model, one that knows tools where there are any",
                "template-refuses",
            ) from error


class StablePrefix:
    """The tokens of a growing text, without its last words, which more text will hardly change.

    Each call tokenises what is new, with some context before it, so that the work grows with the
    text and not with its square.

    Args:
        held: characters at the end that may be cut off when the text ends (a stop string).
    """

    def __init__(self, encode: Encode, held: int = 0) -> None:
        self._encode, self._held = encode, held
        self.tokens: list[int] = []
        self._starts: list[int] = []
        self._text = ""  # that ``tokens`` stand for

    def grow(self, text: str) -> int:
        """Take the text as it is now; return how many of the first tokens stayed as they were."""
        end = _stable_end(text, self._held)
        if not text.startswith(self._text):
            return self._renew(text, end)
        kept = len(self.tokens)
        if end <= len(self._text):
            return kept
        start = self._context_start()
        ids, spans = self._encode(text, start)
        edge = len(self._text) - start
        new = next((i for i, (a, _) in enumerate(spans) if a >= edge), len(ids)) if kept else 0
        check = min(AGREEMENT_TOKENS, kept)
        if ids[max(0, new - check) : new] != self.tokens[kept - check :]:
            return self._renew(text, end)
        self._commit(text, end, start, ids[new:], spans[new:])
        return kept

    def close(self, tokens: Sequence[int]) -> int:
        kept = _common(self.tokens, tokens)
        self.tokens[:] = tokens
        return kept

    def _renew(self, text: str, end: int) -> int:
        before, self.tokens, self._starts, self._text = self.tokens, [], [], ""
        self._commit(text, end, 0, *self._encode(text, 0))
        return _common(before, self.tokens)

    def _commit(
        self, text: str, end: int, start: int, ids: list[int], spans: list[tuple[int, int]]
    ) -> None:
        """Add tokens up to the first that reaches beyond ``end``; spans count from ``start``."""
        edge = len(self._text)
        for token, (a, b) in zip(ids, spans, strict=True):
            if start + b > end:
                break
            self.tokens.append(token)
            self._starts.append(start + a)
            edge = max(edge, start + b)
        self._text = text[:edge]

    def _context_start(self) -> int:
        """Return where to begin tokenising: at a word, some tokens before the first new one."""
        for at in reversed(range(1, len(self.tokens) - CONTEXT_TOKENS + 1)):
            start = self._starts[at]
            at_word = any(c.isspace() for c in self._text[max(0, start - 1) : start + 1])
            if at_word or at < len(self.tokens) - 4 * CONTEXT_TOKENS:
                return start
        return 0


def _stable_end(text: str, held: int) -> int:
    last = max(0, len(text) - held)
    first = max(0, last - HELD_CHARACTERS)
    gaps = [gap.start() for gap in re.finditer(r"\s+", text[first:last])]
    return first + gaps[-HELD_WORDS] if len(gaps) >= HELD_WORDS else first


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
