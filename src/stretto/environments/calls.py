"""Parses tool calls that a policy writes: JSON between marks. Nothing is ever evaluated.

The format is derived from a synthetic call that the chat template rendered. So one parser reads the
formats of Hermes and Qwen (``<tool_call>{...}</tool_call>``), Llama 3 (bare JSON), and Mistral
(``[TOOL_CALLS][{...}]``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, NoReturn

from stretto.errors import first_line

Status = Literal["ok", "invalid", "unclosed"]

MAX_DEPTH = 64
"""Most levels of nested lists and objects in the arguments of a call."""
_OWN_ID = re.compile(r"[A-Za-z0-9]{9}")  # the only form that Mistral's templates take
_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;]*")
_LIKE_A_CALL = re.compile(r'\s*\{\s*"(?:name|type)"')


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote.

    Attributes:
        arguments: by name. Empty unless ``status`` is ``ok``.
        status: ``ok``, ``invalid`` for ``reason``, or ``unclosed`` if the turn ended within it.
        raw: the text of the call.
        id: the policy's, if it can be rendered, or else derived from ``raw``.
        reason: the problem with the call, in words for the policy.
    """

    name: str
    arguments: Mapping[str, Any]
    status: Status
    raw: str
    id: str
    reason: str = ""


class LocatedCall(NamedTuple):
    """A call with its (start, end) in the text. Calls of one list share them."""

    start: int
    end: int
    call: ToolCall


@dataclass(frozen=True)
class CallFormat:
    """The format of calls.

    Attributes:
        opening: text before the JSON. If blank, a call must begin the turn.
        closing: text after the JSON. If blank, the end of the turn.
        arguments: the key of the arguments.
        listed: whether the JSON is a list of calls instead of one call.
        numbered: whether a call has an id.
    """

    opening: str = "<tool_call>\n"
    closing: str = "\n</tool_call>"
    arguments: str = "arguments"
    listed: bool = False
    numbered: bool = False

    def __str__(self) -> str:
        call = f'{{"name": ..., "{self.arguments}": {{...}}}}'
        body = f"[{call}]" if self.listed else call
        return f"{self.opening}{body}{self.closing}".replace("\n", "")

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Render calls, each with name and arguments, as the policy should write them."""
        texts = [self._json(call) for call in calls]
        if self.listed:
            return f"{self.opening}[{', '.join(texts)}]{self.closing}"
        return "\n".join(f"{self.opening}{text}{self.closing}" for text in texts)

    def _json(self, call: Mapping[str, Any]) -> str:
        value = {"name": call["name"], self.arguments: call["arguments"]}
        if self.numbered and call.get("id"):
            value["id"] = call["id"]
        return json.dumps(value, ensure_ascii=False)


HERMES = CallFormat()
"""The default, if a chat template has no format. Most open models have seen it."""


def format_of(written: str, name: str, arguments: Mapping[str, Any]) -> CallFormat | None:
    """Derive the format from a call that a chat template rendered. ``None`` if it has no JSON.

    Args:
        written: the text between the turn's header and its end.
        name, arguments: of the call. They must appear nowhere else in the template.
    """
    for bracket in re.finditer(r"[\[{]", written):
        try:
            value, end = json.JSONDecoder().raw_decode(written, bracket.start())
        except (ValueError, RecursionError):
            continue
        is_list = isinstance(value, list)
        call = value[0] if is_list and len(value) == 1 else value
        if not isinstance(call, dict) or call.get("name") != name:
            continue
        keys = [key for key, entry in call.items() if entry == arguments]
        if len(keys) == 1:
            opening, closing = written[: bracket.start()], written[end:]
            return CallFormat(opening, closing, keys[0], is_list, "id" in call)
    return None


def find_calls(
    escaped: str, plain: str, form: CallFormat, *, names: Collection[str] = (), ended: bool = True
) -> list[LocatedCall]:
    """Return the calls in a text.

    Args:
        escaped: the text, in which control tokens are spelled only if they were sampled as such.
        plain: the same text unescaped, of the same length.
        names: of the tools. If empty, any name is valid.
        ended: whether the turn ended by itself. If not, a call without its own end is unclosed.
    """
    reader = _Reader(escaped, plain, form, names, ended)
    calls = list(reader.marked() if form.opening.strip() else reader.bare())
    numbered_calls = numbered([call for _, _, call in calls])
    return [
        LocatedCall(f.start, f.end, call) for f, call in zip(calls, numbered_calls, strict=True)
    ]


@dataclass
class _Reader:
    escaped: str
    plain: str
    form: CallFormat
    names: Collection[str]
    ended: bool
    _decoder: json.JSONDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = json.JSONDecoder(
            object_pairs_hook=_without_duplicates, parse_constant=_no_number, parse_float=_finite
        )

    def marked(self) -> Iterator[LocatedCall]:
        opening, at = self.form.opening.strip(), 0
        while (start := self.escaped.find(opening, at)) >= 0:
            value, json_end, wrong = self._read(start + len(opening))
            at, closed = self._close(json_end)
            call_end = at - len(self.form.closing.strip())
            if closed and not wrong and _end(_BLANK, self.plain, json_end) < call_end:
                wrong = "text follows the JSON"
            raw = self.plain[start:at]
            for call in self._calls(value, raw, closed, wrong):
                yield LocatedCall(start, at, call)

    def bare(self) -> Iterator[LocatedCall]:
        at = _end(_BLANK, self.plain, 0)
        if not self.plain.startswith("{", at):
            return
        while at < len(self.plain):
            value, json_end, wrong = self._read(at)
            is_call = isinstance(value, dict) and {"name", self.form.arguments} <= value.keys()
            if not (is_call or (wrong and _LIKE_A_CALL.match(self.plain, at))):
                return
            follows = _end(_BETWEEN, self.plain, json_end)
            if wrong or not self.plain.startswith("{", follows):
                wrong = wrong or ("text follows the JSON" if follows < len(self.plain) else "")
                follows = json_end = len(self.plain)
            closed = self.ended or (follows < len(self.plain) and not wrong)
            for call in self._calls(value, self.plain[at:json_end], closed, wrong):
                yield LocatedCall(at, json_end, call)
            at = follows

    def _read(self, start: int) -> tuple[Any, int, str]:
        """Return a JSON value, the position after it, and an error message or ``''``."""
        start = _end(_BLANK, self.plain, start)
        try:
            value, end = self._decoder.raw_decode(self.plain, start)
        except RecursionError:
            return None, start, "the JSON is nested too deeply"
        except ValueError as error:
            return None, start, f"the JSON is not valid: {first_line(error)}"
        return value, end, ""

    def _close(self, json_end: int) -> tuple[int, bool]:
        closing = self.form.closing.strip()
        if not closing:
            return len(self.plain), self.ended
        at = self.escaped.find(closing, json_end)
        return (len(self.plain), False) if at < 0 else (at + len(closing), True)

    def _calls(self, value: Any, raw: str, closed: bool, wrong: str) -> Iterator[ToolCall]:
        if not closed:
            reason = "the turn ended before the call was closed"
            yield ToolCall(_name(value), {}, "unclosed", raw, "", reason)
        elif wrong:
            yield ToolCall(_name(value), {}, "invalid", raw, "", wrong)
        elif self.form.listed and isinstance(value, list) and value:
            for entry in value:
                yield self._call(entry, raw)
        else:
            yield self._call(value, raw)

    def _call(self, value: Any, raw: str) -> ToolCall:
        key = self.form.arguments
        name, call_id = _name(value), ""
        if not isinstance(value, dict):
            return ToolCall(name, {}, "invalid", raw, "", "a call is a JSON object")
        if isinstance(value.get("id"), str) and _OWN_ID.fullmatch(value["id"]):
            call_id = value["id"]
        return checked(name, value.get(key), raw, call_id, names=self.names, key=key)


def checked(
    name: str, arguments: Any, raw: str, own: str, *, names: Collection[str], key: str = "arguments"
) -> ToolCall:
    """Validate a parsed call. ``own`` is the policy's id, and ``key`` that of the arguments."""
    wrong = ""
    if not name:
        wrong = "a call has the name of a tool as 'name'"
    elif not isinstance(arguments, dict):
        wrong = f"a call has an object as '{key}'"
    elif not _is_sound(arguments):
        wrong = f"the arguments are nested more than {MAX_DEPTH} deep, or are no valid Unicode"
    elif names and name not in names:
        wrong = f"there is no tool '{name[:64]}'; known are: {', '.join(sorted(names))}"
    if wrong:
        return ToolCall(name, {}, "invalid", raw, "", wrong)
    return ToolCall(name, arguments, "ok", raw, own if len(own) <= 64 and _is_sound(own) else "")


def numbered(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """Give each call of a turn a unique id."""
    numbered_calls: list[ToolCall] = []
    used_ids = set[str]()
    for n, call in enumerate(calls):
        call_id = call.id
        if not call_id or call_id in used_ids:  # nine letters and digits for Mistral's templates
            call_id = blake2b(f"{n} {call.raw}".encode(), digest_size=5).hexdigest()[:9]
        used_ids.add(call_id)
        numbered_calls.append(replace(call, id=call_id))
    return numbered_calls


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


def _name(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return name.encode(errors="replace").decode() if isinstance(name, str) else ""


def _is_sound(value: Any) -> bool:
    """Whether plain data is valid Unicode and nested at most :data:`MAX_DEPTH` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = [e.values() if isinstance(e, dict) else e for e in level]
        level = [e for entries in inner for e in entries if isinstance(e, dict | list)]
    if level:
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("an object has a key twice")
    return entries


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON's")


def _finite(text: str) -> float:
    number = float(text)
    if abs(number) == float("inf"):
        raise ValueError(f"{text[:32]} is too large")
    return number
