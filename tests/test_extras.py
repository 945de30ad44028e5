"""The core needs no optional library, and whatever does says so and how to install it."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stretto import __version__, errors, tasks
from stretto.config import TaskConfig
from stretto.errors import MissingExtraError, require

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: [Requirement(text) for text in texts]
    for extra, texts in PROJECT["optional-dependencies"].items()
    if extra != "dev"
}
OPTIONAL = {r.name.replace("-", "_") for found in EXTRAS.values() for r in found}
"""Names under which the extras' libraries are imported."""
BROUGHT_ALONG = {"llvmlite"}
"""Large ones that come with them."""


def third_party(file: Path) -> set[str]:
    """Libraries that a module imports when it runs, beside those of Python."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    tops = {name.partition(".")[0] for name in names}
    return tops - {"stretto", "__future__"} - sys.stdlib_module_names


def guarded(file: Path) -> set[str]:
    """Strings of a module that refuses a library which is not installed."""
    tree = ast.parse(file.read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return texts if {"require", "is_installed"} & calls else set()


def test_each_library_that_is_imported_is_declared_and_guarded_if_optional() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    imports = set[str]().union(*map(third_party, files))
    core = {Requirement(text).name.replace("-", "_") for text in PROJECT["dependencies"]}
    assert len(imports) > 20
    assert imports - core - OPTIONAL == set()
    guards = set[str]().union(*map(guarded, files))
    assert (imports & OPTIONAL) - core - guards == set()


HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def test_the_extras_that_are_read_are_those_of_the_project() -> None:
    core = sorted(map(Requirement, PROJECT["dependencies"]), key=lambda r: r.name.lower())
    assert list(map(str, errors.requirements())) == list(map(str, core))
    for extra, wanted in EXTRAS.items():
        found = errors.requirements(extra)
        assert [(r.name, r.specifier) for r in found] == [(r.name, r.specifier) for r in wanted]
        for requirement in wanted:
            assert errors.plain(requirement) in errors.remedy(extra)
        assert errors.remedy(extra).endswith(f"pip install -e '.[{extra}]')")


def test_run_from_its_source_requirements_are_those_of_the_clone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def declared() -> list[object]:
        return [list(map(str, errors.requirements(extra))) for extra in ("", *errors.extras())]

    def nothing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    installed = declared()
    monkeypatch.setattr(importlib.metadata, "metadata", nothing)
    assert declared() == installed
    monkeypatch.setattr(errors, "PROJECT", tmp_path / "pyproject.toml")
    assert declared() == [[]]
    assert errors.remedy("hub") == "pip install -e '.[hub]'"


@pytest.mark.parametrize(
    ("library", "task"),
    [
        ("reasoning_gym", TaskConfig(kind="reasoning-gym")),
        ("pyarrow", TaskConfig(kind="dataset", name="rows.parquet")),
        ("datasets", TaskConfig(kind="gsm8k", name="openai/gsm8k:main")),
    ],
)
def test_a_task_names_the_library_that_it_lacks(
    library: str, task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").touch()
    monkeypatch.setitem(sys.modules, library, None)
    extra = next(e for e, found in EXTRAS.items() if found[0].name.replace("-", "_") == library)
    with pytest.raises(MissingExtraError) as caught:
        tasks.load(task, 0)
    for part in (f"the library '{library}'", errors.plain(EXTRAS[extra][0]), f"'.[{extra}]'"):
        assert part in str(caught.value)


def test_a_folder_with_a_librarys_name_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nosuchlibrary").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="needs the library 'nosuchlibrary'"):
        require("nosuchlibrary", "plots", "a test")


CODE = """
import importlib, sys
from pkgutil import walk_packages
import stretto
from stretto.cli.main import main

small = dict(steps=1, warmup_examples=32, rollout={{"batch": 8}}, observe={{"progress": "off"}})
for recipe in ("tiny", "tiny-tail"):
    assert stretto.train(recipe, **small, out="runs").steps == 1
assert main(["train", "tiny", "--pipeline.ranks", "2", "--observe.progress", "off"]) == 2
for module in walk_packages(stretto.__path__, "stretto."):
    if module.name != "stretto.__main__":
        try:
            importlib.import_module(module.name)
        except Exception:
            print(module.name)
assert not {hidden} & set(sys.modules)
"""
NOT_CORE = {
    "pipelines",
    "training.pipelined",
    "training.planner",
    "training.staged",
    "rollout.vllm",
    "serving.app",
    "serving.connections",
    "serving.programs",
}
"""What may need an optional library to be imported."""


def test_the_core_needs_no_optional_library(tmp_path: Path) -> None:
    """Recipes train, modules of the core can be imported, a pipeline says what it lacks."""
    hidden = OPTIONAL | BROUGHT_ALONG
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(hidden=hidden)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},  # the judges' processes, too
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--pipeline.ranks 2 needs the library 'numba'" in done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("stretto.")]
    assert refused
    parts = tuple(f"stretto.{name}" for name in NOT_CORE)
    assert [name for name in refused if not name.startswith(parts)] == []


def test_the_constraints_have_a_fitting_version_of_every_library() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    core = list(map(Requirement, PROJECT["dependencies"]))
    dev = [Requirement(text) for text in PROJECT["optional-dependencies"]["dev"]]
    elsewhere = {"stretto", "vllm", "lm-eval"}
    for requirement in chain(core, dev, *EXTRAS.values()):
        name = canonicalize_name(requirement.name)
        if name not in elsewhere:
            versions = [str(p.specifier)[2:] for p in pinned if canonicalize_name(p.name) == name]
            assert len(versions) >= 1, name
            assert all(requirement.specifier.contains(version) for version in versions), name


def test_the_version_to_cite_is_the_projects() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert cited == PROJECT["version"] == __version__
