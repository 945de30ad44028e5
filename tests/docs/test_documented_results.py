"""The classes that functions return, and their fields, as the reference of the API has them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("\n## What they return\n")[2]
NAMES = re.findall(r"^::: (.+)$", SECTION.partition("\n## ")[0], re.MULTILINE)
PLAIN = ("Span",)
"""Records that the page does not describe field by field."""


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def classes(kind: Any) -> Iterator[type]:
    """The data classes in an annotation."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
    for inner in typing.get_args(kind):
        yield from classes(inner)


@pytest.mark.parametrize("path", NAMES)
def test_each_field_is_described(path: str) -> None:
    kind = named(path)
    docs = "\n".join(inspect.getdoc(each) or "" for each in inspect.getmro(kind)[:-1])
    described = re.findall(r"^    (\w+): ", docs, re.MULTILINE)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    assert set(described) >= {field.name for field in fields}


def test_what_a_result_holds_is_on_the_page() -> None:
    page = {named(path) for path in NAMES}
    held = {
        inner
        for kind in page
        if dataclasses.is_dataclass(kind)
        for annotation in hints(kind)
        for inner in classes(annotation)
    }
    assert len(page) >= 12
    assert {kind.__name__ for kind in held - page} <= set(PLAIN)


def hints(kind: Any) -> list[Any]:
    """The types of a class's fields, those included that its module imports for types alone."""
    return list(typing.get_type_hints(kind, localns=LOCALS).values())


LOCALS = {path.rpartition(".")[2]: named(path) for path in NAMES}
