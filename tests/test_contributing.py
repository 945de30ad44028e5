"""CONTRIBUTING and the docs on the code's structure, compared with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stretto"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LINE = re.compile(r"(?P<indent>(?:│   |    )*)[├└]── (?P<names>\S+(?:, \S+)*)(?:  +\S.*)?")
"""A line of the tree: what is drawn, names, and two spaces before what is said of them."""


def tree_of(text: str) -> list[str]:
    """Every file or pattern of the drawn tree, relative to its root, in its order."""
    folders: list[str] = []
    files: list[str] = []
    for line in text.splitlines()[1:]:
        match = LINE.fullmatch(line)
        assert match, line
        del folders[len(match["indent"]) // 4 :]
        for name in match["names"].split(", "):
            if name.endswith("/"):
                folders.append(name)
            else:
                files.append("".join([*folders, name]))
    return files


def test_a_drawn_tree_is_read() -> None:
    drawn = """src/
├── a.py, b.py   two files
├── c/           a folder
│   ├── d/  one in it
│   │   └── e.py  deep
│   └── *.toml
└── f.py"""
    assert tree_of(drawn) == ["a.py", "b.py", "c/d/e.py", "c/*.toml", "f.py"]


def test_the_tree_has_every_file_once_and_none_that_is_not_there() -> None:
    drawn = tree_of(CONTRIBUTING.partition("```\n")[2].partition("```")[0].strip())
    found = {name: [str(f.relative_to(SOURCE)) for f in SOURCE.glob(name)] for name in drawn}
    assert [name for name in drawn if not found[name]] == []
    shown = [file for name in drawn for file in found[name]]
    there = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*")
        if file.is_file()
        and "__pycache__" not in file.parts
        and file.name not in ("__init__.py", "py.typed")
    ]
    assert sorted(shown) == sorted(there)


def additions() -> list[str]:
    """The sections on how to add a thing."""
    how = CONTRIBUTING.partition("\n## How to add\n")[2].partition("\n## ")[0]
    return how.split("\n### ")[1:]


@pytest.mark.parametrize("section", additions(), ids=lambda text: text.partition("\n")[0])
def test_files_to_touch_are_there(section: str) -> None:
    files = re.findall(r"`([\w./]+/[\w./]*|[\w]+\.\w+)`", section)
    named = [name for name in files if name.endswith((".py", ".md", ".toml", "/"))]
    assert len(named) >= 4
    gone = [name for name in named if not ((ROOT / name).exists() or (SOURCE / name).exists())]
    assert gone == []


def test_what_can_be_added() -> None:
    titles = [text.partition("\n")[0].split()[1] for text in additions()]
    assert titles == ["algorithm", "knob", "engine", "runtime", "scorer", "task"]


def test_the_documented_layers_are_those_that_are_checked() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## Who may import whom\n")[2]
    documented = section.partition("```\n")[2].partition("```")[0].splitlines()
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert documented == layers


def test_the_hooks_are_the_checks() -> None:
    """As 'make check' has them, on all files."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"].replace(".venv/bin/", "$(BIN)/") for hook in local["hooks"]]
    assert hooks == [line.strip() for line in recipe.splitlines()[1:]]
    assert not any(hook["pass_filenames"] for hook in local["hooks"])
