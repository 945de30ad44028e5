"""Converts cells of users' rows to prompts, messages and tools.

Arrow gives all structures of a column the same keys, with null for missing values. So a key whose
value is null counts as absent, at any depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from stretto.config.sections import ARGUMENTS, wrong_arguments
from stretto.errors import TaskError
from stretto.plain import parse, plain
from stretto.tasks.encode import utf8

if TYPE_CHECKING:
    from stretto.types import Message

Row = Mapping[str, Any]
Answer: TypeAlias = "str | Message"
"""A response as text, or as a turn that also has calls or reasoning."""

TOOLS = "tools"  # default column of tool schemas
SYSTEM = "system"  # default column of a row's own system message

PROMPTS = ("question", "problem", "instruction", "query", "input", "messages", "conversations")
"""Columns that may be the prompt if no column has this name."""

INSTRUCTION = "instruction"
"""Column of prompts in Alpaca and Dolly. The input of an instruction is in another column."""
_CONTEXTS = ("input", "context")

KEYS = "'role' and 'content' (or 'from' and 'value'), both text"
"""Required keys of a message. Further keys are passed on to templates."""

_TEXTS = ("text", "input_text", "output_text")
"""Types of parts in chats, and in OpenAI's responses."""

_WRITTEN = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:.*\]\s*""", re.DOTALL)
"""A text that is a list of messages, as in files whose cells are all text."""

_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by their ShareGPT names."""


def cell_of(row: Row, column: str) -> Any:
    """Return a cell (``a.b`` in nested objects). Raises KeyError if the row lacks it."""
    if column in row or "." not in column:
        return row[column]
    value: Any = row
    for key in column.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(column)
        value = value[key]
    return value


def prompt_of(row: Row, column: str) -> str | tuple[Message, ...]:
    """Return a row's prompt (see :func:`as_prompt`), with the input of an instruction."""
    prompt = as_prompt(cell_of(row, column))
    if column != INSTRUCTION or not isinstance(prompt, str):
        return prompt
    contexts = map(row.get, _CONTEXTS)
    return "\n".join([prompt, *(c for c in contexts if isinstance(c, str) and c.strip())])


def as_prompt(value: Any) -> str | tuple[Message, ...]:
    """Return a prompt cell as text or messages.

    Raises TaskError if it is neither, empty, invalid Unicode, or ends with the assistant's turn.
    """
    prompt = _text_or_messages(value)
    if not prompt:
        raise TaskError(
            f"a prompt must be text, or a list of messages with {KEYS}; got {repr(value)[:200]}",
            "prompt-not-text",
        )
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise TaskError(
            "the assistant's turn ends this prompt, and leaves none to answer; drop that message",
            "prompt-ends-with-assistant",
        )
    return prompt


def as_demonstration(value: Any) -> str | tuple[Message, ...]:
    """Return a demonstration as text or messages. TaskError without a plain assistant turn."""
    messages = _text_or_messages(value)
    if isinstance(messages, str):
        return messages
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns or any("tool_calls" in turn for turn in turns):
        raise TaskError(
            "a demonstration is the policy's turn as text, or messages that follow the prompt, "
            "with the policy's turns as 'assistant' and calls of tools in their 'content', "
            f"spelled as the policy is to spell them; got {repr(value)[:200]}",
            "demonstration-not-text",
        )
    return messages


def _text_or_messages(value: Any) -> str | tuple[Message, ...]:
    messages = as_messages(value)
    if not messages and isinstance(value, str) and value.strip():
        utf8(value)
        return value
    for message in messages:
        utf8(message["role"] + message["content"])
    return messages


def as_messages(value: Any) -> tuple[Message, ...]:
    """Return a cell's messages, which may be JSON text, or none for other cells.

    Raises TaskError for parts other than text, and for messages written in another form than JSON.
    """
    if isinstance(value, str) and _WRITTEN.fullmatch(value):
        value = _parsed(value, "messages")
    entries = [value] if isinstance(value, Mapping) else value
    messages = list(map(_as_message, entries)) if isinstance(entries, list) else []
    return tuple(m for m in messages if m) if all(messages) else ()


def _parsed(text: str, name: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise TaskError(
            f"{name} are a list or its JSON text, as json.dumps writes it, and this text is not "
            f"valid JSON ({error}); got {text[:200]!r}",
            "messages-not-json",
        ) from error


def _as_message(value: Any) -> Message | None:
    if not isinstance(value, Mapping):
        return None
    message: Any = plain(value, finite=False)
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = _parsed(message["tool_calls"] or "[]", "tool_calls")
    message = _without_nulls(message)
    if "role" not in message and "from" in message:
        message = _of_sharegpt(message)
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    content, role = message.pop("content", None), message.pop("role", None)
    # OpenAI's clients write null as the content of a turn with calls only, or of a refusal.
    if content is None and ("tool_calls" in message or ("content" in value and role != "user")):
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content = "".join(map(_text_of_part, content))
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return cast("Message", {"role": role, "content": content, **message})


def _of_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    speaker, value = message.pop("from"), message.pop("value", None)
    message |= {"role": _SHAREGPT.get(speaker, speaker), "content": value}
    if speaker == "function_call":
        with suppress(ValueError, TypeError):
            call = parse(value)
            calls = call if isinstance(call, list) else [call]
            message |= {"tool_calls": [{"type": "function", "function": c} for c in calls]}
            message["content"] = ""
    return message


def text_of_answer(answer: Answer) -> str:
    """Return a response without a template. TaskError for a turn with calls, which needs one."""
    if isinstance(answer, str) or not answer.get("tool_calls"):
        return answer if isinstance(answer, str) else answer["content"]
    raise TaskError(
        "a response has tool_calls, which only a chat template can write as text; use a model that "
        "has one, or write the calls into the content",
        "no-chat-template",
    )


def is_ignored(message: Message) -> bool:
    """Whether a turn is not learned, as OpenAI's fine-tuning says by ``weight``."""
    return message.get("weight", 1) == 0


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        entries = ((key, _without_nulls(entry)) for key, entry in value.items())
        return {key: entry for key, entry in entries if entry is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _text_of_part(part: Mapping[str, Any]) -> str:
    if part.get("type") in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise TaskError(
        f"a part of a message is of type '{part.get('type')}', and models are trained on text "
        "alone; drop it, or describe it in words",
        "part-not-text",
    )


def tools_in(data: Row, column: str) -> list[dict[str, Any]]:
    """Return the tool schemas in a row's column, which may be JSON text.

    Raises TaskError for other content. An empty column name returns none.
    """
    value = tools = data.get(column)
    if isinstance(value, str) and value.strip():
        with suppress(ValueError):
            tools = parse(value)
    else:
        tools = _without_nulls(plain(value, finite=False))
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return []
    schemas = [tools] if isinstance(tools, dict) else tools
    if isinstance(schemas, list):
        with suppress(ValueError):
            schemas = [parse(tool) if isinstance(tool, str) else tool for tool in schemas]
    if not isinstance(schemas, list) or not all(isinstance(tool, dict) for tool in schemas):
        raise TaskError(
            f"column '{column}': tools are a list of JSON schemas, or its JSON text; got "
            f"{repr(value)[:200]}. If the column is something else, rename it, or leave it "
            "alone with task.columns = { tools = '' }",
            "tools-not-schemas",
        )
    return schemas


def system_in(data: Row, column: str) -> str:
    value = data.get(column)
    return value if isinstance(value, str) and value.strip() else ""


def arguments_in(data: Row) -> dict[str, Any]:
    """Return a row's own template arguments, an object or its JSON text.

    Raises TaskError for other content, or for an argument that every conversation already has.
    """
    arguments = data.get(ARGUMENTS) or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse(arguments)
    arguments = _without_nulls(plain(arguments, finite=False))
    if not isinstance(arguments, dict):
        raise TaskError(
            f"column '{ARGUMENTS}': arguments of the chat template are an object, such as "
            f'{{"enable_thinking": false}}; got {repr(arguments)[:200]}',
            "template-arguments-no-object",
        )
    if why := wrong_arguments(arguments):
        raise TaskError(f"column '{ARGUMENTS}': {why}", "template-argument-reserved")
    return arguments
