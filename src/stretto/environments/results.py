"""Converts results of tools and environments to messages, rewards and ends of episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import RewardError
from stretto.plain import plain
from stretto.scoring.conventions import as_number

CHARACTERS_PER_TOKEN = 64
"""Characters kept per token of ``max_observation_tokens``, before anything is tokenised."""

_OBSERVATION = ["observations", "observation", "messages", "environment_feedback"]
_OBSERVATION += ["next_observation"]
_REWARD = ("reward", "rewards")
_DONE = ("done", "terminated", "truncated", "episode_done")
_UNREAD = {"metadata", "info", "metrics", "tools", "scores", "extra_logs", "sampling_params"}
"""Keys of a result that are not part of the observation."""


@dataclass
class TurnResult:
    """The answer to a turn: messages, end of the episode, reward, and records of calls."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    reward: float | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    read_as: str = ""  # how a value of another type became text
    failure: str = ""  # why the episode ends without a reward


@dataclass
class Opening:
    """Changes to the prompt.

    Attributes:
        text: appended to the last user message.
        messages: appended to the conversation.
        conversation: replaces the prompt.
        tools: schemas of this episode.
    """

    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    conversation: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


def as_text(value: Any) -> str:
    """Return a string unchanged, anything else as JSON or ``str()``, always valid Unicode."""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="replace")
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    return text.encode(errors="replace").decode()


def error_text(said: str) -> str:
    return as_text({"error": said})


def read_step(result: Any) -> TurnResult:
    """Read the result of ``step`` (shapes of docs/episodes.md). RewardError if malformed."""
    if result is None:
        raise RewardError("it returned None; it must return an observation, or say 'done'")
    if isinstance(result, tuple):
        if len(result) not in (3, 4, 5):
            raise RewardError(
                f"it returned {len(result)} values; they are (observation, reward, done, info), "
                "or (observation, reward, terminated, truncated, info)"
            )
        observation, reward = result[:2]
        done = bool(result[2]) or (len(result) == 5 and bool(result[3]))
        return _step(observation, reward, done)
    fields = _fields(result)
    if fields is None:
        return _step(result, None, done=False)
    done = any(bool(fields.get(name)) for name in _DONE)
    return _step(_observed(fields), _first(fields, _REWARD), done)


def _fields(result: Any) -> dict[str, Any] | None:
    """Return the named values of a result, or ``None`` for a message or another value."""
    if isinstance(result, Mapping):
        return None if result.get("role") else dict(result)
    names = (*_OBSERVATION, *_REWARD, *_DONE)
    if not any(hasattr(result, name) for name in (*_DONE, "observation")):
        return None
    attributes = {name: getattr(result, name) for name in names if hasattr(result, name)}
    return {**getattr(result, "__dict__", {}), **attributes}


def _observed(fields: Mapping[str, Any]) -> Any:
    """Return the observation of a result, or else its other fields as text (OpenEnv)."""
    if any(name in fields for name in _OBSERVATION):
        return _first(fields, _OBSERVATION)
    reserved = {*_REWARD, *_DONE, *_UNREAD}
    extras = {k: v for k, v in fields.items() if k not in reserved and not k.startswith("_")}
    texts = [value for value in extras.values() if isinstance(value, str)]
    return (texts[0] if len(texts) == len(extras) == 1 else as_text(extras)) if extras else None


def read_opening(result: Any, *, replaces: bool = False) -> Opening:
    """Read the result of ``reset``, ``init`` or ``open``.

    With ``replaces``, its messages replace the prompt. Otherwise they follow it.
    """
    if isinstance(result, tuple):
        result = result[0] if result else None
    fields = _fields(result)
    if fields is not None:
        opening = read_opening(_observed(fields), replaces=replaces)
        opening.tools = plain(fields["tools"]) if fields.get("tools") else None
        return opening
    if result is None:
        return Opening()
    messages, is_text = read_messages(result)
    if is_text:
        return Opening(text=messages[0]["content"])
    return Opening(conversation=messages) if replaces else Opening(messages=messages)


def read_messages(observation: Any) -> tuple[list[dict[str, Any]], bool]:
    """Return an observation as messages, and whether it had to become a user message."""
    one = observation if isinstance(observation, Sequence) else [observation]
    roles = (entry.get("role") if isinstance(entry, Mapping) else None for entry in one)
    if one and not isinstance(observation, str) and all(isinstance(r, str) for r in roles):
        return [_message(entry) for entry in one], False
    fields = None if isinstance(observation, Mapping) else _fields(observation)
    if fields is not None:
        observation = _observed(fields) or ""
    if _is_content(observation):
        observation = "".join(map(_text_of, observation))
    if isinstance(observation, str | bytes | bytearray):
        text = as_text(observation)
    else:  # an array is easier to read as Python prints it
        text = as_text(str(observation))
    return [{"role": "user", "content": text}], True


def _step(observation: Any, reward: Any, done: bool) -> TurnResult:
    messages: list[dict[str, Any]] = []
    read_as, is_sequence = "", isinstance(observation, str | list | tuple)
    if observation is not None and not (is_sequence and not observation):
        messages, is_text = read_messages(observation)
        if is_text and not isinstance(observation, str):
            kind = type(observation)
            read_as = f"str() of {kind.__module__}.{kind.__qualname__}"
    return TurnResult(
        messages, done, None if reward is None else as_number(reward), read_as=read_as
    )


def _is_content(value: Any) -> bool:
    """Whether a value is a list of content parts, such as {"type": "text", "text": ...}."""
    parts = isinstance(value, list) and value
    return bool(parts) and all(isinstance(p, Mapping) and "type" in p for p in value)


def _text_of(part: Mapping[str, Any]) -> str:
    if part["type"] != "text":
        raise RewardError(
            f"it returned a part of the type {part['type']!r}; models read text alone here, so "
            "return text"
        )
    return as_text(part.get("text") or "")


def read_result(result: Any) -> tuple[Any, float | None, Any]:
    """Split a function's result into content, reward and metrics (verl's tools return all)."""
    reward, metrics = None, None
    if isinstance(result, tuple) and len(result) == 3:
        first, second, third = result
        number = second is None or (isinstance(second, int | float) and second is not True)
        if _is_response(first) or (number and isinstance(third, Mapping)):
            result = first
            reward = None if second is None else as_number(second)
            metrics = third
    return (result.text or "") if _is_response(result) else result, reward, metrics


def _is_response(value: Any) -> bool:
    """Whether a value is verl's ToolResponse. Only its text can be used."""
    has_fields = all(hasattr(value, name) for name in ("text", "image", "video"))
    return has_fields and not isinstance(value, type)


def _message(entry: Mapping[str, Any]) -> dict[str, Any]:
    other_fields = {str(key): plain(value) for key, value in entry.items() if key != "content"}
    content = entry.get("content")
    if isinstance(content, list) and _is_content(content):
        content = "".join(map(_text_of, content))
    return {**other_fields, "content": "" if content is None else as_text(content)}


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def shortened(messages: Sequence[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """Cut the text of each message. ``left_out`` is the number of characters removed."""
    short = []
    for message in messages:
        excess = len(message["content"]) - characters
        if excess > 0:
            message = {**message, "content": message["content"][:characters], "left_out": excess}
        short.append(message)
    return short


def summed(*rewards: float | None) -> float | None:
    numbers = [reward for reward in rewards if reward is not None]
    return sum(numbers) if numbers else None


def bounded(value: Any, characters: int) -> Any:
    """Cut plain data to a total number of characters. Numbers are kept first."""
    budget = characters

    def cut(entry: Any) -> Any:
        nonlocal budget
        if isinstance(entry, str):
            prefix = entry[: max(0, budget)]
            budget -= len(entry)
            excess = len(entry) - len(prefix)
            return f"{prefix} [{excess} more characters were left out]" if excess else prefix
        if isinstance(entry, dict):
            entries = {}
            for key in sorted(entry, key=lambda k: isinstance(entry[k], str | dict | list)):
                budget -= len(key) + 1
                if budget < 0:
                    break
                entries[key] = cut(entry[key])
            return {key: entries[key] for key in entry if key in entries}
        if isinstance(entry, list):
            kept_entries = []
            for element in entry:
                budget -= 1
                if budget < 0:
                    break
                kept_entries.append(cut(element))
            return kept_entries
        return entry

    return cut(value)
