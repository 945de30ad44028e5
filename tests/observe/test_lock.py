"""One process at a time writes into a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import stretto
from raising import raises
from run_helpers import supervised, write_rows
from stretto.cli.main import main
from stretto.config import Config
from stretto.errors import StorageError
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.observe.lock import NAME, locked

HOLDER = """
import sys, time
from pathlib import Path
from stretto.observe.lock import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process at work in the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_the_lock_hides_what_machine_json_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/train.py", "--hf-token", "hf_1", "--api-key=2", "tiny"])
    with locked(tmp_path, print):
        command = json.loads((tmp_path / NAME).read_text())["command"]
    assert command == "train.py --hf-token '***' '--api-key=***' tiny"


def test_a_second_process_is_told_who_is_at_work(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as other:
        holder = other.pid, socket.gethostname(), "(-c ", f", since {time.strftime('%Y-')}"
        with raises(StorageError, "folder-in-use", tmp_path, *holder), locked(tmp_path, print):
            pass
        other.kill()
        other.wait()
        with locked(tmp_path, print):  # the system let go of it
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_child_does_not_hold_the_lock_beyond_its_parent(tmp_path: Path) -> None:
    with locked(tmp_path, print):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with locked(tmp_path, print):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who held it lets go between the other's opening of the file and its locking."""
    flock, calls = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not calls:
            (tmp_path / NAME).unlink()
        calls.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path, print):
        assert len(calls) == 2
        with raises(StorageError, "folder-in-use", os.getpid()), locked(tmp_path, print):
            pass


def test_a_look_at_the_lock_keeps_nobody_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the lock, too, for a moment."""
    looking = os.open(tmp_path / NAME, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: os.close(looking))
    with locked(tmp_path, print):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_without_locks_on_the_file_system_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    notes: list[str] = []
    with locked(tmp_path, notes.append):
        pass
    assert notes == [f"'{tmp_path}' is on a file system without locks; let no other run use it"]
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_is_not_named_is_another_process(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path):
        (tmp_path / NAME).write_text("")
        with raises(StorageError, "folder-in-use", "another process"), locked(tmp_path, print):
            pass


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse what a read-only file system does; root may write wherever there is none."""
    opened = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(folder)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)


def test_a_read_only_run_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory.create(tmp_path, "run", Config())
    before = run.config_file.read_bytes()
    read_only(monkeypatch, tmp_path)
    assert main(["train", "--resume", str(run.path), "--steps", "9"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stretto: error: cannot write '{run.path / NAME}': Read-only file")
    assert "make it writable, or copy the folder to a place that is" in error
    assert run.config_file.read_bytes() == before


def test_two_resumptions_do_not_run_side_by_side(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = stretto.train(
        "tiny",
        steps=1,
        out=str(tmp_path),
        warmup_examples=0,
        model__name=str(tiny_folder),
        rollout={"batch": 4, "max_new_tokens": 4},
        observe={"checkpoint_every": 1, "progress": "off"},
    )
    run = result.model.parent
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with held_elsewhere(run):
        assert main(["train", "--resume", str(run), "--steps", "3"]) == 2
        error = capsys.readouterr().err
        assert f"stretto: error: '{run}' is in use by process " in error
        with raises(StorageError, "folder-in-use", run):
            stretto.resume(run, steps=2, progress=Progress())
        after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert {**before, run / NAME: after[run / NAME]} == after
    assert stretto.resume(run, steps=2, progress=Progress()).steps == 2
    assert not (run / NAME).exists()


@pytest.mark.parametrize("command", ["sft", "reward"])
def test_supervised_runs_hold_their_folders(
    command: str, tiny_folder: Path, tmp_path: Path
) -> None:
    sides = {"completion": "ab"} if command == "sft" else {"chosen": "ab", "rejected": "c"}
    name = write_rows(tmp_path, [{"prompt": f"{i}>", **sides} for i in range(8)])
    seen: list[str] = []

    class Looking(Progress):
        def step(self, *_: Any) -> None:
            (run,) = (tmp_path / "runs").iterdir()
            with raises(StorageError, "folder-in-use", os.getpid()), locked(run, print):
                pass
            seen.append(run.name)

    kind: Any = stretto.SftConfig if command == "sft" else stretto.RewardModelConfig
    train: Any = {"sft": stretto.sft, "reward": stretto.train_reward_model}[command]
    out = str(tmp_path / "runs")
    train(supervised(kind, tiny_folder, name, steps=1, out=out), progress=Looking())
    assert seen
