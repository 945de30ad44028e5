"""Numbers: division rounded up, shares of a sequence, and checks in functions and commands by their
annotations, for example ``PositiveInt`` of :mod:`stretto.config.sections`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from stretto.errors import ConfigError

T = TypeVar("T")

_CHECKED = {int, float, dict, Literal}  # parameters whose types contain one of these are checked


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Divide items into consecutive shares. The last ones may be smaller."""
    share = ceil_div(len(items), count)
    return [items[i * share : (i + 1) * share] for i in range(count)]


@cache
def kinds(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the types of a function's parameters, or of a dataclass's fields, by name. Types from
    modules that are only imported for type checkers are left out.
    """
    types: dict[str, Any] = {}
    owner = inspect.unwrap(function)
    space = vars(inspect.getmodule(owner))
    for name, kind in inspect.get_annotations(owner).items():
        with suppress(NameError):
            types[name] = eval(kind, space) if isinstance(kind, str) else kind
    return types


def checked(types: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with their numbers and tables converted to their types. Raises ConfigError,
    with pydantic's code, for a number out of bounds or an invalid choice.
    """
    limited = {n: t for n, t in types.items() if n in values and parts(t) & _CHECKED}
    result = dict(values)
    if limited:
        from pydantic import ConfigDict, TypeAdapter, ValidationError  # slow to import
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
    return {get_origin(kind) or kind}.union(*map(parts, get_args(kind)))
