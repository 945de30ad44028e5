"""The reference: every setting in words, and what the public functions return."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import stretto
from docs_helpers import DOCS, ROOT
from stretto.config import Config, RewardModelConfig, SftConfig

sys.path.append(str(ROOT / "tools"))

import settings_page

API = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
FUNCTIONS = [
    name
    for name in stretto.__all__
    if inspect.isfunction(getattr(stretto, name)) and not name.startswith("_")
]


def settings(data: Mapping[str, Any], path: str = "") -> list[str]:
    """Dotted names of the settings in the data of a configuration; a table of values is one."""
    found = []
    for name, value in data.items():
        inner = isinstance(value, dict) and value
        found += settings(value, f"{path}{name}.") if inner else [path + name]
    return found


@pytest.mark.parametrize(
    ("start", "config"),
    [("", Config()), ("sft.", SftConfig()), ("reward.", RewardModelConfig())],
    ids=["train", "sft", "reward"],
)
def test_every_setting_is_there_and_nothing_else(start: str, config: BaseModel) -> None:
    page = settings_page.page()
    shown = re.findall(r"^#### `([\w.]+)` \{#([\w.]+)\}$", page, re.MULTILINE)
    assert all(anchor.endswith(name) for name, anchor in shown)
    own = [name for name, anchor in shown if anchor == start + name]
    own = [name for name in own if not name.startswith("cluster.processes.")]
    wanted = settings(config.model_dump())
    if start:  # sections that all commands share are shown once
        assert set(own) <= set(wanted)
        assert {name for name in wanted if "." not in name} <= set(own)
    else:
        assert set(own) == set(wanted) - {"cluster.processes"}


def test_choices_and_ranges_are_words() -> None:
    words = settings_page.in_words
    assert words(Literal["sync", "oppo"]) == 'one of `"sync"`, `"oppo"`'
    assert (
        words(Literal["auto"] | Annotated[int, Field(ge=0)])
        == '`"auto"` or whole number, 0 or more'
    )
    assert words(Annotated[float, Field(gt=0, le=1)]) == "number above 0, at most 1"
    assert words(Annotated[int, Field(gt=0)]) == "whole number, 1 or more"
    assert words(tuple[str, ...]) == "list; each text"
    assert words(float | None) == "number"
    assert words(tuple[int, str]) == "list of whole number, text"
    pages = settings_page.page() + settings_page.clusters()
    assert not re.search(r"annotated_types|Field\(|PydanticUndefined|<class|None", pages)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_and_their_results_are_documented(name: str) -> None:
    assert re.search(rf"members: \[.*\b{name}\b.*\]", API)
    result = str(inspect.signature(getattr(stretto, name)).return_annotation)
    result = result.removeprefix("list[").rstrip("]")
    if result not in ("Path", "Config", "str"):
        assert re.search(rf"^::: stretto\.[\w.]+\.{result}$", API, re.MULTILINE), result
