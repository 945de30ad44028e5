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
class Step:
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


def read_step(result: Any) -> Step:
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
    found = _fields(result)
    if found is None:
        return _step(result, None, done=False)
    done = any(bool(found.get(name)) for name in _DONE)
    return _step(_observed(found), _first(found, _REWARD), done)


def _fields(result: Any) -> dict[str, Any] | None:
    """Return the named values of a result, or ``None`` for a message or another value."""
    if isinstance(result, Mapping):
        return None if result.get("role") else dict(result)
    names = (*_OBSERVATION, *_REWARD, *_DONE)
    if not any(hasattr(result, name) for name in (*_DONE, "observation")):
        return None
    known = {name: getattr(result, name) for name in names if hasattr(result, name)}
    return {**getattr(result, "__dict__", {}), **known}


def _observed(found: Mapping[str, Any]) -> Any:
    """Return the observation of a result, or else its other fields as text (OpenEnv)."""
    if any(name in found for name in _OBSERVATION):
        return _first(found, _OBSERVATION)
    known = {*_REWARD, *_DONE, *_UNREAD}
    own = {k: v for k, v in found.items() if k not in known and not k.startswith("_")}
    texts = [value for value in own.values() if isinstance(value, str)]
    return (texts[0] if len(texts) == len(own) == 1 else as_text(own)) if own else None


def read_opening(result: Any, *, replaces: bool = False) -> Opening:
    """Read the result of ``reset``, ``init`` or ``open``.

    With ``replaces``, its messages replace the prompt. Otherwise they follow it.
    """
    if isinstance(result, tuple):
        result = result[0] if result else None
    found = _fields(result)
    if found is not None:
        opening = read_opening(_observed(found), replaces=replaces)
        opening.tools = plain(found["tools"]) if found.get("tools") else None
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
    found = None if isinstance(observation, Mapping) else _fields(observation)
    if found is not None:
        observation = _observed(found) or ""
    if _is_content(observation):
        observation = "".join(map(_text_of, observation))
    if isinstance(observation, str | bytes | bytearray):
        text = as_text(observation)
    else:  # an array is easier to read as Python prints it
        text = as_text(str(observation))
    return [{"role": "user", "content": text}], True


def _step(observation: Any, reward: Any, done: bool) -> Step:
    messages: list[dict[str, Any]] = []
    read_as, is_sequence = "", isinstance(observation, str | list | tuple)
    if observation is not None and not (is_sequence and not observation):
        messages, is_text = read_messages(observation)
        if is_text and not isinstance(observation, str):
            kind = type(observation)
            read_as = f"str() of {kind.__module__}.{kind.__qualname__}"
    return Step(messages, done, None if reward is None else as_number(reward), read_as=read_as)


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
    named = all(hasattr(value, name) for name in ("text", "image", "video"))
    return named and not isinstance(value, type)


def _message(entry: Mapping[str, Any]) -> dict[str, Any]:
    others = {str(key): plain(value) for key, value in entry.items() if key != "content"}
    content = entry.get("content")
    if isinstance(content, list) and _is_content(content):
        content = "".join(map(_text_of, content))
    return {**others, "content": "" if content is None else as_text(content)}


def _first(found: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def shortened(messages: Sequence[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """Cut the text of each message. ``left_out`` is the number of characters removed."""
    short = []
    for message in messages:
        over = len(message["content"]) - characters
        if over > 0:
            message = {**message, "content": message["content"][:characters], "left_out": over}
        short.append(message)
    return short


def summed(*rewards: float | None) -> float | None:
    given = [reward for reward in rewards if reward is not None]
    return sum(given) if given else None


def bounded(value: Any, characters: int) -> Any:
    """Cut plain data to a total number of characters. Numbers are kept first."""
    left = characters

    def cut(entry: Any) -> Any:
        nonlocal left
        if isinstance(entry, str):
            kept = entry[: max(0, left)]
            left -= len(entry)
            over = len(entry) - len(kept)
            return f"{kept} [{over} more characters were left out]" if over else kept
        if isinstance(entry, dict):
            made = {}
            for key in sorted(entry, key=lambda k: isinstance(entry[k], str | dict | list)):
                left -= len(key) + 1
                if left < 0:
                    break
                made[key] = cut(entry[key])
            return {key: made[key] for key in entry if key in made}
        if isinstance(entry, list):
            kept_entries = []
            for each in entry:
                left -= 1
                if left < 0:
                    break
                kept_entries.append(cut(each))
            return kept_entries
        return entry

    return cut(value)
