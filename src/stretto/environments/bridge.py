"""Extends a conversation by token ids from turn to turn. Sampled tokens are never rendered again.

Between two turns of the policy a chat template renders the end of the turn, text that models do not
sample after it (often a line break), the messages that answer, and the next turn's header. The
bridge gets this text by a difference: it renders a synthetic conversation that ends with the
messages, and drops everything before the end of the synthetic turn. So tokens are only appended.

This is right if the template renders the same text after every conversation, and keeps all earlier
text. A new bridge checks both on conversations of several turns, with and without calls and
reasoning. :meth:`Bridge.context` checks again with the actual messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from stretto.config.sections import ARGUMENTS
from stretto.environments.calls import CallFormat, ToolCall, find_calls
from stretto.environments.templates import QUESTION, TemplateShape, made_up, made_up_call, names_of
from stretto.errors import ConfigError, TaskError
from stretto.scoring.response_buffer import before_stop
from stretto.tasks.encode import MARK, Encoder, template_accepts
from stretto.types import Message

MOST_ARGUMENTS = 64
"""Bridges kept for different template arguments of rows."""

THINK, UNTHINK = "<think>", "</think>"
_REASONING = f"{THINK}\nmade up reasoning\n{UNTHINK}\n\n"
_SYSTEM = Message(role="system", content="made up rule")
_WHAT_TO_DO = (
    "environment.on_break = 'fork' begins a new sample of the episode there; a chat_template.jinja "
    "that keeps earlier turns, in the model's folder, needs none"
)


class _Case(NamedTuple):
    """Properties that may change a template's output: next role, reasoning, system message."""

    role: str
    reasoned: bool
    system: bool


@dataclass(frozen=True)
class Turn:
    """One parsed turn of the policy.

    Attributes:
        text: the complete turn with reasoning and calls, without control tokens.
        message: for the chat template. Valid calls are ``tool_calls``, and the rest is content.
        calls: in the order of the text, including invalid ones.
    """

    text: str
    message: Message
    calls: tuple[ToolCall, ...]


class _Start(NamedTuple):
    """A synthetic conversation that ends with a turn of the policy.

    Attributes:
        turns: escaped. :data:`MARK` is in the last one.
        said: the text of that turn before any calls.
        called: whether the mark is within a call.
    """

    turns: tuple[Message, ...]
    said: str
    called: bool


class _Exchange(NamedTuple):
    """Answers to a synthetic turn, and whether the policy reasons in it."""

    answers: list[Message]
    reasoned: bool


class Bridge:
    """Extends token sequences by messages, as a chat template would render them.

    Attributes:
        breaks_before: by the role of the message after a turn, which conversations cannot be
            extended, and why. For all others :meth:`context` decides.
        form: format of tool calls.
    """

    _reads_calls = True

    def __init__(
        self,
        encoder: Encoder,
        tools: Sequence[Mapping[str, Any]] = (),
        end_tokens: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Probe the template with synthetic conversations.

        Args:
            tools: JSON schemas of the tools in prompts. If rows bring their own, those of any row,
                because it matters only whether there are some.
            end_tokens: that end a turn, in addition to the template's.
            stop: strings that end a turn. They are not part of its text.
            arguments: of the template. They override the encoder's.

        Raises:
            ConfigError: there is no chat template, it refuses a plain conversation, or the format
                of its calls is not supported (code ``unknown-call-format``).
        """
        self._encoder = encoder
        self._tools = tuple(tools)
        self._stop = tuple(stop)
        self._end_tokens, reads_calls = end_tokens, bool(tools) and self._reads_calls
        self._shape = TemplateShape(encoder, reads_calls=reads_calls, arguments=arguments)
        self._others: dict[str, Bridge] = {}
        eos = encoder.tokenizer.eos_token_id
        self._ends = end_tokens | self._shape.ends | ({eos} if eos is not None else set())
        self.form: CallFormat = self._shape.form
        opening = encoder.control_in(self.form.opening)
        # Removed from the end of a turn, whichever of them a model ends it with.
        self._silent = (self._ends | encoder.control_ids) - {opening and opening[2]}
        self._header = self._rendered([QUESTION])
        self._opens_reasoning = self._header.rstrip().endswith(THINK)
        self._broken: set[_Case] = set()
        self.breaks_before: dict[str, str] = {}
        if tools:
            self._prove("tool")
        self._prove("user")

    def of(self, arguments: Mapping[str, Any]) -> Bridge:
        """Return the bridge for a row's template arguments. TaskError if it does not work with
        them.

        The template is probed again, because it may render turns differently.
        """
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._others:
            if len(self._others) == MOST_ARGUMENTS:
                del self._others[next(iter(self._others))]
            try:
                self._others[key] = self._with(arguments)
            except ConfigError as error:
                raise TaskError(f"with {ARGUMENTS} = {key}: {error}", error.code) from error
        return self._others[key]

    def _with(self, arguments: Mapping[str, Any]) -> Bridge:
        return Bridge(self._encoder, self._tools, self._end_tokens, self._stop, arguments)

    @property
    def breaks(self) -> str | None:
        return self.breaks_among(self.breaks_before)

    def breaks_among(self, roles: Iterable[str]) -> str | None:
        """Return the entries of ``breaks_before`` for these roles as one text, or ``None``."""
        reasons = "; ".join(self.breaks_before[r] for r in roles if r in self.breaks_before)
        return f"{reasons}. {_WHAT_TO_DO}" if reasons else None

    # -- prompts and turns -------------------------------------------------------------------------

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], str]:
        """Render a conversation up to the policy's turn, for the bridge's tools or others.

        Returns ids and text. Raises TaskError if the template refuses, or for invalid Unicode.
        """
        with template_accepts(messages):
            read = self._rendered(messages, tools=self._tools if tools is None else tools)
        return self._encoder.ids(read), self._encoder.plain(read)

    def parse(
        self, ids: Sequence[int], *, ended: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Turn:
        """Parse a turn, for the bridge's tools or others.

        Args:
            ids: sampled tokens, including the end token.
            ended: whether the turn ended by itself, not at a limit.
        """
        escaped = self._spelled(ids)
        begin = self._begin(escaped)
        rest = escaped[begin:]
        names = names_of(self._tools if tools is None else tools)
        plain = self._encoder.plain(rest)
        matches = find_calls(rest, plain, self.form, names=names, ended=ended)
        if ended:  # only now, because a stop string may close a call
            escaped = escaped[: len(before_stop(self._encoder.plain(escaped), self._stop))]
        text = self._without_control(escaped)
        message = Message(role="assistant", content=text)
        good = [f for f in matches if f.call.status == "ok"]
        if good:
            content, at = "", 0
            for start, end, _ in good:
                content += escaped[at : max(at, begin + start)]
                at = max(at, begin + end)
            message["content"] = self._without_control(content + escaped[at:]).strip()
            message["tool_calls"] = [as_written(f.call) for f in good]
        return Turn(text, message, tuple(call for _, _, call in matches))

    def _spelled(self, ids: Sequence[int]) -> str:
        ids = list(ids)
        while ids and ids[-1] in self._silent:
            ids.pop()
        return self._encoder.spelled(ids)

    def _begin(self, escaped: str) -> int:
        """Return where calls may begin: after reasoning and tokens such as <|python_tag|>."""
        begin = 0
        if self._opens_reasoning or escaped.lstrip().startswith(THINK):
            end = escaped.find(UNTHINK)
            begin = end + len(UNTHINK) if end >= 0 else len(escaped)
        if not self.form.opening.strip():
            while (token := self._encoder.control_in(escaped, begin)) and token[0] == begin:
                begin = token[1]
        return begin

    # -- from turn to turn -------------------------------------------------------------------------

    def context(
        self,
        standing: Sequence[int],
        messages: Sequence[Message],
        *,
        prompt: Sequence[Message] | None = None,
    ) -> list[int] | None:
        """Return the tokens to append, or ``None`` if the template would change earlier ones.

        Raises TaskError if the template refuses the messages, or a text is invalid Unicode.

        Args:
            standing: prompt and response, which must end with a turn of the policy.
            messages: answers to the turn, of the roles user, tool or system.
            prompt: its messages show whether there is a system message. Without it, there may be.
        """
        roles = {m["role"] for m in messages}
        if not roles <= {"user", "tool", "system"}:
            return None
        systems: tuple[bool, ...] = (False, True)
        if prompt is not None:
            systems = (bool(prompt) and prompt[0]["role"] == "system",)
        reasoned = self._has_reasoning(standing, roles)
        if any(_Case(role, reasoned, s) in self._broken for role in roles for s in systems):
            return None
        text = self._text(messages, reasoned)
        if text is None:
            return None
        ids = self._encoder.ids(text)
        return ids[1:] if standing[-1] == ids[0] else ids

    def _has_reasoning(self, standing: Sequence[int], roles: set[str]) -> bool:
        if not any(role in roles and reasoned for role, reasoned, _ in self._broken):
            return False
        text = self._encoder.tokenizer.decode(list(standing), clean_up_tokenization_spaces=False)
        return UNTHINK in str(text)

    def _text(
        self, messages: Sequence[Message], reasoned: bool, system: bool = False
    ) -> str | None:
        """Return the template's text from a turn's end token on, or ``None`` for a break."""
        shaped = self._shape.messages(messages)
        header = self._rendered([], before=[_SYSTEM, QUESTION]) if system else self._header
        refusal: Exception | None = None
        for start in self._starts(shaped, reasoned, MARK):
            before = (_SYSTEM, *start.turns) if system else start.turns
            try:
                rendered = self._rendered(shaped, before=before)
            except TaskError:
                raise
            except Exception as error:  # some need one call per result, some only one
                refusal = error
                continue
            if MARK in rendered:
                goes_on = _begins(rendered, header, start.said)
                return self._behind_turn(rendered, start.called) if goes_on else None
        if refusal:
            raise TaskError(
                f"the chat template refuses the messages {str(list(messages))[:500]}: {refusal}",
                "template-refuses",
            ) from refusal
        return None

    def _behind_turn(self, rendered: str, called: bool) -> str | None:
        """Return the text from the marked turn's end token on, or ``None`` without one."""
        mark = rendered.rindex(MARK)
        end = self._encoder.control_in(rendered, mark)
        while end and called and end[2] not in self._ends:
            end = self._encoder.control_in(rendered, end[1])
        if not end or (rendered[mark + 1 : end[0]].strip() and not called):
            return None
        return rendered[end[0] :]

    def _starts(self, answers: Sequence[Message], reasoned: bool, mark: str) -> Iterator[_Start]:
        """Yield synthetic conversations that the answers could follow, likeliest first."""
        reasoning = _REASONING if reasoned else ""
        if self._opens_reasoning:
            reasoning = reasoning.removeprefix(f"{THINK}\n")
        content = f"{reasoning}made up answer"
        results = list(takewhile(lambda m: m["role"] == "tool", answers))
        if results and self._shape.writes_calls and (self._shape.text_beside_calls or not reasoned):
            call_content = content if self._shape.text_beside_calls else ""
            for count in dict.fromkeys((len(results), 1)):
                calls = [self._call(m, mark) for m in results[:count]]
                turn = Message(role="assistant", content=call_content, tool_calls=calls)
                yield _Start((QUESTION, turn), call_content, True)
        yield _Start((QUESTION, Message(role="assistant", content=content + mark)), content, False)

    def _call(self, result: Message, argument: str) -> dict[str, Any]:
        model = made_up("tool")
        name = result.get("name") or model["name"]
        call_id = result.get("tool_call_id") or model["tool_call_id"]
        return made_up_call(self._encoder.escape(name), self._encoder.escape(call_id), argument)

    # -- proofs ------------------------------------------------------------------------------------

    def _prove(self, role: str) -> None:
        why = dict[_Case, str]()
        systems = (False, True) if self._shape.takes_system else (False,)
        for system in systems:
            for reasoned in (False, True):
                case = _Case(role, reasoned, system)
                if broken := self._why_broken(case):
                    self._broken.add(case)
                    why[case] = broken
        if not why:
            return
        first = next(iter(why))
        where = "a conversation"
        if first.reasoned:
            where += f" with reasoning ({THINK})"
        if first.system:
            where += " with a system message"
        message = "the result of a tool" if role == "tool" else f"a {role} message"
        self.breaks_before[role] = f"{where} does not go on with {message}: {why[first]}"

    def _why_broken(self, case: _Case) -> str:
        answers = [made_up(case.role)]
        try:
            text = self._text(answers, case.reasoned, case.system)
        except TaskError as error:
            return str(error)
        if text is None:
            return "the chat template rewrites or drops what stands, or ends a turn with no token"
        if text != self._text(answers, False):
            return "the chat template goes on in a way that depends on what was said"
        for turns in self._conversations(case):
            if not self._goes_on(turns, case.system):
                return "the chat template rewrites what stands after a few turns"
        return ""

    def _conversations(self, case: _Case) -> Iterator[list[_Exchange]]:
        """Yield conversations as turns with their answers. The last answers are the case's."""
        answers = [made_up(case.role)]
        last = [answers, answers * 2] if case.role == "tool" else [answers]
        for role, reasoned, final in product(("tool", "user"), {case.reasoned, False}, last):
            if _Case(role, reasoned, case.system) not in self._broken:
                first = _Exchange([made_up(role)], reasoned)
                yield [first, _Exchange(final, case.reasoned and not reasoned)]
                yield [first, _Exchange(final, case.reasoned)]

    def _goes_on(self, turns: Sequence[_Exchange], system: bool) -> bool:
        """Whether each rendering extends the last, and ends as bridged. True if one is refused."""
        conversation = [_SYSTEM, QUESTION] if system else [QUESTION]
        standing = self._rendered([], before=conversation)
        goes_on = True
        for answers, reasoned in turns:
            if not goes_on:
                return True
            shaped = self._shape.messages(answers)
            start = next(self._starts(shaped, reasoned, ""))
            conversation = [*conversation, start.turns[-1], *shaped]
            try:
                rendered = self._rendered([], before=conversation)
            except Exception:
                return True
            goes_on = _begins(rendered, standing, start.said)
            standing = rendered
        if not goes_on:
            return False
        text = self._text(turns[-1].answers, False)
        if text is None or not standing.endswith(text):
            return False
        ids = self._encoder.ids
        return ids(standing) == ids(standing.removesuffix(text)) + ids(text)

    # -- texts -------------------------------------------------------------------------------------

    def _rendered(
        self,
        messages: Sequence[Message],
        *,
        before: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        tools = self._tools if tools is None else tools
        return self._shape.render(messages, tools, before)

    def _without_control(self, escaped: str) -> str:
        text, at = "", 0
        while token := self._encoder.control_in(escaped, at):
            text += self._encoder.plain(escaped[at : token[0]])
            at = token[1]
        return text + self._encoder.plain(escaped[at:])


def _begins(rendered: str, standing: str, said: str) -> bool:
    """Whether a rendering begins with ``standing`` and ``said``, ignoring blanks between them."""
    rest = rendered[len(standing) :].lstrip()
    return rendered.startswith(standing) and rest.startswith(said.lstrip())


def as_written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"type": "function", "id": call.id, "function": function}
