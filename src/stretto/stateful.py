"""State of objects as plain data, for checkpoints: numbers, text, ``None``, arrays of :mod:`array`,
and lists, tuples and dicts of these. Reading it from a file runs no code.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from stretto.errors import StateError

T = TypeVar("T")

Unsaved = Annotated[T, "unsaved"]
"""The type of a dataclass's field that is no part of its state."""


class Stateful:
    """Base class of objects whose state is some of their attributes, and is restored in place."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes with plain data or :class:`Stateful` objects. Keys have no leading underscore."""

    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): to_plain(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the attributes in a state. Other keys are ignored, so that older states can be
        read. StateError if it has other keys only.
        """
        name_of = {name.lstrip("_"): name for name in self.saved}
        if state and not state.keys() & name_of.keys():
            raise StateError(
                f"the state of {type(self).__name__} holds {', '.join(map(repr, name_of))} alone; "
                f"got {sorted(state)}. Resume from a checkpoint of this version",
                "foreign-state",
            )
        for key in state.keys() & name_of.keys():
            part = getattr(self, name_of[key])
            if isinstance(part, Stateful):
                part.load_state_dict(state[key])
            else:
                setattr(self, name_of[key], type(part)(deepcopy(state[key])))


def to_plain(value: Any) -> Any:
    """Return the state of a :class:`Stateful` object, of a dataclass (its fields by name, without
    :data:`Unsaved` ones), or of containers of these. Arrays of :mod:`array` are not copied.
    """
    if isinstance(value, Stateful):
        return value.state_dict()
    if is_dataclass(value):
        return {name: to_plain(getattr(value, name)) for name in _hints(type(value))}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return array(value.dtype.char, value.tobytes())
    if isinstance(value, Mapping):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(to_plain, value))
    return value


def from_plain(kind: type[T], plain: Mapping[str, Any], **unsaved: Any) -> T:
    """Restore a dataclass from :func:`to_plain`, with values for unsaved fields. Missing keys take
    the field's default, so that older states can be read. Other keys are ignored.
    """
    hints = _hints(kind)
    values = {name: _restored(hints[name], plain[name]) for name in hints if name in plain}
    return kind(**values, **unsaved)


class _Array(Generic[T]):
    """Stands for :class:`array.array` in hints, which has no parameter before Python 3.12."""


def _read_hints(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind, localns={"array": _Array}, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not Annotated}


_hints: Callable[[Any], Mapping[str, Any]] = cache(_read_hints)  # mypy: classes are not Hashable


def _restored(hint: Any, plain: Any) -> Any:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:  # with None
        return None if plain is None else _restored(parts[0], plain)
    if is_dataclass(kind):
        return from_plain(kind, plain)  # type: ignore[arg-type]
    if kind is np.ndarray:
        return np.asarray(plain, get_args(parts[1])[0])
    if kind is _Array:
        code = "f" if parts[0] is float else "i"
        return array(code, np.asarray(plain, code).tobytes())
    if kind is list:
        return [_restored(parts[0], entry) for entry in plain]
    if kind is tuple or (isinstance(kind, type) and issubclass(kind, Enum)):
        return kind(plain)
    return plain
