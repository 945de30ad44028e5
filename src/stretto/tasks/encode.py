"""Tokenises texts so that only a chat template can write control tokens.

A text may spell a control token: a policy can write ``</s>``, a dataset can contain ``<eos>``. A
tokenizer encodes that as the token itself, so that a text could end a turn and begin another. Here
it stays text: '<', '/', 's', '>'.

Before a text goes into a template, each spelling of a control token in it is *escaped*: replaced by
as many Unicode noncharacters, so that positions do not change. An escaped text is tokenised by a
twin of the tokenizer, which knows control tokens only by these stand-ins, with spellings and
stand-ins exchanged. So the rest of the text gets its usual tokens, even next to a spelling. A text
without escapes goes through the tokenizer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from stretto.config.sections import RESERVED_ARGUMENTS
from stretto.errors import ModelError, StrettoError, TaskError
from stretto.plain import parse

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from stretto.types import Message

*_FIRST, MARK = (chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
"""Unicode noncharacters. The last is never in an escaped text, so it can mark a position."""
_NEXT = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""The other noncharacters. A stand-in is one of the first and as many of these as needed."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of transformers that jinja alone does not know."""
_NONCHARACTER = re.compile(f"[{''.join([*_FIRST, MARK, *_NEXT])}]")

Pieces = tuple[list[int], list[tuple[int, int]]]
"""Tokens and their (start, end) in the tokenised text."""


class Encoder:
    """A tokenizer to which spellings of control tokens are text.

    Control tokens are the tokenizer's special tokens, and the added tokens in its
    ``chat_control_tokens``. Without this list, they are the added tokens that its chat template
    writes with every turn. Any other added token is an ordinary word.

    Attributes:
        tokenizer: is not changed.
        arguments: of the chat template, in every conversation.
        found: spellings of control tokens in texts so far.
        unread: arguments of conversations so far that the chat template never reads.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self.unread: set[str] = set()
        self._control = _control_tokens(tokenizer, self.arguments)
        self._spellings = {i: text for text, i in self._control.items()}
        self._names = _stand_ins(self._control)
        spellings = {name: text for text, name in self._names.items()}
        self._other = self._names | spellings
        self._plain = {text: text for text in self._names} | spellings
        self._spelling = _any_of(self._names)
        self._either = _any_of(self._other)
        # Text outside the vocabulary becomes the unknown token, which controls nothing.
        self.control_ids = frozenset(self._control.values()) - {tokenizer.unk_token_id}
        self.found: set[str] = set()

    def escape(self, text: str) -> str:
        """Replace spellings of control tokens in a text by stand-ins of the same length.

        A noncharacter becomes the replacement character, because it could be taken for a stand-in.
        Raises TaskError for invalid Unicode.
        """
        if not text.isascii():
            utf8(text)
            text = _NONCHARACTER.sub("\ufffd", text)
        if not self._spelling.search(text):
            return text
        self.found.update(self._spelling.findall(text))
        return self._spelling.sub(lambda m: self._names[m[0]], text)

    def plain(self, escaped: str) -> str:
        """Return the readable form of an escaped text (inverse of :meth:`escape`)."""
        if not _is_escaped(escaped):
            return escaped
        return self._either.sub(lambda m: self._plain[m[0]], escaped)

    def chat(
        self,
        turns: Iterable[Message],
        *,
        unfinished: bool = False,
        before: Sequence[Message] = (),
        **options: Any,
    ) -> str:
        """Render a conversation by the chat template, with its contents escaped.

        Args:
            unfinished: append :data:`MARK` to the last content.
            before: earlier turns, escaped already. They may contain :data:`MARK`.
            options: of ``apply_chat_template``, or template arguments, which override
                :attr:`arguments`. Their texts, including ``tools``, are escaped, too.

        JSON text in arguments of tool calls is parsed. Raises TaskError for invalid Unicode, and
        all errors of the template.
        """
        conversation = self._escaped(list(map(with_parsed_arguments, turns)))
        if unfinished:
            conversation[-1]["content"] += MARK
        conversation = [*before, *conversation]
        options = self._with_arguments(options)
        return str(self.tokenizer.apply_chat_template(conversation, tokenize=False, **options))

    def _with_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Add template arguments to options, escaped. Note unread arguments."""
        options = {**self.arguments, **options}
        if names := options.keys() - RESERVED_ARGUMENTS:
            self.unread |= names - (self._variables or names)
        return {name: self._escaped(value) for name, value in options.items()}

    @cached_property
    def _variables(self) -> frozenset[str]:
        """Names that the chat template reads, or empty if unknown."""
        from jinja2 import Environment, TemplateError, meta

        template: Any = self.tokenizer.chat_template
        templates = template.values() if isinstance(template, dict) else [template]
        parser = Environment(extensions=["jinja2.ext.loopcontrols"])
        names = set[str]()
        try:
            for text in templates:
                plain = _GENERATION.sub("", str(text))
                names |= meta.find_undeclared_variables(parser.parse(plain))
        except TemplateError:
            return frozenset()
        return frozenset(names)

    @cached_property
    def turn_marks(self) -> frozenset[str]:
        """Control tokens that the chat template writes around a question."""
        try:
            turn_text = self.chat([{"role": "user", "content": "?"}], add_generation_prompt=True)
        except Exception:  # no template, or it refuses this (see _turn_marks)
            return frozenset()
        return frozenset(mark for mark in self._control if mark in turn_text)

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self._escaped(key): self._escaped(entry) for key, entry in value.items()}
        return list(map(self._escaped, value)) if isinstance(value, list) else value

    def marked(self, turns: Iterable[Message], **options: Any) -> tuple[list[int], list[bool]]:
        """Return tokens, and whether each is the assistant's by the template (see :meth:`chat`)."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self.tokenizer
        render: Any = render_jinja_template  # its annotations lack the second result
        texts, spans = render(
            [self._escaped(list(map(with_parsed_arguments, turns)))],
            chat_template=tokenizer.get_chat_template(tools=options.get("tools")),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
            **self._with_arguments(options),
        )
        ids, places = self.pieces(texts[0])
        return ids, [any(a < end and start < b for start, end in spans[0]) for a, b in places]

    def ids(self, escaped: str, *, special: bool = False, closed: bool = False) -> list[int]:
        """Return the tokens of an escaped text, or of a part of one.

        Args:
            special: add the special tokens that the tokenizer puts before any text.
            closed: add special tokens after the text, too, because nothing follows.
        """
        behind = self._behind if special and not closed else 0
        ids = list[int]()
        if not _is_escaped(escaped):
            ids = list(self.tokenizer(escaped, add_special_tokens=special)["input_ids"])
        if not ids or not self._are_written(ids, escaped, special):
            if self.tokenizer.is_fast:
                ids = list(self._twin_encoded(escaped, special).ids)
            else:
                ids = self._by_parts(escaped, special)
        return ids[: len(ids) - behind]

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the escaped text of tokens, in which only control tokens spell one."""
        text, run = "", list[int]()
        for i in [*ids, None]:
            if i in self.control_ids or i is None:
                run_text = self.tokenizer.decode(run, clean_up_tokenization_spaces=False)
                text += self.escape(str(run_text)) if run else ""
                run = []
            if i in self.control_ids:
                text += self._spellings[i]
            elif i is not None:
                run.append(i)
        return text

    def control_in(self, escaped: str, start: int = 0) -> tuple[int, int, int] | None:
        match = self._spelling.search(escaped, start)
        return (match.start(), match.end(), self._control[match[0]]) if match else None

    def pieces(self, escaped: str, *, special: bool = False) -> Pieces:
        """Return the tokens of :meth:`ids` with their spans, for fast tokenizers only."""
        ids = list[int]()
        spans = list[tuple[int, int]]()
        if not _is_escaped(escaped):
            options = {"add_special_tokens": special, "return_offsets_mapping": True}
            encoding = self.tokenizer(escaped, **options)
            ids, spans = list(encoding["input_ids"]), list(encoding["offset_mapping"])
        if not ids or not self._are_written(ids, escaped, special):
            twin_encoding = self._twin_encoded(escaped, special)
            ids, spans = list(twin_encoding.ids), list(twin_encoding.offsets)
        end = len(ids) - (self._behind if special else 0)
        return ids[:end], spans[:end]

    def _are_written(self, ids: Iterable[int], escaped: str, special: bool) -> bool:
        """Whether the ids contain no more control tokens than the template wrote.

        They contain more if a text spells one only after normalisation ('＜/s＞').
        """
        count = sum(map(self.control_ids.__contains__, ids)) - (self._around if special else 0)
        return count <= 0 or count <= len(self._spelling.findall(escaped))

    @cached_property
    def _behind(self) -> int:
        """Number of special tokens that the tokenizer adds after any text (``add_eos_token``)."""
        text_ids = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        wrapped_ids = list(self.tokenizer("a")["input_ids"])
        extra = len(wrapped_ids) - len(text_ids)
        starts = (
            at
            for at in range(extra + 1)
            if text_ids and wrapped_ids[at : at + len(text_ids)] == text_ids
        )
        return extra - next(starts, extra)

    @cached_property
    def _around(self) -> int:
        return sum(map(self.control_ids.__contains__, self.tokenizer("")["input_ids"]))

    def _twin_encoded(self, escaped: str, special: bool) -> Any:
        # As a batch, because other threads can run during that.
        return self._twin.encode_batch([self._exchanged(escaped)], add_special_tokens=special)[0]

    @cached_property
    def _twin(self) -> Tokenizer:
        backend: Any = self.tokenizer
        return _renamed(backend.backend_tokenizer, self._names)

    def _exchanged(self, escaped: str) -> str:
        return self._either.sub(lambda m: self._other[m[0]], escaped)

    def _by_parts(self, escaped: str, special: bool) -> list[int]:
        """Encode the parts between control tokens one by one, for tokenizers without a twin.

        These are written in Python. Words at the edges may get other tokens than in one text.
        """
        tokenizer: Any = self.tokenizer
        ids: list[int] = []
        at = 0
        for match in [*self._spelling.finditer(escaped), None]:
            part = self.plain(escaped[at : match.start() if match else len(escaped)])
            if part:
                options = {"add_special_tokens": False, "split_special_tokens": True}
                ids += tokenizer(part, **options)["input_ids"]
            if match:
                ids.append(self._control[match[0]])
                at = match.end()
        return list(tokenizer.build_inputs_with_special_tokens(ids)) if special else ids


def _is_escaped(text: str) -> bool:
    return not text.isascii() and bool(_NONCHARACTER.search(text))


def utf8(text: str) -> bytes:
    """Encode a text. TaskError for half of a surrogate pair, which JSON can contain."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TaskError(
            f"a text must be valid Unicode, and character {error.start} of it is half of a "
            f"surrogate pair ({text[error.start]!r}); correct the text, or drop it",
            "invalid-unicode",
        ) from error


def with_parsed_arguments(message: Message) -> Message:
    """Return a message whose tool calls have parsed arguments.

    OpenAI's clients send and store JSON text, but templates expect objects. Other text stays.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return cast("Message", {**message, "tool_calls": [_parsed_call(call) for call in calls]})


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _parsed_call(call["function"])}
    parsed = dict(call)
    if isinstance(call.get("arguments"), str):
        with suppress(ValueError):
            parsed["arguments"] = parse(call["arguments"].strip() or "{}")
    return parsed


@contextmanager
def template_accepts(turns: Iterable[Message]) -> Iterator[None]:
    """Convert any error of a chat template, which is code, to a TaskError."""
    try:
        yield
    except (StrettoError, MemoryError):
        raise
    except Exception as error:
        raise TaskError(
            f"the tokenizer's chat template refuses the messages {str(list(turns))[:500]}: "
            f"{type(error).__name__}: {error}",
            "template-refuses",
        ) from error


def _control_tokens(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Return the ids of tokens that a text must not be able to spell, by spelling."""
    added_tokens = tokenizer.added_tokens_decoder
    control = {token.content: i for i, token in added_tokens.items() if token.special}
    special_ids: Any = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    control |= dict(special_ids)
    plain_ids = {
        t.content: i for i, t in added_tokens.items() if not t.special and t.content.strip()
    }
    declared_marks = getattr(tokenizer, "chat_control_tokens", None)
    marks = (
        _turn_marks(tokenizer, plain_ids, arguments) if declared_marks is None else declared_marks
    )
    return control | {mark: plain_ids[mark] for mark in marks if mark in plain_ids}


def _turn_marks(
    tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str], arguments: Mapping[str, Any]
) -> Sequence[str]:
    """Return the given tokens that the chat template writes with every turn."""
    tokens = list(tokens)
    if not (tokens and tokenizer.chat_template):
        return ()
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
        render_chat = tokenizer.apply_chat_template
        once, twice = (str(render_chat(turns * n, tokenize=False, **arguments)) for n in (1, 2))
    except Exception:  # ignored here, because real turns will show the error
        return ()
    return [token for token in tokens if twice.count(token) > once.count(token)]


def _stand_ins(control: Iterable[str]) -> dict[str, str]:
    """Make a name of noncharacters, of the same length, for each control token."""
    names: dict[str, str] = {}
    by_length: dict[int, Any] = {}
    for text in control:
        free_names = by_length.setdefault(len(text), product(_FIRST, *[_NEXT] * (len(text) - 1)))
        name = next(free_names, None)
        if name is None:
            raise ModelError(
                f"the tokenizer has more special tokens of {len(text)} characters than can be told "
                "from text; choose another model",
                "too-many-special-tokens",
            )
        names[text] = "".join(name)
    return names


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _renamed(backend: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """Return a copy of a tokenizer with other spellings of some tokens and the same ids.

    The model's vocabulary must change, too, because its words and pieces may spell such tokens.
    """
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["truncation"] = state["padding"] = None
    for token in state["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "normalized": False}
    model = state["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [(a, b) for a, b in model["merges"] if not ({a, b, a + b} & names.keys())]
    return Tokenizer.from_str(json.dumps(state))


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same ids: one vocabulary, applied the same way."""
    probe = "Two tokenizers, 1234 words; naïve — “quotes”,\n\n\tand  spaces."
    return a.get_vocab() == b.get_vocab() and a(probe)["input_ids"] == b(probe)["input_ids"]
