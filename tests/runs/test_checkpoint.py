"""Checkpoints on disk: whole, checked, and no more than there is room for."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import full_beyond
from raising import raises
from stretto import files
from stretto.errors import StateError, StorageError
from stretto.files import FileSum
from stretto.runs import checkpoint
from stretto.runtime.state import write
from stretto.training import shard_files

RANKS = ("rank-0-of-2.safetensors", "rank-1-of-2.safetensors")


def pieces(step: int) -> torch.Tensor:
    return torch.arange(1000) + step


def save(folder: Path, step: int, keep: int = 2, state: Any = None) -> Path:
    def write_learner(path: Path) -> dict[str, FileSum]:
        path.mkdir()
        packed = {"tensors": {"tensor": pieces(step)}, "about": "{}"}
        return {name: shard_files.write(path / name, packed) for name in RANKS}

    driver = state or {"step": step, "numbers": [step, 2.5, None]}
    parts = {"driver.pt": writer(driver), "learner": write_learner, "inputs.json": inputs}
    return checkpoint.save(folder, step, parts, keep)


def writer(state: Any) -> Callable[[Path], dict[str, FileSum]]:
    return lambda file: {"": write(file, state)}


def inputs(file: Path) -> dict[str, FileSum]:
    file.write_text("{}")
    return {"": files.sum_of(file)}


def load(folder: Path) -> tuple[int, list[str]]:
    """The step of the one that is taken, and what is said of others."""
    notes: list[str] = []
    step, parts = checkpoint.load_latest(folder, notes.append)
    assert parts.keys() == {"driver.pt", "learner", "inputs.json"}
    assert parts["driver.pt"] == {"step": step, "numbers": [step, 2.5, None]}
    path = parts["learner"]
    assert path == folder / f"step-{step:06d}" / "learner"
    for name in RANKS:
        assert load_file(path / name)["tensor"].equal(pieces(step))
    return step, notes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_two_newest_stay(tmp_path: Path) -> None:
    for step in (5, 9, 10):
        assert save(tmp_path, step).name == f"step-{step:06d}"
    assert names(tmp_path) == ["step-000009", "step-000010"]
    assert load(tmp_path) == (10, [])


def test_as_many_stay_as_are_asked_for(tmp_path: Path) -> None:
    for step in (5, 9):
        save(tmp_path, step)
    save(tmp_path, 10, keep=1)
    assert names(tmp_path) == ["step-000010"]


@pytest.mark.parametrize(
    ("room", "during"),
    [
        (1.6, [1, 2]),  # checkpoints, beside the two that are there: half of one is to be left
        (1.4, [2]),
        (0.6, [2]),
        (0.4, [1, 2]),  # which would not make enough room
    ],
)
def test_where_the_disk_is_small_the_older_one_makes_room_for_the_new(
    room: float, during: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    size = files.size_of(tmp_path / "step-000002")
    disk = room * size + sum(map(files.size_of, tmp_path.iterdir()))

    def usage(_: object) -> SimpleNamespace:
        return SimpleNamespace(free=disk - sum(map(files.size_of, tmp_path.glob("step-*"))))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    seen: list[str] = []

    def write_driver(file: Path) -> dict[str, FileSum]:
        seen.extend(names(tmp_path)[: len(during)])
        return inputs(file)

    checkpoint.save(tmp_path, 3, {"driver.pt": write_driver})
    assert seen == [f"step-{step:06d}" for step in during]
    assert names(tmp_path) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("half", ["step-000010.tmp", "step-000012.tmp"])
def test_a_half_written_one_is_passed_over_and_cleared(half: str, tmp_path: Path) -> None:
    """One of another step too: a resumed run may write at other steps than the killed one."""
    save(tmp_path, 9)
    (tmp_path / half).mkdir()
    (tmp_path / half / "driver.pt").write_bytes(b"half")
    assert load(tmp_path) == (9, [])
    save(tmp_path, 10)
    assert names(tmp_path) == ["step-000009", "step-000010"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    """One bit, in the middle of the tensor."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("driver.pt", empty, "driver.pt has 0 bytes"),
    (f"learner/{RANKS[0]}", truncate, f"{RANKS[0]} has "),
    ("driver.pt", flip, "driver.pt is not what was written: its SHA-256"),
    (f"learner/{RANKS[0]}", flip, f"{RANKS[0]} is not what was written: its SHA-256"),
    (f"learner/{RANKS[1]}", Path.unlink, f"{RANKS[1]} cannot be read: No such file"),
    ("manifest.json", truncate, "manifest.json cannot be read"),
    ("manifest.json", Path.unlink, "it has no manifest.json"),
]


@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGES)
def test_a_damaged_one_is_passed_over_with_the_reason(
    name: str, damage: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    damage(tmp_path / "step-000002" / name)
    step, (note,) = load(tmp_path)
    assert step == 1
    assert note.startswith(f"'{tmp_path / 'step-000002'}' cannot be used: ")
    assert note.endswith("; going on from step 1, before it")
    damage(tmp_path / "step-000001" / name)
    both = "step-000001' cannot be used: ", "step-000002' cannot be used: "
    with raises(StateError, "damaged-checkpoint", reason, *both):
        load(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path, 1) / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
    with raises(StateError, "damaged-checkpoint", "format 2", "knows 5"):
        load(tmp_path)


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return rewrite


def cut_with_its_sum(file: Path) -> None:
    """A shorter driver.pt, of which the manifest knows."""
    driver = file.with_name("driver.pt")
    truncate(driver)
    found = files.sum_of(driver)
    entry = {"bytes": found.size, "sha256": found.sha256}
    manifest(lambda content: content["files"].update({"driver.pt": entry}))(file)


FORGED: list[tuple[Callable[[Path], object], str]] = [
    (manifest(lambda m: m["files"].pop("driver.pt")), "manifest.json lists no driver.pt"),
    (manifest(lambda m: m["files"].pop("inputs.json")), "manifest.json lists no inputs.json"),
    (
        manifest(lambda m: [m["files"].pop(f"learner/{name}") for name in RANKS]),
        "manifest.json lists no learner",
    ),
    (manifest(lambda m: m.update(format=float("inf"))), "manifest.json cannot be read"),
    (
        manifest(lambda m: m["files"]["driver.pt"].update(bytes=float("inf"))),
        "manifest.json cannot be read",
    ),
    (manifest(lambda m: m.update(files=[])), "manifest.json cannot be read"),
    (lambda file: file.write_text("[" * 100_000), "manifest.json cannot be read"),
    (lambda file: file.write_text("5"), "manifest.json cannot be read"),
    (manifest(lambda m: m.update(step=1)), "manifest.json is of step 1, and the folder of 2"),
    (cut_with_its_sum, "driver.pt or inputs.json cannot be read"),
]


@pytest.mark.parametrize(("forge", "reason"), FORGED)
def test_a_forged_manifest_is_passed_over_with_the_reason(
    forge: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    forge(tmp_path / "step-000002" / "manifest.json")
    step, (note,) = load(tmp_path)
    assert (step, reason in note) == (1, True), note


def test_going_on_before_a_damaged_one_replaces_it(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    empty(tmp_path / "step-000020" / "learner" / RANKS[1])
    assert load(tmp_path)[0] == 10
    save(tmp_path, 15)
    assert names(tmp_path) == ["step-000010", "step-000015"]


def test_code_cannot_come_with_one(tmp_path: Path) -> None:
    save(tmp_path, 1, state={"path": Path("x")})
    with raises(StateError, "damaged-checkpoint", "driver.pt", "tensors and plain data"):
        checkpoint.load_latest(tmp_path, print)


def test_without_any_the_settings_for_them_are_named(tmp_path: Path) -> None:
    with raises(StateError, "no-checkpoint", tmp_path, "observe.checkpoint_minutes"):
        checkpoint.load_latest(tmp_path, print)


def test_on_a_full_disk_the_former_ones_stay_and_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    with full_beyond(4000), pytest.raises(StorageError, match=r"step-000003': File too large"):
        save(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert load(tmp_path) == (2, [])


def test_an_older_one_goes_only_once_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    synced: list[str] = []
    sync = files.sync

    def watched(path: Path) -> None:
        sync(path)
        synced.append(path.name)
        assert (tmp_path / "step-000001").exists()

    monkeypatch.setattr(files, "sync", watched)
    save(tmp_path, 3)
    made = ["driver.pt", "inputs.json", "learner", "manifest.json", *RANKS, "step-000003.tmp"]
    assert sorted({*synced[:-1]}) == made
    assert synced[-1] == tmp_path.name  # the new name itself
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_what_cannot_be_synced_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-000001"]
