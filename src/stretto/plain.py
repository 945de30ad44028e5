"""Reads JSON from outside within limits, and converts values of other types to JSON."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping
from enum import Enum
from numbers import Number
from pathlib import PurePath
from typing import Any
from uuid import UUID

MOST_DEPTH = 100  # limit of nesting in JSON, because code that walks through it recurses

_TOO_DEEP = f"lists and objects are nested more than {MOST_DEPTH} deep"


def is_finite(number: float) -> bool:
    """Return whether a reward is finite as float32, in which it is trained on."""
    return abs(number) < 2.0**128 - 2.0**103  # half a step beyond the largest number


def parse(text: str | bytes | bytearray) -> Any:
    """Read untrusted JSON.

    Raises ValueError, with the reason as a sentence, for invalid JSON, too deep nesting, or a
    number with more digits than Python reads.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        reason = str(error).partition(":")[0]
        raise ValueError(f"a number is too long ({reason})") from error
    brackets: Any = "[{" if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MOST_DEPTH and _too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [entry for container in level for entry in _entries(container)]
        if not level:
            return False
    return True


def _entries(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def dumps(value: Any) -> str:
    """Write a value as JSON in valid Unicode, with half surrogate pairs as escape sequences. Raises
    ValueError, with the reason, if a part of the value has no JSON form.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=form)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                text = json.dumps(value, default=form)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except TypeError as error:
        raise ValueError(str(error)) from error
    if text.count("[") + text.count("{") > MOST_DEPTH and _too_deep(json.loads(text)):
        raise ValueError(_TOO_DEEP)
    return text


def form(value: Any) -> Any:
    """Convert a value of another type to JSON. Its parts may need conversion too.

    Arrays and sets become lists, dates ISO text, bytes UTF-8 text (else base64), and decimals, ids,
    paths and time spans text. Raises TypeError for other objects.
    """
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat() if value == value else None  # only NaT differs from itself
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return base64.b64encode(data).decode()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump") and not isinstance(value, type):  # pydantic's
        return dict(value.model_dump())
    if isinstance(value, Number | UUID | PurePath) or hasattr(value, "total_seconds"):
        return str(value)
    raise TypeError(f"got {value!r}")


def plain(value: Any, *, finite: bool = True) -> Any:
    """Return a value as JSON types, else as text. If ``finite``, NaN and infinities become None."""
    if isinstance(value, float):
        return None if finite and not math.isfinite(value) else value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry, finite=finite) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, finite=finite) for entry in value]
    try:
        return plain(form(value), finite=finite)
    except TypeError:
        return str(value)
