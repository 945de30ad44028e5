"""Files that are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers import full_beyond
from stretto import files
from stretto.errors import StorageError


def test_lines_are_added_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert not files.append(file, b"first line\n")
    with full_beyond(15), pytest.raises(StorageError, match=r"lines': .*; make room there"):
        files.append(file, b"second line\n")
    assert file.read_bytes() == b"first line\n"
    assert not files.append(file, b"second line\n")
    assert file.read_bytes() == b"first line\nsecond line\n"


@pytest.mark.parametrize("kept", [b"", b"whole\n", b"x" * 200_000 + b"\n"])
def test_a_torn_last_line_is_dropped_before_more_is_added(kept: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(kept + b'{"step": 3, "rew')
    assert files.append(file, b"next\n")
    assert file.read_bytes() == kept + b"next\n"


def test_what_is_written_in_parts_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: write(to, bytes(data[:3])))
    files.append(tmp_path / "lines", b"a line that takes several calls\n")
    assert (tmp_path / "lines").read_bytes() == b"a line that takes several calls\n"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_gets_another_name_or_a_copy(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, name = tmp_path / "file", tmp_path / "name"
    file.write_bytes(b"content")

    def refused(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    files.link(file, name)
    assert name.read_bytes() == b"content"
    assert name.samefile(file) == has_links
    file.unlink()
    files.link(tmp_path / "missing", name)  # it stays
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    files.write_whole(file, b"former")
    with full_beyond(5), pytest.raises(StorageError):
        files.write_whole(file, b"longer than before")
    assert file.read_bytes() == b"former"
    files.write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["settings"]


def break_off(scratch: Path) -> None:
    (scratch / "weights").write_text("half")
    raise ZeroDivisionError


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "in two"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_takes_the_place_of_the_former_one_once_it_is_filled(
    exchange: bool, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target = tmp_path / "model"
    if linked:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere" / "model")
    with files.new_folder(target) as scratch:
        (scratch / "weights").write_text("1")
        (scratch / "old").write_text("gone later")
        assert not target.exists()
    with pytest.raises(ZeroDivisionError), files.new_folder(target) as scratch:
        break_off(scratch)
    assert sorted(path.name for path in target.iterdir()) == ["old", "weights"]
    with files.new_folder(target) as scratch:
        (scratch / "weights").write_text("2")
        assert (target / "weights").read_text() == "1"
    assert [(p.name, p.read_text()) for p in target.iterdir()] == [("weights", "2")]
    assert [p.name for p in target.resolve().parent.iterdir()] == ["model"]


def test_a_folder_that_cannot_be_put_in_place_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    with files.new_folder(target) as scratch:
        (scratch / "weights").write_text("1")
    rename = Path.rename

    def refusing(self: Path, to: Path) -> Path:
        if to == target and self.name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OSError, match="Input/output"), files.new_folder(target) as scratch:
        (scratch / "weights").write_text("2")
    assert [(p.name, p.read_text()) for p in target.iterdir()] == [("weights", "1")]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("way", [files.new_folder, files.added_to])
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_rights_that_the_umask_leaves(
    umask: int, mode: int, way: Any, tmp_path: Path
) -> None:
    """safetensors 0.8 makes files that only their owner reads; programs stay programs."""
    before = os.umask(umask)
    try:
        with way(tmp_path / "model") as scratch:
            (scratch / "learner").mkdir()
            save_file({"w": torch.zeros(1)}, scratch / "learner" / "model.safetensors")
            (scratch / "run.sh").write_text("")
            (scratch / "run.sh").chmod(0o700)
    finally:
        os.umask(before)
    model = tmp_path / "model"
    assert (model / "learner" / "model.safetensors").stat().st_mode & 0o777 == mode
    assert (model / "run.sh").stat().st_mode & 0o777 == mode | 0o700


def test_files_are_added_to_a_folder_all_or_none(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    with pytest.raises(ZeroDivisionError), files.added_to(folder) as scratch:
        break_off(scratch)
    assert [path.name for path in folder.iterdir()] == ["notes"]
    with files.added_to(folder) as scratch:
        (scratch / "adapter").mkdir()
        (scratch / "adapter" / "weights").write_text("1")
        (scratch / "weights").write_text("2")
    found = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert found == {"notes": "mine", "adapter/weights": "1", "weights": "2"}


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room there"),
        (errno.EROFS, "make it writable"),
        (errno.EIO, "see that the disk is there"),
    ],
)
def test_what_the_system_refuses_is_said_with_a_remedy(number: int, remedy: str) -> None:
    message = f"cannot write 'x/y': .*; {remedy}"
    with pytest.raises(StorageError, match=message), files.explained(Path("x/y")):
        raise OSError(number, os.strerror(number))
