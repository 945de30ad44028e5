"""The wheels that an image lacks, with an index of made wheels in a folder."""

from __future__ import annotations

import importlib.util
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CORE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]

pytest.importorskip("pip", reason="uv's environments have no pip, which the tool calls")


def _wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write a wheel without code."""
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", head + "".join(f"Requires-Dist: {r}\n" for r in requires)
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{info}/RECORD", "")


def _image(**versions: str) -> str:
    """List an image that has the core at its lower bounds, except for other versions or none."""
    lines = []
    for requirement in map(Requirement, CORE):
        lowest = min(s.version for s in requirement.specifier if s.operator == ">=")
        if version := versions.get(requirement.name.replace("-", "_"), lowest):
            lines.append(f"{requirement.name}=={version}\n")
    return "".join(lines)


def test_an_image_gets_what_is_missing_or_too_old_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("offline", ROOT / "tools" / "offline.py")
    assert spec
    assert spec.loader
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    index, wheels, image = tmp_path / "index", tmp_path / "wheels", tmp_path / "image.txt"
    index.mkdir()
    _wheel(index, "tyro", "1.9", "docstring-parser", "typeguard>=4")
    _wheel(index, "typeguard", "4.5")
    _wheel(index, "typeguard", "3.0")
    _wheel(index, "docstring_parser", "0.99")  # the image's own is new enough
    _wheel(index, "rich", "14.0")
    _wheel(index, "starlette", "1.0", "torch>=2.12")  # newer than the image's
    _wheel(index, "uvicorn", "0.40")
    _wheel(index, "torch", "2.13.0")
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(index)),
        ("CONFIG_FILE", "/dev/null"),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    words = [str(image), "--into", str(wheels)]
    image.write_text(_image(tyro="", rich="12.0", torch="2.11.0+cu130"))
    offline.main([*words, "--extras", "serve"])
    added = [
        "rich 14.0",
        "starlette 1.0",
        "torch 2.13.0",
        "typeguard 4.5",
        "tyro 1.9",
        "uvicorn 0.40",
    ]
    *names, count, command = capsys.readouterr().out.splitlines()
    assert names == [each.replace(" ", "==") for each in added]
    expected = [each.replace(" ", "-") + "-py3-none-any.whl" for each in added]
    assert sorted(each.name for each in wheels.iterdir()) == expected
    assert count.startswith("6 packages")
    assert command == f"    pip install --no-index --no-deps {wheels}/*.whl"
    with pytest.raises(SystemExit, match="unknown extras: servers"):
        offline.main([*words, "--extras", "servers"])
    image.write_text("rich @ file:///rich.whl\n")
    with pytest.raises(SystemExit, match="pip list --format=freeze"):
        offline.main(words)
