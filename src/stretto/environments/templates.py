"""Capabilities of a chat template (tools, calls, results), and fallbacks for missing ones.

Unrendered tools are listed in the system message, or in the first user message without a system
role. Calls become content in Hermes' format, and results a user message.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from stretto.environments.calls import HERMES, format_of
from stretto.errors import ConfigError
from stretto.tasks.encode import MARK, Encoder, with_parsed_arguments
from stretto.types import Message

Tools = Sequence[Mapping[str, Any]]

_NAME = "made_up_tool"
_ARGUMENTS = {"made_up_key": "made up value"}
_RESULT = "made up result"
_CALL_ID = "madeup001"  # nine letters and digits, because Mistral's templates demand it
QUESTION = Message(role="user", content="made up question")
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Made up.",
        "parameters": {"type": "object", "properties": {"made_up_key": {"type": "string"}}},
    },
}


class TemplateShape:
    """Capabilities of a chat template, and conversion of messages to its form.

    Attributes:
        form: format of calls.
        writes_calls: whether the template renders ``tool_calls``.
        text_beside_calls: whether it also renders the content of a turn with calls.
        writes_tools: whether it renders tools.
        tool_role: whether it has the role ``tool``.
        takes_system: whether it takes a system message.
        ends: control tokens that end a turn of the assistant.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        reads_calls: bool,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Probe the template with synthetic conversations. Raises ConfigError like :class:`Bridge`.

        Args:
            reads_calls: whether calls must be parsed in the template's format.
            arguments: of the template. They override the encoder's.
        """
        self._encoder, self._arguments = encoder, dict(arguments)
        if not encoder.tokenizer.chat_template:
            raise ConfigError(
                "an environment answers in messages, and the model's tokenizer has no chat "
                "template to write them; choose a model that was made for chat, or put a "
                "chat_template.jinja into its folder",
                "no-chat-template",
            )
        try:
            self._chat([QUESTION], add_generation_prompt=True)
        except Exception as error:
            raise ConfigError(
                f"the chat template refuses a conversation of one question: {error}; environments "
                "need a template that takes messages of the roles user and assistant",
                "template-refuses",
            ) from error
        self.writes_tools = _NAME in self._shown([QUESTION], tools=[_TOOL])
        system = Message(role="system", content=_RESULT)
        self.takes_system = _RESULT in self._shown([system, QUESTION])
        self.form = HERMES
        self.writes_calls = True
        self.text_beside_calls = True
        self.tool_role = any(
            _RESULT in self._shown([QUESTION, turn, made_up("tool")])
            for turn in (_called(), _said())
        )
        self.ends = self._find_ends()
        self._read_calls(reads_calls)

    def _read_calls(self, needed: bool) -> None:
        header = self._chat([QUESTION], add_generation_prompt=True)
        rendering = self._shown([QUESTION, _called(), made_up("tool")])
        rendering = rendering or self._shown([QUESTION, _called()])
        self.writes_calls = _NAME in rendering and "made up value" in rendering
        if not self.writes_calls:
            return
        starts = [len(header)]
        if not rendering.startswith(header):
            # The generation prompt may open with an empty thought, which a turn with calls lacks.
            pairs = enumerate(zip(header, rendering, strict=False))
            difference = next((at for at, (a, b) in pairs if a != b), 0)
            starts = [rendering.rfind("\n", 0, difference) + 1, rendering.find(_NAME)]
        end = self._encoder.control_in(rendering, rendering.find("made up value"))
        while end and end[2] not in self.ends:
            end = self._encoder.control_in(rendering, end[1])
        texts = [rendering[start : end[0] if end else len(rendering)] for start in starts]
        example, form = texts[0], None
        for text in texts:
            form = form or format_of(text.rpartition("</think>")[2].strip(), _NAME, _ARGUMENTS)
        if form:
            self.form = form
        elif needed:
            raise ConfigError(
                "the chat template writes calls of tools in a way that is not read here: "
                f"{example[:200]!r}. Read are JSON objects with 'name' and the arguments, between "
                "marks or alone; choose another model, or put another chat_template.jinja into its "
                "folder",
                "unknown-call-format",
            )
        both = Message(**{**_called(), **_said()})
        self.text_beside_calls = _said()["content"] in self._shown(
            [QUESTION, both, made_up("tool")]
        )

    def _find_ends(self) -> frozenset[int]:
        end_tokens = set()
        for answers in ([], [made_up("user")], [made_up("tool")]):
            turn = Message(role="assistant", content="made up answer" + MARK)
            rendering = self._shown(answers, before=[QUESTION, turn])
            place = rendering.rfind(MARK)
            end = self._encoder.control_in(rendering, place) if place >= 0 else None
            if end and not rendering[place + 1 : end[0]].strip():
                end_tokens.add(end[2])
        return frozenset(end_tokens)

    def messages(self, messages: Iterable[Message]) -> list[Message]:
        """Convert messages to a form that the template takes."""
        shaped: list[Message] = []
        results = False
        for message in messages:
            with_content = cast(Message, {**message, "content": message.get("content") or ""})
            turn = with_parsed_arguments(with_content)
            if turn.get("tool_calls") and not self.writes_calls:
                text = self.form.write([c.get("function", c) for c in turn.pop("tool_calls")])
                turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
            is_result = turn["role"] == "tool" and not self.tool_role
            if is_result:
                text = f"<tool_response>\n{turn['content']}\n</tool_response>"
                if results:
                    shaped[-1]["content"] += f"\n{text}"
                    continue
                turn = Message(role="user", content=text)
            results = is_result
            shaped.append(turn)
        return shaped

    def render(self, messages: Sequence[Message], tools: Tools, before: Sequence[Message]) -> str:
        """Render the turns ``before``, the messages and the next turn's header, escaped."""
        shaped, before = self.messages(messages), list(before)
        if not tools or self.writes_tools:
            return self._chat(shaped, before=before, tools=tools, add_generation_prompt=True)
        about = self._about(tools)
        if before:
            before = self._told(before, self._encoder.escape(about))
        else:
            shaped = self._told(shaped, about)
        return self._chat(shaped, before=before, add_generation_prompt=True)

    def _about(self, tools: Tools) -> str:
        tool_list = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = self.form.write([{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}])
        return (
            f"You can call these tools:\n<tools>\n{tool_list}\n</tools>\n"
            f"To call one, end your turn with its name and arguments as JSON:\n{example}"
        )

    def _told(self, turns: Sequence[Message], about: str) -> list[Message]:
        first, *rest = turns
        takes_it = "system" if self.takes_system else "user"
        if first["role"] not in (takes_it, "system"):
            return [Message(role=takes_it, content=about), *turns]
        texts = (
            [first["content"], about] if first["role"] == "system" else [about, first["content"]]
        )
        return [cast(Message, {**first, "content": "\n\n".join(filter(None, texts))}), *rest]

    def _chat(
        self,
        turns: Sequence[Message],
        tools: Tools = (),
        before: Sequence[Message] = (),
        **options: Any,
    ) -> str:
        options |= {**self._arguments, "tools": [dict(tool) for tool in tools] or None}
        return self._encoder.chat(turns, before=before, **options)

    def _shown(self, turns: Sequence[Message], **options: Any) -> str:
        try:
            return self._chat(turns, **options)
        except Exception:  # a template may fail in any way on unknown input
            return ""


def made_up(role: str) -> Message:
    message = Message(role=role, content=_RESULT)
    return Message(**message, name=_NAME, tool_call_id=_CALL_ID) if role == "tool" else message


def made_up_call(name: str, call_id: str, argument: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"made_up_key": argument}}
    return {"type": "function", "id": call_id, "function": function}


def names_of(tools: Tools) -> Collection[str]:
    return {str(tool.get("function", tool).get("name")) for tool in tools}


def _called() -> Message:
    call = made_up_call(_NAME, _CALL_ID, _ARGUMENTS["made_up_key"])
    return Message(role="assistant", content="", tool_calls=[call])


def _said() -> Message:
    return Message(role="assistant", content="made up answer")
