"""Checkpoints on disk: whole, checked, and two of them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import full_beyond
from stretto import files
from stretto.errors import StateError, StorageError
from stretto.runs import checkpoint


def state(step: int) -> dict[str, Any]:
    return {"numbers": [step, 2.5, None], "tensor": torch.arange(1000) + step}


def load(folder: Path) -> tuple[int, list[str]]:
    """The step of the one that is taken, and what is said of others."""
    notes: list[str] = []
    step, found = checkpoint.load_latest(folder, notes.append)
    assert found["numbers"] == [step, 2.5, None]
    assert torch.equal(found["tensor"], state(step)["tensor"])
    return step, notes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_two_newest_stay(tmp_path: Path) -> None:
    for step in (5, 9, 10):
        assert checkpoint.save(tmp_path, step, state(step)).name == f"step-{step:06d}"
    assert names(tmp_path) == ["step-000009", "step-000010"]
    assert load(tmp_path) == (10, [])


def test_a_half_written_one_is_passed_over_and_cleared(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 9, state(9))
    (tmp_path / "step-000010.tmp").mkdir()
    assert load(tmp_path) == (9, [])
    checkpoint.save(tmp_path, 10, state(10))
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
    ("state.pt", truncate, r"state.pt has \d+ bytes of the \d+ that were written"),
    ("state.pt", empty, r"state.pt has 0 bytes of the \d+ that were written"),
    ("state.pt", flip, r"state.pt is not what was written: its SHA-256 differs"),
    ("state.pt", Path.unlink, r"state.pt cannot be read: No such file"),
    ("manifest.json", truncate, r"manifest.json cannot be read"),
    ("manifest.json", flip, r"manifest.json|state.pt"),
    ("manifest.json", Path.unlink, r"it has no manifest.json \(versions of Stretto before"),
]


@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGES)
def test_a_damaged_one_is_passed_over_with_the_reason(
    name: str, damage: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    damage(tmp_path / "step-000002" / name)
    step, (note,) = load(tmp_path)
    assert step == 1
    assert note.startswith(f"'{tmp_path / 'step-000002'}' cannot be used: ")
    assert note.endswith("; going on from step 1, before it")
    damage(tmp_path / "step-000001" / name)
    with pytest.raises(StateError, match=reason) as refused:
        load(tmp_path)
    assert "step-000001' cannot be used: " in str(refused.value)
    assert "step-000002' cannot be used: " in str(refused.value)
    assert str(refused.value).endswith("There is no other checkpoint: start the run anew")


def test_another_format_is_refused(tmp_path: Path) -> None:
    file = checkpoint.save(tmp_path, 1, state(1)) / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 3}))
    with pytest.raises(StateError, match="has the format 3, and this version knows 2"):
        load(tmp_path)


def test_going_on_before_a_damaged_one_replaces_it(tmp_path: Path) -> None:
    for step in (10, 20):
        checkpoint.save(tmp_path, step, state(step))
    empty(tmp_path / "step-000020" / "state.pt")
    assert load(tmp_path)[0] == 10
    checkpoint.save(tmp_path, 15, state(15))
    assert names(tmp_path) == ["step-000010", "step-000015"]


def test_code_cannot_come_with_one(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"path": Path("x")})
    with pytest.raises(StateError, match="holds other things than tensors and plain data"):
        checkpoint.load_latest(tmp_path, print)


def test_on_a_full_disk_the_former_ones_stay_and_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    with full_beyond(4000), pytest.raises(StorageError, match=r"step-000003': File too large"):
        checkpoint.save(tmp_path, 3, state(3))
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert load(tmp_path) == (2, [])


def test_an_older_one_goes_only_once_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    synced: list[str] = []
    sync = files.sync

    def watched(path: Path) -> None:
        sync(path)
        synced.append(path.name)
        assert (tmp_path / "step-000001").exists()

    monkeypatch.setattr(files, "sync", watched)
    checkpoint.save(tmp_path, 3, state(3))
    assert sorted(synced[:3]) == ["manifest.json", "state.pt", "step-000003.tmp"]
    assert synced[3:] == [tmp_path.name]  # the new name itself
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_what_cannot_be_synced_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, state(1))

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        checkpoint.save(tmp_path, 2, state(2))
    assert names(tmp_path) == ["step-000001"]
