"""CONTRIBUTING and the docs on the code's structure, compared with the code."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from stretto import protocols
from stretto.api.settings import RESUMABLE

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stretto"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_room_is_described_and_none_that_is_not_there() -> None:
    table = CONTRIBUTING.partition("| in `src/stretto/` | |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()]
    described = {name.rstrip("/") for cell in cells for name in re.findall(r"`([\w./]+)`", cell)}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages <= described
    assert all((SOURCE / name).exists() for name in described)


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
    assert titles == [
        *("algorithm", "setting", "knob", "method", "engine", "argument", "runtime", "scorer"),
        *("command", "task"),
    ]


EXAMPLES = {
    "algorithm": r"cispo",
    "setting": r"\bmissing_eos_limits\b",
    "knob": r"knobs\.hold\b|\"hold\": (Knob)?\(|\bHold(Policy|Limits)\b|\bParked\b",
    "method": r"^Hold\b|: Hold\b|generator\.hold\(",
    "engine": r"\"vllm\"|^    .*\bvllm: ",
    "argument": r"\bcuda_graphs\b",
    "runtime": r"\"ray\"|\bRayLauncher\b",
    "scorer": r"\"scorer:\"|'scorer:file|\bStreamingScorer\b|kind\.streams\b",
}
"""Patterns of the worked examples in the source."""


@pytest.mark.parametrize("section", additions()[:-2], ids=lambda text: text.partition("\n")[0])
def test_worked_examples_name_all_files_that_know_a_thing(section: str) -> None:
    pattern = re.compile(EXAMPLES[section.partition("\n")[0].split()[1]], re.M)
    files = {
        str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if pattern.search(p.read_text())
    }
    example = section.partition("\nWorked example, ")[2]
    assert {*re.findall(r"`([a-z_/]+\.py)`", example)} == files
    assert example.startswith(f"{len(files)} files: ")


def test_the_documented_layers_are_those_that_are_checked() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## Import rules\n")[2]
    documented = section.partition("```\n")[2].partition("```")[0].splitlines()
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert documented == layers


def test_the_documented_protocols_are_those_of_the_roles() -> None:
    """With the same methods and parameters in the same order, also those of base classes."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.partition("\n## Four roles\n")[2].partition("```python\n")[2].partition("```")[0]
    documented: dict[str, dict[str, str]] = {}
    for line in block.splitlines():
        if found := re.match(r"class (\w+)", line):
            methods = documented.setdefault(found[1], {})
        elif found := re.match(r" +async def (\w+)(\(.*\) -> .*)", line):
            methods[found[1]] = found[2]
    names = ("Replaceable", "Generator", "Scorer", "Environment", "Learner")
    roles = [getattr(protocols, name) for name in names]
    own = {
        role.__name__: {
            name: str(inspect.signature(method)).replace("'", "")
            for name, method in vars(role).items()
            if inspect.iscoroutinefunction(method)
        }
        for role in roles
    }
    assert documented == own


def test_what_may_change_at_a_resume_is_documented() -> None:
    paragraphs = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8").split("\n\n")
    text = next(part for part in paragraphs if "`steps`, `minutes`" in part)
    assert [name for name in RESUMABLE if f"`{name}`" not in text] == []


def test_the_hooks_are_the_checks() -> None:
    """As 'make check' has them, on all files."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (names,) = re.findall(r"^check: (.*)", makefile, re.M)
    parts = [makefile.partition(f"\n{name}:")[2].partition("\n\n")[0] for name in names.split()]
    checks = [line.strip() for part in parts for line in part.splitlines()[1:]]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"].replace(".venv/bin/", "$(BIN)/") for hook in local["hooks"]]
    assert sorted(hooks) == sorted(checks)
    assert not any(hook["pass_filenames"] for hook in local["hooks"])
