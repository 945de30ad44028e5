"""Bounds of numbers that functions and commands take, as the annotations of parameters name them.

The types of :mod:`stretto.config.sections`, for example ``PositiveInt``, annotate settings and
parameters alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, get_args, get_origin

from stretto.errors import ConfigError

_CHECKED = {int, float, dict, Literal}
"""Types that are checked: a parameter that holds one of them."""


@cache
def kinds(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Types of a function's parameters, or of a dataclass's fields, by name.

    A parameter is left out if its type needs a module that is imported for type checkers only.
    """
    types: dict[str, Any] = {}
    for owner in reversed(getattr(function, "__mro__", [inspect.unwrap(function)])):
        space = vars(inspect.getmodule(owner))
        for name, kind in inspect.get_annotations(owner).items():
            with suppress(NameError):
                types[name] = eval(kind, space) if isinstance(kind, str) else kind
    return types


def checked(types: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with their numbers and tables as their types have them.

    Raises ConfigError, whose code is pydantic's, for a number out of bounds or a word that is no
    choice.
    """
    limited = {n: t for n, t in types.items() if n in values and parts(t) & _CHECKED}
    result = dict(values)
    if limited:
        from pydantic import ConfigDict, TypeAdapter, ValidationError  # takes time
    for name, kind in limited.items():
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
        try:
            result[name] = adapter.validate_python(values[name])
        except ValidationError as error:
            fault = error.errors()[0]
            rule = fault["msg"].replace("Input should be", "must be")
            message = fault.get("ctx", {}).get("error", f"`{name} = {fault['input']}`: {rule}")
            raise ConfigError(str(message), fault["type"]) from None
    return result


def parts(kind: Any) -> set[Any]:
    """Return the types that a type is made of."""
    return {get_origin(kind) or kind}.union(*map(parts, get_args(kind)))
